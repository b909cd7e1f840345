//! Frames of HTTP/2 that a client sends, bounded and changed before h2 reads them.
//!
//! h2 reads all bytes that have arrived before it hands out a single request. Here reading pauses after
//! `READ_BYTES_PER_TURN`, until the requests among them have been started and other connections had their turn.
//! Reading ends at more SETTINGS and GOAWAY frames than `frame_filter` allows.
//!
//! h2 resets a stream whose `:authority` is not one of a URI, such as the name of an Istio cluster. Envoy then lets
//! requests through without a limit. No answer depends on it, so it is overwritten; `authority.rs` says how.
//!
//! Frames are inspected and changed in the buffer of the caller. Only bytes that need those of the next read are copied.

pub mod authority;
pub mod frame_filter;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use self::frame_filter::FrameFilter;

/// Number of bytes after which reading pauses until the next turn of the connection.
const READ_BYTES_PER_TURN: usize = 16 * 1024;

/// Wraps the socket of an HTTP/2 connection: filters the frames that are read from it, and passes writes through.
#[derive(Debug)]
pub struct FrameFilteringIo<I> {
    io: I,
    filter: FrameFilter,
    /// Bytes that were read and not given out, at most two reads.
    held: BytesMut,
    /// Number of the first ones of them that passed the filter.
    passed: usize,
    state: Arc<InboundFrameState>,
}

/// Pause and frame limit of reading from a connection, shared with the task that serves it.
#[derive(Debug, Default)]
pub struct InboundFrameState {
    /// Bytes read since the last pause.
    read_bytes: AtomicUsize,
    is_exceeded: AtomicBool,
}

impl InboundFrameState {
    /// True from the first frame on that is not allowed; nothing is read any more then.
    pub fn exceeds_frame_limit(&self) -> bool {
        self.is_exceeded.load(Ordering::Relaxed)
    }

    /// Ends a pause; false if reading did not pause. The caller must poll the connection again.
    pub fn resume_reading(&self) -> bool {
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
    pub fn new(io: I) -> (Self, Arc<InboundFrameState>) {
        let state = Arc::new(InboundFrameState::default());
        let filter = FrameFilter::default();
        (Self { io, filter, held: BytesMut::new(), passed: 0, state: Arc::clone(&state) }, state)
    }

    /// Moves held bytes that passed into `buffer`; false if there are none.
    fn move_passed_bytes(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        if self.passed == 0 {
            return false;
        }
        let length = self.passed.min(buffer.remaining());
        buffer.put_slice(&self.held[..length]);
        self.passed -= length;
        self.held.advance(length);
        if self.held.is_empty() {
            // An idle connection keeps no buffer.
            self.held = BytesMut::new();
        }
        true
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for FrameFilteringIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.move_passed_bytes(buffer) {
                return Poll::Ready(Ok(()));
            }
            if this.state.exceeds_frame_limit() || this.state.is_paused() {
                // The connection sees this state after its call, so no wake-up is needed.
                return Poll::Pending;
            }
            let before = buffer.filled().len();
            ready!(Pin::new(&mut this.io).poll_read(context, buffer))?;
            let read = &mut buffer.filled_mut()[before..];
            if read.is_empty() {
                // An incomplete frame before the end of the stream is an error that h2 reports.
                this.passed = this.held.len();
                this.move_passed_bytes(buffer);
                return Poll::Ready(Ok(()));
            }
            this.state.count_read_bytes(read.len());
            let mut passed = 0;
            if this.held.is_empty() {
                passed = this.filter.count_and_rewrite_frames(read);
                this.held.extend_from_slice(&read[passed..]);
            } else {
                this.held.extend_from_slice(read);
                this.passed = this.filter.count_and_rewrite_frames(&mut this.held);
            }
            if this.filter.counts.exceeds_limit() {
                this.state.is_exceeded.store(true, Ordering::Relaxed);
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
