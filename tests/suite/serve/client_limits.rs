//! Limits on clients: too many connections, too many requests, and request heads that are too long or too slow.
//!
//! The server rejects the excess at once and still serves clients within the limits.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use ::tollkeeper::base::pb::{RateLimitDescriptor, RateLimitRequest};
use prost::Message as _;
use tonic::Code;

use kit::grpc::{Client, SHOULD_RATE_LIMIT, rate_limit_request};
use kit::http::{self, connect};
use kit::http2_frames::{END_STREAM, GOAWAY, HEADERS, Http2Connection};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 1000000}}
";

fn server() -> Setup {
    with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

fn call(client: &Client) -> Result<(), Code> {
    client.call(&rate_limit_request("shop", &[("user", "ann")])).map(drop).map_err(|status| status.code())
}

/// True if the server closes the connection without sending anything.
fn is_closed(stream: &mut TcpStream) -> bool {
    http::read_until_closed(stream).is_empty()
}

/// Number that `/stats` reports under `name`.
fn stat(server: &Tollkeeper, name: &str) -> f64 {
    let page = http::get(server.debug_port(), "/stats").send().text();
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
}

fn connections(server: &Tollkeeper) -> f64 {
    stat(server, "tollkeeper_connections{listener=\"grpc\"}")
}

#[test]
fn excess_connection_is_closed_at_once_while_others_are_served() {
    const ALL: u8 = 15;
    let server = server().env("TOLLKEEPER_MAX_CONNECTIONS", ALL.to_string()).start();
    wait_for("the connection of the start to end", || (connections(&server) < 0.5).then_some(()));
    let port = server.grpc_port();
    let client = Client::connect(port);
    call(&client).unwrap();
    // One address gets a fifth.
    let addresses = (1..ALL).map(|at| Ipv4Addr::new(127, 0, 0, 2 + at / 3));
    let others: Vec<_> = addresses.map(|address| Http2Connection::connect_from(port, address)).collect();
    wait_for("all to be counted", || (connections(&server) > f64::from(ALL) - 0.5).then_some(()));
    for _ in 0..50 {
        assert!(is_closed(&mut connect(port, Ipv4Addr::LOCALHOST).unwrap()));
    }
    call(&client).unwrap();
    // Each listener has its own limit.
    assert_eq!(server.healthcheck(), 200);
    assert_eq!(stat(&server, "tollkeeper_connections_refused_total"), 50.0);
    let log = server.stderr();
    assert_eq!(log.matches("connection closed: TOLLKEEPER_MAX_CONNECTIONS of 15 is reached").count(), 1, "{log}");
    drop((client, others));
    wait_for("the places to be free", || (connections(&server) < 0.5).then_some(()));
    call(&Client::connect(port)).unwrap();
}

#[test]
fn connections_per_address_are_bounded() {
    let server = server().env("TOLLKEEPER_MAX_CONNECTIONS", "10").start();
    wait_for("the connection of the start to end", || (connections(&server) < 0.5).then_some(()));
    let port = server.grpc_port();
    let open = [Http2Connection::connect(port), Http2Connection::connect(port)];
    wait_for("both to be counted", || (connections(&server) > 1.5).then_some(()));
    assert!(is_closed(&mut connect(port, Ipv4Addr::LOCALHOST).unwrap()));
    let _elsewhere = connect(port, Ipv4Addr::new(127, 0, 0, 9)).unwrap();
    wait_for("another address to be let in", || (connections(&server) > 2.5).then_some(()));
    assert!(
        server.stderr().contains("connection closed: TOLLKEEPER_MAX_CONNECTIONS / 5 for one address of 2 is reached"),
        "{}",
        server.stderr()
    );
    drop(open);
    wait_for("the places to be free", || (connections(&server) < 1.5).then_some(()));
    call(&Client::connect(port)).unwrap();
}

#[test]
fn connections_of_operators_are_few() {
    const PER_ADDRESS: usize = 48;
    // 64, and eight for clients of this machine, as all are here.
    const ALL: usize = 72;
    let server = server().start();
    let port = server.debug_port();
    let connect_from = |last: u8| connect(port, Ipv4Addr::new(127, 0, 0, last)).unwrap();
    let first: Vec<_> = (0..PER_ADDRESS).map(|_| connect_from(2)).collect();
    assert!(is_closed(&mut connect_from(2)));
    let second: Vec<_> = (PER_ADDRESS + 1..ALL).map(|_| connect_from(4)).collect();
    // There is one place for the probe, and for the next connection.
    assert_eq!(http::get(port, "/livez").from(3).send().status, 200);
    let last = wait_for("the last place", || Some(connect_from(4)).filter(stays_open));
    assert!(!stays_open(&connect_from(3)));
    assert_eq!(server.healthcheck(), 200);
    let log = server.stderr();
    assert!(log.contains("connection closed: the limit on connections of operators of 48 is reached"), "{log}");
    drop((first, second, last));
    wait_for("a place to be free", || stays_open(&connect_from(3)).then_some(()));
}

/// True if the server neither sends anything nor closes the connection for a while.
fn stays_open(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    stream.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Sends the head of a request to `/json`, without its body.
fn half_a_request(server: &Tollkeeper, source: Ipv4Addr) -> TcpStream {
    let mut stream = connect(server.http_port(), source).unwrap();
    stream.write_all(b"POST /json HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n").unwrap();
    let mut line = [0; 25];
    stream.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream
}

const BODY: &str = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;

#[test]
fn excess_request_is_rejected_at_once_but_health_checks_pass() {
    let server = server().env("TOLLKEEPER_MAX_CONCURRENT_REQUESTS", "3").start();
    let client = Client::connect(server.grpc_port());
    call(&client).unwrap();
    // One address gets one of three.
    let halves = [1, 2, 3].map(|last| half_a_request(&server, Ipv4Addr::new(127, 0, 0, last)));
    assert_eq!(call(&client), Err(Code::ResourceExhausted));
    let rejected = server.post_json(BODY);
    assert_eq!((rejected.status, rejected.header("retry-after").as_deref()), (503, Some("1")), "{rejected:?}");
    for page in ["/healthcheck", "/livez", "/readyz"] {
        assert_eq!(http::get(server.http_port(), page).send().status, 200);
    }
    assert!(client.is_serving("").unwrap());
    assert_eq!(stat(&server, "ratelimit_server.Check.total_requests"), 1.0);
    assert_eq!(stat(&server, "tollkeeper_overload_refusals_total{reason=\"concurrent_requests\"}"), 2.0);
    let log = server.stderr();
    assert_eq!(log.matches("request rejected: TOLLKEEPER_MAX_CONCURRENT_REQUESTS is reached").count(), 1, "{log}");
    drop(halves);
    wait_for("requests to be answered again", || call(&client).ok());
    assert_eq!(server.post_json(BODY).status, 200);
    assert_eq!(call(&client), Ok(()));
}

#[test]
fn requests_per_address_are_bounded() {
    let server = server().env("TOLLKEEPER_MAX_CONCURRENT_REQUESTS", "8").start();
    let _halves = [half_a_request(&server, Ipv4Addr::LOCALHOST), half_a_request(&server, Ipv4Addr::LOCALHOST)];
    assert_eq!(server.post_json(BODY).status, 503);
    let elsewhere = http::post(server.http_port(), "/json", BODY).from(9).send();
    assert_eq!(elsewhere.status, 200, "{elsewhere:?}");
    assert_eq!(call(&Client::connect(server.grpc_port())), Ok(()));
}

#[test]
fn descriptors_of_a_request_are_bounded() {
    let server = server().env("TOLLKEEPER_MAX_DESCRIPTORS", "2").start();
    let client = Client::connect(server.grpc_port());
    let descriptors = |count: usize| RateLimitRequest {
        descriptors: vec![RateLimitDescriptor::default(); count],
        ..rate_limit_request("shop", &[])
    };
    assert_eq!(client.call(&descriptors(2)).unwrap().statuses.len(), 2);
    let status = client.call(&descriptors(3)).unwrap_err();
    let text = "rate limit descriptor list has 3 entries, more than 2";
    assert_eq!((status.code(), status.message()), (Code::InvalidArgument, text));
    let rejected = server.post_json(r#"{"domain":"shop","descriptors":[{},{},{}]}"#);
    assert!(rejected.status == 400 && rejected.text().contains(text), "{rejected:?}");
}

#[test]
fn slow_first_request_closes_the_connection() {
    let server = server().env("TOLLKEEPER_HEAD_TIMEOUT", "500ms").start();
    let client = Client::connect(server.grpc_port());
    call(&client).unwrap();
    let dawdlers = [
        (server.http_port(), "GET /healthcheck HTTP/1.1\r\nx: "),
        (server.http_port(), ""),
        (server.debug_port(), "GET /"),
        (server.grpc_port(), "PRI * HTTP/2.0\r\n"),
        (server.grpc_port(), ""),
    ];
    let mut streams = dawdlers.map(|(port, text)| {
        let mut stream = connect(port, Ipv4Addr::LOCALHOST).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    });
    let mut silent = Http2Connection::connect(server.grpc_port());
    for stream in &mut streams {
        let last_words = http::read_until_closed(stream);
        assert!(!last_words.starts_with(b"HTTP/1.1 200"), "{}", last_words.escape_ascii());
    }
    // An HTTP/2 connection without a request gets a GOAWAY first.
    assert_eq!(silent.next().map(|frame| frame.kind), Some(GOAWAY));
    // A connection that has sent a request may be idle.
    call(&client).unwrap();
    wait_for("all of them to be gone", || (connections(&server) < 1.5).then_some(()));
    call(&client).unwrap();
}

#[test]
fn idle_connection_gets_goaway() {
    let server = server().env("TOLLKEEPER_HEAD_TIMEOUT", "200ms").env("TOLLKEEPER_IDLE_TIMEOUT", "300ms").start();
    let mut frames = Http2Connection::connect(server.grpc_port());
    frames.call(1, &[]).unwrap();
    frames.message(1, 0, b"", END_STREAM).unwrap();
    let kinds: Vec<u8> = std::iter::from_fn(|| frames.next()).map(|frame| frame.kind).collect();
    assert_eq!(kinds.first(), Some(&HEADERS), "{kinds:?}");
    assert!(kinds.contains(&GOAWAY), "{kinds:?}");
}

/// Status line of the HTTP/1.1 response to a header of `length` bytes; empty if the server cut the response off.
fn answer_to_header(port: u16, length: usize) -> String {
    let mut stream = connect(port, Ipv4Addr::LOCALHOST).unwrap();
    let head =
        format!("GET /healthcheck HTTP/1.1\r\nconnection: close\r\nhost: x\r\nx: {}\r\n\r\n", "y".repeat(length));
    // The server may respond and close before it has read the whole request.
    let _ = stream.write_all(head.as_bytes());
    String::from_utf8_lossy(&http::read_until_closed(&mut stream)).lines().next().unwrap_or_default().to_owned()
}

/// True if the next frame is a response with status 200, which every gRPC response has.
fn is_answered(frames: &mut Http2Connection) -> bool {
    // Status 200 is the eighth entry of HPACK's static table.
    frames.next().is_some_and(|frame| frame.kind == HEADERS && frame.payload.first() == Some(&0x88))
}

#[test]
fn too_long_request_head_is_rejected() {
    let server = server().start();
    assert_eq!(answer_to_header(server.http_port(), 14_000), "HTTP/1.1 200 OK");
    let rejected = answer_to_header(server.http_port(), 40_000);
    assert!(rejected.is_empty() || rejected.starts_with("HTTP/1.1 431"), "{rejected}");
    assert_eq!(server.healthcheck(), 200);
}

#[test]
fn too_long_call_head_is_rejected() {
    let server = server().env("TOLLKEEPER_GRPC_MAX_HEADER_BYTES", "8KiB").start();
    let mut frames = Http2Connection::connect(server.grpc_port());
    frames.call(1, &[("x", &"y".repeat(6000))]).unwrap();
    frames.message(1, 0, b"", END_STREAM).unwrap();
    assert!(is_answered(&mut frames));
    let mut frames = Http2Connection::connect(server.grpc_port());
    frames.call(1, &[("x", &"y".repeat(12_000))]).unwrap();
    // The server may have ended the stream already.
    let _ = frames.message(1, 0, b"", END_STREAM);
    assert!(!is_answered(&mut frames));
    assert_eq!(call(&Client::connect(server.grpc_port())), Ok(()));
}

/// Message and status of a call by a client that reads `at_a_time` bytes at a time.
async fn exchange(port: u16, path: &str, message: &[u8], at_a_time: u32) -> (Vec<u8>, String) {
    let stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let mut builder = h2::client::Builder::new();
    let (mut requests, connection) =
        builder.initial_window_size(at_a_time).handshake::<_, bytes::Bytes>(stream).await.unwrap();
    tokio::spawn(connection);
    let request =
        axum::http::Request::post(format!("http://tollkeeper{path}")).header("content-type", "application/grpc");
    let (response, mut body) = requests.send_request(request.body(()).unwrap(), false).unwrap();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    body.send_data([&[0], &length[..], message].concat().into(), true).unwrap();
    let mut body = response.await.unwrap().into_body();
    let mut gathered = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece.unwrap();
        assert!((1..=at_a_time as usize).contains(&piece.len()), "{} bytes", piece.len());
        body.flow_control().release_capacity(piece.len()).unwrap();
        gathered.extend_from_slice(&piece);
    }
    let trailers = body.trailers().await.unwrap().expect("it is gRPC");
    (gathered, trailers["grpc-status"].to_str().unwrap().to_owned())
}

#[test]
fn slow_reader_gets_the_whole_response() {
    let server = server().start();
    let request = rate_limit_request("shop", &[("user", "ann")]).encode_to_vec();
    // One method of the fast path, and one of the router.
    for (path, message) in [(SHOULD_RATE_LIMIT, request.as_slice()), ("/grpc.health.v1.Health/Check", b"")] {
        let response = |at_a_time| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(exchange(server.grpc_port(), path, message, at_a_time))
        };
        let (whole, status) = response(65_535);
        assert!(whole.len() > 5 && status == "0", "{path}: {whole:?}, {status}");
        let (pieces, status) = response(3);
        assert_eq!((pieces.len(), status.as_str()), (whole.len(), "0"), "{path}");
    }
}
