//! Calls to Redis: at most one at a time on the counters of a descriptor.
//!
//! A leader sends the first call on the counters, and a task sends the next ones for its followers (see
//! [`coalescer`](super::coalescer)). A call also charges a lease if demand requires one, and its reply updates the
//! caches of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::coalescer::{CallReply, CallResults, Coalescer, FollowerBatch, Role};
use super::eventual::CallReport;
use super::eventual::local_admission::{LeaseReply, LocalAdmission};
use super::prepared_call::PreparedCall;
use super::script::replay::ScriptOutcome;
use crate::limit::{Limit, StorePolicy};
use crate::store::charge::{ChargeBatch, ChargeContext, OwnedCounter};
use crate::store::fallback::Fallback;
use crate::store::over_limit_cache::{CallTimes, OverLimitCache};
use crate::store::remote_call::DetachOnDrop;

/// Sender of calls, with the caches that their replies update.
#[derive(Debug)]
pub(super) struct RedisCalls {
    pub(super) local_admission: LocalAdmission,
    pub(super) over_limit_cache: OverLimitCache,
    /// Counters that replace those in Redis while it is away.
    pub(super) fallback: Fallback,
    coalescer: Coalescer,
    /// Upper bound on the duration of a call.
    timeout: Duration,
    sent: AtomicU64,
}

/// Counters with a call in flight. On drop, all followers get an error, so that none waits for ever.
struct InFlightGuard {
    calls: Arc<RedisCalls>,
    id: u128,
    armed: bool,
}

impl RedisCalls {
    /// Creates the state without any call.
    pub(super) fn new(
        local_admission: LocalAdmission,
        over_limit_cache: OverLimitCache,
        fallback: Fallback,
        timeout: Duration,
    ) -> Self {
        let coalescer = Coalescer::default();
        Self { local_admission, over_limit_cache, fallback, coalescer, timeout, sent: AtomicU64::new(0) }
    }

    /// Returns the upper bound on the duration of a call.
    pub(super) const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the number of calls sent; coalesced charges share one.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Adds the charges of one request on the counters with hash `id`.
    pub(super) fn join(&self, id: u128, charges: ChargeBatch, context: ChargeContext<'_>) -> Role {
        self.coalescer.join(id, charges, context)
    }

    /// Sends the call of a leader. If its future is dropped, the call continues in a task.
    pub(super) fn lead(
        self: &Arc<Self>,
        call: PreparedCall,
        charges: ChargeBatch,
        deadline: Instant,
    ) -> DetachOnDrop<CallResults> {
        DetachOnDrop::new(lead(self.guard(&call), call, charges, deadline))
    }

    /// Sends the call of a leader in a task; no caller waits for its results.
    pub(super) fn spawn_lead(self: &Arc<Self>, call: PreparedCall, charges: ChargeBatch, deadline: Instant) {
        tokio::spawn(lead(self.guard(&call), call, charges, deadline));
    }

    fn guard(self: &Arc<Self>, call: &PreparedCall) -> InFlightGuard {
        InFlightGuard { calls: Arc::clone(self), id: call.id.counters, armed: true }
    }

    /// Sends a call for these charges, together with the charge of a lease if demand requires one.
    async fn send(&self, call: &PreparedCall, charges: &mut ChargeBatch, deadline: Instant) -> CallResults {
        let sent = Instant::now();
        let requested = charges.len();
        let lease_hits = self.local_admission.lease_size(call, sent);
        if lease_hits > 0 {
            // The last one, so that its result is the last one too.
            charges.extend(call.lease_charge(lease_hits));
        }
        if charges.is_empty() {
            return Ok(CallReply::default());
        }
        self.sent.fetch_add(1, Ordering::Relaxed);
        let mut span = call.span(charges.len());
        let leases = self.local_admission.lease_call(call, charges, lease_hits);
        let outcome = call.send(charges, leases.as_ref(), deadline, span.as_mut()).await;
        if let (Some(span), Err(error)) = (&mut span, &outcome) {
            span.fail(error.name(), error.to_string());
        }
        drop(span);
        let ScriptOutcome { mut results, states, now, region } = outcome?;
        if let (Some(hooks), Some(charge)) = (&call.global_limits, charges.last()) {
            hooks.record(call.command.keys(), charge, &states, &region);
        }
        // Nobody but the leases learns of their charge.
        charges.truncate(requested);
        let lease = if lease_hits > 0 { results.pop() } else { None };
        let lease = lease.map(|results| LeaseReply { hits: lease_hits, results });
        let times = CallTimes { sent, answered: Instant::now() };
        self.over_limit_cache.update(call.id.counters, charges, &results, times);
        let report = CallReport { sent, now, states, leased: 0 };
        self.update_fallback(call, charges, &report);
        self.local_admission.record(call, report, lease);
        Ok(CallReply { results, now })
    }

    /// Ends leases when their life is over; runs until it is dropped.
    pub(super) async fn reap_leases(&self) {
        self.local_admission.reap_leases(&self.over_limit_cache).await;
    }

    /// Ends all leases and returns their unused hits.
    pub(super) async fn return_leases(&self) {
        self.local_admission.return_leases(&self.over_limit_cache).await;
    }

    /// Copies the reported states to the fallback counters, for limits that use these while Redis is away.
    fn update_fallback(&self, call: &PreparedCall, charges: &ChargeBatch, report: &CallReport) {
        let Some(last) = charges.last() else { return };
        let uses_fallback =
            |counter: &OwnedCounter| !counter.shadow && counter.limit.on_store_error() == StorePolicy::Local;
        if last.counters.iter().any(uses_fallback) {
            let counters: SmallVec<[(Limit, u128); 1]> =
                last.counters.iter().map(|counter| (counter.limit, counter.tag)).collect();
            self.fallback.remember(call.id.path, &counters, &report.states, call.now);
        }
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
#[expect(
    clippy::manual_async_fn,
    reason = "the future of an `async fn` would hold its arguments twice: as passed, and as moved into its body"
)]
fn lead(
    mut guard: InFlightGuard,
    call: PreparedCall,
    mut charges: ChargeBatch,
    deadline: Instant,
) -> impl Future<Output = CallResults> {
    async move {
        let results = guard.calls.send(&call, &mut charges, deadline).await;
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
        batch.answer_locally(|charge| guard.calls.local_admission.admit_waiting(&call, charge));
        let mut charges = std::mem::take(&mut batch.charges);
        let results = match charges.is_empty() {
            true => Ok(CallReply::default()),
            false => batch.wait_for(guard.calls.send(&call, &mut charges, deadline)).await,
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
