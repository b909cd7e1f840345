//! InFlightRequests of one connection, answered in its task.
//!
//! Servers make each request a task. Ours wait for one thing at most, and what wakes them is followed by work of their
//! connection, which has to send the answer. So they stay with it: no task and no second wake-up for each, and what one
//! reading of a connection brought, or one reading of Redis, is answered with one writing.
//!
//! A connection must not keep others waiting, though: each request costs it one of the steps that the runtime lets a
//! task take in a row. When they are used up, its next turn comes after others.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::task::coop::consume_budget;

/// Those that were begun and are not answered yet.
#[derive(Debug)]
pub(super) struct InFlightRequests<F> {
    waiting: FuturesUnordered<Pin<Box<F>>>,
    /// Whether hardly any has to wait.
    poll_eagerly: bool,
}

impl<F: Future<Output = ()>> InFlightRequests<F> {
    /// None yet. Where hardly any has to wait (`poll_eagerly`), each is looked at before it is put with those that do.
    pub(super) fn new(poll_eagerly: bool) -> Self {
        Self { waiting: FuturesUnordered::new(), poll_eagerly }
    }

    /// Ready if one may be begun now.
    pub(super) fn poll_budget(&self, context: &mut Context<'_>) -> Poll<()> {
        pin!(consume_budget()).poll(context)
    }

    /// Begins one.
    pub(super) fn begin(&mut self, request: F) {
        let mut request = Box::pin(request);
        // Nobody is to be woken for this look: what waits is looked at again.
        let mut unwatched = Context::from_waker(Waker::noop());
        if !self.poll_eagerly || request.as_mut().poll(&mut unwatched).is_pending() {
            self.waiting.push(request);
        }
    }

    /// Goes on with those that wait; whether any was answered.
    pub(super) fn poll_pending(&mut self, context: &mut Context<'_>) -> bool {
        let mut is_any_answered = false;
        while let Poll::Ready(Some(())) = self.waiting.poll_next_unpin(context) {
            is_any_answered = true;
        }
        is_any_answered
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_waits_for_nothing_is_done_at_once_if_that_is_usual() {
        for poll_eagerly in [true, false] {
            let done = Cell::new(false);
            let mut requests = InFlightRequests::new(poll_eagerly);
            requests.begin(async { done.set(true) });
            assert_eq!(done.get(), poll_eagerly);
            let answered = poll_fn(|context| Poll::Ready(requests.poll_pending(context))).await;
            assert_eq!((done.get(), answered), (true, !poll_eagerly));
        }
    }

    #[tokio::test]
    async fn what_waits_goes_on_when_it_is_woken() {
        for poll_eagerly in [true, false] {
            let (go, gone) = oneshot::channel();
            let mut requests = InFlightRequests::new(poll_eagerly);
            requests.begin(async { gone.await.expect("it is told to go") });
            let mut look =
                pin!(poll_fn(|context| if requests.poll_pending(context) { Poll::Ready(()) } else { Poll::Pending }));
            assert!(futures_util::poll!(look.as_mut()).is_pending());
            go.send(()).expect("it waits");
            look.await;
        }
    }

    #[tokio::test]
    async fn a_connection_that_brings_ever_more_gives_way_to_others() {
        // In a task, since only tasks have steps.
        let connection = tokio::spawn(async {
            let mut requests = InFlightRequests::new(true);
            let begun = poll_fn(|context| {
                let mut begun = 0_u32;
                while requests.poll_budget(context).is_ready() {
                    requests.begin(async {});
                    begun += 1;
                }
                Poll::Ready(begun)
            });
            let begun = begun.await;
            // It is woken for its next turn.
            poll_fn(|context| requests.poll_budget(context)).await;
            begun
        });
        let begun = connection.await.expect("it has a next turn");
        assert!((1..1000).contains(&begun), "{begun} in a row");
    }
}
