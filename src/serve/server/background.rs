//! Background tasks of the process: expiry of counters and the health of the store.

use std::sync::Arc;
use std::time::Duration;

use crate::base::clock::Time;
use crate::serve::grpc::service::Service;
use crate::store::health::StoreHealth;
use crate::store::stats::MemoryUsage;
use crate::telemetry::log_throttle::LogThrottle;

/// Interval between the sweeps of two parts of the memory store.
const SWEEP_INTERVAL: Duration = Duration::from_millis(125);
/// Number of parts; a sweep of all takes 4 s.
const SWEEP_PARTS: usize = 32;

/// Copies the state of the store's connections to the health pages.
pub(super) async fn report_store(service: Arc<Service>, health: Arc<StoreHealth>) {
    service.decider.store.report_health(&health).await;
}

/// Removes expired counters, one part of the store at a time. Warns about counters that were evicted.
pub(super) async fn sweep(service: Arc<Service>) {
    let mut logged_evictions = 0;
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for part in (0..SWEEP_PARTS).cycle() {
        ticks.tick().await;
        let now = service.clock.now();
        service.decider.store.sweep(now, part, SWEEP_PARTS);
        if part == 0 {
            service.decider.metrics.top_keys.sweep(now);
            warn_evicted(&service.decider.store.stats().memory, &mut logged_evictions, now);
        }
    }
}

/// Warns, once a minute at most, if counters were evicted since the last warning.
fn warn_evicted(usage: &MemoryUsage, logged: &mut u64, now: Time) {
    static THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    if usage.evicted > *logged && THROTTLE.allow(now).is_some() {
        let (evicted, capacity_bytes) = (usage.evicted - *logged, usage.capacity_bytes);
        *logged = usage.evicted;
        tracing::warn!(
            evicted,
            capacity_bytes,
            "counters evicted: TOLLKEEPER_MEMORY_BYTES is used up, and these callers start at zero \
             (raise it, or find keys that grow without end: `tollkeeper top --rules --finding keys_seen_once`)"
        );
    }
}
