//! Requests of one connection, answered in its task.
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
pub(super) struct Requests<F> {
    waiting: FuturesUnordered<Pin<Box<F>>>,
    /// Whether hardly any has to wait.
    are_prompt: bool,
}

impl<F: Future<Output = ()>> Requests<F> {
    /// None yet. Where hardly any has to wait (`are_prompt`), each is looked at before it is put with those that do.
    pub(super) fn new(are_prompt: bool) -> Self {
        Self { waiting: FuturesUnordered::new(), are_prompt }
    }

    /// Ready if one may be begun now.
    pub(super) fn poll_turn(&self, context: &mut Context<'_>) -> Poll<()> {
        pin!(consume_budget()).poll(context)
    }

    /// Begins one.
    pub(super) fn begin(&mut self, request: F) {
        let mut request = Box::pin(request);
        // Nobody is to be woken for this look: what waits is looked at again.
        let mut unwatched = Context::from_waker(Waker::noop());
        if !self.are_prompt || request.as_mut().poll(&mut unwatched).is_pending() {
            self.waiting.push(request);
        }
    }

    /// Goes on with those that wait; whether any was answered.
    pub(super) fn go_on(&mut self, context: &mut Context<'_>) -> bool {
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
        for are_prompt in [true, false] {
            let done = Cell::new(false);
            let mut requests = Requests::new(are_prompt);
            requests.begin(async { done.set(true) });
            assert_eq!(done.get(), are_prompt);
            let answered = poll_fn(|context| Poll::Ready(requests.go_on(context))).await;
            assert_eq!((done.get(), answered), (true, !are_prompt));
        }
    }

    #[tokio::test]
    async fn what_waits_goes_on_when_it_is_woken() {
        for are_prompt in [true, false] {
            let (go, gone) = oneshot::channel();
            let mut requests = Requests::new(are_prompt);
            requests.begin(async { gone.await.expect("it is told to go") });
            let mut look =
                pin!(poll_fn(|context| if requests.go_on(context) { Poll::Ready(()) } else { Poll::Pending }));
            assert!(futures_util::poll!(look.as_mut()).is_pending());
            go.send(()).expect("it waits");
            look.await;
        }
    }

    #[tokio::test]
    async fn a_connection_that_brings_ever_more_gives_way_to_others() {
        // In a task, since only tasks have steps.
        let connection = tokio::spawn(async {
            let mut requests = Requests::new(true);
            let begun = poll_fn(|context| {
                let mut begun = 0_u32;
                while requests.poll_turn(context).is_ready() {
                    requests.begin(async {});
                    begun += 1;
                }
                Poll::Ready(begun)
            });
            let begun = begun.await;
            // It is woken for its next turn.
            poll_fn(|context| requests.poll_turn(context)).await;
            begun
        });
        let begun = connection.await.expect("it has a next turn");
        assert!((1..1000).contains(&begun), "{begun} in a row");
    }
}
