//! Lock-free histogram of durations.
//!
//! Buckets are dense below 20 ms, Envoy's default timeout, and include the default buckets of Prometheus, so dashboards
//! made for those keep working. Counters are striped by thread, so that cores rarely write to the same cache line. A
//! snapshot sums the stripes and can miss half of an observation made meanwhile.
//!
//! Decides: buckets of histograms.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::striped_counters::{STRIPES, stripe_index_of_this_thread};
use crate::base::clock::to_micros;

/// Upper bounds of the buckets in microseconds, ascending; one more bucket counts what is above the last.
pub const BUCKET_BOUNDS_US: [u64; 22] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 7_500, 10_000, 15_000, 20_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000,
];

const BUCKET_COUNT: usize = BUCKET_BOUNDS_US.len() + 1;

/// Histogram of durations.
#[derive(Debug, Default)]
pub struct Histogram {
    stripes: [Stripe; STRIPES],
}

/// Counters of some threads, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe {
    counts: [AtomicU64; BUCKET_COUNT],
    sum_ns: AtomicU64,
}

/// State of a histogram at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Number of observations in each bucket, not cumulative; the last bucket counts what is above all bounds.
    pub counts: [u64; BUCKET_COUNT],
    /// Sum of all observations in nanoseconds; wraps after 584 years.
    pub sum_ns: u64,
}

impl Histogram {
    /// Adds an observation.
    pub fn observe(&self, duration: Duration) {
        let us = to_micros(duration);
        // As in Prometheus, a bound belongs to the bucket below it; fractions of a microsecond round up.
        let us = us.saturating_add(u64::from(!duration.subsec_nanos().is_multiple_of(1_000)));
        let bucket = BUCKET_BOUNDS_US.partition_point(|bound| *bound < us);
        let stripe = &self.stripes[stripe_index_of_this_thread()];
        stripe.counts[bucket].fetch_add(1, Ordering::Relaxed);
        stripe.sum_ns.fetch_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Adds the time since `started`; does nothing for `None`.
    pub fn observe_since(&self, started: Option<Instant>) {
        if let Some(started) = started {
            self.observe(started.elapsed());
        }
    }

    /// Returns the current state.
    pub fn snapshot(&self) -> HistogramSnapshot {
        let mut snapshot = HistogramSnapshot::default();
        for stripe in &self.stripes {
            for (sum, count) in snapshot.counts.iter_mut().zip(&stripe.counts) {
                *sum += count.load(Ordering::Relaxed);
            }
            snapshot.sum_ns = snapshot.sum_ns.wrapping_add(stripe.sum_ns.load(Ordering::Relaxed));
        }
        snapshot
    }
}

impl HistogramSnapshot {
    /// Total number of observations.
    pub fn observation_count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// Returns the upper bound of the bucket with a quantile of durations, in microseconds.
///
/// `None` without durations, or if the quantile is above all bounds. `counts` are those of a [`HistogramSnapshot`], or
/// a sum of several; `per_mille` is 500 for the median.
pub fn quantile_bound_us(counts: &[u64], per_mille: u64) -> Option<u64> {
    let total: u128 = counts.iter().copied().map(u128::from).sum();
    // Rank of the quantile, from 1, rounded up.
    let rank = (total * u128::from(per_mille)).div_ceil(1000).max(1);
    let mut seen = 0;
    let bucket = counts.iter().position(|count| {
        seen += u128::from(*count);
        seen >= rank
    });
    BUCKET_BOUNDS_US.get(bucket?).copied()
}
