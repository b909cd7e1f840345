//! Inputs of a decision besides the request itself.

use std::time::Instant;

use crate::base::clock::Time;
use crate::rules::rule::set::RuleSet;
use crate::store::StoreContext;
use crate::telemetry::traces::SpanRef;

/// Inputs taken once for each decision, when its request arrives.
#[derive(Clone, Copy, Debug)]
pub struct DecisionContext<'r> {
    /// The rules; `None` before any were loaded.
    pub rules: Option<&'r RuleSet>,
    /// Time of the request.
    pub now: Time,
    /// Longest delay of the response that the caller can wait for, in microseconds, after the store's timeout.
    pub max_delay_us: u64,
    /// Latest time for answers from Redis; `None`: the caller leaves no time for a call. A memory store ignores it.
    pub deadline: Option<Instant>,
    /// Span of the decision, if the request is sampled.
    pub span_ref: Option<&'r SpanRef>,
    /// Time of the charge of each descriptor, if it differs from `now`: a replay of charges that Redis timed. The
    /// memory store uses them; empty in a server.
    pub charge_times: &'r [Time],
}

impl<'r> DecisionContext<'r> {
    /// Inputs of the store's operations.
    pub(super) const fn of_store(&self) -> StoreContext<'r> {
        let Self { now, deadline, span_ref, charge_times, .. } = *self;
        StoreContext { now, deadline, span_ref, charge_times }
    }
}
