//! CPU time of the whole service per decision, compared with an empty tonic handler in the same run.
//!
//! The handler decodes the same request and sends the same response, so it is the lower bound for a service on tonic.
//! Both are separate processes; the cost is their CPU time, user and system, per call. Load is a closed loop from this
//! process. Rounds alternate between the two and ratios are per round, so that drift of the machine affects both. The
//! bench asserts nothing.
//!
//! In `tests/bench`: `cargo bench --bench serve [-- SCENARIO...]`, scenarios: hot, keys, million, rules, size, reload,
//! redis-keys, redis-hot, redis-open, redis-ten, eventual, eventual-calls, eventual-flood, metrics, scrape, log, cores,
//! latency.

#![expect(clippy::print_stdout, reason = "a bench talks to a person")]

mod cores;
mod decision_log;
mod load;
mod metrics;
mod process;
mod redis;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message as _;
use tokio::net::TcpListener;
use tollkeeper::base::pb;
use tollkeeper::base::pb::rate_limit_service_server::{RateLimitService, RateLimitServiceServer};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use self::load::{Caller, Pace, STREAMS, call_once_for_each, closed_loop, median, open_loop_latencies, percentile};
use self::process::MeasuredServer;

/// Duration of one measurement.
const ROUND: Duration = Duration::from_secs(3);
const ROUNDS: usize = 5;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    if arguments.first().is_some_and(|first| first == "empty-handler") {
        let port = arguments[1].parse().expect("a port");
        return runtime.block_on(empty_handler(port));
    }
    let selected = |name: &str| arguments.is_empty() || arguments.iter().any(|argument| argument == name);
    if selected("cores") {
        cores::throughput();
    }
    if selected("latency") {
        cores::latency();
    }
    if !arguments.is_empty() && arguments.iter().all(|name| ["cores", "latency"].contains(&name.as_str())) {
        return;
    }
    runtime.block_on(async {
        println!("{:<34} {:>10} {:>10} {:>7} {:>9}", "scenario", "us/call", "empty", "ratio", "calls/s");
        for (name, situation) in [
            ("hot", Situation { label: "one hot key", rules: 10, keys: 1 }),
            ("keys", Situation { label: "100 000 keys", rules: 10, keys: 100_000 }),
            ("million", Situation { label: "1 000 000 keys", rules: 10, keys: 1_000_000 }),
            ("rules", Situation { label: "100 000 keys, 10 rules", rules: 10, keys: 100_000 }),
            ("rules", Situation { label: "100 000 keys, 100 000 rules", rules: 100_000, keys: 100_000 }),
        ] {
            if selected(name) {
                compare(&situation).await;
            }
        }
        if selected("size") {
            size().await;
        }
        if selected("reload") {
            reload().await;
        }
        if selected("metrics") {
            metrics::cost().await;
        }
        if selected("log") {
            decision_log::cost().await;
        }
        if selected("scrape") {
            metrics::scrape().await;
        }
        if ["redis-keys", "redis-hot", "redis-open", "redis-ten", "eventual", "eventual-calls", "eventual-flood"]
            .into_iter()
            .any(selected)
        {
            redis::all(selected).await;
        }
    });
}

/// A measured scenario.
struct Situation {
    label: &'static str,
    rules: usize,
    keys: u64,
}

/// Measures both servers in turn.
async fn compare(situation: &Situation) {
    let tollkeeper = MeasuredServer::start(process::tollkeeper(&rules(situation.rules)));
    let empty = MeasuredServer::empty_handler();
    let (mut ratios, mut ours, mut floors, mut rates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // Warms up: one-time costs, such as growing tables, are not measured.
    closed_loop(&tollkeeper, situation.keys, request, (STREAMS, Duration::from_secs(1 + situation.keys / 100_000)))
        .await;
    for _ in 0..ROUNDS {
        let floor = closed_loop(&empty, situation.keys, request, (STREAMS, ROUND)).await;
        let our = closed_loop(&tollkeeper, situation.keys, request, (STREAMS, ROUND)).await;
        ratios.push(our.us_per_call / floor.us_per_call);
        ours.push(our.us_per_call);
        floors.push(floor.us_per_call);
        rates.push(our.calls_per_s);
    }
    println!(
        "{:<34} {:>10.2} {:>10.2} {:>7.3} {:>9.0}",
        situation.label,
        median(&mut ours),
        median(&mut floors),
        median(&mut ratios),
        median(&mut rates)
    );
}

/// Resident memory per live token_bucket key at a million keys.
async fn size() {
    let server = MeasuredServer::start(process::tollkeeper(&rules(10)));
    closed_loop(&server, 1000, request, (STREAMS, ROUND)).await;
    let before = server.resident_bytes();
    let keys = 1_000_000;
    call_once_for_each(&server, 0..keys, request).await;
    let after = server.resident_bytes();
    println!(
        "resident: {:.1} MB with 1000 keys, {:.1} MB with {keys} more: {:.1} bytes per key",
        before as f64 / 1e6,
        after as f64 / 1e6,
        (after - before) as f64 / keys as f64
    );
}

/// Latency of the slowest calls with and without repeated reloads of 100 000 rules.
async fn reload() {
    let text = rules(100_000);
    let started = Instant::now();
    let tollkeeper = process::tollkeeper(&text).start();
    let path = tollkeeper.rules_path();
    let server = MeasuredServer::from(tollkeeper);
    Caller::connect(server.address()).await.call(request(1)).await;
    println!("start with 100 000 rules: {:.2} s until the first answer", started.elapsed().as_secs_f64());
    for reloads in [false, true] {
        let stop = Arc::new(AtomicBool::new(false));
        let (path, text, stopped) = (path.clone(), text.clone(), Arc::clone(&stop));
        let writer = std::thread::spawn(move || {
            let mut written = 0;
            while reloads && !stopped.load(Ordering::Relaxed) {
                written += 1;
                std::fs::write(&path, format!("{text}# {written}\n")).expect("the rule file is written");
                std::thread::sleep(Duration::from_secs(2));
            }
            written
        });
        let latencies = open_loop_latencies(&server, 2000, Duration::from_secs(15), Pace::Sleep, request).await;
        stop.store(true, Ordering::Relaxed);
        let written = writer.join().expect("the writer ends");
        println!(
            "2000 calls/s, {written:>2} reloads: p50 {} us, p99 {} us, p99.9 {} us, slowest {} us",
            percentile(&latencies, 500),
            percentile(&latencies, 990),
            percentile(&latencies, 999),
            percentile(&latencies, 1000)
        );
    }
}

/// Rules with a token bucket that every call matches, and others that no call matches.
fn rules(count: usize) -> String {
    // The limit rejects nothing, and a used key lives for hours.
    rules_with("{unit: day, requests_per_unit: 10, bucket_size: 4000000000, algorithm: token_bucket}", count)
}

/// Same as [`rules`], with this limit on the rule that every call matches.
fn rules_with(limit: &str, count: usize) -> String {
    let mut text = format!("domain: bench\ndescriptors:\n  - key: user\n    rate_limit: {limit}\n");
    for rule in 1..count {
        text.push_str(&format!(
            "  - key: path\n    value: /service/{rule}/items\n    rate_limit: {{unit: minute, requests_per_unit: {rule}}}\n"
        ));
    }
    text
}

/// The frame of a request for one key.
fn request(key: u64) -> Bytes {
    let entry = pb::rate_limit_descriptor::Entry { key: "user".into(), value: format!("user-{key:08}").into() };
    let descriptor = pb::RateLimitDescriptor { entries: vec![entry], ..Default::default() };
    frame(&pb::RateLimitRequest { domain: "bench".to_owned(), descriptors: vec![descriptor], hits_addend: 0 })
}

/// gRPC frame of a message.
fn frame(message: &pb::RateLimitRequest) -> Bytes {
    let mut frame = BytesMut::with_capacity(5 + message.encoded_len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.encoded_len()).expect("it is short"));
    message.encode(&mut frame).expect("there is room");
    frame.freeze()
}

/// Runs the empty handler, which decodes a request and sends a typical response.
async fn empty_handler(port: u16) {
    let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("the port is free");
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    let service = RateLimitServiceServer::new(Empty { response: typical_response() });
    Server::builder().add_service(service).serve_with_incoming(incoming).await.expect("it serves");
}

struct Empty {
    response: pb::RateLimitResponse,
}

#[tonic::async_trait]
impl RateLimitService for Empty {
    async fn should_rate_limit(
        &self,
        request: Request<pb::RateLimitRequest>,
    ) -> Result<Response<pb::RateLimitResponse>, Status> {
        std::hint::black_box(request.get_ref());
        Ok(Response::new(self.response.clone()))
    }
}

fn typical_response() -> pb::RateLimitResponse {
    use pb::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit};
    pb::RateLimitResponse {
        overall_code: Code::Ok.into(),
        statuses: vec![DescriptorStatus {
            code: Code::Ok.into(),
            current_limit: Some(RateLimit {
                requests_per_unit: 1_000_000,
                unit: Unit::Hour.into(),
                ..Default::default()
            }),
            limit_remaining: 999_999,
            duration_until_reset: Duration::from_secs(1).try_into().ok(),
            ..Default::default()
        }],
        ..Default::default()
    }
}
