//! Health and readiness of the process, the same over HTTP and gRPC.
//!
//! Healthy: not draining, and rules and store are there if the settings require them. A lost store alone does not make
//! the process unhealthy by default, because that would restart all replicas at once. Ready: healthy, rules are loaded,
//! the store is configured correctly, and it is reachable, all slots of a cluster included, if a rule, or the defaults of a
//! domain, need it.
//!
//! Decides: whether the process is healthy and ready (`/readyz`), without rules or without its store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rules::live::LiveRules;
use crate::rules::rule::set::RuleSet;
use crate::store::health::StoreHealth;

/// Health and readiness of the process.
#[derive(Debug)]
pub struct Health {
    is_draining: AtomicBool,
    requirements: HealthRequirements,
    rules: Arc<LiveRules>,
    store: Arc<StoreHealth>,
}

/// Conditions of being healthy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthRequirements {
    /// The loaded rules must have at least one domain.
    pub domain: bool,
    /// Rules must be loaded, even if they have no domain.
    pub rules: bool,
    /// The store must be reachable.
    pub store: bool,
}

impl Health {
    /// Health of a process with these rules and this store.
    pub fn new(rules: Arc<LiveRules>, store: Arc<StoreHealth>, requirements: HealthRequirements) -> Self {
        Self { is_draining: AtomicBool::new(false), requirements, rules, store }
    }

    /// True if the process accepts new traffic.
    pub fn is_healthy(&self) -> bool {
        let has_domain = || self.rules.current_rules().as_ref().is_some_and(|loaded| loaded.rules.domain_count() > 0);
        let lacks_domain = self.requirements.domain && !has_domain();
        let lacks_rules = self.requirements.rules && self.rules.current_rules().is_none();
        let lacks_store = self.requirements.store && self.store.is_lost();
        !(self.is_draining.load(Ordering::Relaxed) || lacks_domain || lacks_rules || lacks_store)
    }

    /// True if the process can decide requests as its rules demand.
    ///
    /// A roll-out of invalid rules or of a misconfigured store stops at this check instead of admitting all requests.
    pub fn is_ready(&self) -> bool {
        self.not_ready_reason().is_none()
    }

    /// Reason why the process is not ready; `None` if it is.
    pub fn not_ready_reason(&self) -> Option<&'static str> {
        let needs_store = |rules: &RuleSet| rules.can_error_on_store_failure();
        let is_unserved = self.store.unserved_slots().is_some();
        match self.rules.current_rules().as_ref() {
            _ if self.is_draining.load(Ordering::Relaxed) => Some("the process is stopping"),
            None => Some("no rules are loaded"),
            Some(_) if self.is_store_misconfigured() => Some("the store is misconfigured (see the log)"),
            Some(loaded) if self.store.is_lost() && needs_store(&loaded.rules) => {
                Some("the store is unreachable, and a rule or the defaults of a domain have `on_store_error: error`")
            }
            Some(loaded) if is_unserved && needs_store(&loaded.rules) => Some(
                "no node serves a part of the slots of the Redis cluster (see the log), and a rule or the defaults of a \
                 domain have `on_store_error: error`",
            ),
            Some(_) => (!self.is_healthy()).then_some("the process is not healthy"),
        }
    }

    /// True if the store is unreachable.
    pub fn is_store_lost(&self) -> bool {
        self.store.is_lost()
    }

    /// Why the store is unreachable: address of a server and kind of failure; `None` if that is not known.
    pub fn store_failure(&self) -> Option<Arc<String>> {
        self.store.failure().filter(|_| self.store.is_lost())
    }

    /// How many slots of a Redis cluster no node serves, and why; `None` if all are served.
    pub fn unserved_slots(&self) -> Option<Arc<String>> {
        self.store.unserved_slots()
    }

    /// True if the store is misconfigured.
    pub fn is_store_misconfigured(&self) -> bool {
        self.store.misconfiguration().is_some()
    }

    /// Waits for the next change of the store's health. One task at a time may wait.
    pub async fn wait_for_store_health_change(&self) {
        self.store.wait_for_change().await;
    }

    /// True while the process stops.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// Makes the process unhealthy, before it stops.
    pub fn start_draining(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }
}
