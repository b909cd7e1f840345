//! Frames that clients send: filtered, counted and paused in the same way however they are split.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use bytes::Bytes;
use futures_util::poll;
use proptest::prelude::*;
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadBuf, ReadHalf, duplex, join, split,
};
use tollkeeper::serve::server::inbound_frames::FrameFilteringIo;

const READ_BYTES_PER_TURN: usize = 16 * 1024;

#[tokio::test]
async fn reading_pauses_until_it_is_resumed() {
    let (mut client, server) = duplex(4 * READ_BYTES_PER_TURN);
    // The preface, and a DATA frame that ends at the last byte.
    let frame_head = [0, 0x7f, 0xe0, 0, 0, 0, 0, 0, 0];
    let bytes = [&[0; 24], frame_head.as_slice(), &[0; 2 * READ_BYTES_PER_TURN - 32]].concat();
    client.write_all(&bytes).await.expect("the bytes fit");
    let (mut frames, state) = FrameFilteringIo::new(server);
    let mut buffer = vec![0; READ_BYTES_PER_TURN];
    for _ in 0..2 {
        frames.read_exact(&mut buffer).await.expect("the bytes are there");
        assert!(poll!(pin!(frames.read_u8())).is_pending());
        assert!(state.resume_reading() && !state.resume_reading());
    }
    assert!(poll!(pin!(frames.read_u8())).is_ready());
    assert!(!state.resume_reading());
}

#[tokio::test]
async fn reading_ends_at_too_many_frames_of_a_kind() {
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let (mut client, server) = duplex(READ_BYTES_PER_TURN);
    let (mut frames, state) = FrameFilteringIo::new(server);
    client.write_all(&[[0; 24].as_slice(), &settings.repeat(64)].concat()).await.expect("the bytes fit");
    frames.read_exact(&mut [0; 24 + 64 * 9]).await.expect("the frames are allowed");
    assert!(!state.exceeds_frame_limit());
    client.write_all(&settings.repeat(2)).await.expect("the bytes fit");
    frames.read_exact(&mut [0; 9]).await.expect("the frames were read");
    assert!(state.exceeds_frame_limit());
    assert!(poll!(pin!(frames.read_u8())).is_pending());
}

/// Request headers: the number of a name, a value, and true if it must not enter the header table.
type Headers = Vec<(u8, String, bool)>;

/// Headers as a server behind a filter gets them, with the authority as `host`; the filter reads up to
/// `piece_bytes` at once.
async fn filtered(requests: &[Headers], piece_bytes: usize) -> Vec<HeaderMap> {
    let (client, server) = duplex(1 << 16);
    let (reader, writer) = split(server);
    let server = join(Pieces { reader, piece_bytes }, writer);
    let serving = tokio::spawn(async move {
        let mut received = Vec::new();
        let mut builder = h2::server::Builder::new();
        builder.max_header_list_size(1 << 20);
        let (io, state) = FrameFilteringIo::new(server);
        let mut connection = builder.handshake::<_, Bytes>(io).await.expect("it is HTTP/2");
        let mut accept = |context: &mut Context<'_>| {
            let request = connection.poll_accept(context);
            if state.resume_reading() {
                context.waker().wake_by_ref();
            }
            request
        };
        while let Some(request) = poll_fn(&mut accept).await {
            let (request, mut response) = request.expect("the request is valid");
            let mut headers = request.headers().clone();
            let authority = request.uri().authority().expect("it is sent").as_str();
            headers.insert("host", HeaderValue::from_str(authority).expect("it is text"));
            received.push(headers);
            response.send_response(Response::new(()), true).expect("the client waits");
        }
        received
    });
    let (mut sender, connection) = h2::client::handshake(client).await.expect("it is HTTP/2");
    let connection = tokio::spawn(connection);
    for request in requests {
        sender = sender.ready().await.expect("the connection lives");
        let mut message = Request::get("http://tollkeeper.example:8081/path").body(()).expect("it is valid");
        for (name, value, is_sensitive) in request {
            let mut value = HeaderValue::from_str(value).expect("it is text");
            value.set_sensitive(*is_sensitive);
            message.headers_mut().append(header_name(*name), value);
        }
        let (response, _) = sender.send_request(message, true).expect("the connection lives");
        response.await.expect("the request is answered");
    }
    drop(sender);
    connection.await.expect("no panic").expect("no error");
    serving.await.expect("no panic")
}

/// Reader that gives at most `piece_bytes` at once.
struct Pieces {
    reader: ReadHalf<DuplexStream>,
    piece_bytes: usize,
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut piece = vec![0; self.piece_bytes.min(buffer.remaining())];
        let mut piece = ReadBuf::new(&mut piece);
        ready!(Pin::new(&mut self.reader).poll_read(context, &mut piece))?;
        buffer.put_slice(piece.filled());
        Poll::Ready(Ok(()))
    }
}

fn header_name(number: u8) -> HeaderName {
    HeaderName::try_from(format!("x-{number}")).expect("it is a name")
}

fn headers() -> impl Strategy<Value = Headers> {
    let short = "[a-z|~ ]{0,40}".prop_map(|text: String| text.trim().to_owned());
    let long = (1_usize..40_000, "[a-z|~]").prop_map(|(count, character): (usize, String)| character.repeat(count));
    prop::collection::vec((0_u8..20, prop_oneof![8 => short, 1 => long], any::<bool>()), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 60, ..kit::costly_property(32) })]
    #[test]
    fn headers_of_any_size_in_pieces_of_any_size_arrive(
        requests in prop::collection::vec(headers(), 1..5),
        piece_bytes in prop_oneof![1 => 1_usize..100, 3 => 100_usize..70_000],
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
        let received = runtime.block_on(filtered(&requests, piece_bytes));
        prop_assert_eq!(received.len(), requests.len());
        for (sent, received) in requests.iter().zip(&received) {
            prop_assert_eq!(&received["host"], "00000000000000000000000");
            prop_assert_eq!(received.len(), sent.len() + 1);
            for number in 0..20 {
                let values = sent.iter().filter(|(name, ..)| *name == number).map(|(_, value, _)| value.as_bytes());
                let got = received.get_all(header_name(number));
                for (value, got) in values.zip(got) {
                    // A tilde takes 13 bits: the values replaced are those of more than 16 KiB as encoded.
                    let is_replaced = value.len() > 10_000 && got.as_bytes().iter().all(|byte| *byte == b'0');
                    prop_assert!(got.as_bytes() == value || is_replaced, "{} bytes", value.len());
                }
            }
        }
    }
}

mod frame_filter {
    use bytes::{BufMut as _, BytesMut};
    use proptest::prelude::*;
    use tokio::io::ReadBuf;
    use tollkeeper::serve::server::inbound_frames::frame_filter::{FrameCounts, FrameFilter, Http2FrameHead};

    const SETTINGS_FRAME_TYPE: u8 = 4;

    const REQUESTS_PER_SETTINGS_OR_GOAWAY_FRAME: u64 = 64;

    const PREFACE_BYTES: usize = 24;

    const PADDED_FLAG: u8 = 0x8;

    const MAX_FRAME_PAYLOAD_BYTES: usize = 16_384;

    const HEADERS_FRAME_TYPE: u8 = 1;

    const GOAWAY_FRAME_TYPE: u8 = 7;

    const FRAME_HEAD_BYTES: usize = 9;

    const CONTINUATION_FRAME_TYPE: u8 = 9;

    /// Output for bytes that are read in pieces of these lengths, over and over, and the frames counted.
    fn filtered(bytes: &[u8], pieces: &[usize]) -> (Vec<u8>, FrameCounts) {
        let mut filter = FrameFilter::default();
        let mut output = Vec::new();
        let mut rest = bytes;
        for length in pieces.iter().cycle() {
            let (piece, later) = rest.split_at((*length).min(rest.len()));
            let passed = filter.filter_read_bytes(piece);
            output.extend_from_slice(&piece[..passed]);
            if later.is_empty() {
                filter.output_incomplete_frame();
            }
            let mut space = [0; 100];
            let mut space = ReadBuf::new(&mut space);
            while filter.write_output_to(&mut space) {
                output.extend_from_slice(space.filled());
                space.clear();
            }
            if later.is_empty() {
                return (output, filter.counts);
            }
            rest = later;
        }
        (output, filter.counts)
    }

    /// Counts the frames whose heads, and whose payloads if they are filtered, are complete.
    fn counted(bytes: &[u8]) -> FrameCounts {
        let mut counts = FrameCounts::default();
        let mut at = PREFACE_BYTES;
        while let Some(head) = bytes.get(at..).and_then(Http2FrameHead::parse) {
            at += FRAME_HEAD_BYTES + head.length;
            if !head.has_filtered_payload() || at <= bytes.len() {
                counts.count_frame(head.kind);
            }
        }
        counts
    }

    #[test]
    fn frames_are_counted_however_the_bytes_are_split() {
        let settings = [0, 0, 6, 4, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4];
        let headers = [0, 0, 3, 1, 4, 0, 0, 0, 1, 7, 7, 7];
        let goaway = [0, 0, 1, 7, 0, 0, 0, 0, 0, 1];
        let frames = [settings.as_slice(), &headers, &goaway].concat().repeat(100);
        let bytes = [vec![7; PREFACE_BYTES], frames].concat();
        let mut expected = FrameCounts::default();
        for kind in [4, 1, 7].repeat(100) {
            expected.count_frame(kind);
        }
        assert!(expected.exceeds_limit());
        for size in 1..40 {
            assert_eq!(filtered(&bytes, &[size]).1, expected, "pieces of {size} bytes");
        }
    }

    /// Payload that often is a header block: fields with short and long values, or any bytes.
    fn payload() -> impl Strategy<Value = Vec<u8>> {
        let name = prop_oneof![Just(vec![0x41]), Just(vec![0x01]), Just(vec![0x44]), Just(b"\x00\x01x".to_vec())];
        let length = prop_oneof![Just(vec![0x05]), Just(vec![0x85]), Just(vec![0x7f, 0xff, 0xff, 0x01])];
        let field = (name, length, prop::collection::vec(any::<u8>(), 0..8));
        let fields =
            prop::collection::vec(field.prop_map(|(name, length, value)| [name, length, value].concat()), 0..6);
        let blank = (0_usize..MAX_FRAME_PAYLOAD_BYTES).prop_map(|length| vec![b'x'; length]);
        prop_oneof![4 => fields.prop_map(|fields| fields.concat()), 2 => prop::collection::vec(any::<u8>(), 0..40), 1 => blank]
    }

    fn frames() -> impl Strategy<Value = Vec<u8>> {
        let kind = prop_oneof![1 => Just(0_u8), 3 => Just(HEADERS_FRAME_TYPE), 3 => Just(CONTINUATION_FRAME_TYPE), 1 => any::<u8>(), 1 => Just(4), 1 => Just(7)];
        let frame = (kind, any::<u8>(), 1_u8..3, payload()).prop_map(|(kind, flags, stream, payload)| {
            let mut frame = BytesMut::new();
            frame.put_uint(payload.len() as u64, 3);
            // Padding is kept only if the frame passes in place.
            frame.put_slice(&[kind, flags & !PADDED_FLAG, 0, 0, 0, stream]);
            frame.put_slice(&payload);
            frame.to_vec()
        });
        prop::collection::vec(frame, 0..8).prop_map(|frames| [vec![0; PREFACE_BYTES], frames.concat()].concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { max_shrink_iters: 1000, ..ProptestConfig::default() })]
        #[test]
        fn output_and_counts_do_not_depend_on_the_pieces_read(
            mut bytes in frames(),
            cut in any::<prop::sample::Index>(),
            pieces in prop::collection::vec(1_usize..20_000, 1..6),
            small_pieces in prop::collection::vec(1_usize..30, 1..6),
        ) {
            bytes.truncate(cut.index(bytes.len()) + 1);
            let whole = filtered(&bytes, &[bytes.len()]);
            prop_assert_eq!(&whole.1, &counted(&bytes));
            prop_assert_eq!(&filtered(&bytes, &pieces), &whole);
            prop_assert_eq!(&filtered(&bytes, &small_pieces), &whole);
            // An interrupted block gets an empty frame, and a value that is cut off an error mark.
            prop_assert!(whole.0.len() <= 2 * bytes.len(), "{} of {}", whole.0.len(), bytes.len());
        }
    }

    #[test]
    fn client_may_change_its_settings_now_and_then() {
        let mut counts = FrameCounts::default();
        for _ in 0..10_000 {
            (0..REQUESTS_PER_SETTINGS_OR_GOAWAY_FRAME).for_each(|_| counts.count_frame(HEADERS_FRAME_TYPE));
            counts.count_frame(SETTINGS_FRAME_TYPE);
            assert!(!counts.exceeds_limit());
        }
    }

    #[test]
    fn settings_and_goaway_frames_without_requests_are_bounded() {
        let mut counts = FrameCounts::default();
        for kind in [SETTINGS_FRAME_TYPE, GOAWAY_FRAME_TYPE].into_iter().cycle().take(64) {
            counts.count_frame(kind);
        }
        assert!(!counts.exceeds_limit());
        counts.count_frame(GOAWAY_FRAME_TYPE);
        assert!(counts.exceeds_limit());
    }
}

mod hpack_filter {
    use tollkeeper::serve::server::inbound_frames::hpack_filter::{ZeroDigitsValue, count_huffman_decoded_bytes};

    const HUFFMAN_AUTHORITY_NAME: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

    const AUTHORITY_NAME: &[u8] = b":authority";

    #[test]
    fn huffman_code_is_complete_and_its_padding_is_checked() {
        // www.example.com, from RFC 7541, C.4.1.
        let example = [0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff];
        assert_eq!(count_huffman_decoded_bytes(&example), Some(15));
        assert_eq!(count_huffman_decoded_bytes(&[]), Some(0));
        assert_eq!(count_huffman_decoded_bytes(HUFFMAN_AUTHORITY_NAME), Some(AUTHORITY_NAME.len()));
        // A byte of padding, bits 0 as padding, and the code that ends a string.
        assert_eq!(count_huffman_decoded_bytes(&[0xf4, 0xff, 0xff]), None);
        assert_eq!(count_huffman_decoded_bytes(&[0x00, 0x00]), None);
        assert_eq!(count_huffman_decoded_bytes(&[0xff, 0xff, 0xff, 0xff]), None);
    }

    /// Length of the string in `block`, and its place: an integer with a prefix of 7 bits (RFC 7541, 5.1).
    fn string_length(block: &[u8]) -> (usize, usize) {
        let mut length = usize::from(block[0] & 0x7f);
        if length < 0x7f {
            return (length, 1);
        }
        for (at, byte) in block[1..].iter().enumerate() {
            length += usize::from(byte & 0x7f) << (7 * at);
            if byte & 0x80 == 0 {
                return (length, at + 2);
            }
        }
        panic!("the length does not end: {block:?}");
    }

    #[test]
    fn zero_digits_have_the_stated_length() {
        for count in [1, 2, 7, 8, 9, 126, 127, 128, 254, 255, 4096, 16_511, 16_512] {
            for is_huffman in [false, true] {
                let mut string = Vec::new();
                ZeroDigitsValue { count, is_huffman }.append_to(&mut string);
                let (length, start) = string_length(&string);
                assert_eq!((start + length, string[0] & 0x80 != 0), (string.len(), is_huffman));
                let digits = &string[start..];
                let decoded = if is_huffman { count_huffman_decoded_bytes(digits) } else { Some(digits.len()) };
                assert_eq!(decoded, Some(count));
            }
        }
    }
}
