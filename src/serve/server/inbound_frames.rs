//! Frames of HTTP/2 that a client sends, bounded and changed before h2 reads them.
//!
//! h2 reads all bytes that have arrived before it hands out a single request. Here reading pauses after
//! [`READ_BYTES_PER_TURN`], until the requests among them have been started and other connections had their turn.
//! Reading ends at more SETTINGS and GOAWAY frames than `frame_filter` allows.
//!
//! h2 resets a stream whose `:authority` is not one of a URI, such as the name of an Istio cluster, and ends the
//! connection if the headers of one call are far too large. Envoy then lets requests through without a limit. No answer
//! depends on these headers, so their values are replaced; the file `hpack_filter.rs` says how.
//!
//! Frames that need no change are not copied: they are inspected in the buffer of the caller. A header block that is
//! changed, or that was not read in one piece, goes through a buffer of its own, frame by frame.

mod frame_filter;
mod hpack_filter;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use self::frame_filter::FrameFilter;

/// Number of bytes after which reading pauses until the next turn of the connection.
const READ_BYTES_PER_TURN: usize = 16 * 1024;

/// Wraps the socket of an HTTP/2 connection: filters the frames that are read from it, and passes writes through.
#[derive(Debug)]
pub(super) struct FrameFilteringIo<I> {
    io: I,
    filter: FrameFilter,
    state: Arc<InboundFrameState>,
}

/// Pause and frame limit of reading from a connection, shared with the task that serves it.
#[derive(Debug, Default)]
pub(super) struct InboundFrameState {
    /// Bytes read since the last pause.
    read_bytes: AtomicUsize,
    is_exceeded: AtomicBool,
}

impl InboundFrameState {
    /// True from the first frame on that is not allowed; nothing is read any more then.
    pub(super) fn exceeds_frame_limit(&self) -> bool {
        self.is_exceeded.load(Ordering::Relaxed)
    }

    /// Ends a pause; false if reading did not pause. The caller must poll the connection again.
    pub(super) fn resume_reading(&self) -> bool {
        let was_paused = self.is_paused();
        self.read_bytes.store(0, Ordering::Relaxed);
        was_paused
    }

    fn is_paused(&self) -> bool {
        self.read_bytes.load(Ordering::Relaxed) >= READ_BYTES_PER_TURN
    }

    fn count_read_bytes(&self, bytes: usize) {
        let read_bytes = self.read_bytes.load(Ordering::Relaxed);
        self.read_bytes.store(read_bytes + bytes, Ordering::Relaxed);
    }
}

impl<I> FrameFilteringIo<I> {
    /// Filters what is read from `io`, from the connection preface on.
    pub(super) fn new(io: I) -> (Self, Arc<InboundFrameState>) {
        let state = Arc::new(InboundFrameState::default());
        (Self { io, filter: FrameFilter::new(), state: Arc::clone(&state) }, state)
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for FrameFilteringIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { io, filter, state } = &mut *self;
        loop {
            if filter.write_output_to(buffer) {
                return Poll::Ready(Ok(()));
            }
            if state.exceeds_frame_limit() || state.is_paused() {
                // The connection sees this state after its call, so no wake-up is needed.
                return Poll::Pending;
            }
            let before = buffer.filled().len();
            ready!(Pin::new(&mut *io).poll_read(context, buffer))?;
            let read = &buffer.filled()[before..];
            if read.is_empty() {
                // An incomplete frame before the end of the stream is an error that h2 reports.
                filter.output_incomplete_frame();
                filter.write_output_to(buffer);
                return Poll::Ready(Ok(()));
            }
            state.count_read_bytes(read.len());
            let passed = filter.filter_read_bytes(read);
            if filter.exceeds_frame_limit() {
                state.is_exceeded.store(true, Ordering::Relaxed);
            }
            buffer.set_filled(before + passed);
            if passed > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for FrameFilteringIo<I> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;

    use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
    use bytes::Bytes;
    use futures_util::poll;
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, duplex, join, split};

    use super::*;

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
        #![proptest_config(ProptestConfig { cases: 100, max_shrink_iters: 60, ..ProptestConfig::default() })]
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
}
