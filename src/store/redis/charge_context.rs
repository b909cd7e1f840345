//! When charges are made, and for whom: what goes along with them from the request to the call.

use std::time::Instant;

use crate::clock::Time;
use crate::telemetry::traces::SpanRef;

/// What is known of charges besides what they charge.
#[derive(Clone, Copy, Debug)]
pub struct ChargeContext<'s> {
    /// When they are made, by this process's clock.
    pub now: Time,
    /// Until when answers are wanted.
    pub until: Instant,
    /// The span that they are made for, if it is sampled.
    pub span_ref: Option<&'s SpanRef>,
}

impl From<(Time, Instant)> for ChargeContext<'_> {
    fn from((now, until): (Time, Instant)) -> Self {
        Self { now, until, span_ref: None }
    }
}
