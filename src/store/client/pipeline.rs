//! One multiplexed connection to one server: commands are pipelined, and replies arrive in the same order.
//!
//! A connection is never reused after an error: it closes, all pending commands fail, and its owner opens a new one. A
//! command is sent once, and not at all if its caller is gone before it is written.

mod driver;
mod send_queue;

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Instant;
use std::{fmt, io};

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use self::driver::ConnectionDriver;
use self::send_queue::SendQueue;
use super::wire_protocol::{PipelineError, Stream, WireProtocol};

/// Receives the reason once the connection is closed.
pub type Closed = oneshot::Receiver<io::Error>;

/// Open connection; dropping it closes it and fails its pending commands.
pub struct Pipeline<P: WireProtocol> {
    queue: Arc<SendQueue<P>>,
    driver: JoinHandle<()>,
}

impl<P: WireProtocol> fmt::Debug for Pipeline<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline").finish_non_exhaustive()
    }
}

impl<P: WireProtocol> Drop for Pipeline<P> {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl<P: WireProtocol> Pipeline<P> {
    /// Opens a connection on `stream`. Needs a tokio runtime.
    pub fn open(stream: Box<dyn Stream>) -> (Self, Closed) {
        let queue = Arc::new(SendQueue::default());
        let mut driver = ConnectionDriver::new(Arc::clone(&queue), stream);
        let (closed, receiver) = oneshot::channel();
        let driver = tokio::spawn(async move {
            let reason = poll_fn(|context| driver.poll(context)).await;
            // The stream is closed before the owner learns of it.
            drop(driver);
            let _no_receiver = closed.send(reason);
        });
        (Self { queue, driver }, receiver)
    }

    /// Sends a command, after `prefix` if there is one, and waits for its reply until `deadline`. The reply to a prefix
    /// is dropped.
    ///
    /// # Errors
    /// No reply arrived. An error reply is a reply.
    pub async fn call(
        &self,
        words: &[&[u8]],
        prefix: Option<&[&[u8]]>,
        deadline: Option<Instant>,
    ) -> Result<P::Reply, PipelineError> {
        let reply = self.queue.push(words, prefix, deadline)?;
        reply.await.unwrap_or(Err(PipelineError::Broken))
    }

    /// Sends a call, in one command with calls that are queued at the same moment and can share it, and waits for its
    /// reply until `deadline`.
    ///
    /// # Errors
    /// No reply arrived. An error reply is a reply.
    pub async fn call_merged(&self, call: P::Mergeable, deadline: Instant) -> Result<P::Reply, PipelineError> {
        let reply = self.queue.push_mergeable(call, deadline)?;
        reply.await.unwrap_or(Err(PipelineError::Broken))
    }
}
