//! Health of the store, reported by the store and read by the health pages.
//!
//! A task that waits for changes is woken when the health changes, not for each report. A memory store is always
//! healthy.
//!
//! Decides: how often the health of the store is reported, who wakes health checks.
//! Decides: when a configuration error ends (`clear_misconfigured`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::sync::Notify;
use tokio::time::sleep;

/// Time between two reports of health.
const HEALTH_REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Health of the store; healthy until the store reports otherwise.
#[derive(Debug, Default)]
pub struct StoreHealth {
    lost: AtomicBool,
    misconfigured: ArcSwapOption<String>,
    failure: ArcSwapOption<String>,
    unserved_slots: ArcSwapOption<String>,
    changed: Notify,
}

/// Health of a store at one moment.
#[derive(Clone, Debug)]
pub(super) struct HealthReading {
    /// The store is unreachable.
    pub(super) is_lost: bool,
    /// Why it is: address of a server and kind of failure, as the log has it.
    pub(super) failure: Option<Arc<String>>,
    /// Misconfiguration of the store, free of secrets.
    pub(super) misconfiguration: Option<Arc<String>>,
    /// How many slots of a cluster no node serves, and why; `None` if all are served.
    pub(super) unserved_slots: Option<Arc<String>>,
}

impl StoreHealth {
    /// Records what `read` returns, ten times a second, until the future is dropped.
    pub(super) async fn record_repeatedly(&self, read: impl Fn() -> HealthReading) {
        loop {
            let HealthReading { is_lost, failure, misconfiguration, unserved_slots } = read();
            if self.unserved_slots.swap(unserved_slots.clone()).is_some() != unserved_slots.is_some() {
                self.changed.notify_one();
            }
            self.set_failure(failure);
            self.set_lost(is_lost);
            self.set_misconfigured(misconfiguration.as_ref().map(|text| text.as_str()));
            sleep(HEALTH_REPORT_INTERVAL).await;
        }
    }

    /// Records that the store is unreachable (`true`) or reachable.
    pub fn set_lost(&self, lost: bool) {
        if self.lost.swap(lost, Ordering::Relaxed) != lost {
            self.changed.notify_one();
        }
    }

    /// True if the store is unreachable.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Sets why the store is unreachable, free of secrets; `None` if it is reachable, or nothing is known.
    pub fn set_failure(&self, why: Option<Arc<String>>) {
        self.failure.store(why);
    }

    /// Why the store is unreachable: address of a server and kind of failure, as the log has it.
    pub fn failure(&self) -> Option<Arc<String>> {
        self.failure.load_full()
    }

    /// Sets the misconfiguration of the store, free of secrets; `None` clears it.
    pub fn set_misconfigured(&self, what: Option<&str>) {
        let old = self.misconfigured.swap(what.map(|what| Arc::new(what.to_owned())));
        if old.as_ref().map(|old| old.as_str()) != what {
            self.changed.notify_one();
        }
    }

    /// Misconfiguration of the store, if any.
    pub fn misconfiguration(&self) -> Option<Arc<String>> {
        self.misconfigured.load_full()
    }

    /// How many slots of a cluster no node serves, and why; `None` if all are served.
    pub fn unserved_slots(&self) -> Option<Arc<String>> {
        self.unserved_slots.load_full()
    }

    /// Waits for a change since the last call. Only one task may wait; changes between two calls count as one.
    pub async fn wait_for_change(&self) {
        self.changed.notified().await;
    }
}
