//! The pipeline on one screen: select, charge, merge.
//!
//! The service, `/json`, `explain` and the benches all come through here, so they can not disagree. Limits are selected
//! for a request as a whole, because a rule may replace others of the same request; then each descriptor charges from
//! its counters; then the verdicts merge. Counters in this process are charged from at once and nothing waits; those in
//! Redis are asked for all descriptors together. A store failure becomes a verdict by the rule's policy here and only
//! here.

mod charge;
pub mod counters;
pub mod explain;
mod failures;
mod merge;
mod metadata;
mod record;
mod selection;
pub mod store_report;
mod verdict;

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use smallvec::SmallVec;

use self::failures::Failures;
use self::merge::merge;
use self::selection::{Selection, select};
use crate::clock::Time;
use crate::decision::Decision;
use crate::limit::StorePolicy;
use crate::request::Request;
use crate::rule::set::RuleSet;
use crate::settings::decisions::DecisionSettings;
use crate::store::error::ChargeError;
use crate::store::outcome::{ChargeResults, StoreOutcome};
use crate::store::{Store, StoreContext};
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::traces::SpanRef;

/// Decides requests: the counters, and what the process was told about deciding.
#[derive(Debug)]
pub struct Decider {
    /// Where the counters live.
    pub store: Store,
    /// What the process was told.
    pub behaviour: DecisionSettings,
    /// Where it is counted what came of them.
    pub metrics: Arc<ServiceMetrics>,
    failures: Failures,
}

/// What is taken once for a decision, where the request came in.
#[derive(Clone, Copy, Debug)]
pub struct DecisionContext<'r> {
    /// The rules; `None` before any were loaded.
    pub rules: Option<&'r RuleSet>,
    /// The time.
    pub now: Time,
    /// How long the caller can wait for its answer, in microseconds, once the store has had all the time it may take.
    pub max_delay_us: u64,
    /// When Redis must have answered; `None`: the caller leaves no time to ask it. Memory does not look at it.
    pub deadline: Option<Instant>,
    /// The span of the decision, if it has one.
    pub span_ref: Option<&'r SpanRef>,
}

/// Why a request has no decision. The texts are envoyproxy/ratelimit's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecideError {
    /// The caller's fault.
    #[error("rate limit domain must not be empty")]
    EmptyDomain,
    /// The caller's fault.
    #[error("rate limit descriptor list must not be empty")]
    NoDescriptors,
    /// Ours: no rules were ever loaded.
    #[error("no rate limit configuration loaded")]
    NoRules,
    /// The store's: it failed, and the policy of a rule is `error`.
    #[error("the counter could not be asked, and the rule says `on_store_error: error`")]
    Store,
}

/// What came of the charge of one descriptor.
#[derive(Clone, Debug)]
enum DescriptorOutcome {
    /// The descriptor has no limit.
    Unlimited,
    /// What its limits found, and who decided.
    Charged(StoreOutcome),
    /// The store failed, and these are the results of what stands in for it.
    Fallback(ChargeResults),
    /// The store failed, and this is the rule's policy, which is not `local`.
    Failed(StorePolicy),
}

impl DescriptorOutcome {
    /// Tells whether the limit at `index` rejected the charge.
    fn rejects(&self, index: usize) -> bool {
        match self {
            Self::Unlimited | Self::Failed(_) => false,
            Self::Charged(StoreOutcome { results, .. }) | Self::Fallback(results) => !results[index].admitted,
        }
    }
}

impl<'r> DecisionContext<'r> {
    /// Inputs of the store's operations.
    const fn of_store(&self) -> StoreContext<'r> {
        StoreContext { now: self.now, deadline: self.deadline, span_ref: self.span_ref }
    }
}

impl Decider {
    /// Decides by the counters of `store`.
    pub fn new(store: Store, behaviour: DecisionSettings, metrics: Arc<ServiceMetrics>) -> Self {
        Self { store, behaviour, metrics, failures: Failures::default() }
    }

    /// Decides a request. Completes on the first poll if the store is immediate, else by the context's deadline.
    ///
    /// # Errors
    /// The request is invalid, no rules are loaded, or the store failed under a rule with the policy `error`.
    pub async fn decide<'r>(
        &'r self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
    ) -> Result<Decision<'r>, DecideError> {
        let selections = self.select(context, request)?;
        let outcomes = self.charge(context, request, &selections).await;
        self.conclude(context, request, &selections, &outcomes)
    }

    /// Decides a request with an immediate store, on the caller's stack; `None` if the store is not immediate.
    pub fn decide_now<'r>(
        &'r self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
    ) -> Option<Result<Decision<'r>, DecideError>> {
        if !self.store.is_immediate() {
            return None;
        }
        match pin!(self.decide(context, request)).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(decision) => Some(decision),
            Poll::Pending => None,
        }
    }

    /// Records metrics of the outcomes, and merges the outcomes.
    fn conclude<'r>(
        &'r self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
        selections: &[Selection<'r>],
        outcomes: &[DescriptorOutcome],
    ) -> Result<Decision<'r>, DecideError> {
        if !self.metrics.is_off() {
            self.record(context, request, selections, outcomes);
        }
        let decision = merge(&self.behaviour, request, selections, outcomes)?;
        if decision.shadowed {
            self.metrics.record_global_shadow();
        }
        Ok(decision)
    }

    /// How many charges the store failed since the start, by the name of what went wrong.
    pub fn failed_charges(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ChargeError::all().map(|error| (error.name(), self.failures.count(error)))
    }

    /// How many charges the store failed since the start and this policy answered.
    pub fn decided_by(&self, policy: StorePolicy) -> u64 {
        self.failures.decided_by(policy)
    }

    /// The limits of each descriptor.
    fn select<'r>(
        &self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
    ) -> Result<SmallVec<[Selection<'r>; 2]>, DecideError> {
        if request.domain.is_empty() {
            return Err(DecideError::EmptyDomain);
        }
        if request.descriptors.is_empty() {
            return Err(DecideError::NoDescriptors);
        }
        Ok(select(&self.behaviour, context.rules.ok_or(DecideError::NoRules)?, request))
    }
}
