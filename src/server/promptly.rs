//! Requests are begun in the task of their connection.
//!
//! Servers make each request a task. Most of ours are done as soon as they are looked at: the message has come with the
//! head, and a decision by memory waits for nothing. So each is polled once right here, and only what has to wait
//! becomes a task. That saves a task and a wake-up for each decision, and what one reading of a connection brought is
//! answered with one writing.
//!
//! It must not keep others waiting, though: each costs the connection one of the steps that the runtime lets a task
//! take in a row. When they are used up the rest become tasks, and the connection has its next turn after others.

use std::pin::pin;
use std::task::{Context, Waker};

use tokio::task::coop::consume_budget;

/// Polls once, and then spawns what is not done.
pub(super) fn promptly(work: impl Future<Output = ()> + Send + 'static) {
    let mut work = Box::pin(work);
    // Nobody is to be woken for this look: a task looks again as soon as it is spawned.
    let mut unwatched = Context::from_waker(Waker::noop());
    let may_run = pin!(consume_budget()).poll(&mut unwatched).is_ready();
    if !may_run || work.as_mut().poll(&mut unwatched).is_pending() {
        tokio::spawn(work);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_waits_for_nothing_is_done_at_once() {
        let done = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&done);
        promptly(async move {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn what_waits_goes_on_when_it_is_woken() {
        let ((go, gone), (tell, told)) = (oneshot::channel(), oneshot::channel());
        promptly(async move {
            gone.await.expect("it is told to go");
            tell.send(()).expect("somebody listens");
        });
        go.send(()).expect("it waits");
        told.await.expect("it went on");
    }

    #[tokio::test]
    async fn a_connection_that_brings_ever_more_gives_way_to_others() {
        const BROUGHT: usize = 10_000;
        let done = Arc::new(AtomicUsize::new(0));
        // In a task, since only tasks have steps.
        let connection = tokio::spawn({
            let done = Arc::clone(&done);
            async move {
                for _ in 0..BROUGHT {
                    let done = Arc::clone(&done);
                    promptly(async move {
                        done.fetch_add(1, Ordering::Relaxed);
                    });
                }
                let at_once = done.load(Ordering::Relaxed);
                (at_once, tokio::task::coop::has_budget_remaining())
            }
        });
        let (at_once, may_go_on) = connection.await.expect("it ends");
        assert!((1..BROUGHT / 10).contains(&at_once) && !may_go_on, "{at_once} at once");
        while done.load(Ordering::Relaxed) < BROUGHT {
            tokio::task::yield_now().await;
        }
    }
}
