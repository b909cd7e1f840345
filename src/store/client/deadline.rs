//! Timeout that checks the work once more after the deadline has passed.

use std::future::Future;
use std::pin::pin;
use std::time::Instant;

use tokio::task::yield_now;
use tokio::time::sleep_until;

/// Number of times the task yields to others after a deadline before the work is given up.
///
/// A process that was not scheduled for a while finds the expired timer and the received reply at the same moment;
/// yielding lets the reply be processed first.
pub(crate) const GRACE_YIELDS: usize = 3;

/// Waits for `work` until `deadline`, then yields [`GRACE_YIELDS`] times; `None` if `work` is still not complete.
pub(crate) async fn timeout_with_grace<F: Future>(work: F, deadline: Instant) -> Option<F::Output> {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        outcome = &mut work => return Some(outcome),
        () = sleep_until(deadline.into()) => {}
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
