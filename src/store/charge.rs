//! A charge as a store takes it, and its outcome: what the stores of this folder share.
//!
//! In the order of events: the inputs of a request besides counters and hits; the owned form of a charge, because a
//! call outlives the request that started it; the deadlines and the trace span of a call, and its continuation without
//! its caller, for Redis and memcached; the outcome, at once or later.
//!
//! The charges of one call have the same counters in the same order; limits and capacities may differ between them.
//!
//! Spans are named after OpenTelemetry's conventions for databases. A call has one span: a child of the first sampled
//! request that it serves, with links to the others. Keys are not recorded, because they contain descriptor values.
//!
//! Decides: the deadline of a store call; how many charges one call may have (`MAX_CHARGES_PER_CALL`).
//! Decides: spans of store calls.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt;
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::client::redis::error::RedisError;
use super::error::ChargeError;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::stored_state::MAX_LUA_INTEGER;
use crate::limit::charge::{ChargeRequest, ChargeResult, JointLimit};
use crate::limit::slot::SlotUse;
use crate::settings::address::Endpoint;
use crate::telemetry::traces::{Span, SpanKind, SpanRef};

/// Upper bound on the charges of one call; other clients of the server wait while a script runs.
pub const MAX_CHARGES_PER_CALL: usize = 512;

/// Whether charges change the counters, or only their results are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitMode {
    /// Hits are charged.
    Commit,
    /// Results are computed, and nothing is charged.
    DryRun,
}

/// Time, deadline and span of charges.
#[derive(Clone, Copy, Debug)]
pub struct ChargeContext<'s> {
    /// Time of the charges by the clock of this process.
    pub now: Time,
    /// Latest time for an answer.
    pub deadline: Instant,
    /// Parent of the call's span, if the request is sampled.
    pub span_ref: Option<&'s SpanRef>,
}

impl ChargeContext<'_> {
    /// A context of an unsampled request.
    pub const fn new(now: Time, deadline: Instant) -> Self {
        Self { now, deadline, span_ref: None }
    }
}

/// Charges of one call, decided in this order.
pub type ChargeBatch = SmallVec<[OwnedCharge; 1]>;

/// Counter of an owned charge: its limit and what identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedCounter {
    /// The limit.
    pub limit: Limit,
    /// The limit is in shadow mode: it never rejects the descriptor.
    pub shadow: bool,
    /// The limit is a quota: its rejection does not keep the other counters from being charged.
    pub quota: bool,
    /// Distinguishes the counter from others of the same path.
    pub tag: u128,
}

/// One charge of a call, in owned form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedCharge {
    /// One counter for each key of the call.
    pub counters: SmallVec<[OwnedCounter; 1]>,
    /// Hits and the longest delay.
    pub request: ChargeRequest,
    /// True if the charge is only computed, and changes no counter.
    pub dry_run: bool,
    /// Time by the counter's clock from which a refund has no effect: at least 1 us after the Unix epoch. `None`: a
    /// refund always has its effect.
    pub void_from: Option<Time>,
    /// Slot of the request, if a limit is concurrent. Such a charge has a call of its own.
    pub slot: Option<Box<SlotUse>>,
}

impl OwnedCharge {
    /// A charge of `request` that changes the counters.
    pub const fn new(counters: SmallVec<[OwnedCounter; 1]>, request: ChargeRequest) -> Self {
        Self { counters, request, dry_run: false, void_from: None, slot: None }
    }

    /// Returns the request with its longest delay reduced to what the algorithms compute exactly.
    pub fn request_with_bounded_delay(&self) -> ChargeRequest {
        let bound_us = |counter: &OwnedCounter| State::max_lua_exact_delay_us(&counter.limit);
        let max_delay_us =
            self.counters.iter().map(bound_us).fold(self.request.max_delay_us.min(MAX_LUA_INTEGER - 1), u64::min);
        ChargeRequest { max_delay_us, ..self.request }
    }

    /// Limits of the counters, as [`charge_together`](crate::limit::algorithm::joint_charge::charge_together) takes them.
    pub fn joint_limits(&self) -> SmallVec<[JointLimit<'_>; 1]> {
        self.counters.iter().map(OwnedCounter::as_joint_limit).collect()
    }
}

impl OwnedCounter {
    /// The limit of the counter, as [`charge_together`](crate::limit::algorithm::joint_charge::charge_together) takes it.
    pub const fn as_joint_limit(&self) -> JointLimit<'_> {
        JointLimit { limit: &self.limit, rejects_others: !self.shadow && !self.quota }
    }
}

/// Deadlines closer than this count as equal; they were computed from two clock readings.
const DEADLINE_TOLERANCE: Duration = Duration::from_millis(1);

/// Deadlines of a call and of the caller that waits for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallDeadlines {
    /// Time by which the call ends.
    pub(super) call: Instant,
    /// Time until which the caller waits, if that is before the end of the call.
    pub(super) caller: Option<Instant>,
}

impl CallDeadlines {
    /// Sets the deadlines of a call that starts at `started` in a store with this timeout, for a caller that waits
    /// until `until`.
    ///
    /// A caller's short deadline must not count against the server: the call continues until the store's timeout. The
    /// caller passes an `until` that is at most the timeout after the start, give or take [`DEADLINE_TOLERANCE`].
    pub(super) fn new(until: Instant, started: Instant, timeout: Duration) -> Self {
        let longest = started + timeout;
        match until + DEADLINE_TOLERANCE < longest {
            true => Self { call: longest, caller: Some(until) },
            false => Self { call: until, caller: None },
        }
    }
}

/// Future that is spawned on drop unless it has completed.
pub(super) struct DetachOnDrop<T: Send + 'static> {
    future: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
}

impl<T: Send + 'static> DetachOnDrop<T> {
    /// Wraps a future.
    pub(super) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self { future: Some(Box::pin(future)) }
    }
}

impl<T: Send + 'static> Future for DetachOnDrop<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let future = self.future.as_mut().expect("polled after completion");
        let output = ready!(future.as_mut().poll(context));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static> Drop for DetachOnDrop<T> {
    fn drop(&mut self) {
        if let (Some(future), Ok(runtime)) = (self.future.take(), Handle::try_current()) {
            runtime.spawn(future);
        }
    }
}

/// Starts the span of a call of `command` to `system` for a number of charges; `None` if no request is sampled.
pub(super) fn start_call_span(
    system: &'static str,
    span_refs: &[SpanRef],
    command: &'static str,
    charges: usize,
) -> Option<Span> {
    let (first, others) = span_refs.split_first()?;
    let mut span = first.start_child_span(command, SpanKind::Client);
    others.iter().for_each(|other| span.add_link(other));
    span.set_attribute("db.system.name", system);
    span.set_attribute("db.operation.name", command);
    span.set_attribute("tollkeeper.draws", i64::try_from(charges).unwrap_or(i64::MAX));
    Some(span)
}

/// Records the server of a call; a redirected call keeps the last one.
pub(super) fn set_span_server(span: &mut Span, endpoint: &Endpoint) {
    match endpoint {
        Endpoint::Tcp { host, port } => {
            span.replace_attribute("server.address", host.clone());
            span.replace_attribute("server.port", i64::from(*port));
        }
        Endpoint::Unix(path) => span.replace_attribute("server.address", path.display().to_string()),
    }
}

/// Results of a descriptor's limits, in their order.
pub type ChargeResults = SmallVec<[ChargeResult; 1]>;

/// For each limit of a descriptor, in their order: true if it would admit the hits.
pub type LimitAdmissions = SmallVec<[bool; 4]>;

/// Outcome of the charge of one descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOutcome {
    /// Results of its limits, in their order.
    pub results: ChargeResults,
    /// Decided by the store, or locally on its behalf.
    pub decided_by: DecidedBy,
    /// Time that the counters worked at: that of Redis, if Redis decided.
    pub now: Time,
}

/// Part of the store that decided a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The counters themselves.
    Store,
    /// The over-limit cache: Redis has just rejected such a charge.
    OverLimitCache,
    /// This process's free share of an eventual limit; its hits are never charged to Redis.
    Share,
    /// A lease: its hits were charged to Redis beforehand.
    Lease,
    /// A proxy, by what it was assigned over the rate limit quota service.
    Rlqs,
}

impl StoreOutcome {
    /// An outcome that the counters decided.
    pub const fn from_store_results(results: ChargeResults, now: Time) -> Self {
        Self { results, decided_by: DecidedBy::Store, now }
    }
}

/// Outcomes of charges, in their order.
pub type StoreOutcomes = Vec<Result<StoreOutcome, ChargeError>>;

/// Outcomes that are not known yet. The future must be polled to its end, or charges may be left out.
pub type PendingOutcomes = Pin<Box<dyn Future<Output = StoreOutcomes> + Send>>;

/// Outcomes of charges that no answer waits for.
pub enum DeferredOutcomes {
    /// The store has decided.
    Ready(StoreOutcomes),
    /// The charges are on their way.
    Pending(PendingOutcomes),
}

impl fmt::Debug for DeferredOutcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready(outcomes) => f.debug_tuple("Ready").field(outcomes).finish(),
            Self::Pending(_) => f.write_str("Pending"),
        }
    }
}

impl DeferredOutcomes {
    /// Polls charges in Redis once, so that their calls are sent.
    pub(super) fn send_charges(
        charges: impl Future<Output = SmallVec<[Result<StoreOutcome, RedisError>; 2]>> + Send + 'static,
    ) -> Self {
        let outcomes = charges.map(|outcomes| outcomes.into_iter().map(|it| it.map_err(ChargeError::from)).collect());
        Self::Pending(Box::pin(outcomes)).resolve_arrived()
    }

    /// Takes up outcomes that have arrived.
    #[must_use]
    pub fn resolve_arrived(self) -> Self {
        match self {
            Self::Pending(mut pending) => match (&mut pending).now_or_never() {
                Some(outcomes) => Self::Ready(outcomes),
                None => Self::Pending(pending),
            },
            Self::Ready(outcomes) => Self::Ready(outcomes),
        }
    }
}

/// Waits for outcomes in a task, and passes them to `each`. Must be called within a tokio runtime.
pub fn spawn_outcome_handler(pending: PendingOutcomes, each: impl FnOnce(StoreOutcomes) + Send + 'static) {
    tokio::spawn(pending.map(each));
}
