//! The signal that ends all streams of a process.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Signal that is set once; streams end in the order in which they began to wait.
#[derive(Debug, Default)]
pub(super) struct StreamEndSignal {
    is_set: AtomicBool,
    waiting: Notify,
}

impl StreamEndSignal {
    /// Sets the signal.
    pub(super) fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        self.waiting.notify_waiters();
    }

    /// Waits until the signal is set.
    pub(super) async fn wait(&self) {
        // Created before the flag is read, so that it is woken by all that set it later.
        let set = self.waiting.notified();
        if !self.is_set.load(Ordering::Acquire) {
            set.await;
        }
    }
}
