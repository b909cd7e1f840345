//! Division of a global limit among regions.
//!
//! Of a limit of L hits, each of n regions always has its *reserve*; the global Redis grants the rest. A region that is
//! cut off may exceed its part by the *cut-off allowance* in each tumbling period. A limit of one region has neither.
//!
//! The amounts are here: reserve, allowance, lifetime of prepaid hits. `algorithm::region` counts with them, and
//! `store::redis::regions` asks for grants.
//!
//! Decides: a region's reserve (the rule's, divided equally); the cut-off allowance (`on_region_loss`).
//! Decides: the life of prepaid hits; which share of `max_overshoot` is for regions, prepaid hits and clocks.

use std::fmt;
use std::num::NonZeroU16;

use super::algorithm::{Algorithm, CountingMethod};
use super::{Consistency, GlobalScope, Limit, Overshoot, RegionLossPolicy, Scope};

/// Allowance of a region that admits everything while it is cut off, in hits.
const UNLIMITED_ALLOWANCE: u64 = 1 << 40;

/// Longest lifetime of a counter: 285 years.
const MAX_TTL_MS: u64 = (1 << 53) / 1000;

/// Prepaid hits of a token bucket last for the period divided by this number, within the bounds below.
const PREPAID_LIFETIME_DIVISOR: u64 = 20;
/// Shortest time for which prepaid hits last, in microseconds: a region asks once a second.
const MIN_PREPAID_LIFETIME_US: u64 = 2_000_000;
/// Longest time for which prepaid hits last, in microseconds: a region that dies keeps them for that long.
const MAX_PREPAID_LIFETIME_US: u64 = 30_000_000;

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

    /// Returns the limit as the region's Redis counts it; a limit of one region stays as it is.
    #[must_use]
    pub const fn as_counted_in_region(&self) -> Self {
        let counting = match (self.scope(), self.algorithm()) {
            (Scope::Global(_), Algorithm::FixedWindow | Algorithm::SlidingWindowCounter) => {
                CountingMethod::RegionWindow
            }
            (Scope::Global(_), Algorithm::TokenBucket) => CountingMethod::RegionBucket,
            (Scope::Global(_), Algorithm::LeakyBucket | Algorithm::SlidingWindowLog | Algorithm::Concurrent)
            | (Scope::Region, _) => self.counting_method(),
        };
        Self { counting, ..*self }
    }

    /// Returns the limit that a region counts alone, in a counter of its own: its part.
    #[must_use]
    pub const fn region_part(&self) -> Self {
        let (requests_per_unit, capacity) = (self.region_reserve(), self.region_capacity());
        Self { requests_per_unit, scope: Scope::Region, ..*self }.with_capacity(capacity)
    }

    /// Returns the limit that the global Redis counts: without the parts of all regions.
    #[must_use]
    pub const fn without_region_parts(&self) -> Self {
        let (requests_per_unit, capacity) = (self.max_granted_hits(), self.max_granted_capacity());
        Self { requests_per_unit, scope: Scope::Region, ..*self }.with_capacity(capacity)
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
            Overshoot::Hits(hits) => Overshoot::Hits(hits.min(self.requests_per_unit())),
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

    /// Returns true for a limit that a region's Redis counts from grants, made by [`Limit::as_counted_in_region`].
    pub const fn is_counted_in_region(&self) -> bool {
        matches!(self.counting_method(), CountingMethod::RegionWindow | CountingMethod::RegionBucket)
    }

    /// Hits in a period that a region always has: a window's reserve, or the rate of a bucket.
    pub const fn region_reserve(&self) -> u32 {
        self.region_reserve_of(self.requests_per_unit())
    }

    /// Tokens of the bucket that a region always has.
    pub const fn region_capacity(&self) -> u32 {
        self.region_reserve_of(self.capacity())
    }

    /// Hits in a period that apply to the counter: the region's reserve if a region counts it, otherwise the limit's.
    pub const fn effective_requests_per_unit(&self) -> u32 {
        if self.is_counted_in_region() { self.region_reserve() } else { self.requests_per_unit() }
    }

    /// Capacity that applies to the counter: the region's own if a region counts it, otherwise the limit's.
    pub const fn effective_capacity(&self) -> u32 {
        if self.is_counted_in_region() { self.region_capacity() } else { self.capacity() }
    }

    /// Number that scripts call the capacity of the counter: [`Limit::effective_capacity`], or of a
    /// sliding_window_counter the most hits of a window that count.
    pub const fn capacity_for_scripts(&self) -> u64 {
        match self.counting_method() {
            CountingMethod::SlidingWindowCounter => self.most_hits_of_window(),
            _ => self.effective_capacity() as u64,
        }
    }

    /// Hits in a period that the global Redis may grant to all regions together: for a window, or as rates.
    pub const fn max_granted_hits(&self) -> u32 {
        self.requests_per_unit() - self.region_reserve() * self.region_count().get() as u32
    }

    /// Tokens of the bucket that the global Redis may grant to all regions together.
    pub const fn max_granted_capacity(&self) -> u32 {
        if self.requests_per_unit() == 0 {
            return 0;
        }
        self.capacity() - self.region_capacity() * self.region_count().get() as u32
    }

    /// Time for which a region may admit prepaid hits of a token bucket, in microseconds: a twentieth of the period
    /// within 2 to 30 s, but at most what refills a quarter of the tokens for grants and
    /// [`Self::max_overshoot_by_prepaid_hits`].
    pub fn prepaid_lifetime_us(&self) -> u64 {
        let by_period_us =
            (self.period_us() / PREPAID_LIFETIME_DIVISOR).clamp(MIN_PREPAID_LIFETIME_US, MAX_PREPAID_LIFETIME_US);
        let refilled = u64::from(self.max_granted_capacity() / 4) + u64::from(self.max_overshoot_by_prepaid_hits());
        let most_us = u128::from(refilled) * u128::from(self.period_us()) / u128::from(self.max_granted_hits().max(1));
        by_period_us.min(u64::try_from(most_us).unwrap_or(u64::MAX))
    }

    /// Tokens of the bucket from which the global Redis grants prepaid hits: those for grants, less what refills while
    /// a region may admit the hits of a grant.
    pub fn prepaid_capacity(&self) -> u32 {
        let refilled = u128::from(self.max_granted_hits()) * u128::from(self.prepaid_lifetime_us());
        let refilled = u32::try_from(refilled.div_ceil(u128::from(self.period_us()))).unwrap_or(u32::MAX);
        let capacity = self.max_granted_capacity();
        capacity.saturating_add(self.max_overshoot_by_prepaid_hits()).saturating_sub(refilled).min(capacity)
    }

    /// Part of the overshoot that prepaid hits may use: a quarter, in proportion to what is granted of the limit.
    pub fn max_overshoot_by_prepaid_hits(&self) -> u32 {
        let Scope::Global(scope) = self.scope() else { return 0 };
        let limit = self.requests_per_unit();
        let milli_hits = u128::from(scope.max_overshoot.milli_hits(limit));
        let hits = milli_hits * u128::from(self.max_granted_hits()) / (4000 * u128::from(limit.max(1)));
        u32::try_from(hits).unwrap_or(u32::MAX)
    }

    /// Time for which the Redis of a region keeps the counter after a charge, in milliseconds.
    ///
    /// Two windows, or the time in which the region's own bucket fills, and longer than prepaid hits last.
    pub fn region_ttl_ms(&self) -> u64 {
        let period_ms = self.period_us() / 1000;
        let needed_ms = match self.algorithm() {
            Algorithm::TokenBucket => {
                let periods = u64::from(self.region_capacity()).div_ceil(u64::from(self.region_reserve().max(1)));
                period_ms.saturating_mul(2 + periods).max(2 * MAX_PREPAID_LIFETIME_US / 1000)
            }
            _ => 2 * period_ms,
        };
        needed_ms.saturating_add(2000).min(MAX_TTL_MS)
    }

    /// Uncertainty of global time in microseconds, of which a token bucket may make half of its overshoot: period x
    /// `max_overshoot` / 2, as a part of the limit. Half as much where leases use the other quarter.
    pub fn clock_slack_us(&self) -> u64 {
        let Scope::Global(scope) = self.scope() else { return 0 };
        let (limit, milli_hits) = (self.requests_per_unit(), scope.max_overshoot.milli_hits(self.requests_per_unit()));
        let parts = if self.consistency() == Consistency::Strict { 2000 } else { 4000 };
        let slack_us = u128::from(self.period_us()) * u128::from(milli_hits) / (parts * u128::from(limit.max(1)));
        u64::try_from(slack_us).unwrap_or(u64::MAX).min(self.period_us())
    }

    /// Hits that a cut-off region may admit in a tumbling period beyond its grants and its reserve; the processes of a
    /// region that lost its own Redis may admit as many.
    pub const fn cut_off_allowance(&self) -> u64 {
        let Scope::Global(scope) = self.scope() else { return 0 };
        let regions = scope.regions.get() as u64;
        // A rolling span meets two tumbling periods, of a region's Redis and of its processes. A bucket needs the other
        // half for the uncertainty of clocks and for prepaid hits.
        let parts = if let Algorithm::TokenBucket = self.algorithm() { 8 } else { 4 };
        match scope.on_region_loss {
            _ if self.requests_per_unit() == 0 => 0,
            RegionLossPolicy::Share => {
                scope.max_overshoot.milli_hits(self.requests_per_unit()) / 1000 / (parts * regions)
            }
            RegionLossPolicy::Local => self.requests_per_unit() as u64 / regions,
            RegionLossPolicy::Deny => 0,
            RegionLossPolicy::Allow => UNLIMITED_ALLOWANCE,
        }
    }

    /// Returns true if the allowances of all regions are parts of the limit and its overshoot, so that regions must
    /// agree on their number.
    pub const fn is_cut_off_allowance_part_of_limit(&self) -> bool {
        let Scope::Global(scope) = self.scope() else { return false };
        matches!(scope.on_region_loss, RegionLossPolicy::Share | RegionLossPolicy::Deny)
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most `hits`: a valid scope reserves 100 % at most")]
    const fn region_reserve_of(&self, hits: u32) -> u32 {
        let Scope::Global(scope) = self.scope() else { return 0 };
        if self.requests_per_unit() == 0 {
            return 0;
        }
        let part = scope.reserve_milli_percent as u64;
        let part = if part < WHOLE_MILLI_PERCENT { part } else { WHOLE_MILLI_PERCENT };
        let reserved = hits as u64 * part / WHOLE_MILLI_PERCENT;
        (reserved / scope.regions.get() as u64) as u32
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

/// Formats thousandths of a percent: `12.5%`.
pub fn format_milli_percent(milli_percent: u32) -> String {
    let decimals = format!("{}.{:03}", milli_percent / 1000, milli_percent % 1000);
    format!("{}%", decimals.trim_end_matches('0').trim_end_matches('.'))
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
    pub const fn milli_hits(self, requests_per_unit: u32) -> u64 {
        match self {
            Self::MilliPercent(part) => requests_per_unit as u64 * part as u64 / 100,
            Self::Hits(hits) => 1000 * hits as u64,
        }
    }
}
