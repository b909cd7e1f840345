//! Whether this process wants traffic.
//!
//! Healthy once it listens; not while it drains, nor while it was told to need rules and has none. A lost store is no
//! reason: it must not restart a fleet. The answer is the same over HTTP and gRPC.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::config::live::LiveRules;

/// Whether this process wants traffic.
#[derive(Debug)]
pub struct Health {
    draining: AtomicBool,
    needs_domain: bool,
    rules: Arc<LiveRules>,
}

impl Health {
    /// The health of a process that decides by `rules`; with `needs_domain` it is unhealthy until they hold one.
    pub fn new(rules: Arc<LiveRules>, needs_domain: bool) -> Self {
        Self { draining: AtomicBool::new(false), needs_domain, rules }
    }

    /// Whether new traffic is welcome.
    pub fn is_healthy(&self) -> bool {
        let has_domain = || self.rules.load().as_ref().is_some_and(|loaded| loaded.rules.domain_count() > 0);
        !self.draining.load(Ordering::Relaxed) && (!self.needs_domain || has_domain())
    }

    /// Whether it can answer what it is asked: healthy, and with rules. A roll-out of rules that can not be loaded
    /// stops here, instead of letting everything through.
    pub fn is_ready(&self) -> bool {
        self.is_healthy() && self.rules.load().is_some()
    }

    /// From now on the process is unhealthy: it is about to stop.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }
}
