//! Counters that stay cheap when many threads add to them.
//!
//! All threads share one block of counters until they contend for it. From then on each stripe of threads has a block
//! of its own, as in Java's `LongAdder`. A limit that is rarely used keeps one block.

use std::array;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Number of stripes, a power of two; threads beyond it share one.
pub(crate) const STRIPES: usize = 8;
/// Minimum number of conflicts before there are blocks for stripes.
const MIN_CONFLICTS_FOR_STRIPES: u64 = 64;
/// Additions for each conflict; fewer mean contention.
const MIN_ADDITIONS_PER_CONFLICT: u64 = 64;

/// `N` counters.
#[derive(Debug, Default)]
pub struct StripedCounters<const N: usize> {
    shared: CacheAlignedCounters<N>,
    /// Additions to `shared` during which another thread changed the counter.
    conflicts: AtomicU64,
    stripes: OnceLock<Box<[CacheAlignedCounters<N>; STRIPES]>>,
}

/// Counters on cache lines of their own.
#[derive(Debug)]
#[repr(align(128))]
struct CacheAlignedCounters<const N: usize>([AtomicU64; N]);

impl<const N: usize> StripedCounters<N> {
    /// Adds to the counter `at`, which is below `N`; wraps.
    pub fn add_to_counter(&self, at: usize, count: u64) {
        if let Some(stripes) = self.stripes.get() {
            stripes[stripe_index_of_this_thread()].0[at].fetch_add(count, Ordering::Relaxed);
            return;
        }
        let counter = &self.shared.0[at];
        let before = counter.load(Ordering::Relaxed);
        let exchanged =
            counter.compare_exchange(before, before.wrapping_add(count), Ordering::Relaxed, Ordering::Relaxed);
        if exchanged.is_err() {
            counter.fetch_add(count, Ordering::Relaxed);
            self.count_conflict_and_add_stripes(before);
        }
    }

    /// Value of the counter `at`, which is below `N`.
    pub fn counter_value(&self, at: usize) -> u64 {
        let blocks = self.stripes.get().into_iter().flat_map(|stripes| stripes.iter());
        let values = blocks.chain([&self.shared]).map(|block| block.0[at].load(Ordering::Relaxed));
        values.fold(0, u64::wrapping_add)
    }

    /// Counts a conflict on a counter with about `additions` additions; adds the stripes if conflicts are frequent.
    #[cold]
    fn count_conflict_and_add_stripes(&self, additions: u64) {
        let conflicts = self.conflicts.fetch_add(1, Ordering::Relaxed) + 1;
        if conflicts >= MIN_CONFLICTS_FOR_STRIPES && conflicts > additions / MIN_ADDITIONS_PER_CONFLICT {
            self.stripes.get_or_init(Box::default);
        }
    }
}

impl<const N: usize> Default for CacheAlignedCounters<N> {
    fn default() -> Self {
        Self(array::from_fn(|_| AtomicU64::new(0)))
    }
}

/// Index of the calling thread's stripe, below [`STRIPES`].
pub(crate) fn stripe_index_of_this_thread() -> usize {
    static NEXT_STRIPE: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static STRIPE: usize = NEXT_STRIPE.fetch_add(1, Ordering::Relaxed) % STRIPES);
    STRIPE.with(|stripe| *stripe)
}
