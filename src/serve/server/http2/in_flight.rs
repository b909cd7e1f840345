//! Requests in flight on one connection, polled inside the connection's task.
//!
//! HTTP servers usually spawn a task per request. A decision waits for at most one thing, and its wake-up is followed
//! by work of the connection, which has to send the response. Polling requests in the connection's task saves a task
//! and a wake-up per request, and all responses that one read of the connection or of Redis produces share one write.
//!
//! To stay fair to other connections, each request consumes one unit of tokio's cooperative budget, and a long one
//! more. When the budget is used up, the connection yields.
//!
//! A request whose client resets its stream is dropped in `http2`, `run_until_reset`.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::task::coop::consume_budget;

use crate::base::threads;

/// Requests that were started and have no response yet.
#[derive(Debug)]
pub struct InFlightRequests<F> {
    pending: FuturesUnordered<Pin<Box<F>>>,
    /// Polls each request once before it is stored: the store is immediate, and most requests complete at this poll.
    poll_eagerly: bool,
}

impl<F: Future<Output = ()>> InFlightRequests<F> {
    /// An empty set. `poll_eagerly` pays off if most requests complete at their first poll.
    pub fn new(poll_eagerly: bool) -> Self {
        Self { pending: FuturesUnordered::new(), poll_eagerly }
    }

    /// Consumes a unit of tokio's budget of the task; ready if another request may start now.
    pub fn poll_task_budget(&self, context: &mut Context<'_>) -> Poll<()> {
        pin!(consume_budget()).poll(context)
    }

    /// Starts a request.
    pub fn start_request(&mut self, request: F) {
        let mut request = Box::pin(request);
        // No wake-up is needed: a pending request is polled again by `poll_pending`.
        let mut no_waker = Context::from_waker(Waker::noop());
        if !self.poll_eagerly || request.as_mut().poll(&mut no_waker).is_pending() {
            self.pending.push(request);
        }
    }

    /// Polls the pending requests while the budget lasts; returns true if any completed.
    pub fn poll_pending(&mut self, context: &mut Context<'_>) -> bool {
        let mut has_completed = false;
        while threads::has_task_budget()
            && let Poll::Ready(Some(())) = self.pending.poll_next_unpin(context)
        {
            has_completed = true;
        }
        has_completed
    }
}
