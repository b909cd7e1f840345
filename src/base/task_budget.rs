//! Accounts for long work, so that a task yields to others.
//!
//! tokio gives a task a budget for each of its polls, and every operation of tokio consumes one unit. A task that does
//! much work per operation consumes more units here; its next operation of tokio yields once none is left.

use std::task::{Context, Poll, Waker};

use tokio::task::coop::{has_budget_remaining, poll_proceed};

/// Units that exceed the whole budget of a poll.
pub const ALL_UNITS: usize = 256;

/// Consumes up to `units` of the running task's budget. Outside a task it does nothing.
pub fn consume(units: usize) {
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..units.min(ALL_UNITS) {
        match poll_proceed(&mut context) {
            Poll::Ready(unit) => unit.made_progress(),
            Poll::Pending => return,
        }
    }
}

/// True if the running task need not yield yet.
pub fn has_remaining() -> bool {
    has_budget_remaining()
}
