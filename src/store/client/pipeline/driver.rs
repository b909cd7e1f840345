//! Connection driver: the task that reads and writes the stream of one connection.
//!
//! All commands queued since the last write go out in one write. While replies are due the driver first yields to other
//! tasks, so that a busy server gets hundreds of commands at a time. A queued command whose caller was dropped, or
//! whose deadline has passed, is not sent. The driver also enforces the deadlines of all commands; a reply that arrives
//! after its deadline is read and dropped.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWrite};

use super::send_queue::{PendingCommand, SendQueue};
use crate::base::write_coalescing::YieldBarrier;
use crate::store::client::deadline::DeadlineTimer;
use crate::store::client::wire_protocol::{Stream, WireProtocol};

/// Free space in the input buffer before each read, in bytes.
const READ_BYTES: usize = 16 << 10;
/// Maximum capacity that an unused output buffer keeps, in bytes.
const MAX_KEPT_BYTES: usize = 64 << 10;

/// State of the driver task; dropping it closes the queue and the stream.
pub(super) struct ConnectionDriver<P: WireProtocol> {
    queue: Arc<SendQueue<P>>,
    stream: Box<dyn Stream>,
    input: BytesMut,
    output: BytesMut,
    replies: Vec<P::Reply>,
    yield_barrier: YieldBarrier,
    timer: DeadlineTimer,
}

impl<P: WireProtocol> Drop for ConnectionDriver<P> {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl<P: WireProtocol> ConnectionDriver<P> {
    /// Creates the driver of `stream` for the commands in `queue`. Needs a tokio runtime.
    pub(super) fn new(queue: Arc<SendQueue<P>>, stream: Box<dyn Stream>) -> Self {
        Self {
            queue,
            stream,
            input: BytesMut::new(),
            output: BytesMut::new(),
            replies: Vec::new(),
            yield_barrier: YieldBarrier::default(),
            timer: DeadlineTimer::new(),
        }
    }

    /// Drives the connection; ready with the reason once it is closed.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        self.queue.driver.register(context.waker());
        let result = self.read(context).and_then(|()| {
            self.poll_deadlines(context);
            self.write(context)
        });
        match result {
            Ok(()) => Poll::Pending,
            Err(reason) => Poll::Ready(reason),
        }
    }

    /// Reads all available replies and passes them to their callers.
    fn read(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        loop {
            self.input.reserve(READ_BYTES);
            let Poll::Ready(read) = pin!(self.stream.read_buf(&mut self.input)).poll(context) else { return Ok(()) };
            let read = read?;
            while let Some(reply) = P::decode(&mut self.input)? {
                self.replies.push(reply);
            }
            self.dispatch_replies()?;
            if read == 0 {
                return Err(io::Error::other("closed by the server"));
            }
            if self.input.len() > P::MAX_REPLY_BYTES {
                let text = format!("a reply of more than {} bytes", P::MAX_REPLY_BYTES);
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
            }
        }
    }

    fn dispatch_replies(&mut self) -> io::Result<()> {
        if self.replies.is_empty() {
            return Ok(());
        }
        // Collected first, so that no caller is woken while the queue is locked.
        let answered: Vec<PendingCommand<P>> = self.queue.lock().take_answered(self.replies.len()).collect();
        let mut replies = self.replies.drain(..);
        for (command, reply) in answered.into_iter().zip(replies.by_ref()) {
            command.answer(reply);
        }
        match replies.next() {
            None => Ok(()),
            Some(reply) => {
                let text = P::error_text(&reply).unwrap_or("a reply without a command");
                Err(io::Error::other(text.to_owned()))
            }
        }
    }

    /// Fails commands whose deadline has passed.
    fn poll_deadlines(&mut self, context: &mut Context<'_>) {
        let earliest = self.queue.lock().earliest();
        self.timer.advance(earliest);
        if self.timer.poll_fired(context).is_ready() {
            let mut queue = self.queue.lock();
            queue.expire(Instant::now());
            let next = queue.earliest();
            drop(queue);
            self.timer.rearm(next, context);
        }
    }

    /// Writes the queued commands.
    fn write(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        loop {
            if self.output.is_empty() && !self.take_unsent(context) {
                break;
            }
            match Pin::new(&mut self.stream).poll_write(context, &self.output) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(written)) => self.output.advance(written),
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => return Ok(()),
            }
        }
        match Pin::new(&mut self.stream).poll_flush(context) {
            Poll::Ready(outcome) => outcome,
            Poll::Pending => Ok(()),
        }
    }

    /// Takes queued commands once other tasks have run; returns true if there is something to write.
    fn take_unsent(&mut self, context: &mut Context<'_>) -> bool {
        if !self.queue.lock().has_unsent() {
            return false;
        }
        if self.yield_barrier.poll(context).is_pending() {
            return false;
        }
        if self.output.capacity() > MAX_KEPT_BYTES {
            self.output = BytesMut::new();
        }
        self.output.clear();
        self.queue.lock().take_unsent(&mut self.output);
        !self.output.is_empty()
    }
}
