//! Requests that h2 refuses, recognised by its messages.

use bytes::Bytes;
use tokio::io::{AsyncWriteExt as _, duplex};
use tollkeeper::telemetry::http2_refusals::{HTTP2_REFUSALS, RefusalReason, build_refusal_layer};
use tracing::Dispatch;
use tracing::subscriber::{NoSubscriber, with_default};
use tracing_subscriber::layer::SubscriberExt as _;

/// Beginnings of the messages of h2, and the reason that each counts as.
const REFUSALS: [(&str, RefusalReason); 7] = [
    ("malformed headers: malformed authority", RefusalReason::MalformedAuthority),
    ("malformed headers: ", RefusalReason::MalformedHeaders),
    ("stream error PROTOCOL_ERROR -- malformed header block", RefusalReason::MalformedHeaders),
    ("stream error REQUEST_HEADER_FIELDS_TOO_LARGE", RefusalReason::HeadersTooLarge),
    ("connection error PROTOCOL_ERROR -- decoded ", RefusalReason::ConnectionHeadersTooLarge),
    ("connection error PROTOCOL_ERROR -- CONTINUATION frame hea", RefusalReason::ConnectionHeadersTooLarge),
    ("too_many_continuations", RefusalReason::ConnectionHeadersTooLarge),
];

/// Bound on the headers of a request; four times as much closes the connection.
const MAX_HEADER_BYTES: u32 = 1024;

/// Kinds of frames.
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
/// Flag of the last frame of a header block.
const END_HEADERS: u8 = 4;

/// A frame of stream 1.
fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = u32::try_from(payload.len()).expect("a payload is short").to_be_bytes();
    [&length[..], &[kind, flags, 0, 0, 0, 1], payload].concat()
}

/// A header that enters no table.
fn header(name: &str, value: &str) -> Vec<u8> {
    let length = |text: &str| u8::try_from(text.len()).expect("a text is short");
    [&[0, length(name)], name.as_bytes(), &[length(value)], value.as_bytes()].concat()
}

/// `count` headers of 100 bytes, as HTTP/2 counts them.
fn many_headers(count: usize) -> Vec<u8> {
    (0..count).flat_map(|index| header(&format!("x-{index:06}"), &"y".repeat(60))).collect()
}

/// Method, scheme and path of a request, from HPACK's static table.
const REQUEST: &[u8] = &[0x83, 0x86, 0x84];

/// Frames that provoke the refusals of [`REFUSALS`], in the same order.
fn provocations() -> [Vec<Vec<u8>>; REFUSALS.len()] {
    let request = |headers: Vec<u8>| vec![frame(HEADERS, END_HEADERS, &[REQUEST, &headers].concat())];
    // The bound is exceeded, and a header of 4223 bytes begins.
    let begun = [REQUEST, &many_headers(12), &[0, 1, b'x', 0x7f, 0x80, 0x20], b"y"].concat();
    let begun = frame(HEADERS, 0, &begun);
    [
        request(header(":authority", "outbound|8081||tollkeeper")),
        vec![frame(HEADERS, END_HEADERS, &REQUEST[..1])],
        request(header("te", "gzip")),
        request(many_headers(12)),
        request(many_headers(50)),
        vec![begun, frame(CONTINUATION, 0, &[b'y'; 1100])],
        [vec![frame(HEADERS, 0, REQUEST)], vec![frame(CONTINUATION, 0, &[]); 6]].concat(),
    ]
}

/// Lets an h2 server read frames to their end.
async fn serve(frames: &[Vec<u8>]) {
    let (mut client, server) = duplex(1 << 16);
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let sent = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..], &frames.concat()].concat();
    client.write_all(&sent).await.expect("the frames fit");
    client.shutdown().await.expect("the server is there");
    let mut builder = h2::server::Builder::new();
    builder.max_header_list_size(MAX_HEADER_BYTES);
    let mut connection = builder.handshake::<_, Bytes>(server).await.expect("it is HTTP/2");
    let accepted = connection.accept().await;
    assert!(!matches!(accepted, Some(Ok(_))), "not refused: {accepted:?}");
}

#[test]
fn each_refusal_of_the_linked_h2_is_recognised() {
    // While a process has one subscriber only, tracing turns an event off for all threads if the first thread to
    // reach it has none. Other tests are such threads.
    let _second = Dispatch::new(NoSubscriber::new());
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
    let subscriber = tracing_subscriber::registry().with(build_refusal_layer());
    with_default(subscriber, || {
        let counts = || RefusalReason::ALL.map(|reason| HTTP2_REFUSALS.refusal_count(reason));
        for ((beginning, reason), frames) in REFUSALS.into_iter().zip(provocations()) {
            let mut expected = counts();
            expected[reason as usize] += 1;
            runtime.block_on(serve(&frames));
            assert_eq!(counts(), expected, "h2 changed its message `{beginning}`: adapt MESSAGE_BEGINNINGS");
        }
    });
}
