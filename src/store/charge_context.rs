//! Inputs of a charge besides its counters and hits.

use std::time::{Duration, Instant};

use crate::base::clock::Time;
use crate::telemetry::traces::SpanRef;

/// Deadlines closer than this count as equal; they were computed from two clock readings.
pub(super) const DEADLINE_TOLERANCE: Duration = Duration::from_millis(1);

/// Effect of charges on the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeMode {
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
    pub until: Instant,
    /// Parent of the call's span, if the request is sampled.
    pub span_ref: Option<&'s SpanRef>,
}

impl ChargeContext<'_> {
    /// A context of an unsampled request.
    pub const fn new(now: Time, until: Instant) -> Self {
        Self { now, until, span_ref: None }
    }
}
