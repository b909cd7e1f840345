//! Floods: what one client sends in masses costs no log, no memory and no time of other clients.
//!
//! `tests/bench/attacks` measures the same attacks with many connections; the tests here check each bound.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use ::tollkeeper::base::clock::Time;
use ::tollkeeper::serve::grpc::call::CallHead;
use ::tollkeeper::serve::grpc::service::ShouldRateLimitMethod;
use axum::http::{HeaderMap, HeaderName};
use bytes::Bytes;
use http_body_util::Full;
use prost::Message as _;
use tokio::task::coop::has_budget_remaining;
use tonic::Code;

use kit::grpc::{Client, rate_limit_request};
use kit::http;
use kit::http2_frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, Http2Connection, PING, PRIORITY, PUSH_PROMISE,
    RST_STREAM, SETTINGS, WINDOW_UPDATE, frame,
};
use kit::test_service::TestService;
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;

const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 4000000000}}
";

/// Reason in GOAWAY of a client that sends too much.
const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 11];

fn server() -> Setup {
    with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

/// Checks that another client is served.
fn assert_serves(server: &Tollkeeper) {
    Client::connect(server.grpc_port()).call(&rate_limit_request("shop", &[("user", "ann")])).unwrap();
}

#[test]
fn frames_of_a_client_do_not_write_log_lines() {
    let server = server().start();
    let lines_before = server.stderr().lines().count();
    let kinds = [
        frame(DATA, 0, 1, b""),
        frame(HEADERS, END_HEADERS, 1, b""),
        frame(PRIORITY, 0, 1, &[0, 0, 0, 1, 0]),
        frame(PRIORITY, 0, 3, &[0, 0, 0, 1, 0]),
        frame(RST_STREAM, 0, 1, &[0; 4]),
        frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]),
        frame(SETTINGS, ACK, 0, b""),
        frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2]),
        frame(PING, ACK, 0, b"12345678"),
        frame(PING, 0, 0, b"12345678"),
        frame(GOAWAY, 0, 0, &[0; 8]),
        frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]),
        frame(WINDOW_UPDATE, 0, 1, &[0; 4]),
        frame(CONTINUATION, 0, 1, b""),
        frame(0xbe, 0, 1, b""),
    ];
    for kind in &kinds {
        // Once on a stream that exists, and once on one that was never opened.
        for opens in [true, false] {
            let mut connection = Http2Connection::connect(server.grpc_port());
            if opens {
                connection.call(1, &[]).unwrap();
            }
            // The server may close the connection before it has read everything.
            let _ = connection.send_bytes(&kind.repeat(3000));
            let _ = connection.send(PING, 0, 0, b"the last");
            drop(connection);
        }
    }
    let mut resets = Http2Connection::connect(server.grpc_port());
    for stream in (1..10_000).step_by(2) {
        if resets.call(stream, &[]).and_then(|()| resets.send(RST_STREAM, 0, stream, &[0; 4])).is_err() {
            break;
        }
    }
    assert_serves(&server);
    let log = server.stderr();
    // Refusals are logged once a minute for each reason.
    let is_refusal =
        |line: &&str| line.contains("reason=malformed_headers") || line.contains("too many SETTINGS or GOAWAY frames");
    let (refusals, others): (Vec<_>, Vec<_>) = log.lines().partition(is_refusal);
    assert_eq!((refusals.len(), others.len()), (2, lines_before), "{}", &log[..log.len().min(3000)]);
}

#[test]
fn flood_of_settings_or_goaway_closes_its_connection() {
    let server = server().start();
    for flood in [frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]), frame(GOAWAY, 0, 0, &[0; 8])] {
        let mut connection = Http2Connection::connect(server.grpc_port());
        connection.call(1, &[]).unwrap();
        connection.send_bytes(&flood.repeat(80)).unwrap();
        let goaway = std::iter::from_fn(|| connection.next()).find(|frame| frame.kind == GOAWAY);
        let reason = goaway.expect("the connection is closed with a reason").payload[4..8].to_vec();
        assert_eq!(reason, ENHANCE_YOUR_CALM);
    }
    assert_serves(&server);
}

/// SETTINGS frame that keeps the server from sending DATA.
fn close_windows() -> Vec<u8> {
    frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])
}

/// SETTINGS and WINDOW_UPDATE frames that let the server send any DATA.
fn open_windows() -> Vec<u8> {
    let of_connection = frame(WINDOW_UPDATE, 0, 0, &0x7000_0000_u32.to_be_bytes());
    [frame(SETTINGS, 0, 0, &[0, 4, 0x7f, 0xff, 0xff, 0xff]), of_connection].concat()
}

/// A request with this number of equal descriptors.
fn request(descriptors: usize) -> Vec<u8> {
    let mut request = rate_limit_request("shop", &[("user", "ann")]);
    request.descriptors = vec![request.descriptors[0].clone(); descriptors];
    request.encode_to_vec()
}

fn length_of(message: &[u8]) -> u32 {
    u32::try_from(message.len()).unwrap()
}

/// Sends a call with its whole message.
fn send_call(connection: &mut Http2Connection, stream: u32, message: &[u8]) {
    connection.call(stream, &[]).unwrap();
    connection.message(stream, length_of(message), message, END_STREAM).unwrap();
}

/// Number of refusals for this reason.
fn refusals(server: &Tollkeeper, reason: &str) -> usize {
    let page = http::get(server.debug_port(), "/stats").send().text();
    let name = format!("tollkeeper_overload_refusals_total{{reason=\"{reason}\"}}: ");
    page.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
}

/// Streams of these whose responses have a message to come, and those whose calls are refused, in order of arrival.
fn responses(connection: &mut Http2Connection, streams: impl IntoIterator<Item = u32>) -> (Vec<u32>, Vec<u32>) {
    let mut awaited: HashSet<u32> = streams.into_iter().collect();
    let (mut answered, mut refused) = (Vec::new(), Vec::new());
    while !awaited.is_empty() {
        let frame = connection.next().expect("the connection lives");
        if awaited.remove(&frame.stream) {
            let is_answered = frame.kind == HEADERS && frame.flags & END_STREAM == 0;
            (if is_answered { &mut answered } else { &mut refused }).push(frame.stream);
        }
    }
    (answered, refused)
}

/// Waits until this number of calls is refused.
fn await_refusals(connection: &mut Http2Connection, count: usize) {
    let mut refused = 0;
    while refused < count {
        let frame = connection.next().expect("the connection lives");
        refused += usize::from(frame.kind == HEADERS && frame.flags & END_STREAM != 0);
    }
}

#[test]
fn call_keeps_its_place_until_its_response_is_taken() {
    let server = server().env("TOLLKEEPER_MAX_CONCURRENT_REQUESTS", "40").start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    connection.send_bytes(&close_windows()).unwrap();
    for stream in (1..60).step_by(2) {
        send_call(&mut connection, stream, &request(1));
    }
    let (answered, refused) = responses(&mut connection, (1..60).step_by(2));
    assert_eq!((answered.len(), refused.len()), (10, 20));
    assert_eq!(refusals(&server, "concurrent_requests_per_address"), 20);
    connection.send_bytes(&open_windows()).unwrap();
    let mut messages = 0;
    while messages < 10 {
        messages += usize::from(connection.next().expect("the connection lives").kind == DATA);
    }
    wait_for("the places to be free", || {
        Client::connect(server.grpc_port()).call(&rate_limit_request("shop", &[("user", "ann")])).ok()
    });
}

#[test]
fn bytes_of_responses_that_are_not_taken_are_bounded() {
    let server = server()
        .env("TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES", "64KiB")
        .env("TOLLKEEPER_MAX_BUFFERED_BYTES", "512KiB")
        .start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    connection.send_bytes(&close_windows()).unwrap();
    let message = request(1000);
    for stream in (1..60).step_by(2) {
        send_call(&mut connection, stream, &message);
    }
    let (answered, refused) = responses(&mut connection, (1..60).step_by(2));
    assert!((1..12).contains(&answered.len()), "{answered:?}");
    assert_eq!(refusals(&server, "buffered_bytes_per_connection"), refused.len());
    assert_serves(&server);
    // Other calls of this connection are answered.
    send_call(&mut connection, 101, &request(1));
    assert_eq!(responses(&mut connection, [101]).0, [101]);
}

#[test]
fn bytes_of_messages_that_never_end_are_bounded() {
    let own = Ipv4Addr::LOCALHOST;
    let other = Ipv4Addr::new(127, 0, 0, 9);
    // Calls of a first connection from an address, before the connection whose calls are refused.
    for (held, source, reason) in [
        (0, own, "buffered_bytes_per_connection"),
        (3, own, "buffered_bytes_per_address"),
        (3, other, "buffered_bytes"),
    ] {
        // As much as a message, so that all three bounds are equal.
        let server = server()
            .env("TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES", "64KiB")
            .env("TOLLKEEPER_MAX_BUFFERED_BYTES", "64KiB")
            .start();
        let begin = |connection: &mut Http2Connection, calls: u32| {
            for stream in (1..2 * calls).step_by(2) {
                connection.call(stream, &[]).unwrap();
                connection.message(stream, 60_000, &[0; 16_000], 0).unwrap();
            }
        };
        let mut first = Http2Connection::connect_from(server.grpc_port(), source);
        begin(&mut first, held);
        send_call(&mut first, 101, &request(1));
        assert_eq!(responses(&mut first, [101]).0, [101]);
        let mut connection = Http2Connection::connect(server.grpc_port());
        begin(&mut connection, 10 - held);
        await_refusals(&mut connection, 6);
        assert_eq!(refusals(&server, reason), 6);
        // Small calls are answered, on this connection too.
        send_call(&mut connection, 101, &request(1));
        assert_eq!(responses(&mut connection, [101]).0, [101]);
        assert_serves(&server);
        // Calls that end free their bytes.
        drop(first);
        for stream in (1..2 * (10 - held)).step_by(2) {
            connection.send(RST_STREAM, 0, stream, &[0; 4]).unwrap();
        }
        let mut streams = (103..).step_by(2);
        wait_for("the bytes to be free", || {
            let stream = streams.next()?;
            send_call(&mut connection, stream, &request(1000));
            (responses(&mut connection, [stream]).0 == [stream]).then_some(())
        });
    }
}

#[test]
fn calls_that_clients_gave_up_are_counted() {
    let server = server().start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    let count = || {
        let stats = http::get(server.debug_port(), "/stats").send().text();
        let line = stats.lines().find_map(|line| line.strip_prefix("tollkeeper_streams_reset_total: "));
        line.map(str::to_owned)
    };
    send_call(&mut connection, 1, &request(1));
    assert_eq!(responses(&mut connection, [1]).0, [1]);
    assert_eq!(count().as_deref(), Some("0"));
    // One after the answer, one before.
    connection.send(RST_STREAM, 0, 1, &[0, 0, 0, 8]).unwrap();
    connection.call(3, &[]).unwrap();
    connection.send(RST_STREAM, 0, 3, &[0, 0, 0, 8]).unwrap();
    wait_for("the count", || (count().as_deref() == Some("2")).then_some(()));
}

#[test]
fn message_that_takes_too_long_ends_its_call() {
    let server = server().env("TOLLKEEPER_HEAD_TIMEOUT", "500ms").start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    send_call(&mut connection, 1, &request(1));
    assert_eq!(responses(&mut connection, [1]).0, [1]);
    connection.call(3, &[]).unwrap();
    connection.call(5, &[]).unwrap();
    connection.message(5, 100, b"half", 0).unwrap();
    connection.call_method(7, CHECK, &[]).unwrap();
    let (_, mut refused) = responses(&mut connection, [3, 5, 7]);
    refused.sort_unstable();
    assert_eq!(refused, [3, 5, 7]);
    assert_eq!(refusals(&server, "message_timeout"), 3);
    send_call(&mut connection, 9, &request(1));
    assert_eq!(responses(&mut connection, [9]).0, [9]);
}

#[test]
fn health_checks_beyond_those_of_an_address_are_refused_and_keep_out_no_decision() {
    const OF_ADDRESS: u32 = 16;
    let server = server().env("TOLLKEEPER_MAX_CONCURRENT_REQUESTS", "40").start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    let all = OF_ADDRESS + 10;
    for stream in (1..2 * all).step_by(2) {
        let path = if stream < 2 * OF_ADDRESS { WATCH } else { CHECK };
        connection.call_method_with(stream, path, &frame(DATA, END_STREAM, stream, &[0; 5])).unwrap();
    }
    let (mut answered, mut refused) = responses(&mut connection, (1..2 * all).step_by(2));
    answered.sort_unstable();
    refused.sort_unstable();
    assert_eq!((answered.last(), refused.first()), (Some(&(2 * OF_ADDRESS - 1)), Some(&(2 * OF_ADDRESS + 1))));
    assert_eq!(refusals(&server, "concurrent_requests_per_address"), 10);
    // Decisions and probes over HTTP have places of their own.
    let client = Client::connect(server.grpc_port());
    client.call(&rate_limit_request("shop", &[("user", "ann")])).unwrap();
    assert_eq!(http::get(server.http_port(), "/livez").send().status, 200);
    connection.send(RST_STREAM, 0, 1, &[0; 4]).unwrap();
    wait_for("a place", || client.is_serving("").ok());
}

#[test]
fn compressed_message_is_smaller_than_others() {
    let server = server().start();
    let client = Client::connect(server.grpc_port());
    let call = |length: usize| {
        let request = rate_limit_request("shop", &[("user", &"x".repeat(length))]);
        client.call_compressed(&request).map(drop).map_err(|status| status.code())
    };
    assert_eq!(call(200 << 10), Ok(()));
    assert_eq!(call(300 << 10), Err(Code::ResourceExhausted));
    client.call(&rate_limit_request("shop", &[("user", &"x".repeat(300 << 10))])).unwrap();
}

#[test]
fn long_call_makes_its_connection_yield() {
    let service = TestService::new::<&str>([], Time::from_secs(1_783_512_000));
    service.load([("shop.yaml", RULES)]);
    let method = ShouldRateLimitMethod::new(Arc::new(service.inner), 4 << 20);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let yields_after = |message: Vec<u8>, is_compressed: bool| {
        let method = method.clone();
        let frame = [&[u8::from(is_compressed)], &length_of(&message).to_be_bytes()[..], &message].concat();
        let call = async move {
            let encoding = if is_compressed { "gzip" } else { "identity" };
            let headers = HeaderMap::from_iter([(HeaderName::from_static("grpc-encoding"), encoding.parse().unwrap())]);
            method
                .answer_call(CallHead::from_headers(&headers, None).unwrap(), Full::new(Bytes::from(frame)))
                .await
                .ok();
            !has_budget_remaining()
        };
        // Only tasks have a budget.
        runtime.block_on(runtime.spawn(call)).unwrap()
    };
    let long_value = rate_limit_request("shop", &[("user", &"x".repeat(100_000))]).encode_to_vec();
    assert!(!yields_after(request(1), false));
    assert!(yields_after(request(1000), false));
    assert!(yields_after(long_value, false));
    // The message need not be valid: decompressing it was the work.
    assert!(yields_after(request(1), true));
}
