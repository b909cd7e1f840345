//! Coalesces the writes of tasks that are ready at the same time.
//!
//! Many small writes to one connection cost a system call each. A writer that first waits for a [`YieldBarrier`] lets
//! the other ready tasks of its thread run, so that their writes go out with its own. If no other task is ready, the
//! barrier resolves at once.
//!
//! A task that queues several writes wakes their writers only after the last one, in [`run_deferring_wakes`]:
//! another thread would otherwise write the first one alone.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use smallvec::SmallVec;
use tokio::task::yield_now;

type DeferredWakers = SmallVec<[Waker; 4]>;

thread_local! {
    /// Wakers to be woken later; `None` outside [`run_deferring_wakes`].
    static DEFERRED_WAKERS: RefCell<Option<DeferredWakers>> = const { RefCell::new(None) };
}

/// Wakes all deferred wakers when it is dropped.
struct WakeDeferredOnDrop;

impl Drop for WakeDeferredOnDrop {
    fn drop(&mut self) {
        // Taken first: a waker may run code that defers again.
        let wakers = DEFERRED_WAKERS.with(|deferred| deferred.borrow_mut().take());
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Runs `work`, and then wakes the wakers that it passed to [`wake_or_defer`]. The outermost of nested calls does so.
pub fn run_deferring_wakes<T>(work: impl FnOnce() -> T) -> T {
    let is_outermost = DEFERRED_WAKERS.with(|deferred| {
        let mut deferred = deferred.borrow_mut();
        let is_outermost = deferred.is_none();
        deferred.get_or_insert_default();
        is_outermost
    });
    let _wake_on_drop = is_outermost.then_some(WakeDeferredOnDrop);
    work()
}

/// Wakes a waker: at once, or at the end of [`run_deferring_wakes`] if this thread is in it.
pub fn wake_or_defer(waker: Waker) {
    let at_once = DEFERRED_WAKERS.with(|deferred| match &mut *deferred.borrow_mut() {
        Some(wakers) => {
            wakers.push(waker);
            None
        }
        None => Some(waker),
    });
    if let Some(waker) = at_once {
        waker.wake();
    }
}

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
