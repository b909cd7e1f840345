//! Counters of one eventual descriptor.

use smallvec::SmallVec;

use super::budget::LocalBudget;
use crate::store::command::OwnedCounter;

/// Identity of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorId {
    /// Hash of its path.
    pub path: u128,
    /// Hash of its set of counters and their limits.
    pub tags: u128,
}

/// Descriptor whose counters are all eventual.
#[derive(Clone, Debug)]
pub struct EventualCounters {
    /// Identity.
    pub id: DescriptorId,
    /// Hits that this process may admit by itself.
    pub budget: LocalBudget,
    /// The counters.
    pub counters: SmallVec<[OwnedCounter; 1]>,
}

impl DescriptorId {
    /// Identifies a descriptor. The limits are part of it: a budget of one limit must not be used under another.
    pub fn new(path: u128, counters: &[OwnedCounter]) -> Self {
        let tags = counters.iter().fold(0_u128, |tags, OwnedCounter { limit, tag, .. }| {
            let amounts = u128::from(limit.requests_per_unit()) << 32 | u128::from(limit.capacity());
            tags.rotate_left(1) ^ tag ^ amounts.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
        });
        Self { path, tags }
    }
}
