//! Bounds on the HTTP/2 frames that a client sends, which h2 does not have.
//!
//! h2 reads as long as bytes arrive. Here each read consumes task budget for its bytes, so that the connection yields
//! after [`BYTES_PER_BUDGET_UNIT`] times the budget. A SETTINGS or GOAWAY frame makes h2 visit each open stream, so only
//! a few are allowed beyond a share of the requests. The bytes are only inspected, never changed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::task_budget;

/// Bytes that cost one of the 128 units of a task's budget.
const BYTES_PER_BUDGET_UNIT: usize = 256;
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
    is_exceeded: Arc<AtomicBool>,
}

/// Tells that a connection has sent more frames than allowed and is no longer read.
#[derive(Clone, Debug)]
pub(super) struct FrameLimit(Arc<AtomicBool>);

impl FrameLimit {
    /// True from the first frame on that is not allowed.
    pub(super) fn is_exceeded(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<I> InboundFrames<I> {
    /// Bounds the frames that are read from `io`, from the connection preface on.
    pub(super) fn new(io: I) -> (Self, FrameLimit) {
        let is_exceeded = Arc::new(AtomicBool::new(false));
        let limit = FrameLimit(Arc::clone(&is_exceeded));
        (Self { io, scanner: FrameScanner::new(), is_exceeded }, limit)
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for InboundFrames<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.is_exceeded.load(Ordering::Relaxed) {
            // The connection sees the limit after this call and closes.
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(context, buffer))?;
        let read = &buffer.filled()[before..];
        task_budget::consume(read.len() / BYTES_PER_BUDGET_UNIT);
        this.scanner.scan(read);
        if this.scanner.is_exceeded() {
            this.is_exceeded.store(true, Ordering::Relaxed);
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
    use super::*;

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
