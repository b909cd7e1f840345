//! Coalesces the writes of tasks that are ready at the same time.
//!
//! Many small writes to one connection cost a system call each. A writer that first waits for a [`YieldBarrier`] lets
//! the other ready tasks of its thread run, so that their writes go out with its own. If no other task is ready, the
//! barrier resolves at once.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use tokio::task::yield_now;

/// Resolves once the other ready tasks of this thread have run. Reusable, by one task.
#[derive(Debug, Default)]
pub struct YieldBarrier {
    flag: Arc<WakeFlag>,
    is_waiting: bool,
}

/// A waker that records its wake-up.
#[derive(Debug, Default)]
struct WakeFlag {
    is_woken: AtomicBool,
    waker: AtomicWaker,
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl YieldBarrier {
    /// Polls the barrier: the first call starts to wait, further calls while it waits change nothing.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.flag.waker.register(context.waker());
        if !self.is_waiting {
            self.is_waiting = true;
            // tokio wakes a task that yields after the others have run; here it wakes the flag.
            let flag = Waker::from(Arc::clone(&self.flag));
            let _pending = pin!(yield_now()).poll(&mut Context::from_waker(&flag));
        }
        if self.flag.is_woken.swap(false, Ordering::Acquire) {
            self.is_waiting = false;
            return Poll::Ready(());
        }
        Poll::Pending
    }
}
