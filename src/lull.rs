//! Waits until the other tasks that are ready to run have run.
//!
//! Many small writes to one connection cost a system call each. Whoever writes waits for a lull first, so that what the
//! other tasks of this thread are about to write goes out with it. A lull comes at once where nobody else has work.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use tokio::task::yield_now;

/// The wait of one task, again and again.
#[derive(Debug, Default)]
pub struct Lull {
    bell: Arc<Bell>,
    awaited: bool,
}

#[derive(Debug, Default)]
struct Bell {
    rung: AtomicBool,
    sleeper: AtomicWaker,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        self.sleeper.wake();
    }
}

impl Lull {
    /// Ready once for each lull. The first call begins to wait; calls for other reasons meanwhile change nothing.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.bell.sleeper.register(context.waker());
        if !self.awaited {
            self.awaited = true;
            // A task that yields is woken when its thread has nothing else to run; here the bell is.
            let bell = Waker::from(Arc::clone(&self.bell));
            let _pending = pin!(yield_now()).poll(&mut Context::from_waker(&bell));
        }
        if self.bell.rung.swap(false, Ordering::Acquire) {
            self.awaited = false;
            return Poll::Ready(());
        }
        Poll::Pending
    }
}
