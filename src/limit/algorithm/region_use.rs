//! Hits that a region's counter admitted, by what they were admitted from.
//!
//! The difference of a counter's use before and after a call, at the time of the call, is what the call admitted.

use std::ops::AddAssign;

/// Number of hits by what they were admitted from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionUse {
    /// Granted hits; of a token bucket all hits while a grant lasts.
    pub grant: u64,
    /// Hits of the part that the region always has.
    pub reserve: u64,
    /// Hits of the loss allowance.
    pub loss_allowance: u64,
}

impl RegionUse {
    /// Returns the hits that were admitted since `before`; refunded hits do not count.
    #[must_use]
    pub const fn since(self, before: Self) -> Self {
        Self {
            grant: self.grant.saturating_sub(before.grant),
            reserve: self.reserve.saturating_sub(before.reserve),
            loss_allowance: self.loss_allowance.saturating_sub(before.loss_allowance),
        }
    }
}

impl AddAssign for RegionUse {
    fn add_assign(&mut self, other: Self) {
        self.grant += other.grant;
        self.reserve += other.reserve;
        self.loss_allowance += other.loss_allowance;
    }
}
