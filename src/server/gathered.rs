//! A connection whose answers go out together.
//!
//! HTTP/2 flushes after each answer; here a flush waits for a lull, and what has been answered until then is one
//! system call.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::coalesce::YieldBarrier;

/// More than this does not wait for more.
const MOST_GATHERED: usize = 64 * 1024;

/// What is read and written by way of `io`.
#[derive(Debug)]
pub(super) struct Gathered<I> {
    io: I,
    gathered: BytesMut,
    lull: YieldBarrier,
}

impl<I> Gathered<I> {
    pub(super) fn new(io: I) -> Self {
        Self { io, gathered: BytesMut::new(), lull: YieldBarrier::default() }
    }
}

impl<I: AsyncWrite + Unpin> Gathered<I> {
    /// Writes out what has gathered.
    fn poll_empty(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            match ready!(Pin::new(&mut self.io).poll_write(context, &self.gathered))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.gathered.advance(written),
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Gathered<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Gathered<I> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.gathered.len() + bytes.len() > MOST_GATHERED {
            ready!(self.poll_empty(context))?;
            if bytes.len() > MOST_GATHERED {
                return Pin::new(&mut self.io).poll_write(context, bytes);
            }
        }
        self.gathered.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.gathered.is_empty() {
            ready!(self.lull.poll(context));
            ready!(self.poll_empty(context))?;
        }
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_empty(context))?;
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
