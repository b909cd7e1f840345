//! Deadlines that let a reply which has arrived be processed first: a timeout, and the timer of a connection.
//!
//! Decides: how long a call to Redis may take (`TOLLKEEPER_STORE_TIMEOUT`, the caller's deadline).

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep_until};

/// Number of times the task yields to others after a deadline before the work is given up.
///
/// A process that was not scheduled for a while finds the expired timer and the received reply at the same moment;
/// yielding lets the reply be processed first.
const GRACE_YIELDS: usize = 3;

/// Waits for `work` until `deadline`, then yields [`GRACE_YIELDS`] times; `None` if `work` is still not complete.
pub(crate) async fn timeout_with_grace<F: Future>(work: F, deadline: Instant) -> Option<F::Output> {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        outcome = &mut work => return Some(outcome),
        () = sleep_until(deadline) => {}
    }
    for _ in 0..GRACE_YIELDS {
        tokio::select! {
            biased;
            outcome = &mut work => return Some(outcome),
            () = yield_now() => {}
        }
    }
    None
}

/// Time until an unarmed timer fires.
const UNARMED_TIMER_DELAY: Duration = Duration::from_secs(3600);

/// Timer of the earliest deadline of a connection's commands: it fires once after a deadline and [`GRACE_YIELDS`]
/// yields to other tasks.
pub(crate) struct DeadlineTimer {
    sleep: Pin<Box<Sleep>>,
    /// Deadline that the timer is set to; `None` if it is unarmed.
    at: Option<Instant>,
    /// Yields left before the timer fires; `None` before the deadline.
    yields_left: Option<usize>,
}

impl DeadlineTimer {
    /// Creates an unarmed timer.
    pub(crate) fn new() -> Self {
        Self { sleep: Box::pin(sleep_until(Instant::now() + UNARMED_TIMER_DELAY)), at: None, yields_left: None }
    }

    /// Moves the timer forward to `earliest`, if that is before the current deadline.
    pub(crate) fn set_if_earlier(&mut self, earliest: Option<Instant>) {
        if let Some(earliest) = earliest
            && self.at.is_none_or(|at| earliest < at)
        {
            self.at = Some(earliest);
            self.sleep.as_mut().reset(earliest);
        }
    }

    /// Ready when the deadline has passed and the yields are used up; call [`DeadlineTimer::rearm`] then.
    pub(crate) fn poll_fired(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.at.is_none() {
            return Poll::Pending;
        }
        if self.yields_left.is_none() && self.sleep.as_mut().poll(context).is_ready() {
            self.yields_left = Some(GRACE_YIELDS);
        }
        match self.yields_left {
            None => Poll::Pending,
            Some(0) => Poll::Ready(()),
            Some(left) => {
                self.yields_left = Some(left - 1);
                let _pending = pin!(yield_now()).poll(context);
                Poll::Pending
            }
        }
    }

    /// Sets the timer to the next deadline after it has fired.
    pub(crate) fn rearm(&mut self, next: Option<Instant>, context: &mut Context<'_>) {
        self.yields_left = None;
        self.at = next;
        if let Some(at) = next {
            self.sleep.as_mut().reset(at);
            if self.sleep.as_mut().poll(context).is_ready() {
                context.waker().wake_by_ref();
            }
        }
    }
}
