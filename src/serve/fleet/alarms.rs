//! What is wrong now, in sentences: with this process, and between replicas.
//!
//! An alarm is a condition that holds at the time of the report. Nothing is kept, and none is acknowledged.

use serde::Serialize;

use super::findings::{FleetFindingKind, find_problems};
use super::view::FleetView;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::report::unmatched::{UnmatchedFinding, UnmatchedQuery, UnmatchedReport};

/// Alarms of this process and of the fleet.
#[derive(Clone, Debug, Serialize)]
pub struct AlarmReport {
    /// Host name of this replica.
    pub replica: String,
    /// Version of tollkeeper.
    pub version: &'static str,
    /// Number of replicas that are known, this one included.
    pub replicas: usize,
    /// Alarms, those that concern decisions first.
    pub alarms: Vec<Alarm>,
}

/// A condition that an operator should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alarm {
    /// Name of the condition, such as `store_lost`.
    pub kind: String,
    /// Replicas that it concerns, by name, at most ten.
    pub replicas: Vec<String>,
    /// What is wrong, and a remedy.
    pub text: String,
}

impl AlarmReport {
    /// Computes the report; the first replica of `view` is this one.
    pub fn new(collector: &MetricsCollector, view: &FleetView) -> Self {
        let replica = view.replicas.first().map(|own| own.name.clone()).unwrap_or_default();
        let mut alarms = find_own_alarms(collector, &replica);
        let is_known = |kind: FleetFindingKind, replicas: &[String]| {
            let own = match kind {
                FleetFindingKind::StoreLost => "store_lost",
                FleetFindingKind::LoadFailed => "reload_failed",
                _ => return false,
            };
            replicas == [replica.as_str()] && alarms.iter().any(|alarm| alarm.kind == own)
        };
        let of_fleet: Vec<Alarm> = find_problems(&view.replicas, view.now)
            .into_iter()
            .filter(|finding| !is_known(finding.kind, &finding.replicas))
            .map(|finding| Alarm {
                kind: serde_json::to_value(finding.kind)
                    .ok()
                    .and_then(|kind| kind.as_str().map(str::to_owned))
                    .unwrap_or_default(),
                replicas: finding.replicas,
                text: finding.advice,
            })
            .collect();
        alarms.extend(of_fleet);
        Self { replica, version: env!("CARGO_PKG_VERSION"), replicas: view.replicas.len(), alarms }
    }
}

/// Conditions of this process.
fn find_own_alarms(collector: &MetricsCollector, replica: &str) -> Vec<Alarm> {
    let (service, health) = (&collector.service, &collector.health);
    let mut alarms = Vec::new();
    let mut add = |kind: &str, text: String| {
        alarms.push(Alarm { kind: kind.to_owned(), replicas: vec![replica.to_owned()], text });
    };
    if let Some(reason) = health.not_ready_reason() {
        add("not_ready", format!("this process cannot decide: {reason}"));
    }
    let stats = service.decider.store.stats();
    let mut servers = stats.shared.map(|shared| shared.servers).unwrap_or_default();
    servers.sort_unstable();
    servers.dedup_by(|a, b| a.address == b.address);
    let open: Vec<&str> =
        servers.iter().filter(|server| server.is_breaker_open).map(|server| server.address.as_str()).collect();
    if health.is_store_lost() {
        let store = stats.store;
        add("store_lost", format!("no charge reaches {store}: failure policies decide (see Failures)"));
    } else if !open.is_empty() {
        let text = format!(
            "{} of {} servers of the store fail and are not used: {}",
            open.len(),
            servers.len(),
            open.join(", ")
        );
        add("server_not_used", text);
    }
    if let Some(error) = service.rules.status().last_error {
        let first = error.lines().next().unwrap_or_default();
        add("reload_failed", format!("the last reload failed, the rules before it are in force: {first}"));
    }
    let rules = service.rules.current_rules_owned();
    let query = UnmatchedQuery { most: Some(1), ..UnmatchedQuery::default() };
    let rules = rules.as_ref().map(|loaded| &loaded.rules);
    let unmatched = UnmatchedReport::new(&service.decider.metrics, rules, service.clock.now(), &query, false);
    for UnmatchedFinding { advice, .. } in unmatched.findings.into_iter().take(MAX_UNMATCHED_ALARMS) {
        add("unmatched", advice);
    }
    alarms
}

/// Maximum number of alarms about domains without a matching rule: requests name domains.
const MAX_UNMATCHED_ALARMS: usize = 3;
