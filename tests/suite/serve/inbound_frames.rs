//! Frames that clients send: changed, counted and paused in the same way however they are split.

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

/// Request: its authority, and for each header the number of a name, a value, and true if it must not enter the header
/// table.
type SentRequest = (String, Vec<(u8, String, bool)>);

/// Headers as a server behind a filter gets them, with the authority as `host`; the filter reads up to
/// `piece_bytes` at once.
async fn filtered(requests: &[SentRequest], piece_bytes: usize) -> Vec<HeaderMap> {
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
    for (authority, headers) in requests {
        sender = sender.ready().await.expect("the connection lives");
        let mut message = Request::get(format!("http://{authority}/path")).body(()).expect("it is valid");
        for (name, value, is_sensitive) in headers {
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

fn request() -> impl Strategy<Value = SentRequest> {
    let short = "[a-z|~ ]{0,40}".prop_map(|text: String| text.trim().to_owned());
    let long = (1_usize..40_000, "[a-z|~]").prop_map(|(count, character): (usize, String)| character.repeat(count));
    let headers = prop::collection::vec((0_u8..20, prop_oneof![8 => short, 1 => long], any::<bool>()), 0..12);
    (prop_oneof![Just("tollkeeper.example:8081".to_owned()), "[a-zA-Z0-9.-]{1,1000}"], headers)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 60, ..kit::costly_property(32) })]
    #[test]
    fn headers_of_any_size_in_pieces_of_any_size_arrive(
        requests in prop::collection::vec(request(), 1..5),
        piece_bytes in prop_oneof![1 => 1_usize..100, 3 => 100_usize..70_000],
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
        let received = runtime.block_on(filtered(&requests, piece_bytes));
        prop_assert_eq!(received.len(), requests.len());
        for ((authority, sent), received) in requests.iter().zip(&received) {
            let host = received["host"].as_bytes();
            prop_assert!(host.len() == authority.len() && host.iter().all(|letter| b"03jX".contains(letter)));
            prop_assert_eq!(received.len(), sent.len() + 1);
            for number in 0..20 {
                let values = sent.iter().filter(|(name, ..)| *name == number).map(|(_, value, _)| value.as_bytes());
                let got = received.get_all(header_name(number)).iter().map(HeaderValue::as_bytes);
                prop_assert!(got.eq(values), "x-{}", number);
            }
        }
    }
}

mod frame_filter {
    use bytes::{BufMut as _, BytesMut};
    use proptest::prelude::*;
    use tollkeeper::serve::server::inbound_frames::frame_filter::{FrameCounts, FrameFilter};

    const SETTINGS_FRAME_TYPE: u8 = 4;

    const REQUESTS_PER_SETTINGS_OR_GOAWAY_FRAME: u64 = 64;

    const PREFACE_BYTES: usize = 24;

    const MAX_FRAME_PAYLOAD_BYTES: usize = 16_384;

    const HEADERS_FRAME_TYPE: u8 = 1;

    const GOAWAY_FRAME_TYPE: u8 = 7;

    /// Bytes that passed of those that are read in pieces of these lengths, over and over; those that are held at the
    /// end; and the frames counted.
    fn filtered(bytes: &[u8], pieces: &[usize]) -> (Vec<u8>, Vec<u8>, FrameCounts) {
        let mut filter = FrameFilter::default();
        let (mut passed, mut held) = (Vec::new(), Vec::new());
        let mut rest = bytes;
        for length in pieces.iter().cycle() {
            let (piece, later) = rest.split_at((*length).min(rest.len()));
            held.extend_from_slice(piece);
            let count = filter.count_and_rewrite_frames(&mut held);
            passed.extend(held.drain(..count));
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        (passed, held, filter.counts)
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
            assert_eq!(filtered(&bytes, &[size]).2, expected, "pieces of {size} bytes");
        }
    }

    /// Payload that often is a header block: fields with short and long values, or any bytes.
    fn payload() -> impl Strategy<Value = Vec<u8>> {
        let name =
            prop_oneof![Just(vec![0x41]), Just(vec![0x01]), Just(vec![0x44]), Just(b"\x00\x0a:authority".to_vec())];
        let length = prop_oneof![Just(vec![0x05]), Just(vec![0x85]), Just(vec![0x7f, 0xff, 0xff, 0x01])];
        let field = (name, length, prop::collection::vec(any::<u8>(), 0..8));
        let fields =
            prop::collection::vec(field.prop_map(|(name, length, value)| [name, length, value].concat()), 0..6);
        let blank = (0_usize..=MAX_FRAME_PAYLOAD_BYTES).prop_map(|length| vec![b'x'; length]);
        prop_oneof![4 => fields.prop_map(|fields| fields.concat()), 2 => prop::collection::vec(any::<u8>(), 0..40), 1 => blank]
    }

    fn frames() -> impl Strategy<Value = Vec<u8>> {
        let kind =
            prop_oneof![1 => Just(0_u8), 5 => Just(HEADERS_FRAME_TYPE), 1 => any::<u8>(), 1 => Just(4), 1 => Just(7)];
        let frame = (kind, any::<u8>(), 1_u8..3, payload()).prop_map(|(kind, flags, stream, payload)| {
            let mut frame = BytesMut::new();
            frame.put_uint(payload.len() as u64, 3);
            frame.put_slice(&[kind, flags, 0, 0, 0, stream]);
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
            prop_assert_eq!(whole.0.len() + whole.1.len(), bytes.len());
            // At most one frame is held.
            prop_assert!(whole.1.len() < 9 + MAX_FRAME_PAYLOAD_BYTES);
            prop_assert_eq!(&filtered(&bytes, &pieces), &whole);
            prop_assert_eq!(&filtered(&bytes, &small_pieces), &whole);
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

mod authority {
    use proptest::prelude::*;
    use tollkeeper::serve::server::inbound_frames::authority::{count_huffman_decoded_bytes, overwrite_authority};

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

    /// Characters and their Huffman codes.
    const CODES: [(char, &str); 8] = [
        ('0', "00000"),
        ('a', "00011"),
        ('3', "011001"),
        ('.', "010111"),
        ('j', "1110100"),
        ('X', "11111100"),
        ('~', "1111111111101"),
        ('|', "111111111111100"),
    ];

    fn huffman(text: &str) -> Vec<u8> {
        let code = |character| CODES.iter().find(|(known, _)| *known == character).expect("it has a code").1;
        let mut bits: String = text.chars().map(code).collect();
        bits.extend(std::iter::repeat_n('1', bits.len().next_multiple_of(8) - bits.len()));
        bits.as_bytes().chunks(8).map(|byte| byte.iter().fold(0, |byte, bit| byte << 1 | (bit - b'0'))).collect()
    }

    /// Text of Huffman-coded bytes without padding, if it has only characters that are known here.
    fn decode(bytes: &[u8]) -> Option<String> {
        let bits: String = bytes.iter().map(|byte| format!("{byte:08b}")).collect();
        let (mut text, mut rest) = (String::new(), bits.as_str());
        while !rest.is_empty() {
            let (character, code) = CODES.iter().find(|(_, code)| rest.starts_with(code))?;
            text.push(*character);
            rest = &rest[code.len()..];
        }
        Some(text)
    }

    /// POST, http, and a field of `:authority`: what precedes the value.
    fn start(name: &[u8], is_huffman: bool, value_bytes: usize) -> Vec<u8> {
        let flag = if is_huffman { 0x80 } else { 0 };
        let length = match value_bytes.checked_sub(0x7f) {
            None => vec![flag | u8::try_from(value_bytes).expect("it is short")],
            Some(rest) => vec![
                flag | 0x7f,
                u8::try_from(rest % 128).expect("it is small") | 0x80,
                u8::try_from(rest / 128).expect("it is small"),
            ],
        };
        [&[0x83, 0x86], name, &length].concat()
    }

    fn names() -> impl Strategy<Value = Vec<u8>> {
        let huffman = [&[0x40, 0x88][..], HUFFMAN_AUTHORITY_NAME].concat();
        let text = [&[0x10, 0x0a][..], AUTHORITY_NAME].concat();
        prop_oneof![Just(vec![0x41]), Just(vec![0x01]), Just(huffman), Just(text)]
    }

    proptest! {
        #[test]
        fn authority_keeps_its_lengths(text in "[0a3.jX~|]{0,400}", name in names(), is_huffman in any::<bool>()) {
            let value = if is_huffman { huffman(&text) } else { text.clone().into_bytes() };
            let start = start(&name, is_huffman, value.len());
            // A path, which could be one more authority if the search went on.
            let end = [0x44, 0x01, b'/', 0x41, 0x01, b'|'];
            let mut block = [&start, &value, &end[..]].concat();
            overwrite_authority(&mut block);
            let (before, rest) = block.split_at(start.len());
            let (after, rest) = rest.split_at(value.len());
            prop_assert_eq!((before, rest), (&start[..], &end[..]));
            if !is_huffman {
                prop_assert!(after.iter().all(|byte| *byte == b'0'));
            } else if value.len() > text.len() {
                prop_assert_eq!(after, &value);
            } else {
                let decoded = decode(after).expect("it has known characters");
                prop_assert_eq!(decoded.len(), text.len());
                prop_assert!(decoded.chars().all(|letter| "03jX".contains(letter)), "{}", decoded);
                prop_assert_eq!(count_huffman_decoded_bytes(after), Some(text.len()));
            }
            let once = block.clone();
            overwrite_authority(&mut block);
            prop_assert_eq!(block, once);
        }

        #[test]
        fn any_bytes_keep_their_number(mut block in prop::collection::vec(any::<u8>(), 0..200)) {
            let before = block.len();
            overwrite_authority(&mut block);
            prop_assert_eq!(block.len(), before);
        }

        #[test]
        fn fields_after_the_pseudo_headers_are_not_changed(
            regular in prop_oneof![Just(vec![0x8f]), Just(vec![0x5f, 0x01, b'x']), Just(vec![0x00, 0x01, b'x', 0x00])],
        ) {
            let block = [&[0x83, 0x86][..], &regular, &[0x41, 0x02, b'|', b'|']].concat();
            let mut after = block.clone();
            overwrite_authority(&mut after);
            prop_assert_eq!(after, block);
        }
    }
}
