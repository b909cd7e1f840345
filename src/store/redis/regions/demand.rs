//! How many hits a region asks the global Redis for, by what callers asked of its counter.
//!
//! Decides: how many hits a region asks the global Redis for, and how often.

use crate::limit::algorithm::global_bucket::GlobalBucketParameters;
use crate::limit::algorithm::region::MIN_GRANT_REQUEST_INTERVAL_US;
use crate::limit::algorithm::region_bucket::BucketCounts;
use crate::limit::algorithm::region_window::WindowCounts;

/// Time that the hits which are left must last: until a grant is requested and has crossed an ocean, with some margin.
const LOOKAHEAD_US: u64 = 1_500_000;
/// Shortest time over which the present rate of a window is measured.
const MIN_WINDOW_RATE_SPAN_US: u64 = 100_000;
/// Shortest time over which the demand on a bucket is measured, in microseconds.
const MIN_BUCKET_RATE_SPAN_US: u64 = 250_000;
/// Shortest time between two requests, of a bucket during a burst or of a short sliding window, in microseconds.
const BURST_REQUEST_INTERVAL_US: u64 = 250_000;
/// Number of grant requests for a sliding window per period, within the intervals of other requests.
const SLIDING_REQUESTS_PER_PERIOD: u64 = 30;
/// Time between two requests of a window of which nothing is left to grant, in microseconds.
const EXHAUSTED_REQUEST_INTERVAL_US: u64 = 5_000_000;
/// Divisor of a window's period: demand that was measured over this part is steady, and predicts the rest.
const STEADY_WINDOW_DIVISOR: u64 = 12;

/// Demand on a counter of windows at the time of its grant request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowDemand {
    /// Hits that are left.
    left: u64,
    /// Hits that callers ask for until the window ends.
    until_end: u64,
    /// Hits that callers ask for within [`LOOKAHEAD_US`].
    soon: u64,
    /// Hits that the region has used in the window.
    used: u64,
    /// Microseconds until the window ends.
    pub rest_us: u64,
    period_us: u64,
}

impl WindowDemand {
    /// Estimates the demand at `global_us`, a time of the window in microseconds. `reserve` is that of the region.
    pub fn estimate_at(counts: &WindowCounts, reserve: u64, period_us: u64, global_us: u64) -> Self {
        let elapsed_us = global_us.saturating_sub(counts.window * period_us).min(period_us);
        let rest_us = period_us - elapsed_us;
        let now = scale_by_fraction(counts.requested, rest_us, elapsed_us.max(period_us / STEADY_WINDOW_DIVISOR));
        let before = scale_by_fraction(counts.previous_requested, rest_us, period_us);
        Self {
            left: counts.granted + reserve.saturating_sub(counts.reserve_used),
            until_end: now.max(before),
            used: counts.granted_total.saturating_sub(counts.granted) + counts.reserve_used,
            soon: scale_by_fraction(
                counts.requested,
                LOOKAHEAD_US.min(rest_us),
                elapsed_us.max(MIN_WINDOW_RATE_SPAN_US),
            ),
            rest_us,
            period_us,
        }
    }

    /// Hits to request: those of the rest of the window and a tenth more, less what is left. At least a fourth of what
    /// is used, so that requests grow with a burst late in a long window, and at least one.
    pub fn hits_to_request(&self) -> u32 {
        let until_end = self.until_end + self.until_end / 10;
        let wanted = until_end.max(self.soon).saturating_sub(self.left).max(self.used / 4).max(1);
        u32::try_from(wanted).unwrap_or(u32::MAX)
    }

    /// Number of hits left at which the next request is opened, after a grant of `hits`.
    pub fn request_more_at_hits_left(&self, hits: u64) -> u64 {
        self.soon.min((self.left + hits) / 2)
    }

    /// Time after which the next request may be opened. A fixed window of which nothing is left is asked rarely. What a
    /// sliding window frees between two requests lies idle, so those of a short window are frequent.
    pub fn next_request_pause_us(&self, is_sliding: bool, granted: u64) -> u64 {
        if is_sliding {
            (self.period_us / SLIDING_REQUESTS_PER_PERIOD)
                .clamp(BURST_REQUEST_INTERVAL_US, MIN_GRANT_REQUEST_INTERVAL_US)
        } else if granted == 0 {
            EXHAUSTED_REQUEST_INTERVAL_US.min(self.rest_us).max(MIN_GRANT_REQUEST_INTERVAL_US)
        } else {
            MIN_GRANT_REQUEST_INTERVAL_US
        }
    }
}

/// Demand on a bucket at the time of its grant request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketDemand {
    /// Hits that are left.
    left: u64,
    /// Hits that callers ask for in half of the time that the hits of a grant last, at least in [`LOOKAHEAD_US`].
    ahead: u64,
    /// Hits that callers ask for within [`LOOKAHEAD_US`].
    soon: u64,
    /// Tokens that the shared bucket holds.
    capacity: u64,
}

impl BucketDemand {
    /// Estimates the demand at `now_us`, a time of the region's Redis in microseconds, from the last seconds.
    pub fn estimate_at(counts: &BucketCounts, pool: GlobalBucketParameters, now_us: u64) -> Self {
        let elapsed_us = now_us.saturating_sub(counts.requested_since.as_micros()).max(MIN_BUCKET_RATE_SPAN_US);
        Self {
            left: counts.hits_left(),
            ahead: scale_by_fraction(
                counts.requested,
                (pool.prepaid_lifetime_us / 2).max(LOOKAHEAD_US).min(pool.prepaid_lifetime_us),
                elapsed_us,
            ),
            soon: scale_by_fraction(counts.requested, LOOKAHEAD_US.min(pool.prepaid_lifetime_us), elapsed_us),
            capacity: u64::from(pool.capacity),
        }
    }

    /// Hits to request: those for half of the time that they last, less what is left; at least one.
    pub fn hits_to_request(&self) -> u32 {
        u32::try_from(self.ahead.saturating_sub(self.left).max(1)).unwrap_or(u32::MAX)
    }

    /// Number of hits left at which the next request is opened, after a grant of `hits`.
    pub fn request_more_at_hits_left(&self, hits: u64) -> u64 {
        self.soon.min((self.left + hits) / 2)
    }

    /// Time after which the next request may be opened: soon during a burst, of which a grant covers a part while the
    /// shared bucket has more.
    pub fn next_request_pause_us(&self, granted: u64, free: u64) -> u64 {
        let is_burst = granted < u64::from(self.hits_to_request()) && 4 * free > self.capacity;
        if is_burst { BURST_REQUEST_INTERVAL_US } else { MIN_GRANT_REQUEST_INTERVAL_US }
    }
}

/// Returns a pause between two requests, 3/4 to 5/4 of `pause_us` by any `random` number: regions that ask at equal
/// distances would keep their order, and the first takes most of what has become free.
pub const fn jittered_pause_us(pause_us: u64, random: u64) -> u64 {
    pause_us / 4 * 3 + pause_us / 2 * (random % 1001) / 1000
}

/// Computes floor(count x part / whole).
fn scale_by_fraction(count: u64, part: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(count) * u128::from(part) / u128::from(whole.max(1))).unwrap_or(u64::MAX)
}
