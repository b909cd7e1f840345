//! Limits over several regions.

pub mod bucket_grants;
pub mod region_call;
pub mod window_grants;

use crate::algorithm::global_clock::GlobalClock;
use crate::redis::node::Node;
use crate::redis::server_clock::InstantRange;

/// Client of the global Redis.
#[derive(Debug)]
pub struct GlobalGrants {}

impl GlobalGrants {
    /// Returns the clock of the global Redis for a call on `region` that is sent and ends `within` a range. The counters
    /// have the same slot in both.
    pub(super) fn clock(
        &self,
        _region: &Node,
        _global_slot: impl FnOnce() -> u16,
        _within: InstantRange,
    ) -> GlobalClock {
        GlobalClock::UNKNOWN
    }
}
