//! Domains as requests name them, from their names in metrics.
//!
//! Metrics replace some characters by `_`, so a name there may stand for several domains. A row of a report has a
//! domain only if it is certain, because an operator resets counters by it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::rules::rule::set::RuleSet;
use crate::telemetry::metrics::limit_stats::LimitName;

/// Domains of the loaded rules, by their names in metrics.
#[derive(Clone, Debug, Default)]
pub struct DomainsByMetricName {
    /// `None` for a name that several domains have.
    by_metric_name: HashMap<String, Option<String>>,
    /// Names of limits in metrics that only candidates, or only limits in shadow mode, have.
    modes: HashMap<String, Option<UnenforcedMode>>,
}

/// Why a limit rejects nothing.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UnenforcedMode {
    /// It stands beside an enforced limit to be compared.
    Candidate,
    /// It is in shadow mode.
    Shadow,
}

impl UnenforcedMode {
    /// Mark behind the name of a limit.
    pub const fn name_suffix(self) -> &'static str {
        match self {
            Self::Candidate => " (candidate)",
            Self::Shadow => " (shadow)",
        }
    }
}

impl DomainsByMetricName {
    /// Domains of these rules.
    pub fn new(rules: Option<&RuleSet>) -> Self {
        let mut by_metric_name: HashMap<String, Option<String>> = HashMap::new();
        for domain in rules.into_iter().flat_map(RuleSet::domains) {
            let in_metrics = LimitName::new([&*domain.name]).as_str().to_owned();
            by_metric_name
                .entry(in_metrics)
                .and_modify(|domain| *domain = None)
                .or_insert_with(|| Some(domain.name.to_string()));
        }
        let mut modes: HashMap<String, Option<UnenforcedMode>> = HashMap::new();
        for limit in rules.into_iter().flat_map(RuleSet::rules).flat_map(|rule| &rule.limits) {
            let mode = match (limit.candidate, limit.shadow) {
                (true, _) => Some(UnenforcedMode::Candidate),
                (false, true) => Some(UnenforcedMode::Shadow),
                (false, false) => None,
            };
            let known = modes.entry(limit.stats.name().as_str().to_owned()).or_insert(mode);
            *known = known.filter(|known| Some(*known) == mode);
        }
        Self { by_metric_name, modes }
    }

    /// Domain of a limit; `None` if it is not certain.
    pub fn find_domain(&self, limit: &LimitName) -> Option<String> {
        self.find_domain_by_metric_name(limit.known_domain()?)
    }

    /// Returns why a limit rejects nothing; `None` if it rejects, or if it is not certain.
    pub fn find_mode(&self, limit: &LimitName) -> Option<UnenforcedMode> {
        self.modes.get(limit.as_str()).copied().flatten()
    }

    /// Returns the domain that has this name in metrics; `None` if it is not certain.
    pub fn find_domain_by_metric_name(&self, in_metrics: &str) -> Option<String> {
        match self.by_metric_name.get(in_metrics) {
            Some(domain) => domain.clone(),
            // No character was replaced.
            None => (!in_metrics.contains('_')).then(|| in_metrics.to_owned()),
        }
    }
}
