//! Evidence that a proxy has received what was sent to it: the reply to an HTTP/2 PING that was sent after it.
//!
//! A PING may overtake data that waits to be written. So the bytes of a stream are counted when h2 drops them, which it
//! does once they are written, and a PING is asked for after that. Frames arrive in their order, so its reply proves
//! that the data arrived. A proxy that is frozen or cut off replies to nothing.
//!
//! Decides: when a response on a quota stream is known to have arrived (PING).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;
use tokio::sync::watch;

/// PINGs of one connection, and their replies.
#[derive(Debug, Default)]
pub struct ConnectionPings {
    is_wanted: AtomicBool,
    connection: AtomicWaker,
    sent: AtomicU64,
    /// Number of the last PING that was answered.
    answered: watch::Sender<u64>,
}

/// What a stream can know of the delivery of its responses; an extension of its request.
#[derive(Clone, Debug)]
pub struct DeliveryEvidence {
    /// PINGs of the connection.
    pub pings: Arc<ConnectionPings>,
    /// Bytes of the response body that are written.
    pub written: Arc<watch::Sender<u64>>,
}

/// A part of a response body; counts as written when it is dropped.
#[derive(Debug)]
pub struct BodyPart {
    written: Arc<watch::Sender<u64>>,
    bytes: u64,
}

impl ConnectionPings {
    /// Returns true if a PING is wanted; wakes the task of `context` when one is. For the connection.
    pub fn take_request(&self, context: &Context<'_>) -> bool {
        self.connection.register(context.waker());
        self.is_wanted.load(Ordering::Acquire) && self.is_wanted.swap(false, Ordering::AcqRel)
    }

    /// Records that a PING is sent.
    pub fn record_sent(&self) {
        self.sent.fetch_add(1, Ordering::AcqRel);
    }

    /// Records the reply to the last PING. There is one at a time.
    pub fn record_reply(&self) {
        self.answered.send_replace(self.sent.load(Ordering::Acquire));
    }

    /// Asks for a PING, and waits for its reply. Waits forever if the connection ends first.
    async fn ping(&self) {
        let mut answered = self.answered.subscribe();
        // One that is on its way may have been sent too early.
        let next = self.sent.load(Ordering::Acquire) + 1;
        self.is_wanted.store(true, Ordering::Release);
        self.connection.wake();
        if answered.wait_for(|number| *number >= next).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl DeliveryEvidence {
    /// Evidence of a new stream.
    pub fn new(pings: Arc<ConnectionPings>) -> Self {
        Self { pings, written: Arc::new(watch::Sender::new(0)) }
    }

    /// Waits until the proxy has received the first `bytes` of the response body. Waits forever if it never does.
    pub async fn wait_until_received(self, bytes: u64) {
        let mut written = self.written.subscribe();
        if written.wait_for(|written| *written >= bytes).await.is_err() {
            std::future::pending::<()>().await;
        }
        self.pings.ping().await;
    }
}

impl BodyPart {
    /// A part of this many bytes.
    pub fn new(written: &Arc<watch::Sender<u64>>, bytes: usize) -> Self {
        Self { written: Arc::clone(written), bytes: bytes as u64 }
    }
}

impl Drop for BodyPart {
    fn drop(&mut self) {
        self.written.send_modify(|written| *written += self.bytes);
    }
}
