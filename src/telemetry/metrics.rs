//! What is counted and timed, and how it is told.
//!
//! On the way of a request a metric is one addition to a number that was found beforehand; everything else happens when
//! somebody reads. What other parts of the process know of themselves is not kept twice here: whoever reads asks them.
//! Names that come from strangers have a bound.

pub mod family;
pub mod histogram;
pub mod mapper;
pub mod limit_stats;
pub mod limit_registry;
pub mod prometheus;
pub mod statsd;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use self::histogram::Histogram;
use self::limit_registry::LimitRegistry;
use super::recent_keys::RecentKeys;
use super::top_keys::TopKeys;

/// What is counted on the way of requests.
#[derive(Debug)]
pub struct Metrics {
    /// By limit.
    pub limits: LimitRegistry,
    /// How long decisions took, without the time that answers were held.
    pub decisions: Histogram,
    /// How long calls of `ShouldRateLimit` took.
    pub calls: Histogram,
    /// How long calls of the health service took.
    pub health_checks: Histogram,
    /// The keys that are refused most.
    pub top_keys: TopKeys,
    /// The keys whose counters began last.
    pub recent_keys: RecentKeys,
    service_errors: AtomicU64,
    global_shadow_mode: AtomicU64,
    is_off: bool,
}

impl Default for Metrics {
    /// With room for what a few requests bring: for tools and tests.
    fn default() -> Self {
        Self::new(1000, 256)
    }
}

impl Metrics {
    /// Nothing counted yet; at most so many series of names that come with requests, and so many of the keys that are
    /// refused most.
    pub fn new(most_requested: usize, top_keys: usize) -> Self {
        Self {
            limits: LimitRegistry::new(most_requested),
            decisions: Histogram::default(),
            calls: Histogram::default(),
            health_checks: Histogram::default(),
            top_keys: TopKeys::new(top_keys),
            recent_keys: RecentKeys::default(),
            service_errors: AtomicU64::new(0),
            global_shadow_mode: AtomicU64::new(0),
            is_off: false,
        }
    }

    /// The same where nothing is counted or timed on the way of a request.
    #[must_use]
    pub fn disabled(mut self) -> Self {
        self.is_off = true;
        self
    }

    /// Whether nothing is counted.
    pub const fn is_off(&self) -> bool {
        self.is_off
    }

    /// The time, if anything is timed: for [`Histogram::observe_since`].
    pub fn begin(&self) -> Option<Instant> {
        (!self.is_off).then(Instant::now)
    }

    /// Counts a request that could not be decided through no fault of the store.
    pub fn record_service_error(&self) {
        self.service_errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that SHADOW_MODE let pass.
    pub fn record_global_shadow(&self) {
        self.global_shadow_mode.fetch_add(1, Ordering::Relaxed);
    }

    /// Requests that could not be decided through no fault of the store.
    pub fn service_errors(&self) -> u64 {
        self.service_errors.load(Ordering::Relaxed)
    }

    /// Requests that SHADOW_MODE let pass.
    pub fn global_shadow_mode(&self) -> u64 {
        self.global_shadow_mode.load(Ordering::Relaxed)
    }
}
