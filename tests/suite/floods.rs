//! Floods: what one client sends in masses costs no log, no memory and no time of other clients.
//!
//! `tests/bench/attacks` measures the same attacks with many connections; the tests here check each bound.

use crate::kit::grpc::{Client, rate_limit_request};
use crate::kit::http2_frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, GOAWAY, HEADERS, Http2Connection, PING, PRIORITY, PUSH_PROMISE, RST_STREAM,
    SETTINGS, WINDOW_UPDATE, frame,
};
use crate::kit::tollkeeper::{Setup, Tollkeeper, with_rules};

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
    // A refusal for malformed headers is logged once a minute.
    let (refusals, others): (Vec<_>, Vec<_>) = log.lines().partition(|line| line.contains("reason=malformed_headers"));
    assert_eq!((refusals.len(), others.len()), (1, lines_before), "{}", &log[..log.len().min(3000)]);
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
