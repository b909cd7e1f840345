//! Metrics of limits.
//!
//! Decides: metrics of limits and their labels.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use crate::limit::Consistency;
use crate::rules::live::LiveRules;
use crate::rules::rule::set::CompiledLimit;
use crate::serve::grpc::service::RateLimitService;
use crate::telemetry::metrics::limit_registry::{LimitRegistry, OVERFLOW_NAME};
use crate::telemetry::metrics::limit_stats::{LimitName, LimitStat, LimitStats};
use crate::telemetry::metrics::{Family, Label, MetricKind, MetricValue, Series};

/// Emits the metrics of limits. Series of rules start at 0; series named by requests appear with their first count.
pub(super) fn emit_limits(service: &RateLimitService, path_label: bool, emit: &mut dyn FnMut(Family)) {
    let registry = &service.decider.metrics.limits;
    let limits = registry.all_limit_stats();
    for (stat, name, help) in LimitStat::ENVOY_RATELIMIT_COUNTERS {
        emit(build_envoy_ratelimit_family(stat, name, help, &limits, path_label));
    }
    // Limits of one domain can have equal dotted names, such as `a` with `b.c` and `a.b` with `c` below it.
    emit(build_decision_family(&limits).sum_counters_of_equal_labels());
    emit_configured_limits(&service.rules, emit);
    emit(build_overshoot_family(&limits).sum_counters_of_equal_labels());
    for (stat, name, help) in BAN_METRICS.into_iter().chain(SLOT_METRICS).chain(RESERVATION_METRICS) {
        emit(build_nonzero_family(stat, name, help, &limits).sum_counters_of_equal_labels());
    }
    emit(build_unknown_domain_family(registry));
    emit(build_unmatched_family(&limits));
    let help = "Number of series named by requests.";
    emit(Family::gauge("tollkeeper_metric_series", help, registry.request_series_count()));
    let help = "Maximum number of series named by requests.";
    emit(Family::gauge("tollkeeper_metric_series_limit", help, registry.max_request_series()));
    let help = "Total number of times a series named by a request did not fit and was counted with its rule.";
    emit(Family::counter("tollkeeper_metric_series_overflow_total", help, registry.series_overflow_count()));
}

/// Builds the family of a counter per limit that envoyproxy/ratelimit also has.
fn build_envoy_ratelimit_family(
    stat: LimitStat,
    name: &str,
    help: &'static str,
    limits: &[Arc<LimitStats>],
    path_label: bool,
) -> Family {
    let starts_at_zero = !matches!(stat, LimitStat::OverLimitWithLocalCache | LimitStat::TotalNegativeHits);
    let mut family = Family::new(format!("ratelimit_service_rate_limit_{name}"), MetricKind::Counter, help);
    let shown = limits.iter().filter(|limit| starts_at_zero && is_rule_limit(limit) || limit.counter_value(stat) > 0);
    family.series.extend(shown.map(|limit| Series {
        statsd_name: Some(format!("ratelimit.service.rate_limit.{}.{name}", limit.name().as_str())),
        labels: build_labels(limit.name(), path_label),
        value: MetricValue::Counter(limit.counter_value(stat)),
    }));
    family
}

fn build_labels(name: &LimitName, path_label: bool) -> Vec<Label> {
    let mut labels = name.labels();
    if path_label {
        labels.push((Cow::Borrowed("path"), name.as_str().to_owned()));
    }
    labels
}

/// Builds the decisions by verdict.
fn build_decision_family(limits: &[Arc<LimitStats>]) -> Family {
    let mut family = Family::new(
        "tollkeeper_decisions_total",
        MetricKind::Counter,
        "Total number of decisions on a limit, by verdict: of the limit, or of the failure policy if the store failed.",
    );
    for limit in limits {
        let verdicts =
            LimitStat::VERDICT_COUNTERS.into_iter().map(|(stat, verdict)| (limit.counter_value(stat), verdict));
        let is_shown = |(count, verdict): &(u64, &str)| *count > 0 || *verdict == "ok" && is_rule_limit(limit);
        let series = |(count, verdict): (u64, &'static str)| {
            build_rule_series(limit.name(), count).with_label("verdict", verdict)
        };
        family.series.extend(verdicts.filter(is_shown).map(series));
    }
    family
}

/// Emits the configured limits and the number of their decisions, including those counted under names from requests.
fn emit_configured_limits(rules: &LiveRules, emit: &mut dyn FnMut(Family)) {
    let help = "Number of hits that a limit allows per period.";
    let mut limits = Family::new("tollkeeper_rule_limit", MetricKind::Gauge, help);
    let help = "Total number of decisions on a configured limit, including those counted under names from requests.";
    let mut decisions = Family::new("tollkeeper_rule_decisions_total", MetricKind::Counter, help);
    if let Some(loaded) = rules.current_rules().as_ref() {
        // Rules with equal names (`a_b`, and `a` with value `b`) share statistics, and a series must not occur twice:
        // of limits that differ only in their number, emit the first.
        let (mut seen_stats, mut seen_labels) = (HashSet::new(), HashSet::new());
        for limit in loaded.rules.rules().flat_map(|compiled| &compiled.limits) {
            let series = build_limit_series(limit);
            if seen_labels.insert(series.labels.clone()) {
                limits.series.push(series);
            }
            if seen_stats.insert(Arc::as_ptr(&limit.stats)) {
                decisions.series.push(build_rule_series(limit.stats.name(), limit.stats.total_decision_counts().total));
            }
        }
    }
    emit(limits);
    emit(decisions.sum_counters_of_equal_labels());
}

fn build_limit_series(compiled: &CompiledLimit) -> Series {
    let (name, limit) = (compiled.stats.name(), &compiled.limit);
    let consistency = if matches!(limit.consistency(), Consistency::Eventual(_)) { "eventual" } else { "strict" };
    #[expect(clippy::cast_precision_loss, reason = "limits are at most 2^53 - 1")]
    let requests_per_unit = limit.requests_per_unit() as f64;
    Series::new(MetricValue::Gauge(requests_per_unit))
        .with_label("domain", name.domain())
        .with_label("rule", name.as_str())
        .with_label("algorithm", limit.algorithm().to_string())
        .with_label("period", limit.period().to_string())
        .with_label("consistency", consistency)
        .with_label("scope", if limit.global_scope().is_some() { "global" } else { "region" })
}

fn build_overshoot_family(limits: &[Arc<LimitStats>]) -> Family {
    let help = "Total number of hits that an eventual rule admitted from its share and never charged.";
    build_nonzero_family(LimitStat::Uncharged, "tollkeeper_rule_overshoot_hits_total", help, limits)
}

/// Metrics of bans: statistic, name and HELP text.
const BAN_METRICS: [(LimitStat, &str, &str); 2] = [
    (
        LimitStat::Banned,
        "tollkeeper_rule_banned_total",
        "Total number of decisions that a ban rejected, or would reject without shadow mode.",
    ),
    (
        LimitStat::Bans,
        "tollkeeper_rule_bans_total",
        "Total number of bans that a limit began, or would begin without shadow mode.",
    ),
];

/// Metrics of slots: statistic, name and HELP text.
const SLOT_METRICS: [(LimitStat, &str, &str); 5] = [
    (LimitStat::SlotsTaken, "tollkeeper_rule_slots_taken_total", "Total number of slots that requests took."),
    (LimitStat::SlotsFreed, "tollkeeper_rule_slots_freed_total", "Total number of slots that a release freed."),
    (
        LimitStat::SeatsExpired,
        "tollkeeper_rule_seats_expired_total",
        "Total number of seats that were never released: max_duration was over, or the Envoy was dead.",
    ),
    (
        LimitStat::EarlyReleases,
        "tollkeeper_rule_early_releases_total",
        "Total number of releases without an answer whose slot was unknown, so that it cannot be taken for 15 s.",
    ),
    (
        LimitStat::LateRequests,
        "tollkeeper_rule_late_requests_total",
        "Total number of requests that were rejected because their release came first.",
    ),
];

/// Metrics of reservations: statistic, name and HELP text.
const RESERVATION_METRICS: [(LimitStat, &str, &str); 4] = [
    (
        LimitStat::Reservations,
        "tollkeeper_rule_reservations_total",
        "Total number of estimates that requests reserved.",
    ),
    (
        LimitStat::ReservationsSettled,
        "tollkeeper_rule_reservations_settled_total",
        "Total number of reservations that were settled with the true cost.",
    ),
    (
        LimitStat::ReservationsUnsettled,
        "tollkeeper_rule_reservations_unsettled_total",
        "Total number of reservations found unsettled after settle_within, or after the end of their Envoy.",
    ),
    (
        LimitStat::ReservationExcessHits,
        "tollkeeper_rule_reservations_excess_hits_total",
        "Total number of hits by which true costs exceeded their estimates.",
    ),
];

/// Builds a counter of rules whose series appear with their first count.
fn build_nonzero_family(stat: LimitStat, name: &'static str, help: &'static str, limits: &[Arc<LimitStats>]) -> Family {
    let mut family = Family::new(name, MetricKind::Counter, help);
    let nonzero = limits.iter().filter(|limit| limit.counter_value(stat) > 0);
    family.series.extend(nonzero.map(|limit| build_rule_series(limit.name(), limit.counter_value(stat))));
    family
}

fn build_unknown_domain_family(registry: &LimitRegistry) -> Family {
    let mut family = Family::new(
        "ratelimit_service_rate_limit_domain_not_found",
        MetricKind::Counter,
        "Total number of descriptors for domains without rules.",
    );
    family.series.extend(registry.unknown_domain_counts().into_iter().map(|(domain, count)| {
        let statsd_name = format!("ratelimit.service.rate_limit.{domain}.domain_not_found");
        Series::new(MetricValue::Counter(count)).with_label("domain", domain).with_statsd_name(statsd_name)
    }));
    family
}

/// Descriptors that matched no rule, by domain, from 0 on.
fn build_unmatched_family(limits: &[Arc<LimitStats>]) -> Family {
    let help = "Total number of descriptors that matched no rule of their domain, so that nothing limited them.";
    let mut family = Family::new("tollkeeper_unmatched_descriptors_total", MetricKind::Counter, help);
    let of_domains = limits.iter().filter(|limit| !is_rule_limit(limit));
    family.series.extend(of_domains.map(|limit| {
        Series::new(MetricValue::Counter(limit.counter_value(LimitStat::Unmatched)))
            .with_label("domain", limit.name().domain())
    }));
    family.sum_counters_of_equal_labels()
}

fn build_rule_series(name: &LimitName, count: u64) -> Series {
    Series::new(MetricValue::Counter(count)).with_label("domain", name.domain()).with_label("rule", name.as_str())
}

/// True for statistics of rules, which are emitted from 0 on.
fn is_rule_limit(limit: &LimitStats) -> bool {
    limit.name().parts().nth(1) != Some(OVERFLOW_NAME)
}
