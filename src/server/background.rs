//! Background tasks of the process: expiry of counters and the health of the store.

use std::sync::Arc;
use std::time::Duration;

use crate::grpc::service::Service;
use crate::store::health::StoreHealth;

/// Interval between the sweeps of two parts of the memory store.
const SWEEP_INTERVAL: Duration = Duration::from_millis(125);
/// Number of parts; a sweep of all takes 4 s.
const SWEEP_PARTS: usize = 32;

/// Copies the state of the store's connections to the health pages.
pub(super) async fn report_store(service: Arc<Service>, health: Arc<StoreHealth>) {
    service.decider.store.report_health(&health).await;
}

/// Removes expired counters, one part of the store at a time.
pub(super) async fn sweep(service: Arc<Service>) {
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for part in (0..SWEEP_PARTS).cycle() {
        ticks.tick().await;
        let now = service.clock.now();
        service.decider.store.sweep(now, part, SWEEP_PARTS);
        if part == 0 {
            service.decider.metrics.top_keys.sweep(now);
        }
    }
}
