//! A connection that coalesces small writes into one system call.
//!
//! HTTP/2 flushes after each response. Here a flush first waits until the other ready tasks of the thread have run, so
//! that responses written meanwhile share one `write`.
//!
//! While the client does not take what is written, nothing is read from it either. Otherwise its further requests would
//! pile up responses here.
//!
//! Decides: a client that does not read its responses: it is not read from.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::base::write_coalescing::YieldBarrier;

/// Size of the buffer in bytes; more is written at once.
const MAX_BUFFERED_BYTES: usize = 64 * 1024;

/// Reads from `io` directly and writes to it through a buffer.
#[derive(Debug)]
pub struct CoalescedWriter<I> {
    io: I,
    buffer: BytesMut,
    barrier: YieldBarrier,
    /// True if the last write to `io` had to wait.
    is_blocked: bool,
}

impl<I> CoalescedWriter<I> {
    /// Buffers what is written to `io`.
    pub fn new(io: I) -> Self {
        Self { io, buffer: BytesMut::new(), barrier: YieldBarrier::default(), is_blocked: false }
    }
}

impl<I: AsyncWrite + Unpin> CoalescedWriter<I> {
    /// Writes the buffer to `io`.
    fn poll_write_buffer(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.buffer.is_empty() {
            let written = Pin::new(&mut self.io).poll_write(context, &self.buffer);
            self.is_blocked = written.is_pending();
            match ready!(written)? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.buffer.advance(written),
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin> AsyncRead for CoalescedWriter<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_blocked {
            ready!(self.poll_write_buffer(context))?;
        }
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for CoalescedWriter<I> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.buffer.len() + bytes.len() > MAX_BUFFERED_BYTES {
            ready!(self.poll_write_buffer(context))?;
            if bytes.len() > MAX_BUFFERED_BYTES {
                return Pin::new(&mut self.io).poll_write(context, bytes);
            }
        }
        self.buffer.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.buffer.is_empty() {
            ready!(self.barrier.poll(context));
            ready!(self.poll_write_buffer(context))?;
        }
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_buffer(context))?;
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
