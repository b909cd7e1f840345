//! Parts of a global limit.
//!
//! Of a limit of L hits, each of n regions has its *part*: a counter of its own under the *reserve*, which is larger
//! while the region is cut off (`on_region_loss`). The global Redis counts the rest, and regions hold hits of it
//! ([`region_pool`](super::algorithm::region_pool)). A limit of one region has neither.
//!
//! Decides: a region's reserve (the rule's, divided equally); its part while it is cut off (`on_region_loss`).

use std::fmt;
use std::num::NonZeroU16;

use super::algorithm::{Algorithm, CountingMethod};
use super::{GlobalScope, Limit, LimitError, Overshoot, RegionConnection, RegionLossPolicy, Scope};
use crate::base::text::format_milli_percent;
use crate::limit::charge::{MAX_HELD_HITS, clamp_to_u32};

/// Allowance of a region that admits everything while it is cut off, in hits.
const UNLIMITED_ALLOWANCE: u64 = 1 << 40;

/// 100 % in thousandths of a percent.
const WHOLE_MILLI_PERCENT: u64 = 100_000;

impl Limit {
    /// Keys of a global limit; `None` for a limit of one region.
    pub const fn global_scope(&self) -> Option<GlobalScope> {
        match self.scope() {
            Scope::Global(scope) => Some(scope),
            Scope::Region => None,
        }
    }

    /// Number of regions that share the limit; 1 for a limit of one region.
    pub const fn region_count(&self) -> NonZeroU16 {
        match self.scope() {
            Scope::Global(scope) => scope.regions,
            Scope::Region => NonZeroU16::MIN,
        }
    }

    /// Returns the limit as the region's Redis counts it: as a part, with a pool beside it. A limit of one region stays as
    /// it is.
    #[must_use]
    pub const fn as_counted_in_region(&self, connection: RegionConnection) -> Self {
        let in_region = if let Scope::Global(_) = self.scope() { Some(connection) } else { None };
        Self { in_region, ..*self }
    }

    /// Returns the limit that a region counts alone, in a counter of its own: its reserve, and while it is cut off from
    /// the global Redis what `on_region_loss` says.
    #[must_use]
    pub fn region_part(&self) -> Self {
        let (hits, capacity) = (self.region_reserve(), self.region_capacity());
        let scope = match (self.scope(), self.in_region) {
            (Scope::Global(scope), Some(RegionConnection::CutOff)) => Some(scope.on_region_loss),
            _ => None,
        };
        let regions = u64::from(self.region_count().get());
        let (requests_per_unit, capacity) = match scope {
            Some(RegionLossPolicy::Share) => {
                let allowance = self.cut_off_allowance().min(MAX_HELD_HITS);
                (hits.saturating_add(allowance), capacity.saturating_add(allowance))
            }
            Some(RegionLossPolicy::Local) => {
                (hits.max(self.requests_per_unit() / regions), capacity.max(self.capacity() / regions))
            }
            Some(RegionLossPolicy::Allow) if self.requests_per_unit() > 0 => (MAX_HELD_HITS, MAX_HELD_HITS),
            _ => (hits, capacity),
        };
        Self { requests_per_unit, scope: Scope::Region, in_region: None, ..*self }.with_capacity(capacity)
    }

    /// Returns the limit that the global Redis counts: without the parts of all regions.
    #[must_use]
    pub const fn without_region_parts(&self) -> Self {
        let (requests_per_unit, capacity) = (self.max_granted_hits(), self.max_granted_capacity());
        Self { requests_per_unit, scope: Scope::Region, in_region: None, ..*self }.with_capacity(capacity)
    }

    /// Returns the most hits that a charge in a region can have to pass ever.
    pub fn largest_charge_in_region(&self) -> u64 {
        self.without_region_parts().capacity() + self.region_part().capacity()
    }

    /// Checks that the reserve gives each region a hit, and a token of the bucket.
    pub(super) fn check_reserve(&self) -> Result<(), LimitError> {
        match self.scope {
            Scope::Global(GlobalScope { regions, .. })
                if self.requests_per_unit > 0 && (self.region_reserve() == 0 || self.region_capacity() == 0) =>
            {
                Err(LimitError::ReserveTooSmall { regions: regions.get() })
            }
            Scope::Global(_) | Scope::Region => Ok(()),
        }
    }

    /// Returns the limit as one that each region has for itself.
    #[must_use]
    pub const fn without_global_scope(&self) -> Self {
        Self { scope: Scope::Region, ..*self }
    }

    /// Returns the limit as one that all regions share, without counting rejected hits; `None` if it cannot be global.
    #[must_use]
    pub fn with_global_scope(&self, scope: GlobalScope) -> Option<Self> {
        let max_overshoot = match scope.max_overshoot {
            Overshoot::Hits(hits) => Overshoot::Hits(hits.min(clamp_to_u32(self.requests_per_unit()))),
            part @ Overshoot::MilliPercent(_) => part,
        };
        let scope = Scope::Global(GlobalScope { max_overshoot, ..scope });
        let limit = Self { scope, count_rejected: false, ..*self };
        let can_be_global = self.algorithm().can_be_global()
            && !self.follows_calendar_months()
            && self.calendar_windows().is_none()
            && self.ban().is_none();
        let has_reserve = limit.region_reserve() > 0 && limit.region_capacity() > 0;
        Some(limit).filter(|_| can_be_global && has_reserve)
    }

    /// Returns true for a limit that a region's Redis counts as a part, made by [`Limit::as_counted_in_region`].
    pub const fn is_counted_in_region(&self) -> bool {
        self.in_region.is_some()
    }

    /// Hits in a period that a region always has: a window's reserve, or the rate of a bucket.
    pub const fn region_reserve(&self) -> u64 {
        self.region_reserve_of(self.requests_per_unit())
    }

    /// Tokens of the bucket that a region always has.
    pub const fn region_capacity(&self) -> u64 {
        self.region_reserve_of(self.capacity())
    }

    /// Returns the limit whose numbers scripts get: the part of a limit that a region counts, otherwise the limit.
    pub fn limit_for_scripts(&self) -> Self {
        if self.is_counted_in_region() { self.region_part() } else { *self }
    }

    /// Number that scripts call the capacity of the counter: the capacity, or of a sliding_window_counter the most hits
    /// of a window that count.
    pub const fn capacity_for_scripts(&self) -> u64 {
        match self.counting_method() {
            CountingMethod::SlidingWindowCounter => self.most_hits_of_window(),
            _ => self.capacity(),
        }
    }

    /// Hits in a period that the global Redis may grant to all regions together: for a window, or as rates.
    pub const fn max_granted_hits(&self) -> u64 {
        self.requests_per_unit() - self.region_reserve() * self.region_count().get() as u64
    }

    /// Tokens of the bucket that the global Redis may grant to all regions together.
    pub const fn max_granted_capacity(&self) -> u64 {
        if self.requests_per_unit() == 0 {
            return 0;
        }
        self.capacity() - self.region_capacity() * self.region_count().get() as u64
    }

    /// Hits by which the part of a cut-off region is larger; under `local`, the hits of the part. The processes of a region
    /// that lost its own Redis may admit as many.
    pub const fn cut_off_allowance(&self) -> u64 {
        let Scope::Global(scope) = self.scope() else { return 0 };
        let regions = scope.regions.get() as u64;
        // A rolling span meets two windows, and a region may lose the global Redis and then its own. A bucket needs the
        // other half for what refills while replicas hold leases.
        let parts = if let Algorithm::TokenBucket = self.algorithm() { 8 } else { 4 };
        match scope.on_region_loss {
            _ if self.requests_per_unit() == 0 => 0,
            RegionLossPolicy::Share => {
                scope.max_overshoot.milli_hits(self.requests_per_unit()) / 1000 / (parts * regions)
            }
            RegionLossPolicy::Local => self.requests_per_unit() / regions,
            RegionLossPolicy::Deny => 0,
            RegionLossPolicy::Allow => UNLIMITED_ALLOWANCE,
        }
    }

    const fn region_reserve_of(&self, hits: u64) -> u64 {
        let Scope::Global(scope) = self.scope() else { return 0 };
        if self.requests_per_unit() == 0 {
            return 0;
        }
        let part = scope.reserve_milli_percent as u64;
        let part = if part < WHOLE_MILLI_PERCENT { part } else { WHOLE_MILLI_PERCENT };
        hits * part / WHOLE_MILLI_PERCENT / scope.regions.get() as u64
    }
}

impl GlobalScope {
    /// Returns the keys of a rule file that make a limit global, with their values.
    pub fn rule_file_keys(self) -> [(&'static str, String); 4] {
        [
            ("scope", "global".to_owned()),
            ("reserve", format_milli_percent(self.reserve_milli_percent)),
            ("max_overshoot", self.max_overshoot.to_string()),
            ("on_region_loss", self.on_region_loss.name().to_owned()),
        ]
    }
}

impl fmt::Display for Overshoot {
    /// Writes the value of `max_overshoot` in a rule file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hits(hits) => write!(f, "{hits}"),
            Self::MilliPercent(part) => f.write_str(&format_milli_percent(*part)),
        }
    }
}

impl Overshoot {
    /// Returns the overshoot of a limit of `requests_per_unit`, in thousandths of a hit, rounded down.
    pub const fn milli_hits(self, requests_per_unit: u64) -> u64 {
        match self {
            // In two steps, because 2^53 hits times 100 000 exceed 64 bits.
            Self::MilliPercent(part) => {
                requests_per_unit / 100 * part as u64 + requests_per_unit % 100 * part as u64 / 100
            }
            Self::Hits(hits) => 1000 * hits as u64,
        }
    }
}
