//! How much a descriptor is asked for: hits in the last tenth of a second.

use std::time::{Duration, Instant};

/// What demand is measured over.
const SLOT: Duration = Duration::from_millis(100);

/// Hits asked for, in this slot and in the one before; without each slot's first charge, which promises no other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    since: Instant,
    /// The hits of the last charge.
    pub(super) last: u64,
    fresh: bool,
    hits: u64,
    before: u64,
}

impl Demand {
    /// None yet.
    pub(super) const fn new(at: Instant) -> Self {
        Self { since: at, last: 0, fresh: true, hits: 0, before: 0 }
    }

    /// Takes note of a charge's hits.
    pub(super) fn note(&mut self, hits: u64, at: Instant) {
        self.turn(at);
        self.last = hits;
        if !std::mem::take(&mut self.fresh) {
            self.hits = self.hits.saturating_add(hits);
        }
    }

    /// The hits that will be asked for within so many microseconds, if demand stays as it is.
    pub(super) fn within(&mut self, span_us: u64, at: Instant) -> u64 {
        self.turn(at);
        let most = u128::from(self.hits.max(self.before));
        u64::try_from(most * u128::from(span_us) / SLOT.as_micros()).unwrap_or(u64::MAX)
    }

    fn turn(&mut self, at: Instant) {
        let passed = at.saturating_duration_since(self.since);
        if passed >= SLOT {
            self.before = if passed < 2 * SLOT { self.hits } else { 0 };
            (self.since, self.fresh, self.hits) = (at, true, 0);
        }
    }
}
