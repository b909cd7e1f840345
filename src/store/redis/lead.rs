//! Calls for busy counters: whoever finds one idle leads, and what comes meanwhile follows.
//!
//! A call belongs to its connection and not to who waits for it: given up, it goes on by itself. However it ends, who
//! waits for the counter hears of it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::coalescer::{Batch, ChargeBatch};
use super::prepared_call::PreparedCall;
use super::{Answer, Shared};
use crate::redis::deadline::timeout_with_grace;
use crate::redis::error::RedisError;
use crate::store::outcome::{ChargeResults, StoreOutcome};

/// Charges that were sent or wait to be.
pub(super) struct Pending {
    pub(super) way: PendingKind,
    /// When to stop waiting; `None`: the call sees to that itself.
    pub(super) until: Option<Instant>,
}

pub(super) enum PendingKind {
    /// So many charges, all of which are known to find this.
    Known(usize, StoreOutcome),
    /// So many charges went out, by a call that this request leads.
    Led(usize, DetachOnDrop),
    /// They wait for their turn.
    Waits(SmallVec<[oneshot::Receiver<Answer>; 1]>),
}

/// A counter whose call is in flight. However that ends, whoever waits for it must not wait for ever.
pub(super) struct InFlightGuard {
    shared: Arc<Shared>,
    id: u128,
    armed: bool,
}

impl InFlightGuard {
    /// That counter's.
    pub(super) const fn new(shared: Arc<Shared>, id: u128) -> Self {
        Self { shared, id, armed: true }
    }

    /// What waits; once nothing does, the counter is idle and no longer this one's affair.
    fn next(&mut self) -> Option<Batch> {
        let next = self.shared.coalescer.next(self.id);
        self.armed = next.is_some();
        next
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        // A call that was torn down: all who wait hear that it broke.
        while self.armed && self.next().is_some() {}
    }
}

/// Makes a leader's call; what has come to wait meanwhile is another call then.
pub(super) async fn lead(
    mut busy: InFlightGuard,
    place: PreparedCall,
    mut commands: ChargeBatch,
    deadline: Instant,
) -> Result<Vec<ChargeResults>, RedisError> {
    let outcome = busy.shared.call(&place, &mut commands, deadline).await;
    if let Some(batch) = busy.next() {
        tokio::spawn(follow(busy, place, batch));
    }
    outcome
}

/// Makes calls for what waits until nothing does.
async fn follow(mut busy: InFlightGuard, mut place: PreparedCall, mut batch: Batch) {
    loop {
        let deadline = Instant::now() + busy.shared.timeout;
        // A counter may be busy for so long that the first charge's time is no longer anybody's.
        place.now = batch.now;
        place.span_refs = std::mem::take(&mut batch.span_refs);
        batch.answer_some(|command| busy.shared.admit_again(&place, command));
        let mut commands = std::mem::take(&mut batch.commands);
        let outcome = match commands.is_empty() {
            true => Ok(Vec::new()),
            false => batch.wait_for(busy.shared.call(&place, &mut commands, deadline)).await,
        };
        // Taken before anybody is answered: whoever comes back for more then finds an idle counter idle.
        let next = busy.next();
        batch.answer(outcome);
        match next {
            Some(next) => batch = next,
            None => break,
        }
    }
}

type Call = Pin<Box<dyn Future<Output = Result<Vec<ChargeResults>, RedisError>> + Send>>;

/// A call that a request leads. Given up, it goes on by itself: it belongs to the connection.
pub(super) struct DetachOnDrop {
    call: Option<Call>,
}

impl DetachOnDrop {
    /// That call.
    pub(super) fn of(call: impl Future<Output = Result<Vec<ChargeResults>, RedisError>> + Send + 'static) -> Self {
        Self { call: Some(Box::pin(call)) }
    }
}

impl Future for DetachOnDrop {
    type Output = Result<Vec<ChargeResults>, RedisError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let call = self.call.as_mut().expect("nobody asks again for what was answered");
        let outcome = ready!(call.as_mut().poll(context));
        self.call = None;
        Poll::Ready(outcome)
    }
}

impl Drop for DetachOnDrop {
    fn drop(&mut self) {
        if let (Some(call), Ok(runtime)) = (self.call.take(), Handle::try_current()) {
            runtime.spawn(call);
        }
    }
}

impl Pending {
    /// The answers, in the order of the charges; those that have not come in time are errors.
    pub(super) async fn answers(self) -> SmallVec<[Answer; 1]> {
        match self.way {
            PendingKind::Known(count, found) => (0..count).map(|_| Ok(found.clone())).collect(),
            PendingKind::Led(count, lead) => match within(lead, self.until).await.unwrap_or(Err(RedisError::Timeout)) {
                Ok(levels) => levels.into_iter().map(|levels| Ok(StoreOutcome::by_store(levels))).collect(),
                Err(error) => (0..count).map(|_| Err(error)).collect(),
            },
            PendingKind::Waits(receivers) => {
                let mut answers = SmallVec::with_capacity(receivers.len());
                for receiver in receivers {
                    answers.push(match within(receiver, self.until).await {
                        Some(Ok(answer)) => answer,
                        Some(Err(_torn)) => Err(RedisError::Broken),
                        None => Err(RedisError::Timeout),
                    });
                }
                answers
            }
        }
    }
}

async fn within<F: Future>(work: F, until: Option<Instant>) -> Option<F::Output> {
    match until {
        Some(until) => timeout_with_grace(work, until).await,
        None => Some(work.await),
    }
}
