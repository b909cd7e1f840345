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
pub(super) struct InFlightRequests<F> {
    pending: FuturesUnordered<Pin<Box<F>>>,
    /// Polls each request once before it is stored: the store is immediate, and most requests complete at this poll.
    poll_eagerly: bool,
}

impl<F: Future<Output = ()>> InFlightRequests<F> {
    /// An empty set. `poll_eagerly` pays off if most requests complete at their first poll.
    pub(super) fn new(poll_eagerly: bool) -> Self {
        Self { pending: FuturesUnordered::new(), poll_eagerly }
    }

    /// Consumes a unit of tokio's budget of the task; ready if another request may start now.
    pub(super) fn poll_task_budget(&self, context: &mut Context<'_>) -> Poll<()> {
        pin!(consume_budget()).poll(context)
    }

    /// Starts a request.
    pub(super) fn start_request(&mut self, request: F) {
        let mut request = Box::pin(request);
        // No wake-up is needed: a pending request is polled again by `poll_pending`.
        let mut no_waker = Context::from_waker(Waker::noop());
        if !self.poll_eagerly || request.as_mut().poll(&mut no_waker).is_pending() {
            self.pending.push(request);
        }
    }

    /// Polls the pending requests while the budget lasts; returns true if any completed.
    pub(super) fn poll_pending(&mut self, context: &mut Context<'_>) -> bool {
        let mut has_completed = false;
        while threads::has_task_budget()
            && let Poll::Ready(Some(())) = self.pending.poll_next_unpin(context)
        {
            has_completed = true;
        }
        has_completed
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn eager_request_completes_at_start() {
        for poll_eagerly in [true, false] {
            let done = Cell::new(false);
            let mut requests = InFlightRequests::new(poll_eagerly);
            requests.start_request(async { done.set(true) });
            assert_eq!(done.get(), poll_eagerly);
            let has_completed = poll_fn(|context| Poll::Ready(requests.poll_pending(context))).await;
            assert_eq!((done.get(), has_completed), (true, !poll_eagerly));
        }
    }

    #[tokio::test]
    async fn pending_request_completes_after_wake_up() {
        for poll_eagerly in [true, false] {
            let (sender, receiver) = oneshot::channel();
            let mut requests = InFlightRequests::new(poll_eagerly);
            requests.start_request(async { receiver.await.expect("the sender sends") });
            let mut completed =
                pin!(poll_fn(|context| if requests.poll_pending(context) { Poll::Ready(()) } else { Poll::Pending }));
            assert!(futures_util::poll!(completed.as_mut()).is_pending());
            sender.send(()).expect("the request waits");
            completed.await;
        }
    }

    #[tokio::test]
    async fn busy_connection_yields_to_other_tasks() {
        // Only tasks have a budget.
        let connection = tokio::spawn(async {
            let mut requests = InFlightRequests::new(true);
            let started = poll_fn(|context| {
                let mut started = 0_u32;
                while requests.poll_task_budget(context).is_ready() {
                    requests.start_request(async {});
                    started += 1;
                }
                Poll::Ready(started)
            });
            let started = started.await;
            // The task is woken again with a new budget.
            poll_fn(|context| requests.poll_task_budget(context)).await;
            started
        });
        let started = connection.await.expect("the task completes");
        assert!((1..1000).contains(&started), "{started} requests without a yield");
    }

    #[tokio::test]
    async fn long_request_makes_its_connection_yield() {
        let connection = tokio::spawn(async {
            let mut requests = InFlightRequests::new(false);
            for _ in 0..3 {
                requests.start_request(async { threads::consume_task_budget(1000) });
            }
            poll_fn(|context| {
                let has_completed = requests.poll_pending(context);
                Poll::Ready((has_completed, requests.pending.len()))
            })
            .await
        });
        assert_eq!(connection.await.expect("the task completes"), (true, 2));
    }
}
