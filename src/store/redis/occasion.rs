//! When draws are made, and for whom: what goes along with them from the request to the call.

use std::time::Instant;

use crate::clock::Time;
use crate::telemetry::traces::Anchor;

/// What is known of draws besides what they draw.
#[derive(Clone, Copy, Debug)]
pub struct Occasion<'s> {
    /// When they are made, by this process's clock.
    pub now: Time,
    /// Until when answers are wanted.
    pub until: Instant,
    /// The span that they are made for, if it is sampled.
    pub anchor: Option<&'s Anchor>,
}

impl From<(Time, Instant)> for Occasion<'_> {
    fn from((now, until): (Time, Instant)) -> Self {
        Self { now, until, anchor: None }
    }
}
