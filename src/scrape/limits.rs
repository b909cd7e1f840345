//! What limits did, by limit.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use super::{MetricsCollector, counter, gauge};
use crate::limit::Consistency;
use crate::telemetry::metrics::family::{Family, Label, MetricKind, MetricValue, Series};
use crate::telemetry::metrics::limit_registry::OTHER;
use crate::telemetry::metrics::limit_stats::{LimitName, LimitStat, LimitStats};

impl MetricsCollector {
    /// What limits did: of rules also what is 0, of what requests brought only what is not.
    pub(super) fn limits(&self, each: &mut dyn FnMut(Family)) {
        let registry = &self.service.decider.metrics.limits;
        let limit_stats = registry.all();
        for (count, name, help) in LimitStat::OF_PEER {
            let shows_zero = !matches!(count, LimitStat::OverLimitWithLocalCache | LimitStat::TotalNegativeHits);
            let mut family = Family::new(format!("ratelimit_service_rate_limit_{name}"), MetricKind::Counter, help);
            let wanted = limit_stats.iter().filter(|stats| shows_zero && is_of_rule(stats) || stats.get(count) > 0);
            family.series.extend(wanted.map(|stats| Series {
                stats: Some(format!("ratelimit.service.rate_limit.{}.{name}", stats.name().key())),
                labels: self.labels(stats.name()),
                value: MetricValue::Counter(stats.get(count)),
            }));
            each(family);
        }
        each(decisions(&limit_stats));
        let (configured, met) = self.in_force();
        each(configured);
        each(met);
        let mut uncharged = Family::new(
            "tollkeeper_rule_overshoot_hits_total",
            MetricKind::Counter,
            "Hits that an eventual rule admitted from free shares: nobody charged them.",
        );
        let with_some = limit_stats.iter().filter(|stats| stats.get(LimitStat::Uncharged) > 0);
        uncharged.series.extend(with_some.map(|stats| of_rule(stats.name(), stats.get(LimitStat::Uncharged))));
        each(uncharged);
        let mut unknown = Family::new(
            "ratelimit_service_rate_limit_domain_not_found",
            MetricKind::Counter,
            "Descriptors of domains without rules.",
        );
        unknown.series.extend(registry.unknown_domains().into_iter().map(|(domain, count)| {
            let stats = format!("ratelimit.service.rate_limit.{domain}.domain_not_found");
            Series::of(MetricValue::Counter(count)).label("domain", domain).stats(stats)
        }));
        each(unknown);
        let (requested, most) = registry.requested();
        each(gauge("tollkeeper_metric_series", "Names that requests have made.", requested));
        each(gauge("tollkeeper_metric_series_limit", "How many they may make.", most));
        let help = "Times that there was no room for a name: it was counted with its rule.";
        each(counter("tollkeeper_metric_series_overflow_total", help, registry.overflow()));
    }

    fn labels(&self, name: &LimitName) -> Vec<Label> {
        let mut labels = name.labels();
        if self.path_label {
            labels.push((Cow::Borrowed("path"), name.key().to_owned()));
        }
        labels
    }

    /// What the rules in force allow, and how often they were met, under whatever name that was counted: the
    /// decisions of a rule with `detailed_metric` or `value_to_metric` are under names that requests made.
    fn in_force(&self) -> (Family, Family) {
        let help = "Hits that a limit allows in its period.";
        let mut configured = Family::new("tollkeeper_rule_limit", MetricKind::Gauge, help);
        let help = "Decisions on a limit of the rules in force, under whatever name they are counted elsewhere.";
        let mut met = Family::new("tollkeeper_rule_decisions_total", MetricKind::Counter, help);
        let loaded = self.service.rules.load();
        let Some(loaded) = loaded.as_ref() else { return (configured, met) };
        // Rules whose names come out the same, `a_b` and `a` with the value `b`, share a stats, and no series may come
        // twice: of limits that differ in nothing but their number the first is told.
        let (mut seen, mut told) = (HashSet::new(), HashSet::new());
        for limit in loaded.rules.rules().flat_map(|compiled| &compiled.limits) {
            let (stats, limit) = (&limit.stats, &limit.limit);
            let consistency =
                if matches!(limit.consistency(), Consistency::Eventual(_)) { "eventual" } else { "strict" };
            let series = Series::of(MetricValue::Gauge(f64::from(limit.requests_per_unit())))
                .label("domain", stats.name().domain())
                .label("rule", stats.name().key())
                .label("algorithm", limit.algorithm().to_string())
                .label("period", limit.period().to_string())
                .label("consistency", consistency);
            if told.insert(series.labels.clone()) {
                configured.series.push(series);
            }
            if seen.insert(Arc::as_ptr(stats)) {
                met.series.push(of_rule(stats.name(), stats.all_decisions().0));
            }
        }
        (configured, met)
    }
}

/// Decisions by verdict, those that there were.
fn decisions(limit_stats: &[Arc<LimitStats>]) -> Family {
    let mut family = Family::new(
        "tollkeeper_decisions_total",
        MetricKind::Counter,
        "Decisions on a limit, by verdict: its own, or that of the policy that answered in the store's place.",
    );
    for stats in limit_stats {
        let verdicts = LimitStat::VERDICTS.into_iter().map(|(count, verdict)| (stats.get(count), verdict));
        let known = |(count, verdict): &(u64, &str)| *count > 0 || *verdict == "ok" && is_of_rule(stats);
        let series = |(count, verdict): (u64, &'static str)| of_rule(stats.name(), count).label("verdict", verdict);
        family.series.extend(verdicts.filter(known).map(series));
    }
    family
}

fn of_rule(name: &LimitName, count: u64) -> Series {
    Series::of(MetricValue::Counter(count)).label("domain", name.domain()).label("rule", name.key())
}

/// Whether it is to be seen before it has counted anything.
fn is_of_rule(stats: &LimitStats) -> bool {
    stats.name().parts().nth(1) != Some(OTHER)
}
