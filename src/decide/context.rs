//! Inputs of a decision besides the request itself.

use std::time::Instant;

use crate::clock::Time;
use crate::rule::set::RuleSet;
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
}

impl<'r> DecisionContext<'r> {
    /// Inputs of the store's operations.
    pub(super) const fn of_store(&self) -> StoreContext<'r> {
        StoreContext { now: self.now, deadline: self.deadline, span_ref: self.span_ref }
    }
}
