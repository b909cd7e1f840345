//! What limits did, by limit.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use super::{Instruments, counter, gauge};
use crate::limit::Consistency;
use crate::telemetry::metrics::family::{Family, Kind, Label, Series, Value};
use crate::telemetry::metrics::limit_stats::{Count, LimitStats, Name};
use crate::telemetry::metrics::meters::OTHER;

impl Instruments {
    /// What limits did: of rules also what is 0, of what requests brought only what is not.
    pub(super) fn limits(&self, each: &mut dyn FnMut(Family)) {
        let registry = &self.service.decider.metrics.meters;
        let meters = registry.all();
        for (count, name, help) in Count::OF_PEER {
            let shows_zero = !matches!(count, Count::OverLimitWithLocalCache | Count::TotalNegativeHits);
            let mut family = Family::new(format!("ratelimit_service_rate_limit_{name}"), Kind::Counter, help);
            let wanted = meters.iter().filter(|meter| shows_zero && is_of_rule(meter) || meter.get(count) > 0);
            family.series.extend(wanted.map(|meter| Series {
                stats: Some(format!("ratelimit.service.rate_limit.{}.{name}", meter.name().key())),
                labels: self.labels(meter.name()),
                value: Value::Count(meter.get(count)),
            }));
            each(family);
        }
        each(decisions(&meters));
        let (configured, met) = self.in_force();
        each(configured);
        each(met);
        let mut uncharged = Family::new(
            "tollkeeper_rule_overshoot_hits_total",
            Kind::Counter,
            "Hits that an eventual rule admitted from free shares: nobody charged them.",
        );
        let with_some = meters.iter().filter(|meter| meter.get(Count::Uncharged) > 0);
        uncharged.series.extend(with_some.map(|meter| of_rule(meter.name(), meter.get(Count::Uncharged))));
        each(uncharged);
        let mut unknown = Family::new(
            "ratelimit_service_rate_limit_domain_not_found",
            Kind::Counter,
            "Descriptors of domains without rules.",
        );
        unknown.series.extend(registry.unknown_domains().into_iter().map(|(domain, count)| {
            let stats = format!("ratelimit.service.rate_limit.{domain}.domain_not_found");
            Series::of(Value::Count(count)).label("domain", domain).stats(stats)
        }));
        each(unknown);
        let (requested, most) = registry.requested();
        each(gauge("tollkeeper_metric_series", "Names that requests have made.", requested));
        each(gauge("tollkeeper_metric_series_limit", "How many they may make.", most));
        let help = "Times that there was no room for a name: it was counted with its rule.";
        each(counter("tollkeeper_metric_series_overflow_total", help, registry.overflow()));
    }

    fn labels(&self, name: &Name) -> Vec<Label> {
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
        let mut configured = Family::new("tollkeeper_rule_limit", Kind::Gauge, help);
        let help = "Decisions on a limit of the rules in force, under whatever name they are counted elsewhere.";
        let mut met = Family::new("tollkeeper_rule_decisions_total", Kind::Counter, help);
        let loaded = self.service.rules.load();
        let Some(loaded) = loaded.as_ref() else { return (configured, met) };
        // Rules whose names come out the same, `a_b` and `a` with the value `b`, share a meter, and no series may come
        // twice: of limits that differ in nothing but their number the first is told.
        let (mut seen, mut told) = (HashSet::new(), HashSet::new());
        for limit in loaded.rules.rules().flat_map(|compiled| &compiled.limits) {
            let (meter, limit) = (&limit.meter, &limit.limit);
            let consistency =
                if matches!(limit.consistency(), Consistency::Eventual(_)) { "eventual" } else { "strict" };
            let series = Series::of(Value::Level(f64::from(limit.requests_per_unit())))
                .label("domain", meter.name().domain())
                .label("rule", meter.name().key())
                .label("algorithm", limit.algorithm().to_string())
                .label("period", limit.period().to_string())
                .label("consistency", consistency);
            if told.insert(series.labels.clone()) {
                configured.series.push(series);
            }
            if seen.insert(Arc::as_ptr(meter)) {
                met.series.push(of_rule(meter.name(), meter.all_decisions().0));
            }
        }
        (configured, met)
    }
}

/// Decisions by verdict, those that there were.
fn decisions(meters: &[Arc<LimitStats>]) -> Family {
    let mut family = Family::new(
        "tollkeeper_decisions_total",
        Kind::Counter,
        "Decisions on a limit, by verdict: its own, or that of the policy that answered in the store's place.",
    );
    for meter in meters {
        let verdicts = Count::VERDICTS.into_iter().map(|(count, verdict)| (meter.get(count), verdict));
        let known = |(count, verdict): &(u64, &str)| *count > 0 || *verdict == "ok" && is_of_rule(meter);
        let series = |(count, verdict): (u64, &'static str)| of_rule(meter.name(), count).label("verdict", verdict);
        family.series.extend(verdicts.filter(known).map(series));
    }
    family
}

fn of_rule(name: &Name, count: u64) -> Series {
    Series::of(Value::Count(count)).label("domain", name.domain()).label("rule", name.key())
}

/// Whether it is to be seen before it has counted anything.
fn is_of_rule(meter: &LimitStats) -> bool {
    meter.name().parts().nth(1) != Some(OTHER)
}
