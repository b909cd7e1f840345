//! Whether this process wants traffic.
//!
//! Healthy once it listens; not while it drains, nor while it was told to need rules and has none. A lost store is no
//! reason unless it was told so: it must not restart a fleet. Ready is more: a store that is set up wrongly, or lost
//! under a rule that answers nothing without it, makes this process the wrong one to ask. The answer is the same over
//! HTTP and gRPC.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::config::live::LiveRules;
use crate::rule::set::RuleSet;
use crate::store::health::StoreHealth;

/// Whether this process wants traffic.
#[derive(Debug)]
pub struct Health {
    draining: AtomicBool,
    needs: HealthRequirements,
    rules: Arc<LiveRules>,
    store: Arc<StoreHealth>,
}

/// Without what a process is unhealthy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthRequirements {
    /// Rules that hold at least one domain.
    pub domain: bool,
    /// A store that can be reached.
    pub store: bool,
}

impl Health {
    /// The health of a process that decides by `rules` and counts in a store that is as `store` says.
    pub fn new(rules: Arc<LiveRules>, store: Arc<StoreHealth>, needs: HealthRequirements) -> Self {
        Self { draining: AtomicBool::new(false), needs, rules, store }
    }

    /// Whether new traffic is welcome.
    pub fn is_healthy(&self) -> bool {
        let has_domain = || self.rules.load().as_ref().is_some_and(|loaded| loaded.rules.domain_count() > 0);
        let lacks_domain = self.needs.domain && !has_domain();
        let lacks_store = self.needs.store && self.store.is_lost();
        !(self.draining.load(Ordering::Relaxed) || lacks_domain || lacks_store)
    }

    /// Whether it can answer what it is asked: healthy, with rules, and with a store as these rules want it. A roll-out
    /// of rules that can not be loaded or of a store that is set up wrongly stops here, instead of letting everything
    /// through.
    pub fn is_ready(&self) -> bool {
        self.unready().is_none()
    }

    /// Why it is not ready, if it is not.
    pub fn unready(&self) -> Option<&'static str> {
        let needs_store = |rules: &RuleSet| self.store.is_lost() && rules.any_rule_says_error();
        match self.rules.load().as_ref() {
            _ if self.draining.load(Ordering::Relaxed) => Some("the process is stopping"),
            None => Some("no rules are loaded"),
            Some(_) if self.store.misconfigured().is_some() => Some("the store is set up wrongly; the log says how"),
            Some(loaded) if needs_store(&loaded.rules) => Some("the store is lost, and a rule says `error`"),
            Some(_) => (!self.is_healthy()).then_some("the process is not healthy"),
        }
    }

    /// Whether the store can not be reached now, and whether it is set up wrongly.
    pub fn store(&self) -> (bool, bool) {
        (self.store.is_lost(), self.store.misconfigured().is_some())
    }

    /// Waits until the store is lost or back, or its setting up is found wrong or right; one task may wait.
    pub async fn store_changed(&self) {
        self.store.changed().await;
    }

    /// From now on the process is unhealthy: it is about to stop.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }
}
