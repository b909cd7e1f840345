//! Report of what is wrong: the log, the last failed load of rules, and the store.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::rules::live::RuleProblem;
use crate::serve::metrics_collector::MetricsCollector;
use crate::store::stats::StoreServerStats;
use crate::telemetry::logs::{LoggedProblem, RECENT_PROBLEMS};

/// Warnings, errors and failures of this process.
#[derive(Clone, Debug, Serialize)]
pub struct ProblemsReport {
    /// Last warnings and errors of the log, the oldest first.
    pub log: Vec<LoggedProblem>,
    /// Errors of the last attempt to load rules, if it failed, with the lines around each.
    pub diagnostics: Vec<RuleProblem>,
    /// Charges that the store failed to decide, by kind of failure.
    pub failed_charges: BTreeMap<&'static str, u64>,
    /// The same charges by the failure policy that decided.
    pub decided_by_policy: BTreeMap<&'static str, u64>,
    /// False if no charge reaches the store.
    pub store_available: bool,
    /// Servers of the store.
    pub servers: Vec<StoreServerReport>,
}

/// A server of the store, and whether its circuit breaker is open.
#[derive(Clone, Debug, Serialize)]
pub struct StoreServerReport {
    /// Address.
    pub address: String,
    /// True while calls fail at once because the server failed too often.
    pub is_breaker_open: bool,
}

impl ProblemsReport {
    /// Computes the report of this moment.
    pub fn new(collector: &MetricsCollector) -> Self {
        let service = &collector.service;
        let store = service.decider.build_store_totals();
        let mut servers = service.decider.store.stats().shared.map(|shared| shared.servers).unwrap_or_default();
        servers.sort_unstable();
        servers.dedup_by(|a, b| a.address == b.address);
        let report = |server: StoreServerStats| StoreServerReport {
            address: server.address,
            is_breaker_open: server.is_breaker_open,
        };
        Self {
            log: RECENT_PROBLEMS.copy_lines(),
            diagnostics: service.rules.last_problems(),
            failed_charges: store.failed_charges,
            decided_by_policy: store.decided_by_policy,
            store_available: !collector.health.is_store_lost(),
            servers: servers.into_iter().map(report).collect(),
        }
    }
}
