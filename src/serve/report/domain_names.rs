//! Domains as requests name them, from their names in metrics.
//!
//! Metrics replace some characters by `_`, so a name there may stand for several domains. A row of a report has a
//! domain only if it is certain, because an operator resets counters by it.

use std::collections::HashMap;

use crate::rules::rule::set::RuleSet;
use crate::telemetry::metrics::limit_stats::LimitName;

/// Domains of the loaded rules, by their names in metrics.
#[derive(Clone, Debug, Default)]
pub struct DomainsByMetricName {
    /// `None` for a name that several domains have.
    by_metric_name: HashMap<String, Option<String>>,
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
        Self { by_metric_name }
    }

    /// Domain of a limit; `None` if it is not certain.
    pub fn find_domain(&self, limit: &LimitName) -> Option<String> {
        self.find_domain_by_metric_name(limit.known_domain()?)
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
