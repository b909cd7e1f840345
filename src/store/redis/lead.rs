//! Who makes the calls for a busy counter: first the request that found it idle, then a task of its own.
//!
//! A counter is busy from its first call until nothing waits for it. However a call ends, torn down or given up by who
//! asked, what waits behind it is called for or told. What waits, and in which order, is the combiner's affair.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::runtime::Handle;

use super::call::Place;
use super::combine::{Batch, Drawings};
use super::failure::RedisError;
use super::{Levels, Shared};

/// A counter whose call is in flight. However that ends, whoever waits for it must not wait for ever.
pub(super) struct Busy {
    pub(super) shared: Arc<Shared>,
    pub(super) id: u128,
    pub(super) armed: bool,
}

impl Busy {
    /// What waits; once nothing does, the counter is idle and no longer this one's affair.
    fn next(&mut self) -> Option<Batch> {
        let next = self.shared.combiner.next(self.id);
        self.armed = next.is_some();
        next
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // A call that was torn down: all who wait hear that it broke.
        while self.armed && self.next().is_some() {}
    }
}

/// Makes a leader's call; what has come to wait meanwhile is another call then.
pub(super) async fn lead(
    mut busy: Busy,
    place: Place,
    drawings: Drawings,
    deadline: Instant,
) -> Result<Vec<Levels>, RedisError> {
    let outcome = busy.shared.call(busy.id, &place, &drawings, deadline).await;
    if let Some(batch) = busy.next() {
        tokio::spawn(follow(busy, place, batch));
    }
    outcome
}

/// Makes calls for what waits until nothing does.
async fn follow(mut busy: Busy, mut place: Place, mut batch: Batch) {
    loop {
        let deadline = Instant::now() + busy.shared.timeout;
        // A counter may be busy for so long that the first draw's time is no longer anybody's.
        place.now = batch.now;
        let drawings = std::mem::take(&mut batch.drawings);
        let outcome = batch.wait_for(busy.shared.call(busy.id, &place, &drawings, deadline)).await;
        // Taken before anybody is answered: whoever comes back for more then finds an idle counter idle.
        let next = busy.next();
        batch.answer(outcome);
        match next {
            Some(next) => batch = next,
            None => break,
        }
    }
}

type Call = Pin<Box<dyn Future<Output = Result<Vec<Levels>, RedisError>> + Send>>;

/// A call that a request leads. Given up, it goes on by itself: it belongs to the connection.
pub(super) struct Lead {
    call: Option<Call>,
}

impl Lead {
    pub(super) fn new(call: impl Future<Output = Result<Vec<Levels>, RedisError>> + Send + 'static) -> Self {
        Self { call: Some(Box::pin(call)) }
    }
}

impl Future for Lead {
    type Output = Result<Vec<Levels>, RedisError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let call = self.call.as_mut().expect("nobody asks again for what was answered");
        let outcome = ready!(call.as_mut().poll(context));
        self.call = None;
        Poll::Ready(outcome)
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if let (Some(call), Ok(runtime)) = (self.call.take(), Handle::try_current()) {
            runtime.spawn(call);
        }
    }
}
