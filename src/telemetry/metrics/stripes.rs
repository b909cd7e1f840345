//! Assignment of threads to stripes of counters.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of stripes, a power of two; threads beyond it share one.
pub(super) const STRIPES: usize = 8;

/// Index of the calling thread's stripe, below [`STRIPES`].
pub(super) fn stripe_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static STRIPE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES);
    STRIPE.with(|stripe| *stripe)
}
