//! Families of limits that differ in one number, in which a search finds the smallest.

use crate::limit::algorithm::{Algorithm, Capacity};
use crate::limit::period::Period;
use crate::limit::{Limit, LimitSpec};

/// Limits of one algorithm and period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitFamily {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Period.
    pub period: Period,
    /// token_bucket and leaky_bucket: bound of the bucket, or queue, in multiples of `requests_per_unit`.
    pub capacity_factor: u32,
    /// Keys of the limit that a search does not change.
    pub fixed_keys: FixedKeys,
}

/// Keys of a limit that a search does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedKeys {
    /// `max_wait` in microseconds.
    pub max_wait_us: Option<u64>,
    /// Fixed windows of months follow the calendar.
    pub calendar_months: bool,
    /// Maximum `requests_per_unit` of a sliding_window_log.
    pub log_max: u32,
}

impl LimitFamily {
    /// The limit of `requests_per_unit`; `capacity` of a bucket or queue, in place of the largest one of the family.
    ///
    /// `None` if a limit cannot be so large.
    pub fn limit(&self, requests_per_unit: u32, capacity: Option<u32>) -> Option<Limit> {
        let properties = self.algorithm.properties();
        let largest = requests_per_unit.saturating_mul(self.capacity_factor);
        let capacity = capacity.unwrap_or(largest).max(1);
        let FixedKeys { max_wait_us, calendar_months, log_max } = self.fixed_keys;
        let spec = LimitSpec {
            bucket_size: (properties.capacity == Capacity::BucketSize).then_some(capacity),
            queue_size: (properties.capacity == Capacity::QueueSize).then_some(capacity),
            max_wait_us,
            calendar_months,
            log_max,
            ..LimitSpec::new(self.algorithm, requests_per_unit, self.period)
        };
        Limit::new(&spec).ok()
    }

    /// True if the limit has a bucket or a queue of its own size.
    pub const fn has_capacity(&self) -> bool {
        self.algorithm.properties().capacity.key().is_some()
    }

    /// Largest `requests_per_unit` of the family.
    pub fn max_requests_per_unit(&self) -> u32 {
        if self.algorithm.properties().has_log() { self.fixed_keys.log_max } else { u32::MAX }
    }
}
