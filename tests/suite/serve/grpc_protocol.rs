//! Protocol errors of gRPC calls: each gets the status that the specification demands and charges nothing.
//!
//! Statuses of gRPC are those of grpc-go, which envoyproxy/ratelimit uses.

use std::net::Ipv4Addr;
use std::thread;
use std::time::Duration;

use ::tollkeeper::base::pb::RateLimitResponse;
use ::tollkeeper::base::pb::rate_limit_response::Code as Verdict;
use axum::http::{HeaderMap, Request};
use bytes::Bytes;
use prost::Message as _;
use tonic::transport::Endpoint;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use kit::PATIENCE;
use kit::grpc::{SHOULD_RATE_LIMIT, rate_limit_request};
use kit::http2_frames::{DATA, END_HEADERS, END_STREAM, HEADERS, Http2Connection, WINDOW_UPDATE};
use kit::tollkeeper::{self, Tollkeeper};

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 1}}
- {key: open, rate_limit: {unit: day, requests_per_unit: 1000000}}
";
/// Bound on messages of [`server`], in bytes.
const MAX_MESSAGE_BYTES: usize = 65_536;

fn server() -> Tollkeeper {
    tollkeeper::with_rules(RULES).env("TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES", "64KiB").start()
}

/// A call as sent on the wire; [`GrpcCall::new`] is a valid one that the rule of `user` limits.
struct GrpcCall {
    method: &'static str,
    path: &'static str,
    headers: Vec<(&'static str, &'static str)>,
    body: Vec<u8>,
    /// Ends the stream after the body.
    ends: bool,
}

/// Head of a gRPC message frame: the compressed flag and the length.
fn frame_head(compressed: u8, length: usize) -> Vec<u8> {
    [[compressed].as_slice(), &u32::try_from(length).unwrap().to_be_bytes()].concat()
}

impl GrpcCall {
    fn new() -> Self {
        let message = rate_limit_request("shop", &[("user", "ann")]).encode_to_vec();
        let body = [frame_head(0, message.len()), message].concat();
        let headers = vec![("te", "trailers"), ("content-type", "application/grpc")];
        Self { method: "POST", path: SHOULD_RATE_LIMIT, headers, body, ends: true }
    }

    fn with_method(method: &'static str) -> Self {
        Self { method, ..Self::new() }
    }

    /// The call with another content type; `None` for no such header.
    fn with_content_type(value: Option<&'static str>) -> Self {
        let headers = value.map(|value| ("content-type", value)).into_iter().collect();
        Self { headers, ..Self::new() }
    }

    fn with_header(name: &'static str, value: &'static str) -> Self {
        let mut call = Self::new();
        call.headers.push((name, value));
        call
    }

    fn with_body(body: Vec<u8>) -> Self {
        Self { body, ..Self::new() }
    }

    /// Sends the call on a connection of its own.
    fn send(&self, port: u16) -> GrpcAnswer {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let answer = async { tokio::time::timeout(PATIENCE, self.exchange(port)).await };
        runtime.block_on(answer).unwrap_or_else(|_| panic!("no answer to {} {:?}", self.method, self.headers))
    }

    async fn exchange(&self, port: u16) -> GrpcAnswer {
        let stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let (mut requests, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut request = Request::builder().method(self.method).uri(format!("http://tollkeeper{}", self.path));
        for (name, value) in &self.headers {
            request = request.header(*name, *value);
        }
        let (response, mut sender) = requests.send_request(request.body(()).unwrap(), false).unwrap();
        // The server may have answered and reset the stream already.
        let _ = sender.send_data(Bytes::copy_from_slice(&self.body), self.ends);
        let (head, mut body) = response.await.unwrap().into_parts();
        let mut message = Vec::new();
        while let Some(Ok(data)) = body.data().await {
            message.extend_from_slice(&data);
        }
        let trailers = body.trailers().await.ok().flatten().unwrap_or_default();
        let grpc_status = grpc_status(&trailers).or_else(|| grpc_status(&head.headers));
        GrpcAnswer { http_status: head.status.as_u16(), grpc_status, headers: head.headers, message }
    }
}

fn grpc_status(headers: &HeaderMap) -> Option<u32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

#[derive(Debug)]
struct GrpcAnswer {
    http_status: u16,
    grpc_status: Option<u32>,
    headers: HeaderMap,
    message: Vec<u8>,
}

impl GrpcAnswer {
    fn statuses(&self) -> (u16, u32) {
        (self.http_status, self.grpc_status.unwrap_or_else(|| panic!("no grpc-status: {self:?}")))
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    fn verdict(&self) -> Verdict {
        assert_eq!(self.statuses(), (200, 0), "{self:?}");
        RateLimitResponse::decode(&self.message[5..]).unwrap().overall_code()
    }
}

/// Checks that no earlier call charged the limit of one hit, and that it works.
fn assert_uncharged(server: &Tollkeeper) {
    let call = GrpcCall::new();
    assert_eq!([(); 2].map(|()| call.send(server.grpc_port()).verdict()), [Verdict::Ok, Verdict::OverLimit]);
}

#[test]
fn call_by_other_method_than_post_is_405() {
    let server = server();
    for method in ["GET", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH"] {
        let answer = GrpcCall::with_method(method).send(server.grpc_port());
        assert_eq!(answer.http_status, 405, "{method}: {answer:?}");
        assert_eq!((answer.grpc_status, answer.header("allow")), (Some(13), Some("POST")), "{method}");
        let health = GrpcCall { path: "/grpc.health.v1.Health/Check", ..GrpcCall::with_method(method) };
        assert_eq!(health.send(server.grpc_port()).http_status, 405, "{method}");
    }
    assert_uncharged(&server);
}

#[test]
fn call_with_foreign_content_type_is_415() {
    let server = server();
    let foreign = [None, Some(""), Some("text/html"), Some("application/json"), Some("application/grpc-web")];
    for content_type in foreign.into_iter().chain([Some("application/grpc-web+proto"), Some("application/grpcx")]) {
        let answer = GrpcCall::with_content_type(content_type).send(server.grpc_port());
        assert_eq!(answer.statuses(), (415, 3), "{content_type:?}");
        let path = "/grpc.health.v1.Health/Check";
        let health = GrpcCall { path, ..GrpcCall::with_content_type(content_type) }.send(server.grpc_port());
        assert_eq!(health.statuses(), (415, 3), "{content_type:?}");
    }
    assert_uncharged(&server);
    for of_grpc in ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8", "Application/gRPC"]
    {
        let answer = GrpcCall::with_content_type(Some(of_grpc)).send(server.grpc_port());
        assert_eq!(answer.verdict(), Verdict::OverLimit, "{of_grpc}");
    }
}

#[test]
fn malformed_timeout_is_refused() {
    let server = server();
    for timeout in ["", "S", "5", "5s", "5 S", "-5S", "+5S", "1.5S", "100000000S", "99999999999H", "5S5S"] {
        let answer = GrpcCall::with_header("grpc-timeout", timeout).send(server.grpc_port());
        assert_eq!(answer.statuses(), (400, 13), "{timeout:?}");
        assert!(answer.header("grpc-message").unwrap().contains("malformed%20grpc-timeout"), "{answer:?}");
    }
    assert_uncharged(&server);
    for timeout in ["99999999H", "1M", "00000010S", "5000m", "5000000u", "99999999n"] {
        let answer = GrpcCall::with_header("grpc-timeout", timeout).send(server.grpc_port());
        assert_eq!(answer.verdict(), Verdict::OverLimit, "{timeout}");
    }
}

#[test]
fn refusal_follows_the_end_of_the_call() {
    let server = server();
    let call = GrpcCall::new();
    let mut connection = Http2Connection::connect(server.grpc_port());
    connection.call(1, &[("grpc-timeout", "malformed")]).unwrap();
    let answer_to = |connection: &mut Http2Connection, stream: u32| {
        connection.call(stream, &[]).unwrap();
        connection.send(DATA, END_STREAM, stream, &call.body).unwrap();
        let kinds = [(); 3].map(|()| connection.next().map(|frame| (frame.stream, frame.kind)));
        assert_eq!(kinds, [HEADERS, DATA, HEADERS].map(|kind| Some((stream, kind))));
    };
    answer_to(&mut connection, 3);
    connection.send(DATA, 0, 1, &call.body).unwrap();
    connection.send(DATA, END_STREAM, 1, b"").unwrap();
    let refusal = connection.next().expect("the connection lives");
    assert_eq!((refusal.kind, refusal.flags, refusal.stream), (HEADERS, END_HEADERS | END_STREAM, 1));
    // No reset follows, which clients would report in place of the refusal.
    answer_to(&mut connection, 5);
    // A call that does not end is refused too.
    let unended = GrpcCall { ends: false, ..GrpcCall::with_method("GET") };
    assert_eq!(unended.send(server.grpc_port()).http_status, 405);
}

#[test]
fn bytes_after_the_message_are_an_internal_error() {
    let server = server();
    let whole = GrpcCall::new().body;
    for stray in [b"\0".as_slice(), b"stray", b"\0\0\0\0", b"\0\0\0\0\0", &whole] {
        let body = [&whole, stray].concat();
        let answer = GrpcCall::with_body(body.clone()).send(server.grpc_port());
        assert_eq!(answer.statuses(), (200, 13), "{}", stray.escape_ascii());
        // The error does not wait for the end of the stream.
        let unended = GrpcCall { ends: false, ..GrpcCall::with_body(body.clone()) }.send(server.grpc_port());
        assert_eq!(unended.statuses(), (200, 13), "{}", stray.escape_ascii());
        let with_encoding = GrpcCall { body, ..GrpcCall::with_header("grpc-encoding", "gzip") };
        assert_eq!(with_encoding.send(server.grpc_port()).statuses(), (200, 13), "{}", stray.escape_ascii());
    }
    assert_uncharged(&server);
}

#[test]
fn incomplete_message_is_an_internal_error() {
    let server = server();
    let whole = GrpcCall::new().body;
    for length in [0, 1, 4, 5, whole.len() - 1] {
        let answer = GrpcCall::with_body(whole[..length].to_vec()).send(server.grpc_port());
        assert_eq!(answer.statuses(), (200, 13), "{length} bytes");
    }
    assert_uncharged(&server);
}

#[test]
fn too_large_message_is_refused_at_its_length() {
    let server = server();
    for (compressed, encoding) in [(0, None), (0, Some("gzip")), (1, Some("gzip")), (0, Some("identity"))] {
        for length in [MAX_MESSAGE_BYTES + 1, 1 << 24, u32::MAX as usize] {
            // Only the head of the frame is sent, and the stream stays open.
            let mut call = GrpcCall { ends: false, ..GrpcCall::with_body(frame_head(compressed, length)) };
            call.headers.extend(encoding.map(|encoding| ("grpc-encoding", encoding)));
            let answer = call.send(server.grpc_port());
            assert_eq!(answer.statuses(), (200, 8), "{length} bytes, {encoding:?}");
        }
    }
    let largest = vec![0xff; MAX_MESSAGE_BYTES];
    let answer = GrpcCall::with_body([frame_head(0, largest.len()), largest].concat()).send(server.grpc_port());
    assert_eq!(answer.statuses(), (200, 13), "the largest message is read, and is not protobuf");
    assert_uncharged(&server);
}

#[test]
fn compression_is_identity_or_gzip() {
    let server = server();
    let answer = GrpcCall::with_header("grpc-encoding", "deflate").send(server.grpc_port());
    assert_eq!(answer.statuses(), (200, 12));
    assert_eq!(answer.header("grpc-accept-encoding"), Some("identity,gzip"));
    let mut flagged = GrpcCall::new();
    // The flags of a compressed message without an encoding, and of an unknown kind.
    for flag in [1, 2, 255] {
        flagged.body[0] = flag;
        assert_eq!(flagged.send(server.grpc_port()).statuses(), (200, 13), "{flag}");
    }
    let with_encoding = GrpcCall { body: flagged.body, ..GrpcCall::with_header("grpc-encoding", "gzip") };
    assert_eq!(with_encoding.send(server.grpc_port()).statuses(), (200, 13));
    assert_uncharged(&server);
    for encoding in ["identity", "gzip"] {
        let plain = GrpcCall::with_header("grpc-encoding", encoding).send(server.grpc_port());
        assert_eq!(plain.verdict(), Verdict::OverLimit, "{encoding}");
    }
}

#[test]
fn call_that_ends_in_trailers_is_answered() {
    let server = server();
    let mut connection = Http2Connection::connect(server.grpc_port());
    connection.call(1, &[]).unwrap();
    connection.send(DATA, 0, 1, &GrpcCall::new().body).unwrap();
    // An HPACK literal without indexing, `x: y`.
    connection.send(HEADERS, END_HEADERS | END_STREAM, 1, b"\0\x01x\x01y").unwrap();
    let kinds = [(); 3].map(|()| connection.next().map(|frame| frame.kind));
    assert_eq!(kinds, [HEADERS, DATA, HEADERS].map(Some));
}

/// Number of calls whose first DATA frames exceed h2's own budget for small frames.
const SMALL_CALLS: u32 = 2500;

#[test]
fn many_calls_that_end_in_a_later_frame_are_answered() {
    let server = server();
    let mut connection = Http2Connection::connect(server.grpc_port());
    let message = rate_limit_request("shop", &[("open", "x")]).encode_to_vec();
    let message = [frame_head(0, message.len()), message].concat();
    let streams = || (1..2 * SMALL_CALLS).step_by(2);
    // The answers together exceed the initial window.
    connection.send(WINDOW_UPDATE, 0, 0, &(1_u32 << 20).to_be_bytes()).unwrap();
    let mut sender = connection.try_clone();
    // The process reads all frames in one pass when it continues.
    server.freeze();
    let sending = thread::spawn(move || {
        for stream in streams() {
            sender.call_indexed(stream).unwrap();
            sender.send(DATA, 0, stream, &message).unwrap();
        }
        for stream in streams() {
            sender.send(DATA, END_STREAM, stream, b"").unwrap();
        }
    });
    server.thaw();
    let mut answered = 0;
    while answered < SMALL_CALLS {
        let frame = connection.next().unwrap_or_else(|| panic!("closed after {answered} answers"));
        assert!(matches!(frame.kind, DATA | HEADERS), "{frame:?} after {answered} answers");
        answered += u32::from(frame.kind == HEADERS && frame.flags == END_HEADERS | END_STREAM);
    }
    sending.join().unwrap();
}

#[test]
fn health_watch_of_unknown_service_reports_it_and_stays_open() {
    let mut server = tollkeeper::with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let target = format!("http://127.0.0.1:{}", server.grpc_port());
        let channel = Endpoint::from_shared(target).unwrap().connect().await.unwrap();
        let mut client = HealthClient::new(channel);
        let unknown = || HealthCheckRequest { service: "no.such.Service".to_owned() };
        assert_eq!(client.check(unknown()).await.unwrap_err().code(), tonic::Code::NotFound);
        let mut watch = client.watch(unknown()).await.unwrap().into_inner();
        let status = |response: HealthCheckResponse| response.status().as_str_name();
        assert_eq!(watch.message().await.unwrap().map(status), Some("SERVICE_UNKNOWN"));
        // A change of known services is none of the unknown one.
        for (service, expected) in [("", "SERVING"), ("ratelimit", "SERVING")] {
            let request = HealthCheckRequest { service: service.to_owned() };
            let mut known = client.watch(request).await.unwrap().into_inner();
            assert_eq!(known.message().await.unwrap().map(status), Some(expected));
        }
        let next = tokio::time::timeout(Duration::from_millis(200), watch.message());
        assert!(next.await.is_err(), "the stream stays open");
        server.signal("TERM");
        let end = tokio::time::timeout(PATIENCE, watch.message()).await.expect("shutdown ends the stream");
        assert_eq!(end.unwrap().map(status), None);
    });
    assert!(server.wait().success());
}
