//! Malicious clients: a clear status, never a panic, bounded memory, and no delay for other clients.
//!
//! Random bytes come from a fixed seed, so that a failure can be repeated.

use std::io::{Read as _, Write as _};
use std::iter;
use std::net::{Ipv4Addr, Shutdown};
use std::thread;

use ::tollkeeper::base::pb::rate_limit_descriptor::RateLimitOverride;
use ::tollkeeper::base::pb::{RateLimitRequest, RateLimitResponse};
use bytes::Bytes;
use prost::Message as _;
use tonic::{Code, Status};

use kit::grpc::{self, Client, SHOULD_RATE_LIMIT};
use kit::http;
use kit::http2_frames::{DATA, END_STREAM, Http2Connection, RST_STREAM};
use kit::tollkeeper::{self, Tollkeeper};

const RULES: &str = "\
domain: shop
descriptors:
- key: user
  rate_limit: {unit: day, requests_per_unit: 3}
- key: open
  rate_limit: {unit: day, requests_per_unit: 4000000000, algorithm: token_bucket}
";

/// Maximum resident memory in MiB; without bounds, these requests would take gigabytes.
const MAX_MIB: u64 = 200;

/// A server that must be unharmed after the test.
struct Target {
    server: Tollkeeper,
    client: Client,
}

impl Target {
    fn start() -> Self {
        let server = tollkeeper::with_rules(RULES).env("RESPONSE_DYNAMIC_METADATA", "true").start();
        Self { client: Client::connect(server.grpc_port()), server }
    }

    fn call(&self, request: &RateLimitRequest) -> Result<RateLimitResponse, Status> {
        self.client.call(request)
    }

    /// Checks that the server answers on every listener, has not panicked, and has not grown.
    fn assert_unharmed(mut self) {
        let client = Client::connect(self.server.grpc_port());
        let response = client.call(&grpc::rate_limit_request("shop", &[("open", "")])).unwrap();
        assert!(response.statuses[0].current_limit.is_some());
        assert_eq!(self.server.healthcheck(), 200);
        assert_eq!(self.server.rules_status()["version"], 1);
        assert!(self.server.try_wait().is_none());
        let (log, peak) = (self.server.stderr(), self.server.peak_mib());
        assert!(!log.contains("panicked"), "{log}");
        assert!(log.lines().count() < 50, "clients fill the log:\n{log}");
        assert!(peak < MAX_MIB, "{peak} MiB");
    }
}

/// Pseudorandom numbers from a fixed seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next().to_le_bytes()[0]).collect()
    }
}

/// A request for one entry with the key `user` and this value.
fn with_value(value: &[u8]) -> RateLimitRequest {
    let mut request = grpc::rate_limit_request("shop", &[("user", "")]);
    request.descriptors[0].entries[0].value = Bytes::copy_from_slice(value);
    request
}

#[test]
fn empty_requests_get_a_clear_status() {
    let target = Target::start();
    let empty = RateLimitRequest::default();
    let domain_only = RateLimitRequest { domain: "shop".into(), ..empty.clone() };
    let no_domain = RateLimitRequest { domain: String::new(), ..grpc::rate_limit_request("", &[("user", "ann")]) };
    let table = [
        (empty, "rate limit domain must not be empty"),
        (no_domain, "rate limit domain must not be empty"),
        (domain_only, "rate limit descriptor list must not be empty"),
    ];
    for (request, expected) in table {
        let status = target.call(&request).unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, expected));
    }
    for request in [
        grpc::rate_limit_request("shop", &[]),
        grpc::rate_limit_request("shop", &[("", "")]),
        grpc::rate_limit_request("no such", &[]),
    ] {
        let response = target.call(&request).unwrap();
        assert_eq!((response.overall_code, response.statuses.len()), (1, 1), "{request:?}");
        assert_eq!(response.statuses[0].current_limit, None);
    }
    target.assert_unharmed();
}

#[test]
fn value_of_any_bytes_is_limited() {
    let target = Target::start();
    let long = "x".repeat(20 * 1024);
    let longer = "x".repeat(3 << 20);
    let values =
        [b"".as_slice(), b"\0", b"a\0b", b"\xff\xfe", b"caf\xe9", b"a\r\nb", long.as_bytes(), longer.as_bytes()];
    for value in values {
        let request = with_value(value);
        let codes: Vec<_> = (0..4).map(|_| target.call(&request).unwrap().overall_code).collect();
        assert_eq!(codes, [1, 1, 1, 2], "{} bytes", value.len());
    }
    target.assert_unharmed();
}

#[test]
fn descriptors_are_decided_up_to_their_bound() {
    let target = Target::start();
    let many = |count| RateLimitRequest {
        descriptors: vec![grpc::descriptor(&[("open", "x")]); count],
        ..grpc::rate_limit_request("shop", &[])
    };
    assert_eq!(target.call(&many(10_000)).unwrap().statuses.len(), 10_000);
    let status = target.call(&many(10_001)).unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains("10001"), "{status}");
    target.assert_unharmed();
}

#[test]
fn call_that_could_backtrack_for_long_is_refused() {
    let level = |indent: &str, value: &str, below: &str| {
        let rule = |at| format!("{indent}- key: k\n{indent}  value: '*{value}{at}*'\n{below}");
        (0..20).map(rule).collect::<String>()
    };
    let last = "    descriptors: [{key: z, value: z, rate_limit: {unit: day, requests_per_unit: 1}}]\n";
    let rules = format!(
        "domain: shop\nmatching: {{order: any, backtrack: true}}\ndescriptors:\n{}",
        level("", "a", &format!("  descriptors:\n{}", level("  ", "b", last)))
    );
    // One descriptor takes up to 8040 steps, and a call two million.
    const MAX: usize = 248;
    for backtrack in [true, false] {
        let server = tollkeeper::with_rules(&rules.replace("true", &backtrack.to_string())).start();
        let client = Client::connect(server.grpc_port());
        // A client of the proxy chooses the length of a value, and Envoy lets pass what is refused.
        for (count, value_kib, is_refused) in [(1, 0, false), (MAX, 0, false), (MAX + 1, 0, true), (1, MAX, false)] {
            let value = "x".repeat(value_kib << 10);
            let mut request = grpc::rate_limit_request("shop", &[]);
            request.descriptors = vec![grpc::descriptor(&[("k", &value)]); count];
            let called = client.call(&request);
            let error =
                called.err().map(|status| (status.code(), status.message().contains("at most 248 descriptors")));
            let expected = (is_refused && backtrack).then_some((Code::InvalidArgument, true));
            assert_eq!(error, expected, "{backtrack}: {count} descriptors of {value_kib} KiB");
        }
        assert_eq!(server.stderr().contains("call refused: rate limit descriptor list is too long"), backtrack);
    }
}

#[test]
fn overrides_of_any_number_are_decided_or_ignored() {
    let target = Target::start();
    for requests_per_unit in [0, 1, u32::MAX] {
        for unit in [i32::MIN, -1, 0, 1, 2, 6, 7, 8, 99, i32::MAX] {
            for unit_multiplier in [None, Some(0), Some(1), Some(366), Some(u32::MAX)] {
                for hits_addend in [None, Some(0), Some(1), Some(u64::MAX)] {
                    for is_negative_hits in [false, true] {
                        let mut request = grpc::rate_limit_request("shop", &[("open", "override")]);
                        let limit = Some(RateLimitOverride { requests_per_unit, unit, unit_multiplier });
                        let descriptor = &mut request.descriptors[0];
                        (descriptor.limit, descriptor.hits_addend, descriptor.is_negative_hits) =
                            (limit, hits_addend, is_negative_hits);
                        let response = target.call(&request).unwrap();
                        assert!(response.statuses[0].current_limit.is_some(), "{request:?}");
                        if unit == 0 {
                            assert_eq!(
                                response.statuses[0].current_limit.as_ref().unwrap().requests_per_unit,
                                4_000_000_000
                            );
                        }
                    }
                }
            }
        }
    }
    target.assert_unharmed();
}

#[test]
fn damaged_messages_are_rejected_or_decided() {
    let target = Target::start();
    let mut request = grpc::rate_limit_request("shop", &[("user", "ann"), ("path", "/")]);
    request.descriptors[0].limit = Some(RateLimitOverride { requests_per_unit: 1, unit: 1, unit_multiplier: Some(2) });
    let message = request.encode_to_vec();
    let mut random = Random(0x2026);
    let truncated = (0..message.len()).map(|length| message[..length].to_vec());
    let flipped: Vec<_> = (0..300)
        .map(|_| {
            let mut message = message.clone();
            let at = random.below(message.len());
            message[at] ^= 1 << random.below(8);
            message
        })
        .collect();
    let mut noise: Vec<_> = (0..300)
        .map(|_| {
            let length = random.below(200);
            random.bytes(length)
        })
        .collect();
    // Nested groups, a length past the end, an endless varint.
    noise.extend([vec![0x0b; 100_000], vec![0x12, 0xff, 0xff, 0xff, 0xff, 0x0f], vec![0xff; 100_000]]);
    for damaged in truncated.chain(flipped).chain(noise) {
        match target.client.call_raw(SHOULD_RATE_LIMIT, damaged.clone()) {
            Ok(_) => {}
            Err(status) => assert!(
                matches!(status.code(), Code::InvalidArgument | Code::Internal),
                "{status} for {}",
                damaged.escape_ascii()
            ),
        }
    }
    target.assert_unharmed();
}

#[test]
fn invalid_frames_end_only_their_call() {
    let target = Target::start();
    let good = grpc::rate_limit_request("shop", &[("open", "x")]).encode_to_vec();
    let length = u32::try_from(good.len()).unwrap();
    let mut connection = Http2Connection::connect(target.server.grpc_port());
    let bad_frames: [(u32, &[u8], u8); 5] = [
        (length + 1, &good, END_STREAM),
        (length - 1, &good, END_STREAM),
        (u32::MAX, &good, END_STREAM),
        (0, &good, END_STREAM),
        (4 << 20, b"", END_STREAM),
    ];
    for (stream, (length_field, bytes, flags)) in (1..).step_by(2).zip(bad_frames) {
        connection.call(stream, &[]).unwrap();
        connection.message(stream, length_field, bytes, flags).unwrap();
        let response = connection.next().expect("the connection lives");
        assert_eq!(response.stream, stream);
        read_to_end_of(&mut connection, stream, response.flags);
    }
    for (stream, payload) in
        [(101, b"\x01\0\0\0\x03abc".as_slice()), (103, b"\x07\0\0\0\x03abc"), (105, b"\0"), (107, b"")]
    {
        connection.call(stream, &[("grpc-encoding", "gzip")]).unwrap();
        connection.send(DATA, END_STREAM, stream, payload).unwrap();
        let response = connection.next().expect("the connection lives");
        assert_eq!(response.stream, stream);
        read_to_end_of(&mut connection, stream, response.flags);
    }
    // Invalid headers. The server refuses some before it has the message, and resets the stream after its response.
    for (stream, name, value) in [
        (201, "content-type", "text/html"),
        (203, "grpc-timeout", "99999999999H"),
        (205, "grpc-timeout", "-1S"),
        (207, "grpc-encoding", "no such"),
    ] {
        connection.call(stream, &[(name, value)]).unwrap();
        connection.message(stream, length, &good, END_STREAM).unwrap();
        let mut frames = iter::from_fn(|| connection.next()).skip_while(|frame| frame.kind == RST_STREAM);
        let response = frames.next().expect("the connection lives");
        assert_eq!(response.stream, stream, "{name}: {value}");
        read_to_end_of(&mut connection, stream, response.flags);
    }
    target.assert_unharmed();
}

/// Reads until the response on `stream` has ended; `flags` are those of its first frame.
fn read_to_end_of(connection: &mut Http2Connection, stream: u32, mut flags: u8) {
    while flags & END_STREAM == 0 {
        let frame = connection.next().expect("the connection lives");
        assert_eq!(frame.stream, stream);
        flags = frame.flags;
    }
}

#[test]
fn split_message_is_decided_like_a_whole_one() {
    let target = Target::start();
    let good = grpc::rate_limit_request("shop", &[("open", "x")]).encode_to_vec();
    let length = u32::try_from(good.len()).unwrap();
    let whole = [&[0], &length.to_be_bytes()[..], &good].concat();
    let mut connection = Http2Connection::connect(target.server.grpc_port());
    let mut answer_to = |stream: u32, pieces: &[&[u8]]| {
        connection.call(stream, &[]).unwrap();
        for (place, piece) in pieces.iter().enumerate() {
            let flags = if place + 1 == pieces.len() { END_STREAM } else { 0 };
            connection.send(DATA, flags, stream, piece).unwrap();
        }
        let mut frames = vec![connection.next().expect("the connection lives")];
        while frames[frames.len() - 1].flags & END_STREAM == 0 {
            frames.push(connection.next().expect("the connection lives"));
        }
        frames.into_iter().find(|frame| frame.kind == DATA).map(|frame| frame.payload)
    };
    let response = answer_to(1, &[&whole]).expect("it is answered");
    // Byte by byte, with END_STREAM on an empty frame, in two parts, and with empty frames between.
    let bytes: Vec<&[u8]> = whole.chunks(1).collect();
    assert_eq!(answer_to(3, &bytes).as_ref(), Some(&response));
    assert_eq!(answer_to(5, &[&whole, b""]).as_ref(), Some(&response));
    assert_eq!(answer_to(7, &[&whole[..7], &whole[7..]]).as_ref(), Some(&response));
    assert_eq!(answer_to(9, &[b"", &whole[..3], b"", &whole[3..]]).as_ref(), Some(&response));
    // Incomplete or invalid messages get no response message.
    for (stream, pieces) in [
        (101, [&whole[..7], b""]),
        (103, [b"", b""]),
        (105, [b"\x01", &whole[1..]]),
        (107, [&whole[..1], &[0xff; 300]]),
    ] {
        assert_eq!(answer_to(stream, &pieces), None, "{pieces:?}");
    }
    target.assert_unharmed();
}

#[test]
fn decompression_bombs_use_no_memory() {
    let target = Target::start();
    let descriptors = b"\x12\x00".repeat(2_000_000);
    let entries = |count: usize| {
        let entries = b"\x0a\x00".repeat(count);
        let mut descriptor = vec![0x12];
        prost::encoding::encode_varint(entries.len() as u64, &mut descriptor);
        [b"\x0a\x04shop".as_slice(), &descriptor, &entries].concat()
    };
    let mixed = [b"\x0a\x04shop".as_slice(), &b"\x12\x02\x0a\x00".repeat(1_000_000)].concat();
    let port = target.server.grpc_port();
    let bombs = [Bytes::from(descriptors), entries(2_000_000).into(), mixed.into()];
    thread::scope(|scope| {
        for bomb in bombs.iter().cycle().take(6) {
            scope.spawn(move || {
                let status = Client::connect(port).call_raw(SHOULD_RATE_LIMIT, bomb.clone()).unwrap_err();
                assert_eq!(status.code(), Code::InvalidArgument, "{status}");
            });
        }
    });
    let status = target.client.call_raw(SHOULD_RATE_LIMIT, vec![0; (4 << 20) + 1]).unwrap_err();
    assert!(matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted), "{status}");
    // 64 MiB of blanks are 64 KiB compressed.
    let status = target.client.call_compressed(&with_value(&vec![b' '; 64 << 20])).unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");

    let objects = format!(r#"{{"domain":"shop","descriptors":[{}{{}}]}}"#, "{},".repeat(1_390_000));
    assert_eq!(target.server.post_json(&objects).status, 400);
    let entries = format!(r#"{{"domain":"shop","descriptors":[{{"entries":[{}{{}}]}}]}}"#, "{},".repeat(1_390_000));
    assert_eq!(target.server.post_json(&entries).status, 400);
    assert!(is_bad_or_too_long(&http::post(target.server.debug_port(), "/explain", objects.as_str())));
    target.assert_unharmed();
}

/// True if a request is refused: with 400, or with 413 above a mebibyte, before its body is read, so that the response can
/// be lost in a reset.
fn is_bad_or_too_long(request: &http::Request) -> bool {
    request.try_send().map_or(true, |response| [400, 413].contains(&response.status))
}

#[test]
fn json_of_any_depth_or_size_is_a_bad_request() {
    let target = Target::start();
    let table = [
        "[".repeat(1_000_000),
        r#"{"descriptors":["#.repeat(200_000),
        format!(r#"{{"domain":{}}}"#, "9".repeat(1_000_000)),
        format!(r#"{{"domain":"{}""#, r"\u0000".repeat(100_000)),
        r#"{"hitsAddend":1e999999999}"#.to_owned(),
        "\u{feff}{}".to_owned(),
    ];
    for body in &table {
        assert_eq!(target.server.post_json(body).status, 400, "{}", &body[..body.len().min(60)]);
        assert!(is_bad_or_too_long(&http::post(target.server.debug_port(), "/explain", body.as_str())));
    }
    let mut random = Random(7);
    for _ in 0..100 {
        let length = random.below(300);
        let body = random.bytes(length);
        assert_eq!(http::post(target.server.http_port(), "/json", body).send().status, 400);
    }
    // The server answers before it has read the body, so the response can be lost in a reset.
    let large = http::post(target.server.http_port(), "/json", vec![b' '; 8 << 20]).try_send();
    assert!(large.is_err() || matches!(large, Ok(response) if (400..500).contains(&response.status)));
    target.assert_unharmed();
}

/// Response to `bytes`, even if the server did not read all of them.
fn answer_to(port: u16, bytes: &[u8]) -> Vec<u8> {
    let mut stream = http::connect(port, Ipv4Addr::LOCALHOST).unwrap();
    let mut response = Vec::new();
    // The server may close or reset the connection before everything is written.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.read_to_end(&mut response);
    response
}

#[test]
fn garbage_on_any_listener_is_rejected() {
    let target = Target::start();
    let ports = [target.server.grpc_port(), target.server.http_port(), target.server.debug_port()];
    let mut random = Random(0xbad);
    let mut garbage: Vec<Vec<u8>> = (0..30)
        .map(|_| {
            let length = random.below(5000);
            random.bytes(length)
        })
        .collect();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let after_preface: Vec<_> = garbage.iter().map(|noise| [preface, noise.as_slice()].concat()).collect();
    garbage.extend(after_preface);
    garbage.extend([
        b"".to_vec(),
        b"\0".to_vec(),
        b"\r\n\r\n".to_vec(),
        preface.to_vec(),
        b"\x16\x03\x01\x02\0\x01\0".to_vec(),
    ]);
    for (index, bytes) in garbage.iter().enumerate() {
        answer_to(ports[index % 3], bytes);
        answer_to(ports[0], bytes);
    }
    target.assert_unharmed();
}

#[test]
fn bad_http_gets_a_bad_status() {
    let target = Target::start();
    let header = |text: &str| format!("GET /healthcheck HTTP/1.1\r\nhost: x\r\n{text}\r\n\r\n").into_bytes();
    let json = |text: &str| format!("POST /json HTTP/1.1\r\nhost: x\r\n{text}").into_bytes();
    let table = [
        b"GET\r\n\r\n".to_vec(),
        b"GET / HTTP/9.9\r\n\r\n".to_vec(),
        b"G\0T / HTTP/1.1\r\n\r\n".to_vec(),
        header("x\0y: z"),
        header("a b: c"),
        header(&format!("x: {}", "y".repeat(1 << 20))),
        header(&"x: y\r\n".repeat(10_000)),
        json("content-length: -1\r\n\r\n{}"),
        json("content-length: 99999999999999999999\r\n\r\n{}"),
        json("content-length: 2\r\ncontent-length: 3\r\n\r\n{}"),
        json("transfer-encoding: chunked\r\n\r\nzz\r\n"),
        json("transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}"),
        format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(1 << 20)).into_bytes(),
    ];
    for bytes in &table {
        // The debug listener answers unknown paths with its index and does not read the body.
        let for_debug = String::from_utf8_lossy(bytes).replace("/json", "/explain").into_bytes();
        for (port, bytes) in [(target.server.http_port(), bytes), (target.server.debug_port(), &for_debug)] {
            let response = String::from_utf8_lossy(&answer_to(port, bytes)).into_owned();
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).into_owned();
            // A reset can leave no response at all.
            let rejected = ["HTTP/1.1 4", "HTTP/1.0 4", "HTTP/1.1 505"].iter().any(|start| response.starts_with(start));
            assert!(response.is_empty() || rejected, "{shown}: {response}");
        }
    }
    target.assert_unharmed();
}

#[test]
fn slow_clients_do_not_delay_others() {
    let target = Target::start();
    let mut slow_clients = Vec::new();
    for (port, text) in [
        (target.server.http_port(), "POST /json HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n{"),
        (target.server.http_port(), "GET /healthcheck HT"),
        (target.server.debug_port(), "GET /"),
        (target.server.grpc_port(), "PRI * HTTP/2.0\r\n"),
    ] {
        for _ in 0..50 {
            // An address of its own: the debug listener has few connections for each, and closes the others.
            let mut stream = http::connect(port, Ipv4Addr::new(127, 0, 0, 2)).unwrap();
            let _ = stream.write_all(text.as_bytes());
            slow_clients.push(stream);
        }
    }
    let mut half_sent = Http2Connection::connect(target.server.grpc_port());
    for stream in (1..1000).step_by(2) {
        half_sent.call(stream, &[]).unwrap();
        half_sent.message(stream, 1000, b"half", 0).unwrap();
    }
    for _ in 0..20 {
        target.call(&grpc::rate_limit_request("shop", &[("open", "x")])).unwrap();
        assert_eq!(target.server.healthcheck(), 200);
    }
    drop(half_sent);
    target.assert_unharmed();
}
