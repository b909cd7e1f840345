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
pub struct YieldBarrier {
    flag: Arc<WakeFlag>,
    awaited: bool,
}

#[derive(Debug, Default)]
struct WakeFlag {
    raised: AtomicBool,
    waker: AtomicWaker,
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.raised.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl YieldBarrier {
    /// Ready once for each lull. The first call begins to wait; calls for other reasons meanwhile change nothing.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.flag.waker.register(context.waker());
        if !self.awaited {
            self.awaited = true;
            // A task that yields is woken when its thread has nothing else to run; here the flag is.
            let flag = Waker::from(Arc::clone(&self.flag));
            let _pending = pin!(yield_now()).poll(&mut Context::from_waker(&flag));
        }
        if self.flag.raised.swap(false, Ordering::Acquire) {
            self.awaited = false;
            return Poll::Ready(());
        }
        Poll::Pending
    }
}
