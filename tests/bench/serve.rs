//! What a decision costs the whole service, beside an empty tonic handler in the same run.
//!
//! The handler decodes the same request and answers the same response, so it is the floor of anything built on tonic.
//! Both are processes of their own; the cost is their CPU time, user and system, over the calls they answered. Load is
//! a closed loop from this process. Rounds alternate between the two, and ratios are taken round by round, so that a
//! machine that drifts drifts for both. Nothing is asserted: the figures are for people.
//!
//! `cargo bench --bench serve [-- SCENARIO...]`, scenarios: hot, keys, million, rules, size, reload.

#![expect(clippy::print_stdout, reason = "a bench talks to a person")]

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use prost::Message as _;
use tokio::net::TcpListener;
use tollkeeper::pb;
use tollkeeper::pb::rate_limit_service_server::{RateLimitService, RateLimitServiceServer};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

/// How long one measurement takes.
const ROUND: Duration = Duration::from_secs(3);
const ROUNDS: usize = 5;
const CONNECTIONS: usize = 2;
const STREAMS: usize = 32;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    if arguments.first().is_some_and(|first| first == "empty-handler") {
        let port = arguments[1].parse().expect("a port");
        return runtime.block_on(empty_handler(port));
    }
    let wanted = |name: &str| arguments.is_empty() || arguments.iter().any(|argument| argument == name);
    runtime.block_on(async {
        println!("{:<34} {:>10} {:>10} {:>7} {:>9}", "scenario", "us/call", "empty", "ratio", "calls/s");
        for (name, situation) in [
            ("hot", Situation { label: "one hot key", rules: 10, keys: 1 }),
            ("keys", Situation { label: "100 000 keys", rules: 10, keys: 100_000 }),
            ("million", Situation { label: "1 000 000 keys", rules: 10, keys: 1_000_000 }),
            ("rules", Situation { label: "100 000 keys, 10 rules", rules: 10, keys: 100_000 }),
            ("rules", Situation { label: "100 000 keys, 100 000 rules", rules: 100_000, keys: 100_000 }),
        ] {
            if wanted(name) {
                compare(&situation).await;
            }
        }
        if wanted("size") {
            size().await;
        }
        if wanted("reload") {
            reload().await;
        }
    });
}

/// What is measured.
struct Situation {
    label: &'static str,
    rules: usize,
    keys: u64,
}

/// Measures both servers in turn.
async fn compare(situation: &Situation) {
    let rules = rule_file(situation.rules);
    let tollkeeper = ServerProcess::tollkeeper(rules.path());
    let empty = ServerProcess::empty_handler();
    let (mut ratios, mut ours, mut floors, mut rates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // What comes once, such as growing, is not what is measured.
    drive(&tollkeeper, situation, Duration::from_secs(1 + situation.keys / 100_000)).await;
    for _ in 0..ROUNDS {
        let floor = drive(&empty, situation, ROUND).await;
        let our = drive(&tollkeeper, situation, ROUND).await;
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
    let rules = rule_file(10);
    let server = ServerProcess::tollkeeper(rules.path());
    let few = Situation { label: "", rules: 10, keys: 1000 };
    drive(&server, &few, ROUND).await;
    let before = server.resident_bytes();
    let keys = 1_000_000;
    visit_each(&server, keys).await;
    let after = server.resident_bytes();
    println!(
        "resident: {:.1} MB with 1000 keys, {:.1} MB with {keys} more: {:.1} bytes per key",
        before as f64 / 1e6,
        after as f64 / 1e6,
        (after - before) as f64 / keys as f64
    );
}

/// The slowest calls while 100 000 rules are reloaded again and again, and without that.
async fn reload() {
    let rules = rule_file(100_000);
    let started = Instant::now();
    let server = ServerProcess::tollkeeper(rules.path());
    call(&mut tonic::client::Grpc::new(server.connect().await), request(1)).await;
    println!("start with 100 000 rules: {:.2} s until the first answer", started.elapsed().as_secs_f64());
    let text = std::fs::read_to_string(rules.path()).expect("the rule file");
    for reloads in [false, true] {
        let stop = Arc::new(AtomicBool::new(false));
        let (path, text, stopped) = (rules.path().to_owned(), text.clone(), Arc::clone(&stop));
        let writer = std::thread::spawn(move || {
            let mut written = 0;
            while reloads && !stopped.load(Ordering::Relaxed) {
                written += 1;
                std::fs::write(&path, format!("{text}# {written}\n")).expect("the rule file is written");
                std::thread::sleep(Duration::from_secs(2));
            }
            written
        });
        let mut latencies = paced(&server, 2000, Duration::from_secs(15)).await;
        stop.store(true, Ordering::Relaxed);
        let written = writer.join().expect("the writer ends");
        latencies.sort_unstable();
        let at = |permille: usize| latencies[(latencies.len() - 1) * permille / 1000];
        println!(
            "2000 calls/s, {written:>2} reloads: p50 {} us, p99 {} us, p99.9 {} us, slowest {} us",
            at(500),
            at(990),
            at(999),
            at(1000)
        );
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A rule file with a token bucket that every call meets, and others beside it.
fn rule_file(rules: usize) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".yaml").tempfile().expect("a temporary file");
    let mut text = String::from("domain: bench\ndescriptors:\n");
    // Nothing is refused, and a key that was used once lives for hours.
    let limit = "{unit: day, requests_per_unit: 10, bucket_size: 4000000000, algorithm: token_bucket}";
    text.push_str(&format!("  - key: user\n    rate_limit: {limit}\n"));
    for rule in 1..rules {
        text.push_str(&format!(
            "  - key: path\n    value: /service/{rule}/items\n    rate_limit: {{unit: minute, requests_per_unit: {rule}}}\n"
        ));
    }
    file.write_all(text.as_bytes()).expect("the rule file is written");
    file
}

/// The frame of a request for one key.
fn request(key: u64) -> Vec<u8> {
    let entry = pb::rate_limit_descriptor::Entry { key: "user".into(), value: format!("user-{key:08}").into() };
    let descriptor = pb::RateLimitDescriptor { entries: vec![entry], ..Default::default() };
    pb::RateLimitRequest { domain: "bench".to_owned(), descriptors: vec![descriptor], hits_addend: 0 }.encode_to_vec()
}

/// What one measurement found.
struct Cost {
    us_per_call: f64,
    calls_per_s: f64,
}

/// Calls in a closed loop for `time`.
async fn drive(server: &ServerProcess, situation: &Situation, time: Duration) -> Cost {
    let calls = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let mut streams = tokio::task::JoinSet::new();
    for connection in 0..CONNECTIONS {
        let channel = server.connect().await;
        for stream in 0..STREAMS {
            let (channel, calls, stop) = (channel.clone(), Arc::clone(&calls), Arc::clone(&stop));
            let (keys, mut random) = (situation.keys, (connection * STREAMS + stream + 1) as u64 * 0x9e37_79b9);
            streams.spawn(async move {
                let mut client = tonic::client::Grpc::new(channel);
                while !stop.load(Ordering::Relaxed) {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    call(&mut client, request(random % keys)).await;
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    }
    let (cpu, before, started) = (server.cpu(), calls.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(time).await;
    let (cpu, count, elapsed) = (server.cpu() - cpu, calls.load(Ordering::Relaxed) - before, started.elapsed());
    stop.store(true, Ordering::Relaxed);
    while streams.join_next().await.is_some() {}
    Cost { us_per_call: cpu.as_secs_f64() * 1e6 / count as f64, calls_per_s: count as f64 / elapsed.as_secs_f64() }
}

/// Calls once for each of `keys`, keys that [`drive`] does not use.
async fn visit_each(server: &ServerProcess, keys: u64) {
    let mut streams = tokio::task::JoinSet::new();
    let channel = server.connect().await;
    for stream in 0..STREAMS as u64 {
        let channel = channel.clone();
        streams.spawn(async move {
            let mut client = tonic::client::Grpc::new(channel);
            for key in (stream..keys).step_by(STREAMS) {
                call(&mut client, request(10_000_000 + key)).await;
            }
        });
    }
    while streams.join_next().await.is_some() {}
}

/// Calls at a steady rate; each latency in microseconds, counted from when the call was meant to start.
async fn paced(server: &ServerProcess, per_second: u32, time: Duration) -> Vec<u64> {
    let channel = server.connect().await;
    let started = Instant::now();
    let mut calls = tokio::task::JoinSet::new();
    for place in 0..per_second * u32::try_from(time.as_secs()).expect("seconds") {
        let intended = started + Duration::from_secs(1) * place / per_second;
        tokio::time::sleep_until(intended.into()).await;
        let mut client = tonic::client::Grpc::new(channel.clone());
        calls.spawn(async move {
            call(&mut client, request(u64::from(place % 1000))).await;
            u64::try_from(intended.elapsed().as_micros()).unwrap_or(u64::MAX)
        });
    }
    calls.join_all().await
}

async fn call(client: &mut tonic::client::Grpc<Channel>, frame: Vec<u8>) {
    client.ready().await.expect("the server is there");
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let answer = client.unary(Request::new(frame), path.parse().expect("a path"), Frames).await;
    assert!(!answer.expect("an answer").into_inner().is_empty(), "an empty answer");
}

/// Frames as they are: the load must not spend its time on protobuf.
#[derive(Clone, Copy)]
struct Frames;

impl Codec for Frames {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Frames {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, frame: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put_slice(buffer, &frame);
        Ok(())
    }
}

impl Decoder for Frames {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut frame = vec![0; bytes::Buf::remaining(buffer)];
        bytes::Buf::copy_to_slice(buffer, &mut frame);
        Ok(Some(frame))
    }
}

/// A server in a process of its own.
struct ServerProcess {
    child: Child,
    address: SocketAddr,
}

impl ServerProcess {
    fn tollkeeper(rules: &Path) -> Self {
        let [grpc, http, debug] = [free_port(), free_port(), free_port()];
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollkeeper"));
        command.arg("serve").arg("--config").arg(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("LOG_LEVEL", "error");
        command.env("GRPC_HOST", "127.0.0.1").env("HOST", "127.0.0.1").env("DEBUG_HOST", "127.0.0.1");
        command.env("GRPC_PORT", grpc.to_string()).env("PORT", http.to_string()).env("DEBUG_PORT", debug.to_string());
        Self::start(command, grpc)
    }

    fn empty_handler() -> Self {
        let port = free_port();
        let program: PathBuf = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.arg("empty-handler").arg(port.to_string());
        Self::start(command, port)
    }

    fn start(mut command: Command, port: u16) -> Self {
        let child = command.stdout(Stdio::null()).spawn().expect("the server starts");
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        while std::net::TcpStream::connect(address).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { child, address }
    }

    async fn connect(&self) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).expect("an address");
        endpoint.tcp_nodelay(true).connect().await.expect("a connection")
    }

    /// CPU time of all its threads, from the scheduler's nanosecond account.
    fn cpu(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("the server runs");
        tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok())
            .filter_map(|account| account.split(' ').next()?.parse().ok())
            .map(Duration::from_nanos)
            .sum()
    }

    fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the server runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its resident size");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}

/// The floor: decodes a request, and answers what a decision would.
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
            duration_until_reset: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
            ..Default::default()
        }],
        ..Default::default()
    }
}
