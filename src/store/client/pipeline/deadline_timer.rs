//! Timer of the earliest deadline of a connection's commands.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::{Sleep, sleep_until};

use crate::store::client::deadline::GRACE_YIELDS;

/// Time until an unarmed timer fires.
const UNARMED: Duration = Duration::from_secs(3600);

/// Timer that fires once after a deadline and [`GRACE_YIELDS`] yields to other tasks.
pub(super) struct DeadlineTimer {
    sleep: Pin<Box<Sleep>>,
    /// Deadline that the timer is set to; `None` if it is unarmed.
    at: Option<Instant>,
    /// Yields left before the timer fires; `None` before the deadline.
    yields_left: Option<usize>,
}

impl DeadlineTimer {
    /// Creates an unarmed timer.
    pub(super) fn new() -> Self {
        Self { sleep: Box::pin(sleep_until((Instant::now() + UNARMED).into())), at: None, yields_left: None }
    }

    /// Moves the timer forward to `earliest`, if that is before the current deadline.
    pub(super) fn advance(&mut self, earliest: Option<Instant>) {
        if let Some(earliest) = earliest
            && self.at.is_none_or(|at| earliest < at)
        {
            self.at = Some(earliest);
            self.sleep.as_mut().reset(earliest.into());
        }
    }

    /// Ready when the deadline has passed and the yields are used up; call [`DeadlineTimer::rearm`] then.
    pub(super) fn poll_fired(&mut self, context: &mut Context<'_>) -> Poll<()> {
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
                let _pending = pin!(tokio::task::yield_now()).poll(context);
                Poll::Pending
            }
        }
    }

    /// Sets the timer to the next deadline after it has fired.
    pub(super) fn rearm(&mut self, next: Option<Instant>, context: &mut Context<'_>) {
        self.yields_left = None;
        self.at = next;
        if let Some(at) = next {
            self.sleep.as_mut().reset(at.into());
            if self.sleep.as_mut().poll(context).is_ready() {
                context.waker().wake_by_ref();
            }
        }
    }
}
