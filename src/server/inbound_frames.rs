//! Bounds on the HTTP/2 frames that a client sends, which h2 does not have.
//!
//! h2 reads all bytes that have arrived before it hands out a single request. Here reading pauses after
//! [`BYTES_PER_TURN`], until the requests among them have been started and other connections had their turn. A SETTINGS
//! or GOAWAY frame makes h2 visit each open stream, so only a few are allowed beyond a share of the requests. The bytes
//! are only inspected, never changed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes after which reading pauses.
const BYTES_PER_TURN: usize = 16 * 1024;
/// Maximum number of SETTINGS and GOAWAY frames of a connection without requests.
const MAX_ALL_STREAM_FRAMES: u64 = 64;
/// Number of requests that allow one more of these frames.
const REQUESTS_PER_ALL_STREAM_FRAME: u64 = 64;
/// Length of the connection preface in bytes, before the first frame.
const PREFACE_BYTES: usize = 24;
const FRAME_HEAD_BYTES: usize = 9;

/// Connection whose inbound frames are bounded.
#[derive(Debug)]
pub(super) struct InboundFrames<I> {
    io: I,
    scanner: FrameScanner,
    state: Arc<InboundState>,
}

/// State of the inbound frames of a connection.
#[derive(Debug, Default)]
pub(super) struct InboundState {
    /// Bytes read since the last pause.
    read_bytes: AtomicUsize,
    is_exceeded: AtomicBool,
}

impl InboundState {
    /// True from the first frame on that is not allowed; nothing is read any more then.
    pub(super) fn is_exceeded(&self) -> bool {
        self.is_exceeded.load(Ordering::Relaxed)
    }

    /// Ends a pause; false if reading did not pause. The caller must poll the connection again.
    pub(super) fn resume(&self) -> bool {
        let was_paused = self.is_paused();
        self.read_bytes.store(0, Ordering::Relaxed);
        was_paused
    }

    fn is_paused(&self) -> bool {
        self.read_bytes.load(Ordering::Relaxed) >= BYTES_PER_TURN
    }

    fn add(&self, bytes: usize) {
        let read_bytes = self.read_bytes.load(Ordering::Relaxed);
        self.read_bytes.store(read_bytes + bytes, Ordering::Relaxed);
    }
}

impl<I> InboundFrames<I> {
    /// Bounds the frames that are read from `io`, from the connection preface on.
    pub(super) fn new(io: I) -> (Self, Arc<InboundState>) {
        let state = Arc::new(InboundState::default());
        (Self { io, scanner: FrameScanner::new(), state: Arc::clone(&state) }, state)
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for InboundFrames<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.state.is_exceeded() || this.state.is_paused() {
            // The connection sees this state after its call, so no wake-up is needed.
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(context, buffer))?;
        let read = &buffer.filled()[before..];
        this.scanner.scan(read);
        this.state.add(read.len());
        if this.scanner.is_exceeded() {
            this.state.is_exceeded.store(true, Ordering::Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for InboundFrames<I> {
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

/// Counts frames in a stream of bytes that arrives in pieces of any length.
#[derive(Debug)]
struct FrameScanner {
    /// Start of the next frame head, `head_length` bytes of it.
    head: [u8; FRAME_HEAD_BYTES],
    head_length: usize,
    /// Bytes left until the next frame head.
    skip: usize,
    requests: u64,
    all_stream_frames: u64,
}

impl FrameScanner {
    const fn new() -> Self {
        Self { head: [0; FRAME_HEAD_BYTES], head_length: 0, skip: PREFACE_BYTES, requests: 0, all_stream_frames: 0 }
    }

    fn scan(&mut self, mut bytes: &[u8]) {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let length = (FRAME_HEAD_BYTES - self.head_length).min(bytes.len());
            let (head, rest) = bytes.split_at(length);
            self.head[self.head_length..][..length].copy_from_slice(head);
            self.head_length += length;
            bytes = rest;
            if self.head_length < FRAME_HEAD_BYTES {
                return;
            }
            self.head_length = 0;
            let [a, b, c, kind, ..] = self.head;
            self.skip = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            self.count(kind);
        }
    }

    fn count(&mut self, kind: u8) {
        const HEADERS: u8 = 1;
        const SETTINGS: u8 = 4;
        const GOAWAY: u8 = 7;
        match kind {
            HEADERS => self.requests += 1,
            SETTINGS | GOAWAY => self.all_stream_frames += 1,
            _ => {}
        }
    }

    const fn is_exceeded(&self) -> bool {
        self.all_stream_frames > MAX_ALL_STREAM_FRAMES + self.requests / REQUESTS_PER_ALL_STREAM_FRAME
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::poll;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn reading_pauses_until_it_is_resumed() {
        let (mut client, server) = duplex(4 * BYTES_PER_TURN);
        client.write_all(&vec![0; 2 * BYTES_PER_TURN + 1]).await.expect("the bytes fit");
        let (mut frames, state) = InboundFrames::new(server);
        let mut buffer = vec![0; BYTES_PER_TURN];
        for _ in 0..2 {
            frames.read_exact(&mut buffer).await.expect("the bytes are there");
            assert!(poll!(pin!(frames.read_u8())).is_pending());
            assert!(state.resume() && !state.resume());
        }
        assert!(poll!(pin!(frames.read_u8())).is_ready());
        assert!(!state.resume());
    }

    #[test]
    fn frames_are_counted_however_the_bytes_are_split() {
        let settings = [0, 0, 6, 4, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4];
        let headers = [0, 0, 3, 1, 4, 0, 0, 0, 1, 7, 7, 7];
        let mut bytes = vec![7; PREFACE_BYTES];
        for _ in 0..100 {
            bytes.extend(settings);
            bytes.extend(headers);
        }
        for size in 1..40 {
            let mut scanner = FrameScanner::new();
            for piece in bytes.chunks(size) {
                scanner.scan(piece);
            }
            assert_eq!((scanner.all_stream_frames, scanner.requests), (100, 100), "pieces of {size} bytes");
            assert!(scanner.is_exceeded());
        }
    }
    #[test]
    fn client_may_change_its_settings_now_and_then() {
        let mut scanner = FrameScanner::new();
        for _ in 0..10_000 {
            (0..REQUESTS_PER_ALL_STREAM_FRAME).for_each(|_| scanner.count(1));
            scanner.count(4);
            assert!(!scanner.is_exceeded());
        }
    }
}
