//! Requests are begun in the task of their connection.
//!
//! HTTP/2 gives each request to an executor. Most of ours are done as soon as they are looked at: the message has come
//! with the head, and a decision by memory waits for nothing. So each is polled once right here, and only what has to
//! wait becomes a task. That saves a task and a wake-up for each decision, and what one reading of a connection brought
//! is answered with one writing.

use std::task::{Context, Waker};

use hyper::rt::Executor;

/// Polls once, and then spawns what is not done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promptly;

impl<F> Executor<F> for Promptly
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let mut future = Box::pin(future);
        // Nobody is to be woken for this look: a task looks again as soon as it is spawned.
        if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            tokio::spawn(future);
        }
    }
}
