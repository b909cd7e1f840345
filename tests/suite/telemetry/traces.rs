//! Traces of a running process as a collector receives them; tracing never delays or fails a decision.

use std::net::TcpListener;
use std::time::SystemTime;

use opentelemetry::trace::{SpanId, TraceId};
use proptest::prelude::*;
use tollkeeper::telemetry::traces::propagation::{PropagationFormats, RemoteParent};

use kit::envoy::Envoy;
use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::otlp_collector::{OtlpCollector, ReceivedSpan};
use kit::redis;
use kit::redis::certificates::Certificates;
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::{PATIENCE, read, repository, wait_for};

const RULES: &str = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: day, requests_per_unit: 1000}}
- {key: never, rate_limit: {unit: day, requests_per_unit: 0}}
";
const CALL: &str = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const NOT_SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

/// Exports traces to that URL without delay.
fn traced(url: &str) -> Setup {
    with_rules(RULES)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TRACING_ENABLED", "true")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        .env("OTEL_BSP_SCHEDULE_DELAY", "10")
}

fn over_grpc(setup: Setup) -> Setup {
    setup.env("TRACING_EXPORTER_PROTOCOL", "grpc")
}

/// Both protocols of the collector.
const WAYS: [fn(Setup) -> Setup; 2] = [over_grpc, |setup| setup];

fn call(server: &Tollkeeper, headers: &[(&'static str, &str)]) {
    Client::connect(server.grpc_port())
        .call_with_headers(&rate_limit_request("shop", &[("login", "ann")]), headers)
        .unwrap();
}

/// Value of an attribute; panics if it is missing.
fn attribute<'r>(received: &'r ReceivedSpan, name: &str) -> &'r str {
    received.attributes.get(name).unwrap_or_else(|| panic!("no {name} in {received:?}"))
}

#[test]
fn call_continues_the_callers_trace_in_every_format() {
    let forms: [&[(&'static str, &str)]; 6] = [
        &[("traceparent", SAMPLED), ("tracestate", "vendor=1")],
        &[("b3", "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1")],
        &[("b3", "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-d-05e3ac9a4f6e3b90")],
        &[("x-b3-traceid", TRACE), ("x-b3-spanid", PARENT), ("x-b3-sampled", "1")],
        &[("x-b3-traceid", TRACE), ("x-b3-spanid", PARENT), ("x-b3-flags", "1")],
        // W3C takes precedence over B3.
        &[("traceparent", SAMPLED), ("b3", "0")],
    ];
    for setup in WAYS {
        let collector = OtlpCollector::start();
        // A call without a context starts an unsampled trace.
        let server = setup(traced(&collector.url())).env("TRACING_SAMPLING_RATE", "0").start();
        for (count, form) in (1..).zip(forms) {
            call(&server, form);
            let calls = collector.wait_for(CALL, count);
            let [trace, own, parent] = calls[count - 1].ids();
            assert_eq!((trace.as_str(), parent.as_str()), (TRACE, PARENT), "{form:?}");
            let decisions = collector.wait_for("decide", count);
            assert_eq!(decisions[count - 1].ids()[2], own, "{form:?}");
        }
        assert_eq!(collector.received()[0].span.trace_state, "vendor=1");
    }
}

#[test]
fn spans_describe_request_decision_and_decider() {
    let collector = OtlpCollector::start();
    let server = over_grpc(traced(&collector.url()))
        .env("TRACING_SERVICE_NAMESPACE", "edge")
        .env("OTEL_SERVICE_NAME", "limits")
        .env("OTEL_RESOURCE_ATTRIBUTES", "service.name=other,team=a%20b")
        .start();
    call(&server, &[]);
    let call = &collector.wait_for(CALL, 1)[0];
    let decision = &collector.wait_for("decide", 1)[0];
    assert_eq!((call.span.kind, decision.span.kind), (2, 1), "server and internal");
    assert!(call.span.parent_span_id.is_empty());
    assert_eq!(decision.ids()[..1], call.ids()[..1]);
    for (name, value) in [("rpc.system.name", "grpc"), ("rpc.method", CALL), ("rpc.response.status_code", "OK")] {
        assert_eq!(attribute(call, name), value);
    }
    for (name, value) in [("tollkeeper.domain", "shop"), ("tollkeeper.descriptors", "1"), ("tollkeeper.code", "OK")] {
        assert_eq!(attribute(decision, name), value);
    }
    assert!(decision.span.start_time_unix_nano >= call.span.start_time_unix_nano);
    assert!(decision.span.end_time_unix_nano >= decision.span.start_time_unix_nano);
    for (name, value) in [
        ("service.name", "limits"),
        ("service.namespace", "edge"),
        ("team", "a b"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("telemetry.sdk.language", "rust"),
    ] {
        assert_eq!(call.resource.get(name).map(String::as_str), Some(value), "{name}: {:?}", call.resource);
    }
    assert_eq!(call.resource["service.instance.id"].len(), 36, "{:?}", call.resource);
    assert!(!format!("{:?}", collector.received()).contains("ann"), "descriptors are not recorded by default");

    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"never","value":"b"}]}]}"#;
    http::post(server.http_port(), "/json", body).header("traceparent", SAMPLED).send();
    let page = &collector.wait_for("POST /json", 1)[0];
    assert_eq!((page.ids()[0].as_str(), page.ids()[2].as_str()), (TRACE, PARENT));
    for (name, value) in
        [("http.request.method", "POST"), ("http.route", "/json"), ("http.response.status_code", "429")]
    {
        assert_eq!(attribute(page, name), value);
    }
    assert_eq!(attribute(&collector.wait_for("decide", 2)[1], "tollkeeper.code"), "OVER_LIMIT");

    let wrong = Client::connect(server.grpc_port()).call(&rate_limit_request("", &[("login", "ann")]));
    assert!(wrong.is_err());
    let call = &collector.wait_for(CALL, 2)[1];
    assert_eq!(attribute(call, "rpc.response.status_code"), "INVALID_ARGUMENT");
    assert_eq!(collector.wait_for("decide", 3)[2].span.status.as_ref().unwrap().code, 2, "an error");
}

#[test]
fn descriptors_are_recorded_if_enabled_and_bounded() {
    let collector = OtlpCollector::start();
    let server = traced(&collector.url()).env("TOLLKEEPER_TRACE_DESCRIPTORS", "true").start();
    let long = "x".repeat(5000);
    for value in ["ann", &long] {
        Client::connect(server.grpc_port()).call(&rate_limit_request("shop", &[("login", value)])).unwrap();
    }
    let decisions = collector.wait_for("decide", 2);
    assert_eq!(attribute(&decisions[0], "tollkeeper.request"), "login=ann");
    assert_eq!(attribute(&decisions[1], "tollkeeper.request").len(), 1024);
}

/// Headers of several calls.
type Many<'a> = &'a [&'a [(&'static str, &'a str)]];
/// Settings, calls that are sampled under them, and calls that are not.
type Situation<'a> = (&'a [(&'a str, &'a str)], Many<'a>, Many<'a>);

#[test]
fn callers_sampling_decision_takes_precedence_over_the_ratio() {
    let collector = OtlpCollector::start();
    let b3 = |decision: &str| format!("{TRACE}-{PARENT}-{decision}");
    let (b3_no, b3_undecided) = (b3("0"), format!("{TRACE}-{PARENT}"));
    let no: [&[(&'static str, &str)]; 4] =
        [&[("traceparent", NOT_SAMPLED)], &[("b3", &b3_no)], &[("b3", "0")], &[("x-b3-sampled", "0")]];
    let all: [Situation<'_>; 6] = [
        (&[("TRACING_SAMPLING_RATE", "1")], &[&[], &[("b3", &b3_undecided)]], &no),
        (
            &[("TRACING_SAMPLING_RATE", "0")],
            &[&[("traceparent", SAMPLED)], &[("b3", "1")]],
            &[&[], &[("b3", &b3_undecided)]],
        ),
        (&[("OTEL_TRACES_SAMPLER", "always_on")], &[&[("traceparent", NOT_SAMPLED)], &[]], &[]),
        (&[("OTEL_TRACES_SAMPLER", "always_off")], &[], &[&[("traceparent", SAMPLED)], &[]]),
        (
            &[("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "0")],
            &[&[("traceparent", SAMPLED)]],
            &[&[]],
        ),
        (
            &[("OTEL_PROPAGATORS", "b3")],
            &[&[("traceparent", NOT_SAMPLED)], &[("x-b3-sampled", "0")]],
            &[&[("b3", "0")]],
        ),
    ];
    for (env, sampled, not_sampled) in all {
        let before = collector.received().iter().filter(|received| received.span.name == CALL).count();
        let setup = env.iter().fold(traced(&collector.url()), |setup, (name, value)| setup.env(name, value));
        let mut server = setup.start();
        not_sampled.iter().for_each(|headers| call(&server, headers));
        sampled.iter().for_each(|headers| call(&server, headers));
        // The shutdown exports all spans.
        server.signal("TERM");
        assert_eq!(server.wait().code(), Some(0));
        let calls = collector.received().iter().filter(|received| received.span.name == CALL).count() - before;
        assert_eq!(calls, sampled.len(), "{env:?}: {}", server.stderr());
    }
}

#[test]
fn ratio_samples_about_that_share() {
    let collector = OtlpCollector::start();
    let mut server = over_grpc(traced(&collector.url())).env("TRACING_SAMPLING_RATE", "0.5").start();
    let client = Client::connect(server.grpc_port());
    for _ in 0..400 {
        client.call(&rate_limit_request("shop", &[("login", "ann")])).unwrap();
    }
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    let calls = collector.received().iter().filter(|received| received.span.name == CALL).count();
    // Outside of this in one run of 10^15: eight standard deviations.
    assert!((120..=280).contains(&calls), "{calls} of 400");
}

#[test]
fn invalid_context_is_ignored() {
    let collector = OtlpCollector::start();
    let server = traced(&collector.url()).start();
    let bad = [
        ("traceparent", "00-00000000000000000000000000000000-00f067aa0ba902b7-00"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-00"),
        ("traceparent", "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-00"),
        ("traceparent", "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00-more"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"),
        ("traceparent", "00_4bf92f3577b34da6a3ce929d0e0e4736_00f067aa0ba902b7_00"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-00"),
        ("traceparent", ""),
        ("b3", "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-2"),
        ("b3", "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0-5"),
        ("b3", "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0-05e3ac9a4f6e3b90-"),
        ("b3", "4bf92f3577b34da6-0"),
        ("b3", "-"),
        ("x-b3-sampled", "no"),
        ("x-b3-traceid", TRACE),
    ];
    for (count, header) in (1..).zip(bad) {
        call(&server, &[header]);
        let call = &collector.wait_for(CALL, count)[count - 1];
        assert!(call.span.parent_span_id.is_empty() && call.ids()[0] != TRACE, "{header:?}: {call:?}");
    }
    // A later version of W3C can have more fields; an invalid tracestate is ignored.
    let later = format!("01{}-more", &SAMPLED[2..]);
    call(&server, &[("traceparent", &later), ("tracestate", "no state, = at all")]);
    let call = &collector.wait_for(CALL, bad.len() + 1)[bad.len()];
    assert_eq!((call.ids()[0].as_str(), call.span.trace_state.as_str()), (TRACE, ""));
}

proptest! {
    /// Any header is parsed without a panic, into a valid context or none.
    #[test]
    fn any_header_bytes_parse_without_panic(
        parent in of_header("(00|01|ff|..)-([0-9a-f]{32}|0{32}|.{32})-([0-9a-f]{16}|0{16})-(00|01|..)(-.{0,8})?"),
        single in of_header("([0-9a-fA-F]{16}|[0-9a-f]{32}|.{0,40})(-([0-9a-f]{16}|0{16}))?(-[01d2])?(-[0-9a-f]{0,17})?"),
        trace in of_header("[0-9a-f]{16}|[0-9a-f]{32}|0{32}|.{0,40}"),
        span in of_header("[0-9a-f]{16}|.{0,20}"),
        word in of_header("0|1|true|false|.{0,3}"),
    ) {
        let formats = PropagationFormats { tracecontext: true, b3: true, b3_multi: true };
        let headers = [
            ("traceparent", &parent), ("b3", &single), ("x-b3-traceid", &trace), ("x-b3-spanid", &span),
            ("x-b3-sampled", &word), ("x-b3-flags", &word),
        ];
        // All formats together, and each alone.
        for some in [&headers[..], &headers[..1], &headers[1..2], &headers[2..]] {
            let header = |name| some.iter().find(|(own, _)| *own == name).map(|(_, value)| value.as_slice());
            let RemoteParent { ids, .. } = formats.read_remote_parent(&header);
            if let Some((trace, span)) = ids {
                prop_assert!(trace != TraceId::INVALID && span != SpanId::INVALID);
                let digits = (trace.to_string(), span.to_string());
                let said = |text: &str| some.iter().any(|(_, value)| {
                    String::from_utf8_lossy(value).to_ascii_lowercase().contains(text)
                });
                prop_assert!(said(digits.0.trim_start_matches('0')) && said(&digits.1), "{digits:?}");
            }
        }
    }
}

/// Bytes that match `pattern`, or any bytes.
fn of_header(pattern: &'static str) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        3 => proptest::string::bytes_regex(pattern).unwrap(),
        1 => proptest::collection::vec(any::<u8>(), 0..80),
    ]
}

#[test]
fn redis_call_has_its_own_span() {
    let redis = redis::options().start();
    let collector = OtlpCollector::start();
    let proxy = TcpProxy::to(&redis.address());
    let address = format!("127.0.0.1:{}", proxy.port());
    let server = over_grpc(traced(&collector.url()))
        .env("REDIS_URL", &address)
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .env("REDIS_SOCKET_TYPE", "tcp")
        .start();
    wait_for("the store to be there", || {
        call(&server, &[]);
        collector.received().iter().any(|received| received.span.name == "EVALSHA").then_some(())
    });
    let call = collector.wait_for("EVALSHA", 1).pop().unwrap();
    assert_eq!(collector.wait_for_span_id(&call.span.parent_span_id).span.name, "decide", "above {call:?}");
    assert_eq!(call.span.kind, 3, "a client's");
    for (name, value) in [
        ("db.system.name", "redis"),
        ("db.operation.name", "EVALSHA"),
        ("server.address", "127.0.0.1"),
        ("server.port", &proxy.port().to_string()),
        ("tollkeeper.draws", "1"),
    ] {
        assert_eq!(attribute(&call, name), value);
    }
    assert!(!format!("{call:?}").contains("ann"), "{call:?}");
}

#[test]
fn coalesced_call_links_to_its_requests() {
    const TOGETHER: usize = 8;
    let redis = redis::options().start();
    let collector = OtlpCollector::start();
    let proxy = TcpProxy::to(&redis.address());
    let server = over_grpc(traced(&collector.url()))
        .env("REDIS_URL", format!("127.0.0.1:{}", proxy.port()))
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("TRACING_SAMPLING_RATE", "1")
        .start();
    wait_for("the store to be there", || {
        call(&server, &[]);
        collector.received().iter().any(|received| received.span.name == "EVALSHA").then_some(())
    });
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let charged_before = charges(&server);
    proxy.set(Mode::Stall);
    let client = Client::connect(server.grpc_port());
    std::thread::scope(|scope| {
        let request = rate_limit_request("shop", &[("login", "hot")]);
        let responses = scope.spawn(move || client.call_concurrently(&request, TOGETHER, PATIENCE));
        wait_for("all to be there", || (charges(&server) >= charged_before + TOGETHER).then_some(()));
        proxy.set(Mode::Pass);
        assert!(responses.join().unwrap().iter().all(Result::is_ok));
    });
    let charged = |calls: &[ReceivedSpan]| -> usize { calls.iter().map(|call| number(call, "tollkeeper.draws")).sum() };
    let calls = wait_for("all calls", || {
        let mut calls = collector.wait_for("EVALSHA", 1);
        calls.retain(|call| u128::from(call.span.start_time_unix_nano) > since.as_nanos());
        (charged(&calls) == TOGETHER).then_some(calls)
    });
    assert!(calls.len() < TOGETHER, "some went together: {calls:?}");
    for call in &calls {
        assert_eq!(call.span.links.len(), number(call, "tollkeeper.draws") - 1, "{call:?}");
        for link in &call.span.links {
            assert_eq!(collector.wait_for_span_id(&link.span_id).span.name, "decide", "linked by {call:?}");
        }
    }
}

/// Number of charges requested.
fn charges(server: &Tollkeeper) -> usize {
    let stats = http::get(server.debug_port(), "/stats").send().text();
    let line = stats.lines().find_map(|line| line.strip_prefix("tollkeeper_draws_total"));
    line.unwrap_or_else(|| panic!("{stats}")).trim_start_matches([':', ' ']).parse().unwrap()
}

fn number(received: &ReceivedSpan, name: &str) -> usize {
    attribute(received, name).parse().unwrap()
}

#[test]
fn store_failure_is_recorded_in_the_span() {
    let redis = redis::options().start();
    let collector = OtlpCollector::start();
    let server = traced(&collector.url())
        .env("REDIS_URL", redis.address())
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("TOLLKEEPER_KEY_FORMAT", "ratelimit")
        .start();
    wait_for("the store to be there", || {
        call(&server, &[]);
        collector.received().iter().any(|received| received.span.name == "INCRBY").then_some(())
    });
    redis.freeze();
    call(&server, &[]);
    let failed = wait_for("a call that failed", || {
        collector.received().into_iter().find(|received| received.attributes.contains_key("error.type"))
    });
    assert_eq!((failed.span.name.as_str(), attribute(&failed, "error.type")), ("INCRBY", "timeout"));
    assert_eq!(failed.span.status.as_ref().unwrap().code, 2);
    redis.thaw();
}

/// The Envoy example in `docs/traces.md`.
fn example_for_envoy() -> String {
    let page = read(&repository("docs/traces.md"));
    let from = page.find("tracing:\n").unwrap();
    page[from..from + page[from..].find("```").unwrap()].to_owned()
}

#[test]
fn documented_envoy_tracing_includes_the_calls() {
    let collector = OtlpCollector::start();
    let server = over_grpc(traced(&collector.url())).env("TRACING_SAMPLING_RATE", "0").start();
    let cluster = format!(
        "    - name: otel_collector
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          \"@type\": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: {{ http2_protocol_options: {{}} }}
      load_assignment:
        cluster_name: otel_collector
        endpoints:
          - lb_endpoints:
              - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }} }}
",
        collector.port()
    );
    let envoy = Envoy::start_with("gateway", &[server.grpc_port()], |bootstrap| {
        let example = example_for_envoy().replace("{ value: 1 }", "{ value: 100 }").replace("0.25s", "10s");
        let indent = "                ";
        let example: String = example.lines().map(|line| format!("{indent}{line}\n")).collect();
        let anchor_line = "stat_prefix: gateway\n";
        assert!(bootstrap.contains(anchor_line));
        bootstrap
            .replace(anchor_line, &format!("{anchor_line}{example}"))
            .replace("  clusters:\n", &format!("  clusters:\n{cluster}"))
    });
    assert_eq!(envoy.get("/search").send().status, 200);
    let call = collector.wait_for(CALL, 1).pop().unwrap();
    let above = collector.wait_for_span_id(&call.span.parent_span_id);
    assert_eq!(above.ids()[0], call.ids()[0]);
    assert_eq!(above.resource["service.name"], "edge");
}

#[test]
fn collector_headers_are_sent_and_never_shown() {
    for setup in WAYS {
        let collector = OtlpCollector::start();
        let secret = "authorization=Bearer%20hunter2";
        let server = setup(traced(&collector.url())).env("OTEL_EXPORTER_OTLP_HEADERS", secret).start();
        call(&server, &[]);
        assert_eq!(collector.wait_for(CALL, 1)[0].authorization, "Bearer hunter2");
        let page = http::get(server.debug_port(), "/settings").send().text();
        assert!(!page.contains("hunter2") && page.contains("OTEL_EXPORTER_OTLP_HEADERS"), "{page}");
        assert!(!server.stderr().contains("hunter2"), "{}", server.stderr());
    }
}

#[test]
fn collector_over_tls_is_verified_by_the_configured_authority() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    for setup in WAYS {
        let collector = OtlpCollector::tls(&certificates);
        let trusting = |authority| {
            let setup = setup(traced(&collector.url()));
            setup.env("OTEL_EXPORTER_OTLP_CERTIFICATE", certificates.path(authority)).start()
        };
        let server = trusting("other_ca.crt");
        call(&server, &[]);
        wait_for("a line", || server.stderr().contains("spans are lost").then_some(()));
        let server = trusting("ca.crt");
        call(&server, &[("traceparent", SAMPLED)]);
        assert_eq!(collector.wait_for(CALL, 1)[0].ids()[0], TRACE, "the first of all");
    }
}

#[test]
fn cancelled_call_is_exported() {
    let redis = redis::options().start();
    let collector = OtlpCollector::start();
    let server = traced(&collector.url())
        .env("REDIS_URL", redis.address())
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .start();
    wait_for("the store to be there", || {
        call(&server, &[]);
        collector.received().iter().any(|received| received.span.name == "EVALSHA").then_some(())
    });
    redis.freeze();
    let client = Client::connect(server.grpc_port());
    let charges_before = charges(&server);
    client.call_until(&rate_limit_request("shop", &[("login", "bob")]), || charges(&server) > charges_before);
    let gave_up = wait_for("a call that was given up", || {
        let mut calls = collector.wait_for(CALL, 1);
        calls.retain(|call| attribute(call, "rpc.response.status_code") == "CANCELLED");
        calls.pop()
    });
    assert!(gave_up.span.end_time_unix_nano > gave_up.span.start_time_unix_nano);
    redis.thaw();
}

/// Exports traces to a collector that fails; checks that decisions and the shutdown are not affected.
fn assert_decisions_unaffected(setup: Setup, why: &str) {
    let mut server = setup.env("OTEL_BSP_MAX_QUEUE_SIZE", "16").env("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4").start();
    let client = Client::connect(server.grpc_port());
    for _ in 0..200 {
        client.call(&rate_limit_request("shop", &[("login", "ann")])).unwrap();
    }
    wait_for(why, || server.stderr().contains("spans are lost").then_some(()));
    client.call(&rate_limit_request("shop", &[("login", "ann")])).unwrap();
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr());
    let log = server.stderr();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("spans are lost")).collect();
    assert_eq!(lines.len(), 1, "one line a minute: {log}");
    assert!(lines[0].contains("OTEL_EXPORTER_OTLP_ENDPOINT"), "{log}");
}

#[test]
fn absent_or_hanging_collector_costs_only_spans() {
    let unreachable_listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let unreachable = format!("http://{}", unreachable_listener.local_addr().unwrap());
    drop(unreachable_listener);
    let silent_listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let silent = format!("http://{}", silent_listener.local_addr().unwrap());
    for url in [&unreachable, &silent] {
        assert_decisions_unaffected(traced(url), "a line over HTTP");
        assert_decisions_unaffected(over_grpc(traced(url)), "a line over gRPC");
    }
}

#[test]
fn spans_are_counted_by_outcome() {
    let collector = OtlpCollector::start();
    let server = traced(&collector.url()).start();
    call(&server, &[]);
    collector.wait_for("decide", 1);
    wait_for("both spans to be counted", || {
        let stats = http::get(server.debug_port(), "/stats").send().text();
        stats
            .lines()
            .any(|line| line.contains("tollkeeper_spans_total") && line.contains("sent") && line.ends_with('2'))
            .then_some(())
    });
}

#[test]
fn invalid_trace_settings_stop_the_start_and_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let large = directory.path().join("large.pem");
    std::fs::write(&large, "x".repeat((1 << 20) + 1)).unwrap();
    let [empty, large] = [&empty, &large].map(|path| path.to_str().unwrap());
    for (name, value, why) in [
        ("TRACING_EXPORTER_PROTOCOL", "udp", "http or grpc"),
        ("TRACING_SAMPLING_RATE", "5", "0 to 1"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "otel:4317", "http://host:port"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://", "http://host:port"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:hunter2@otel:4317", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://otel:+4317", "http://host:port"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1:4317", "http://host:port"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2", "name=value"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "key=hunter2%+f", "name=value"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf or grpc"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "whole number"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere", "No such file"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", empty, "no certificate"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", large, "larger than 1 MiB"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", empty, "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team", "name=value"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=a%2", "name=value"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "always_on"),
        ("OTEL_TRACES_SAMPLER_ARG", "2", "0 to 1"),
        ("OTEL_PROPAGATORS", "xray", "tracecontext"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096", "OTEL_BSP_MAX_QUEUE_SIZE"),
    ] {
        let ended = with_rules(RULES)
            .env("TRACING_ENABLED", "true")
            .env("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
            .env("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1000")
            .env(name, value)
            .run();
        let lines: Vec<_> = ended.stderr.lines().filter(|line| !line.contains("level=warning")).collect();
        assert_eq!((ended.code, lines.len()), (Some(2), 1), "{name}={value}: {}", ended.stderr);
        assert!(lines[0].contains(name) && lines[0].contains(why), "{name}={value}: {}", ended.stderr);
        assert!(!ended.stderr.contains("hunter2"), "{}", ended.stderr);
    }
}
