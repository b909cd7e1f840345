//! Frames of HTTP/2 that a client sends, bounded and changed before h2 reads them.
//!
//! h2 reads all bytes that have arrived before it hands out a single request. Here reading pauses after
//! `READ_BYTES_PER_TURN`, until the requests among them have been started and other connections had their turn.
//! Reading ends at more SETTINGS and GOAWAY frames than `frame_filter` allows.
//!
//! h2 resets a stream whose `:authority` is not one of a URI, such as the name of an Istio cluster, and ends the
//! connection if the headers of one call are far too large. Envoy then lets requests through without a limit. No answer
//! depends on these headers, so their values are replaced; the file `hpack_filter.rs` says how.
//!
//! Frames that need no change are not copied: they are inspected in the buffer of the caller. A header block that is
//! changed, or that was not read in one piece, goes through a buffer of its own, frame by frame.

pub mod frame_filter;
pub mod hpack_filter;

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
pub struct FrameFilteringIo<I> {
    io: I,
    filter: FrameFilter,
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
        (Self { io, filter: FrameFilter::default(), state: Arc::clone(&state) }, state)
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
