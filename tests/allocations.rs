//! Allocations per decision, counted in a binary of their own, because counting replaces the allocator.
//!
//! Counts are of the deciding thread; a decision from memory needs no other. The tests compare a call with and without
//! a feature, so absolute numbers do not matter.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, its helpers too")]

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName};
use futures_util::FutureExt as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use prost::Message as _;
use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::RateLimitRequest;
use tollkeeper::base::pb::codec::encode_grpc_frame;
use tollkeeper::serve::grpc::call::CallHead;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use tollkeeper::telemetry::traces::propagation::PropagationFormats;
use tollkeeper::telemetry::traces::{ExportThreadContext, SpanQueue, SpanQueueOptions, TraceSampler, Tracer};

use kit::fixtures::load_shop_rules;
use kit::grpc::rate_limit_request;
use kit::test_service::TestService;

const NOON: Time = Time::from_secs(1_783_512_000);
const RULES: &str = "descriptors: [{key: login, rate_limit: {unit: day, requests_per_unit: 1000000}}]";
const CALLS: u64 = 100;

/// Accepts spans and drops them.
#[derive(Debug)]
struct DiscardingExporter;

impl SpanExporter for DiscardingExporter {
    async fn export(&self, _: Vec<SpanData>) -> OTelSdkResult {
        Ok(())
    }
}

/// Tracer that samples this share of the traces that start here.
fn tracer(ratio: f64) -> Tracer {
    let thread = ExportThreadContext { setting: "OTEL", on_start: || {} };
    let queue = SpanQueueOptions { max_spans: 10_000, max_batch_spans: 100, delay: Duration::from_secs(3600) };
    Tracer {
        sampler: TraceSampler { follows_parent: true, ratio },
        formats: PropagationFormats { tracecontext: true, b3: true, b3_multi: true },
        shows_descriptors: false,
        span_queue: Arc::new(SpanQueue::start(DiscardingExporter, &Resource::builder_empty().build(), queue, thread)),
    }
}

fn service(tracer: Option<Tracer>) -> Arc<RateLimitService> {
    let mut service = TestService::new::<&str>([], NOON);
    load_shop_rules(&service, RULES);
    service.inner.tracer = tracer;
    Arc::new(service.inner)
}

fn login(user: &str) -> RateLimitRequest {
    rate_limit_request("shop", &[("login", user)])
}

/// Number of allocations of [`CALLS`] calls with these headers.
fn allocations(tracer: Option<Tracer>, headers: &[(&'static str, &str)]) -> u64 {
    let service = service(tracer);
    let headers = headers.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()));
    let (headers, message) = (HeaderMap::from_iter(headers), login("ann"));
    let call = || {
        let head = CallHead::from_headers(&headers, service.tracer.as_ref()).expect("there is no timeout");
        let answer = service
            .answer_decoded_grpc_call(&head, &decode::convert_request(&message))
            .now_or_never()
            .expect("memory answers at once");
        drop(answer.unwrap());
    };
    // Warms up: one-time allocations of the first calls are not counted.
    (0..10).for_each(|_| call());
    allocation_counter::measure(|| (0..CALLS).for_each(|_| call())).count_total
}

#[test]
fn unsampled_call_allocates_nothing_for_traces() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";
    let with_state = ("tracestate", "vendor=1,other=2");
    let not_sampled = format!("00-{TRACE}-{SPAN}-00");
    let b3 = format!("{TRACE}-{SPAN}-0");
    let undecided = format!("{TRACE}-{SPAN}");
    let situations: [&[(&'static str, &str)]; 7] = [
        &[],
        &[("traceparent", &not_sampled), with_state],
        &[("traceparent", "00-nonsense"), with_state],
        &[("b3", &b3)],
        &[("b3", &undecided)],
        &[("x-b3-traceid", TRACE), ("x-b3-spanid", SPAN), ("x-b3-sampled", "0")],
        &[("x-b3-traceid", TRACE), ("x-b3-spanid", SPAN)],
    ];
    for headers in situations {
        let without = allocations(None, headers);
        assert!(without >= CALLS, "something is counted: {without}");
        assert_eq!(allocations(Some(tracer(0.0)), headers), without, "{headers:?}");
    }
    let sampled = format!("00-{TRACE}-{SPAN}-01");
    let (without, with) =
        (allocations(None, &[("traceparent", &sampled)]), allocations(Some(tracer(0.0)), &[("traceparent", &sampled)]));
    assert!(with > without + CALLS, "an unsampled span allocates: {with} and {without}");
}

/// Decodes, decides and encodes: one allocation for the statuses, one for the encoded response.
#[test]
fn memory_decision_allocates_twice() {
    let service = service(None);
    let decide = |message: &[u8]| {
        let request = decode::decode_borrowed_request(message).expect("it is plain");
        let response = service
            .answer_request(&request, DEFAULT_CALLER_DEADLINE, None)
            .now_or_never()
            .expect("memory answers at once");
        encode_grpc_frame(&response.unwrap())
    };
    let messages: Vec<Vec<u8>> = (0..CALLS).map(|user| login(&format!("user{user}")).encode_to_vec()).collect();
    let count =
        || allocation_counter::measure(|| messages.iter().for_each(|message| drop(decide(message)))).count_total;
    // The first decision on a user creates the counter, which allocates.
    let first = count();
    assert_eq!(count(), 2 * CALLS, "the first time {first}");
}
