//! How long things took, counted in buckets that any thread adds to without waiting.
//!
//! The buckets are dense below 20 ms, which is what Envoy waits, and hold the default buckets of Prometheus besides, so
//! that what was charged from those goes on. Each thread has a stripe of its own as a rule, so that two cores do not pass
//! one line of memory to and fro with each decision. A reading adds the stripes up, and may see half of a thread's last
//! observation. Nothing here knows what is measured.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::clock::micros;

/// The upper bounds of the buckets, in microseconds, ascending; what lies above the last is in one more bucket.
pub const BOUNDS_US: [u64; 22] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 7_500, 10_000, 15_000, 20_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000,
];

const BUCKETS: usize = BOUNDS_US.len() + 1;
/// Enough that few threads share one; a power of two.
const STRIPES: usize = 8;

/// Durations, counted.
#[derive(Debug, Default)]
pub struct Histogram {
    stripes: [Stripe; STRIPES],
}

/// Lines of memory of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe {
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

/// What was observed until now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// How many lie in each bucket, those below it not included; the last is what lies above all bounds.
    pub counts: [u64; BUCKETS],
    /// All durations together, in nanoseconds; it wraps after 584 years of waiting.
    pub sum_ns: u64,
}

impl Histogram {
    /// Counts one that took so long.
    pub fn observe(&self, took: Duration) {
        let us = micros(took);
        // A bound belongs to the bucket below it, as Prometheus has it; parts of a microsecond count as one more.
        let us = us.saturating_add(u64::from(!took.subsec_nanos().is_multiple_of(1_000)));
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        let stripe = &self.stripes[stripe()];
        stripe.counts[bucket].fetch_add(1, Ordering::Relaxed);
        stripe.sum_ns.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Counts what began then and ends now; `None`: nothing is timed.
    pub fn observe_since(&self, begun: Option<Instant>) {
        if let Some(begun) = begun {
            self.observe(begun.elapsed());
        }
    }

    /// What was observed until now.
    pub fn snapshot(&self) -> HistogramSnapshot {
        let mut observed = HistogramSnapshot::default();
        for stripe in &self.stripes {
            for (sum, count) in observed.counts.iter_mut().zip(&stripe.counts) {
                *sum += count.load(Ordering::Relaxed);
            }
            observed.sum_ns = observed.sum_ns.wrapping_add(stripe.sum_ns.load(Ordering::Relaxed));
        }
        observed
    }
}

impl HistogramSnapshot {
    /// How many were observed.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// The stripe of this thread.
fn stripe() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES);
    MINE.with(|mine| *mine)
}
