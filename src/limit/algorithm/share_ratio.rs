//! Ratio of this process's share of a limit to the limit.
//!
//! Rounding is against the caller: the share is used at least as much as the limit was.

use super::leaky_level::LevelParts;
use crate::limit::Limit;

/// Ratio of a share to its limit, by capacity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShareRatio {
    limit: u64,
    share: u64,
}

impl ShareRatio {
    /// Computes the ratio of `share` to `limit`.
    pub(super) fn of(share: &Limit, limit: &Limit) -> Self {
        Self { limit: u64::from(limit.capacity().max(1)), share: u64::from(share.capacity().max(1)) }
    }

    pub(super) fn rounded_up(self, count: u64) -> u64 {
        if self.share == self.limit {
            count
        } else {
            narrow((u128::from(count) * u128::from(self.share)).div_ceil(self.limit.into()))
        }
    }

    pub(super) fn rounded_down(self, count: u64) -> u64 {
        narrow(u128::from(count) * u128::from(self.share) / u128::from(self.limit))
    }

    /// Scales a level of `limit`, rounded up to the smallest fraction of a hit.
    pub(super) fn scale_level(self, level: LevelParts, limit: &Limit) -> LevelParts {
        if self.share == self.limit {
            return level;
        }
        let period = u128::from(limit.period_us());
        let units = u128::from(level.whole) * period + u128::from(level.part);
        // No overflow: levels are below 2^40 hits, periods below 2^45 us, and shares below 2^32.
        let scaled = units.saturating_mul(self.share.into()).div_ceil(self.limit.into());
        LevelParts { whole: narrow(scaled / period), part: narrow(scaled % period) }
    }
}

fn narrow(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
