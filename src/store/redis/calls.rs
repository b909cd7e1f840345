//! Calls to Redis: at most one at a time on the counters of a descriptor.
//!
//! A counter is in the table only while a call on it is in flight. The charge that finds no call becomes the leader and
//! sends one at once; later ones are followers and leave their charge and a channel for the outcome. When the call
//! ends, a task takes all followers as one batch and sends the next call, in order of arrival, without those whose
//! caller has given up. Charges of one request on one counter stay in one batch. A batch has at most
//! [`MAX_CHARGES_PER_CALL`] charges, so a caller waits for two round trips at most, unless more charges wait. No lock is
//! held across an await.
//!
//! A request waits for all its charges at once ([`PendingChargeGroups`]). A call also charges a lease if demand
//! requires one, and its reply updates the caches of this process.
//!
//! Decides: which requests share one call on a counter, and how many wait.
//! Decides: that a call goes on when its caller gives up; that held counters are not cached.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::task::coop::has_budget_remaining;
use tokio::time::Instant;

use super::eventual::DescriptorStateReport;
use super::eventual::local_admission::{LeaseReply, LocalAdmission};
use super::prepared_call::PreparedCall;
use super::script::ScriptOutcome;
use crate::base::clock::{Clock, Time};
use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, upper_half};
use crate::base::write_coalescing::run_deferring_wakes;
use crate::limit::request::Hits;
use crate::limit::{Limit, StoreFailurePolicy};
use crate::store::charge::{
    ChargeBatch, ChargeContext, ChargeResults, DetachOnDrop, MAX_CHARGES_PER_CALL, OwnedCharge, OwnedCounter,
    StoreOutcome,
};
use crate::store::client::deadline::timeout_with_grace;
use crate::store::client::redis::error::RedisError;
use crate::store::fallback::Fallback;
use crate::store::over_limit_cache::{CallTimes, OverLimitCache};
use crate::telemetry::traces::{MAX_LINKS, SpanRef};

/// Sender of calls, with the caches that their replies update.
#[derive(Debug)]
pub(super) struct RedisCallSender {
    pub(super) local_admission: LocalAdmission,
    pub(super) over_limit_cache: OverLimitCache,
    /// Counters that replace those in Redis while it is away.
    pub(super) fallback: Fallback,
    coalescer: Coalescer,
    /// Wall clock of this process.
    pub(super) clock: Clock,
    /// Upper bound on the duration of a call.
    timeout: Duration,
    sent: AtomicU64,
}

/// Counters with a call in flight. On drop, all followers get an error, so that none waits for ever.
struct InFlightGuard {
    calls: Arc<RedisCallSender>,
    id: u128,
    armed: bool,
}

impl RedisCallSender {
    /// Creates a sender without calls in flight.
    pub(super) fn new(
        local_admission: LocalAdmission,
        over_limit_cache: OverLimitCache,
        fallback: Fallback,
        clock: Clock,
        timeout: Duration,
    ) -> Self {
        let coalescer = Coalescer::default();
        Self { local_admission, over_limit_cache, fallback, coalescer, clock, timeout, sent: AtomicU64::new(0) }
    }

    /// Returns the upper bound on the duration of a call.
    pub(super) const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the number of calls sent; coalesced charges share one.
    pub(super) fn calls_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Counts a call that is sent past the table of calls in flight.
    pub(super) fn count_sent_call(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds the charges of one request on the counters with hash `id`.
    pub(super) fn join_or_lead(&self, id: u128, charges: ChargeBatch, context: ChargeContext<'_>) -> CallRole {
        self.coalescer.join_or_lead(id, charges, context)
    }

    /// Sends the call of a leader. If its future is dropped, the call continues in a task.
    pub(super) fn lead_call(
        self: &Arc<Self>,
        call: PreparedCall,
        charges: ChargeBatch,
        deadline: Instant,
    ) -> DetachOnDrop<CallOutcome> {
        DetachOnDrop::new(send_leader_call(self.guard_in_flight(&call), call, charges, deadline))
    }

    /// Sends the call of a leader in a task; no caller waits for its results.
    pub(super) fn spawn_call(self: &Arc<Self>, call: PreparedCall, charges: ChargeBatch, deadline: Instant) {
        tokio::spawn(send_leader_call(self.guard_in_flight(&call), call, charges, deadline));
    }

    fn guard_in_flight(self: &Arc<Self>, call: &PreparedCall) -> InFlightGuard {
        InFlightGuard { calls: Arc::clone(self), id: call.id.counters, armed: true }
    }

    /// Sends a call for these charges, together with the charge of a lease if demand requires one.
    async fn send_call(&self, call: &PreparedCall, charges: &mut ChargeBatch, deadline: Instant) -> CallOutcome {
        let sent = Instant::now();
        let requested = charges.len();
        // Leases do not concern a call that only charges strict counters.
        let is_refund = |charge: &OwnedCharge| charge.slot.is_none() && matches!(charge.request.hits, Hits::Refund(_));
        let has_refund = charges.iter().any(is_refund);
        let local_admission = (call.eventual.is_some() || has_refund).then_some(&self.local_admission);
        let lease_hits = local_admission.map_or(0, |local| local.hits_to_lease(call, sent));
        if lease_hits > 0 {
            // The last one, so that its result is the last one too.
            charges.extend(call.build_lease_charge(lease_hits));
        }
        if charges.is_empty() {
            return Ok(CallResults::default());
        }
        self.sent.fetch_add(1, Ordering::Relaxed);
        let mut span = call.start_span(charges.len());
        let leases = local_admission.and_then(|local| local.build_lease_arguments(call, charges, lease_hits));
        let outcome = call.send_charges(charges, leases.as_ref(), deadline, span.as_mut()).await;
        if let (Some(span), Err(error)) = (&mut span, &outcome) {
            span.set_error(error.name(), error.to_string());
        }
        drop(span);
        let (ScriptOutcome { mut results, mut states, now, pools, holds }, node) = outcome?;
        if let (Some(region), Some(charge)) = (&call.region, charges.last()) {
            region.record_effects(call.command.keys(), charge, &states, &pools);
        }
        // Nobody but the leases learns of their charge.
        charges.truncate(requested);
        let lease = if lease_hits > 0 { results.pop() } else { None };
        let lease = lease.map(|results| LeaseReply { hits: lease_hits, results });
        let times = CallTimes { sent, answered: Instant::now() };
        node.record_answer(sent, times.answered);
        // What a holder gives back may make room at any time, so a rejection says little of later charges.
        if holds.is_empty() {
            self.over_limit_cache.record_results(call.id.counters, charges, &results, times);
        }
        if let Some(charge) = charges.first() {
            holds
                .iter()
                .for_each(|(index, hold)| hold.count_as_used(&charge.counters[*index].limit, &mut states[*index]));
        }
        let report = DescriptorStateReport { sent, now, states, leased: 0 };
        self.update_fallback(call, charges, &report);
        if let Some(local) = local_admission {
            local.record_call_report(call, report, lease);
        }
        Ok(CallResults { results, now })
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
    fn update_fallback(&self, call: &PreparedCall, charges: &ChargeBatch, report: &DescriptorStateReport) {
        let Some(last) = charges.last() else { return };
        let uses_fallback =
            |counter: &OwnedCounter| !counter.shadow && counter.limit.on_store_error() == StoreFailurePolicy::Local;
        if last.counters.iter().any(uses_fallback) {
            let counters: SmallVec<[(Limit, u128); 1]> =
                last.counters.iter().map(|counter| (counter.limit, counter.tag)).collect();
            self.fallback.store_reported_states(call.id.path, &counters, &report.states, call.now);
        }
    }
}

impl InFlightGuard {
    /// Takes the followers; once there are none, the counter has no call in flight.
    fn take_followers(&mut self) -> Option<FollowerBatch> {
        let batch = self.calls.coalescer.take_followers(self.id);
        self.armed = batch.is_some();
        batch
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        // The call was aborted. Dropping a batch fails its charges.
        while self.armed && self.take_followers().is_some() {}
    }
}

/// Sends the leader's call, and leaves its followers to a task.
#[expect(
    clippy::manual_async_fn,
    reason = "the future of an `async fn` would hold its arguments twice: as passed, and as moved into its body"
)]
fn send_leader_call(
    mut guard: InFlightGuard,
    call: PreparedCall,
    mut charges: ChargeBatch,
    deadline: Instant,
) -> impl Future<Output = CallOutcome> {
    async move {
        let results = guard.calls.send_call(&call, &mut charges, deadline).await;
        if let Some(batch) = guard.take_followers() {
            tokio::spawn(send_follower_batches(guard, call, batch));
        }
        results
    }
}

/// Sends a call for each batch of followers, until there are none left.
async fn send_follower_batches(mut guard: InFlightGuard, mut call: PreparedCall, mut batch: FollowerBatch) {
    loop {
        let deadline = Instant::now() + guard.calls.timeout;
        // A counter can be busy for long; the time of the leader is outdated.
        call.now = batch.now;
        call.span_refs = std::mem::take(&mut batch.span_refs);
        if call.eventual.is_some() {
            batch.answer_decided_charges(|charge| guard.calls.local_admission.decide_after_wait(&call, charge));
        }
        let mut charges = std::mem::take(&mut batch.charges);
        let results = match charges.is_empty() {
            true => Ok(CallResults::default()),
            false => batch.await_call_with_deadlines(guard.calls.send_call(&call, &mut charges, deadline)).await,
        };
        // Take the next batch before answering: a caller that returns at once then finds no call in flight.
        let next = guard.take_followers();
        batch.answer_remaining(results);
        match next {
            Some(next) => batch = next,
            None => break,
        }
    }
}

/// Upper bound on the charges that wait for one counter; further charges fail at once.
const MAX_WAITING_CHARGES: usize = 32 * MAX_CHARGES_PER_CALL;

/// Outcome of one charge.
pub(super) type ChargeOutcome = Result<StoreOutcome, RedisError>;

/// Reply to a call.
#[derive(Debug, Default)]
pub(super) struct CallResults {
    /// Results of each charge.
    pub(super) results: Vec<ChargeResults>,
    /// Time at which the charges were made.
    pub(super) now: Time,
}

/// Reply to a call, or its failure.
pub(super) type CallOutcome = Result<CallResults, RedisError>;

/// Counters with a call in flight, by the hash of their keys, and the charges that wait for it.
#[derive(Debug)]
pub(super) struct Coalescer(Sharded<WaitQueues>);

type WaitQueues = PrehashedMap<VecDeque<WaitingCharge>>;

/// Charge of a follower.
#[derive(Debug)]
struct WaitingCharge {
    charge: OwnedCharge,
    outcome: oneshot::Sender<ChargeOutcome>,
    /// Latest time for its outcome.
    deadline: Instant,
    /// Time of the charge, by the clock of this process.
    now: Time,
    /// True if it belongs to the same request as the charge before it.
    same_request: bool,
    /// Parent of the call's span; `None` if the charge is joined or not sampled.
    span_ref: Option<SpanRef>,
}

/// Role of a request in the calls on a counter.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the large variant is the common one; a box would cost an allocation")]
pub(super) enum CallRole {
    /// Sends these charges by [`RedisCallSender::lead_call`] or [`RedisCallSender::spawn_call`], which serve followers.
    Leader(ChargeBatch),
    /// Waits for the outcomes, in the order of its charges.
    Follower {
        outcomes: SmallVec<[oneshot::Receiver<ChargeOutcome>; 1]>,
        /// True if the next call will be full without these charges; the follower must then watch its own deadline.
        beyond_next_call: bool,
    },
}

/// Charges of followers, taken to be sent as one call.
#[derive(Debug, Default)]
pub(super) struct FollowerBatch {
    pub(super) charges: ChargeBatch,
    /// Latest time of the charges.
    pub(super) now: Time,
    /// Parents of the call's span, as many as a span can link to.
    pub(super) span_refs: Vec<SpanRef>,
    /// One for each charge; `None` once it has its outcome.
    waiters: Vec<Option<Waiter>>,
}

/// Follower that waits for one outcome.
#[derive(Debug)]
struct Waiter {
    /// Sender to the follower.
    outcome: oneshot::Sender<ChargeOutcome>,
    deadline: Instant,
}

impl Waiter {
    fn deliver_outcome_to_follower(self, outcome: ChargeOutcome) {
        // A caller that gave up has dropped its receiver.
        let _dropped = self.outcome.send(outcome);
    }
}

impl Default for Coalescer {
    fn default() -> Self {
        Self(Sharded::new(DEFAULT_SHARDS, WaitQueues::default))
    }
}

impl Coalescer {
    /// Adds the charges of one request on one counter, at most [`MAX_CHARGES_PER_CALL`].
    pub(super) fn join_or_lead(&self, id: u128, charges: ChargeBatch, context: ChargeContext<'_>) -> CallRole {
        let ChargeContext { now, deadline, span_ref } = context;
        let mut shard = self.0.lock_shard(upper_half(id));
        let Some(waiting) = shard.get_mut(&id) else {
            shard.insert(id, VecDeque::new());
            return CallRole::Leader(charges);
        };
        let is_full = waiting.len() >= MAX_WAITING_CHARGES;
        let mut joined = false;
        let wait = |charge| {
            let (outcome, receiver) = oneshot::channel();
            if is_full {
                let _dropped = outcome.send(Err(RedisError::Overloaded));
            } else {
                let span_ref = span_ref.filter(|_| !joined).cloned();
                waiting.push_back(WaitingCharge { charge, outcome, deadline, now, same_request: joined, span_ref });
                joined = true;
            }
            receiver
        };
        let outcomes = charges.into_iter().map(wait).collect();
        CallRole::Follower { outcomes, beyond_next_call: waiting.len() > MAX_CHARGES_PER_CALL }
    }

    /// Takes the followers of a call that has ended. Returns `None`, and forgets the counter, if there are none.
    pub(super) fn take_followers(&self, id: u128) -> Option<FollowerBatch> {
        let mut shard = self.0.lock_shard(upper_half(id));
        let waiting = shard.get_mut(&id)?;
        let mut batch = FollowerBatch::default();
        while let Some(first) = waiting.front() {
            let given_up = first.outcome.is_closed();
            let in_request = 1 + waiting.iter().skip(1).take_while(|next| next.same_request).count();
            if given_up {
                // A request drops its receivers one by one; once the first is gone, send none of its charges.
                for WaitingCharge { outcome, .. } in waiting.drain(..in_request) {
                    let _dropped = outcome.send(Err(RedisError::Timeout));
                }
                continue;
            }
            if !batch.charges.is_empty() && batch.charges.len() + in_request > MAX_CHARGES_PER_CALL {
                break;
            }
            for WaitingCharge { charge, outcome, deadline, now, span_ref, .. } in waiting.drain(..in_request) {
                batch.now = batch.now.max(now);
                batch.span_refs.extend(span_ref.filter(|_| batch.span_refs.len() <= MAX_LINKS));
                batch.charges.push(charge);
                batch.waiters.push(Some(Waiter { outcome, deadline }));
            }
        }
        if batch.charges.is_empty() {
            shard.remove(&id);
            return None;
        }
        Some(batch)
    }
}

impl FollowerBatch {
    /// Waits for the batch's call, and fails each charge whose time is up meanwhile. One timer serves all followers.
    pub(super) async fn await_call_with_deadlines(&mut self, call: impl Future<Output = CallOutcome>) -> CallOutcome {
        let mut call = pin!(call);
        loop {
            let next_deadline = self.waiters.iter().flatten().map(|waiter| waiter.deadline).min();
            let Some(until) = next_deadline else { return call.await };
            if let Some(results) = timeout_with_grace(&mut call, until).await {
                return results;
            }
            self.fail_expired(Instant::now());
        }
    }

    /// Removes the charges that `decide` decides, and sends their outcomes to the followers.
    pub(super) fn answer_decided_charges(&mut self, decide: impl Fn(&OwnedCharge) -> Option<StoreOutcome>) {
        let charges = std::mem::take(&mut self.charges);
        let waiters = std::mem::take(&mut self.waiters);
        for (charge, waiter) in charges.into_iter().zip(waiters) {
            match (decide(&charge), waiter) {
                (Some(outcome), Some(waiter)) => waiter.deliver_outcome_to_follower(Ok(outcome)),
                (_, waiter) => {
                    self.charges.push(charge);
                    self.waiters.push(waiter);
                }
            }
        }
    }

    /// Sends all outcomes that are still missing to the followers.
    pub(super) fn answer_remaining(self, results: CallOutcome) {
        let mut results = results.map(|reply| (reply.results.into_iter(), reply.now));
        for waiter in self.waiters {
            // Consume the results of charges that already have an outcome too, to keep the order.
            let outcome = match &mut results {
                Ok((results, now)) => {
                    let results = results.next().ok_or(RedisError::BadReply);
                    results.map(|results| StoreOutcome::from_store_results(results, *now))
                }
                Err(error) => Err(*error),
            };
            if let Some(waiter) = waiter {
                waiter.deliver_outcome_to_follower(outcome);
            }
        }
    }

    fn fail_expired(&mut self, now: Instant) {
        for waiter in &mut self.waiters {
            if let Some(waiter) = waiter.take_if(|waiter| waiter.deadline <= now) {
                waiter.deliver_outcome_to_follower(Err(RedisError::Timeout));
            }
        }
    }
}

/// Charges of a request on one counter.
pub(super) struct PendingCharges {
    pub(super) progress: ChargeProgress,
    /// Time until which the caller waits, equal for all charges of a request; `None`: the call itself ends in time.
    pub(super) caller_deadline: Option<Instant>,
    /// Index of each charge in the request.
    pub(super) indices: SmallVec<[usize; 1]>,
}

/// Submitted charges of a request, in groups.
#[derive(Default)]
pub(super) struct PendingChargeGroups {
    groups: SmallVec<[PendingCharges; 1]>,
    /// Number of groups at the start of `groups` that have their outcomes.
    decided: usize,
    outcomes: SmallVec<[ChargeOutcome; 2]>,
}

/// Progress of submitted charges.
pub(super) enum ChargeProgress {
    /// Sent by a call that this request leads.
    Leading(DetachOnDrop<CallOutcome>),
    /// Waiting for a call that another request started, with one receiver for each charge.
    Following(SmallVec<[oneshot::Receiver<ChargeOutcome>; 1]>),
    /// The outcomes are written.
    Decided,
}

impl PendingCharges {
    /// Writes the outcomes that are known by now to their indices; ready once all are written.
    fn poll_outcomes(&mut self, context: &mut Context<'_>, outcomes: &mut [ChargeOutcome]) -> Poll<()> {
        match &mut self.progress {
            ChargeProgress::Leading(call) => match ready!(Pin::new(call).poll(context)) {
                Ok(CallResults { results, now }) => {
                    for (&index, results) in self.indices.iter().zip(results) {
                        outcomes[index] = Ok(StoreOutcome::from_store_results(results, now));
                    }
                }
                Err(error) => self.fail_unanswered_charges(error, outcomes),
            },
            ChargeProgress::Following(receivers) => {
                let waiting = self.indices.iter().zip(receivers).filter(|(_, receiver)| !receiver.is_terminated());
                for (&index, receiver) in waiting {
                    // Without a sender, the call was aborted.
                    outcomes[index] = ready!(Pin::new(receiver).poll(context)).unwrap_or(Err(RedisError::Broken));
                }
            }
            ChargeProgress::Decided => {}
        }
        self.progress = ChargeProgress::Decided;
        Poll::Ready(())
    }

    /// Writes an error for all charges that have no outcome.
    fn fail_unanswered_charges(&self, error: RedisError, outcomes: &mut [ChargeOutcome]) {
        let receivers = if let ChargeProgress::Following(receivers) = &self.progress { &receivers[..] } else { &[] };
        let has_outcome = |place: usize| receivers.get(place).is_some_and(oneshot::Receiver::is_terminated);
        for (_, &index) in self.indices.iter().enumerate().filter(|(place, _)| !has_outcome(*place)) {
            outcomes[index] = Err(error);
        }
    }
}

impl PendingChargeGroups {
    /// Creates the state of a request without charges, with room for this number of them.
    pub(super) fn with_capacity(charges: usize) -> Self {
        Self {
            groups: SmallVec::with_capacity(charges),
            decided: 0,
            outcomes: (0..charges).map(|_| Err(RedisError::Broken)).collect(),
        }
    }

    /// Adds a group.
    pub(super) fn add_group(&mut self, group: PendingCharges) {
        self.groups.push(group);
    }

    /// Sets the outcome of charges that are decided without a call.
    pub(super) fn set_outcome_without_call(&mut self, indices: &[usize], outcome: StoreOutcome) {
        let Some((last, others)) = indices.split_last() else { return };
        for &index in others {
            self.outcomes[index] = Ok(outcome.clone());
        }
        self.outcomes[*last] = Ok(outcome);
    }

    /// Waits for all outcomes, in the order of the request's charges. An outcome that is late is a timeout.
    pub(super) async fn wait_for_outcomes(mut self) -> SmallVec<[ChargeOutcome; 2]> {
        let until = self.groups.iter().find_map(|group| group.caller_deadline);
        if let Some(until) = until
            && timeout_with_grace(poll_fn(|context| run_deferring_wakes(|| self.poll_groups(context))), until)
                .await
                .is_none()
        {
            self.fail_late_charges();
        }
        poll_fn(|context| run_deferring_wakes(|| self.poll_groups(context))).await;
        self.outcomes
    }

    /// Polls all groups without outcomes: all calls are queued before the first one is written.
    fn poll_groups(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut result = Poll::Ready(());
        for index in self.decided..self.groups.len() {
            if self.groups[index].poll_outcomes(context, &mut self.outcomes).is_pending() {
                result = Poll::Pending;
                // The other groups would be pending too; the task is polled again at once.
                if !has_budget_remaining() {
                    break;
                }
            } else if result.is_ready() {
                self.decided = index + 1;
            }
        }
        result
    }

    /// Fails the charges whose time is up. Their calls continue without them.
    fn fail_late_charges(&mut self) {
        for group in &mut self.groups[self.decided..] {
            if group.caller_deadline.is_some() && !matches!(group.progress, ChargeProgress::Decided) {
                group.fail_unanswered_charges(RedisError::Timeout, &mut self.outcomes);
                group.progress = ChargeProgress::Decided;
            }
        }
    }
}
