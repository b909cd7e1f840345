//! Demand of a descriptor: hits requested in the last 100 ms.

use std::time::{Duration, Instant};

/// Width of the time slots in which hits are counted.
const SLOT: Duration = Duration::from_millis(100);

/// Hits requested in this time slot and in the previous one. The first charge of a slot is not counted: a single charge
/// does not predict another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    slot_start: Instant,
    /// Hits of the last charge.
    pub(super) last_hits: u64,
    slot_is_new: bool,
    hits: u64,
    previous_hits: u64,
}

impl Demand {
    /// No demand yet.
    pub(super) const fn new(at: Instant) -> Self {
        Self { slot_start: at, last_hits: 0, slot_is_new: true, hits: 0, previous_hits: 0 }
    }

    /// Counts the hits of a charge.
    pub(super) fn record(&mut self, hits: u64, at: Instant) {
        self.advance(at);
        self.last_hits = hits;
        if !std::mem::take(&mut self.slot_is_new) {
            self.hits = self.hits.saturating_add(hits);
        }
    }

    /// Predicts the hits of the next `span_us` microseconds, if demand stays the same.
    pub(super) fn predict(&mut self, span_us: u64, at: Instant) -> u64 {
        self.advance(at);
        let max_hits = u128::from(self.hits.max(self.previous_hits));
        u64::try_from(max_hits * u128::from(span_us) / SLOT.as_micros()).unwrap_or(u64::MAX)
    }

    fn advance(&mut self, at: Instant) {
        let passed = at.saturating_duration_since(self.slot_start);
        if passed >= SLOT {
            self.previous_hits = if passed < 2 * SLOT { self.hits } else { 0 };
            (self.slot_start, self.slot_is_new, self.hits) = (at, true, 0);
        }
    }
}
