//! Metrics that the request path updates.
//!
//! A decision adds to counters that were looked up when its rules were loaded; all other work is done when metrics are
//! collected. Statistics of other parts stay with them and are read from there: failed charges (`redis_error`) with the
//! store. `serve::grpc::service` says what is a `service_error`.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

use super::decision_history::DecisionHistory;
use super::metrics::histogram::Histogram;
use super::metrics::limit_registry::LimitRegistry;
use super::metrics::striped_counters::StripedCounters;
use super::recently_created_keys::RecentlyCreatedKeys;
use super::top_keys::TopKeys;
use super::unmatched_descriptors::UnmatchedDescriptors;

/// Divisor of the number of keys tracked as rejected, which gives the number of keys tracked as busy.
const BUSIEST_KEYS_DIVISOR: usize = 4;

/// Metrics that the request path updates.
#[derive(Debug)]
pub struct ServiceMetrics {
    /// Statistics by limit.
    pub limits: LimitRegistry,
    /// Decisions of each limit by minute.
    pub history: DecisionHistory,
    /// Duration of decisions, without the delay of responses.
    pub decisions: Histogram,
    /// Duration of `ShouldRateLimit` calls.
    pub calls: Histogram,
    /// Duration of calls of the gRPC health service.
    pub health_checks: Histogram,
    /// Keys that are rejected most.
    pub top_keys: TopKeys,
    /// Keys with most hits, rejected or not, from a sample of the decisions.
    pub busiest_keys: TopKeys,
    /// Descriptors that matched no rule.
    pub unmatched: UnmatchedDescriptors,
    /// Keys whose counters were created last.
    pub recently_created_keys: RecentlyCreatedKeys,
    service_error_count: AtomicU64,
    rejected_request_count: StripedCounters<1>,
    global_shadow_mode_count: AtomicU64,
    is_off: bool,
}

impl Default for ServiceMetrics {
    /// Small limits, for tools and tests.
    fn default() -> Self {
        Self::new(1000, 256)
    }
}

impl ServiceMetrics {
    /// Empty metrics. `max_requested` bounds the series whose names come from requests, `top_keys` the keys that are
    /// tracked per minute.
    pub fn new(max_requested: usize, top_keys: usize) -> Self {
        Self {
            limits: LimitRegistry::new(max_requested),
            history: DecisionHistory::default(),
            decisions: Histogram::default(),
            calls: Histogram::default(),
            health_checks: Histogram::default(),
            top_keys: TopKeys::remembering_past(top_keys),
            busiest_keys: TopKeys::new(top_keys.div_ceil(BUSIEST_KEYS_DIVISOR)),
            unmatched: UnmatchedDescriptors::new(top_keys > 0),
            recently_created_keys: RecentlyCreatedKeys::default(),
            service_error_count: AtomicU64::new(0),
            rejected_request_count: StripedCounters::default(),
            global_shadow_mode_count: AtomicU64::new(0),
            is_off: false,
        }
    }

    /// Switches off counting and timing on the request path.
    #[must_use]
    pub fn without_request_counts(mut self) -> Self {
        self.is_off = true;
        self
    }

    /// True if counting and timing are off.
    pub const fn is_off(&self) -> bool {
        self.is_off
    }

    /// Returns the current time for [`Histogram::observe_since`]; `None` if timing is off.
    pub fn start_timer(&self) -> Option<Instant> {
        (!self.is_off).then(Instant::now)
    }

    /// Counts a request that failed for a reason other than the store.
    pub fn record_error_outside_store(&self) {
        self.service_error_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that was rejected; does nothing if counting is off.
    pub fn record_rejected_request(&self) {
        if !self.is_off {
            self.rejected_request_count.add_to_counter(0, 1);
        }
    }

    /// Number of requests that were rejected, however many of their limits were exceeded.
    pub fn rejected_request_count(&self) -> u64 {
        self.rejected_request_count.counter_value(0)
    }

    /// Counts a request that was admitted because of SHADOW_MODE.
    pub fn record_global_shadow_mode(&self) {
        self.global_shadow_mode_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of requests that failed for a reason other than the store.
    pub fn service_error_count(&self) -> u64 {
        self.service_error_count.load(Ordering::Relaxed)
    }

    /// Number of requests that were admitted because of SHADOW_MODE.
    pub fn global_shadow_mode_count(&self) -> u64 {
        self.global_shadow_mode_count.load(Ordering::Relaxed)
    }
}
