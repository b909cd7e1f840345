//! Calls in flight: a leader sends the first call on a counter, and a task sends the next ones for its followers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call_runner::CallRunner;
use super::coalescer::{CallReply, CallResults, Coalescer, FollowerBatch, Role};
use super::prepared_call::PreparedCall;
use crate::store::charge_context::ChargeContext;
use crate::store::command::ChargeBatch;
use crate::store::detach_on_drop::DetachOnDrop;

/// Coalescer, and the runner of its calls.
#[derive(Debug)]
pub(super) struct InFlightCalls {
    pub(super) runner: CallRunner,
    coalescer: Coalescer,
    /// Upper bound on the duration of a call.
    timeout: Duration,
}

/// Counter with a call in flight. On drop, all followers get an error, so that none waits for ever.
struct InFlightGuard {
    calls: Arc<InFlightCalls>,
    id: u128,
    armed: bool,
}

impl InFlightCalls {
    /// Creates the state without any call.
    pub(super) fn new(runner: CallRunner, timeout: Duration) -> Self {
        Self { runner, coalescer: Coalescer::default(), timeout }
    }

    /// Returns the upper bound on the duration of a call.
    pub(super) const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Adds the charges of one request on the counters with hash `id`.
    pub(super) fn join(&self, id: u128, commands: ChargeBatch, context: ChargeContext<'_>) -> Role {
        self.coalescer.join(id, commands, context)
    }

    /// Sends the call of a leader. If its future is dropped, the call continues in a task.
    pub(super) fn lead(
        self: &Arc<Self>,
        call: PreparedCall,
        commands: ChargeBatch,
        deadline: Instant,
    ) -> DetachOnDrop<CallResults> {
        DetachOnDrop::new(lead(self.guard(&call), call, commands, deadline))
    }

    /// Sends the call of a leader in a task; no caller waits for its results.
    pub(super) fn spawn_lead(self: &Arc<Self>, call: PreparedCall, commands: ChargeBatch, deadline: Instant) {
        tokio::spawn(lead(self.guard(&call), call, commands, deadline));
    }

    fn guard(self: &Arc<Self>, call: &PreparedCall) -> InFlightGuard {
        InFlightGuard { calls: Arc::clone(self), id: call.id.counters, armed: true }
    }
}

impl InFlightGuard {
    /// Takes the followers; once there are none, the counter has no call in flight.
    fn next_batch(&mut self) -> Option<FollowerBatch> {
        let batch = self.calls.coalescer.next_batch(self.id);
        self.armed = batch.is_some();
        batch
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        // The call was aborted. Dropping a batch fails its charges.
        while self.armed && self.next_batch().is_some() {}
    }
}

/// Sends the leader's call, and leaves its followers to a task.
#[expect(clippy::manual_async_fn, reason = "an async function has room for its arguments twice")]
fn lead(
    mut guard: InFlightGuard,
    call: PreparedCall,
    mut commands: ChargeBatch,
    deadline: Instant,
) -> impl Future<Output = CallResults> {
    async move {
        let results = guard.calls.runner.run(&call, &mut commands, deadline).await;
        if let Some(batch) = guard.next_batch() {
            tokio::spawn(follow(guard, call, batch));
        }
        results
    }
}

/// Sends calls until there are no followers left.
async fn follow(mut guard: InFlightGuard, mut call: PreparedCall, mut batch: FollowerBatch) {
    loop {
        let deadline = Instant::now() + guard.calls.timeout;
        // A counter can be busy for long; the time of the leader is outdated.
        call.now = batch.now;
        call.span_refs = std::mem::take(&mut batch.span_refs);
        batch.answer_locally(|command| guard.calls.runner.local_admission.admit_waiting(&call, command));
        let mut commands = std::mem::take(&mut batch.commands);
        let results = match commands.is_empty() {
            true => Ok(CallReply::default()),
            false => batch.wait_for(guard.calls.runner.run(&call, &mut commands, deadline)).await,
        };
        // Take the next batch before answering: a caller that returns at once then finds no call in flight.
        let next = guard.next_batch();
        batch.answer(results);
        match next {
            Some(next) => batch = next,
            None => break,
        }
    }
}
