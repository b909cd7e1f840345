//! Headers of gRPC calls that HTTP/2 libraries do not send: each call is answered, or refused, counted and logged.

use ::tollkeeper::base::pb::RateLimitResponse;
use prost::Message as _;

use kit::grpc::{SHOULD_RATE_LIMIT, rate_limit_request};
use kit::http;
use kit::http2_frames::{
    CONTINUATION, DATA, END_STREAM, Frame, GOAWAY, HEADERS, Http2Connection, RST_STREAM, put_length,
};
use kit::tollkeeper::{Tollkeeper, with_rules};

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 1000000}}
";

const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";

/// First byte of a header block with `:status: 200`, the eighth entry of HPACK's static table.
const STATUS_200: u8 = 0x88;

/// End of a call as its client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallEnd {
    /// A decision.
    Decided,
    /// A status other than 200.
    ErrorStatus,
    /// RST_STREAM.
    Reset,
    /// GOAWAY with an error, or a closed connection.
    Closed,
}

/// Sends the message of a call whose headers were sent, and reads to the end of the call.
fn finish(frames: &mut Http2Connection, stream: u32) -> CallEnd {
    let message = rate_limit_request("shop", &[("user", "ann")]).encode_to_vec();
    // The server may have ended the stream or the connection already.
    let _ = frames.message(stream, u32::try_from(message.len()).unwrap(), &message, END_STREAM);
    loop {
        match frames.next() {
            Some(Frame { kind: GOAWAY, .. }) | None => return CallEnd::Closed,
            // What follows on a stream that ended before.
            Some(frame) if frame.stream != stream => {}
            Some(Frame { kind: RST_STREAM, .. }) => return CallEnd::Reset,
            Some(Frame { kind: HEADERS, payload, .. }) if payload[0] != STATUS_200 => return CallEnd::ErrorStatus,
            Some(Frame { kind: DATA, payload, .. }) => {
                let response = RateLimitResponse::decode(&payload[5..]).unwrap();
                assert!(response.statuses[0].current_limit.is_some(), "{response:?}");
                return CallEnd::Decided;
            }
            Some(_) => {}
        }
    }
}

/// `count` headers of 100 bytes, as HTTP/2 counts them.
fn many_headers(count: usize) -> Vec<(String, String)> {
    (0..count).map(|index| (format!("x-{index:06}"), "y".repeat(60))).collect()
}

fn borrowed(headers: &[(String, String)]) -> Vec<(&str, &str)> {
    headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

/// Number of refusals that `/stats` reports for a reason.
fn refusals(server: &Tollkeeper, reason: &str) -> u64 {
    let page = http::get(server.debug_port(), "/stats").send().text();
    let name = format!("tollkeeper_http2_refusals_total{{reason=\"{reason}\"}}: ");
    let value = page.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or_else(|| panic!("no {name} in {page}"));
    value.parse().unwrap()
}

/// Number of log lines about refusals for a reason.
fn refusal_lines(server: &Tollkeeper, reason: &str) -> usize {
    server.stderr().lines().filter(|line| line.contains(&format!("reason={reason}"))).count()
}

#[test]
fn headers_up_to_the_bound_are_answered_and_larger_ones_refused() {
    let server = with_rules(RULES).start();
    let mut frames = Http2Connection::connect(server.grpc_port());
    // The bound is 128 KiB; the usual headers take the rest.
    for (stream, count, expected) in [
        (1, 10, CallEnd::Decided),
        (3, 1300, CallEnd::Decided),
        (5, 1311, CallEnd::ErrorStatus),
        (7, 1700, CallEnd::ErrorStatus),
        (9, 1, CallEnd::Decided),
    ] {
        frames.call(stream, &borrowed(&many_headers(count))).unwrap();
        assert_eq!(finish(&mut frames, stream), expected, "{count} headers");
    }
    assert_eq!(refusals(&server, "headers_too_large"), 2);
    assert_eq!(refusals(&server, "connection_headers_too_large"), 0);
    assert_eq!(refusal_lines(&server, "headers_too_large"), 1, "{}", server.stderr());
    assert!(server.stderr().contains("TOLLKEEPER_GRPC_MAX_HEADER_BYTES"), "{}", server.stderr());
}

#[test]
fn headers_far_above_the_bound_close_only_their_connection() {
    let server = with_rules(RULES).start();
    let mut other = Http2Connection::connect(server.grpc_port());
    for count in [3000, 5400, 9000] {
        let mut frames = Http2Connection::connect(server.grpc_port());
        // The server may close the connection meanwhile.
        let _ = frames.call(1, &borrowed(&many_headers(count)));
        assert_eq!(finish(&mut frames, 1), CallEnd::Closed, "{count} headers");
    }
    assert_eq!(refusals(&server, "connection_headers_too_large"), 3);
    assert_eq!(refusal_lines(&server, "connection_headers_too_large"), 1, "{}", server.stderr());
    other.call(1, &[]).unwrap();
    assert_eq!(finish(&mut other, 1), CallEnd::Decided);
}

#[test]
fn malformed_headers_are_refused_counted_and_logged_once() {
    let server = with_rules(RULES).env("LOG_LEVEL", "error").start();
    let warning = with_rules(RULES).start();
    for (server, lines) in [(&server, 0), (&warning, 1)] {
        let mut frames = Http2Connection::connect(server.grpc_port());
        for stream in [1, 3, 5] {
            frames.call_to("", stream).unwrap();
            assert_eq!(finish(&mut frames, stream), CallEnd::Reset);
        }
        for stream in [7, 9] {
            frames.call(stream, &[("te", "gzip")]).unwrap();
            assert_eq!(finish(&mut frames, stream), CallEnd::Reset);
        }
        frames.call(11, &[]).unwrap();
        assert_eq!(finish(&mut frames, 11), CallEnd::Decided);
        assert_eq!(refusals(server, "malformed_authority"), 3);
        assert_eq!(refusals(server, "malformed_headers"), 2);
        assert_eq!(refusal_lines(server, "malformed_authority"), lines, "{}", server.stderr());
        assert_eq!(refusal_lines(server, "malformed_headers"), lines, "{}", server.stderr());
    }
    assert!(warning.stderr().contains("set `authority` in Envoy's grpc_service"), "{}", warning.stderr());
}

/// Values of `:authority` that are not authorities of URIs.
const ODD_AUTHORITIES: [&str; 6] = [
    "outbound|8081||ratelimit.default.svc.cluster.local",
    "extension/ns/name",
    "tmp%2Ffoo.sock",
    "/var/run/tollkeeper.sock",
    "a b",
    "caf\u{e9}:\u{1f980}",
];

#[test]
fn call_to_any_authority_is_answered() {
    let server = with_rules(RULES).start();
    let mut frames = Http2Connection::connect(server.grpc_port());
    for (stream, authority) in (1..).step_by(2).zip(ODD_AUTHORITIES) {
        frames.call_to(authority, stream).unwrap();
        assert_eq!(finish(&mut frames, stream), CallEnd::Decided, "{authority}");
    }
    assert_eq!(refusals(&server, "malformed_authority"), 0);
}

/// Field of a header block: a first byte with the index of its name, and a value.
fn field(first: u8, value: &[u8]) -> Vec<u8> {
    let mut field = vec![first];
    put_length(&mut field, value.len());
    field.extend(value);
    field
}

#[test]
fn authority_in_the_header_table_is_answered_at_each_reference() {
    let server = with_rules(RULES).start();
    let mut frames = Http2Connection::connect(server.grpc_port());
    // POST, http, and the fields that enter the table, the oldest last: path, content-type, authority.
    let start = [0x83, 0x86];
    let first = [
        &start[..],
        &field(0x44, SHOULD_RATE_LIMIT.as_bytes()),
        &field(0x41, b"outbound|8081||tollkeeper"),
        &field(0x5f, b"application/grpc"),
    ];
    frames.header_block(1, &first.concat()).unwrap();
    assert_eq!(finish(&mut frames, 1), CallEnd::Decided);
    let again = [&start[..], &[0x80 | 64, 0x80 | 63, 0x80 | 62]].concat();
    for stream in [3, 5, 7] {
        frames.header_block(stream, &again).unwrap();
        assert_eq!(finish(&mut frames, stream), CallEnd::Decided);
    }
}

#[test]
fn long_value_counts_towards_the_bound() {
    let server = with_rules(RULES).start();
    let mut frames = Http2Connection::connect(server.grpc_port());
    for (stream, length, expected) in [
        (1, 16_385, CallEnd::Decided),
        (3, 130_000, CallEnd::Decided),
        (5, 131_072, CallEnd::ErrorStatus),
        (7, 1, CallEnd::Decided),
        (9, 8 << 20, CallEnd::Closed),
    ] {
        // The server may close the connection meanwhile.
        let _ = frames.call(stream, &[("tracestate", &"y".repeat(length)), ("x", "z")]);
        assert_eq!(finish(&mut frames, stream), expected, "{length} bytes");
    }
    assert_eq!(refusals(&server, "headers_too_large"), 1);
    assert!(server.peak_mib() < 100, "{} MiB", server.peak_mib());
}

#[test]
fn half_sent_calls_do_not_keep_the_frames_of_their_headers() {
    let server = with_rules(RULES).start();
    let before_mib = server.peak_mib();
    // Neither the path nor the name of the Envoy is in HPACK's tables, so each is a part of the frame.
    let long = [&field(0x00, b"x-long")[..], &string(&[b'y'; 15_000])].concat();
    let kept = [&field(0x00, b"x-tollkeeper-holder")[..], &string(b"z")].concat();
    let mut connections: Vec<_> = (0..4).map(|_| Http2Connection::connect(server.grpc_port())).collect();
    // Calls of a service of the router, and decisions.
    for (frames, path) in connections.iter_mut().zip([HEALTH_WATCH, SHOULD_RATE_LIMIT].into_iter().cycle()) {
        let path = field(0x04, path.as_bytes());
        let block = [&[0x83, 0x86][..], &path, &field(0x5f, b"application/grpc"), &long, &kept].concat();
        for stream in (1..2001).step_by(2) {
            frames.header_block(stream, &block).unwrap();
        }
        frames.call(2001, &[]).unwrap();
        assert_eq!(finish(frames, 2001), CallEnd::Decided);
    }
    let used_mib = server.peak_mib() - before_mib;
    // 4000 frames would take 60 MiB.
    assert!(used_mib < 45, "{used_mib} MiB after {before_mib}");
}

#[test]
fn many_short_headers_do_not_take_more_memory_than_their_bound() {
    let server = with_rules(RULES).start();
    // References to `accept-charset`, entry 15 of HPACK's static table: 2800 are 129 kB as HTTP/2 counts them, and more
    // in a map of headers. The bound is 128 KiB a call and 8 MiB a connection.
    let path = field(0x44, SHOULD_RATE_LIMIT.as_bytes());
    let block = |count| [&[0x83, 0x86][..], &path, &field(0x5f, b"application/grpc"), &vec![0x8f; count]].concat();
    let mut connections: Vec<_> = (0..4).map(|_| Http2Connection::connect(server.grpc_port())).collect();
    for frames in &mut connections {
        for stream in (1..401).step_by(2) {
            frames.header_block(stream, &block(2800)).unwrap();
        }
        // The response to the last one comes after all others were read.
        frames.header_block(401, &block(3000)).unwrap();
        assert_eq!(finish(frames, 401), CallEnd::ErrorStatus);
    }
    assert!(server.peak_mib() < 75, "{} MiB", server.peak_mib());
}

/// String of a header block, without the Huffman code.
fn string(text: &[u8]) -> Vec<u8> {
    field(0, text).split_off(1)
}

#[test]
fn continuation_frames_without_content_close_the_connection() {
    let server = with_rules(RULES).start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    // A value of 100 000 bytes begins.
    let start = [&[0x83, 0x86][..], &[0x00, 0x01, b'x', 0x7f, 0xa1, 0x8c, 0x06]].concat();
    connection.send(HEADERS, 0, 1, &start).unwrap();
    for _ in 0..30 {
        let _ = connection.send(CONTINUATION, 0, 1, b"");
    }
    assert_eq!(finish(&mut connection, 1), CallEnd::Closed);
    assert_eq!(refusals(&server, "connection_headers_too_large"), 1);
}

#[test]
fn frame_within_a_header_block_closes_the_connection() {
    let server = with_rules(RULES).start();
    for interruption in [DATA, HEADERS, CONTINUATION] {
        let mut connection = Http2Connection::connect(server.grpc_port());
        connection.send(HEADERS, 0, 1, &[0x83]).unwrap();
        connection.send(interruption, 0, 3, &[0x86]).unwrap();
        assert_eq!(finish(&mut connection, 1), CallEnd::Closed);
    }
}
