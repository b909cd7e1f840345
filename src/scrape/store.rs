//! How the counters are, and those who keep them.

use super::{MetricsCollector, counter, gauge, level_of};
use crate::limit::StorePolicy;
use crate::redis::stats::DeploymentStats;
use crate::store::memory::usage::MemoryUsage;
use crate::store::stats::RedisStats;
use crate::telemetry::metrics::family::{Family, MetricKind, MetricValue, Series};

impl MetricsCollector {
    /// The store.
    pub(super) fn store(&self, each: &mut dyn FnMut(Family)) {
        let decider = &self.service.decider;
        let stats = decider.store.stats();
        each(
            Family::new("tollkeeper_store_info", MetricKind::Gauge, "Where counters live; always 1.")
                .with(Series::of(MetricValue::Gauge(1.0)).label("store", stats.store)),
        );
        let mut errors = Family::new(
            "tollkeeper_store_errors_total",
            MetricKind::Counter,
            "Charges that the store failed, by what went wrong, whoever answered them.",
        );
        errors.series.extend(
            decider.failed_charges().map(|(kind, count)| Series::of(MetricValue::Counter(count)).label("kind", kind)),
        );
        each(errors);
        let mut policies = Family::new(
            "tollkeeper_policy_verdicts_total",
            MetricKind::Counter,
            "Charges that the store failed, by the policy that answered.",
        );
        policies.series.extend(
            StorePolicy::ALL.into_iter().map(|policy| {
                Series::of(MetricValue::Counter(decider.decided_by(policy))).label("policy", policy.name())
            }),
        );
        each(policies);
        let (lost, misconfigured) = self.health.store();
        each(gauge("tollkeeper_store_lost", "Whether no server of a deployment takes charges.", u8::from(lost)));
        let help = "Whether the store is set up in a way that somebody has to mend.";
        each(gauge("tollkeeper_store_misconfigured", help, u8::from(misconfigured)));
        in_memory(each, stats.memory);
        if let Some(redis) = stats.redis {
            in_redis(each, redis);
        }
    }
}

/// Counters in this process: all there are, or those that stand in.
fn in_memory(each: &mut dyn FnMut(Family), usage: MemoryUsage) {
    each(gauge("tollkeeper_keys", "Counters in this process.", usage.counters));
    each(gauge("tollkeeper_memory_bytes", "What they take, in bytes.", usage.bytes));
    each(gauge("tollkeeper_memory_capacity_bytes", "What they may take, in bytes.", usage.capacity_bytes));
    each(counter("tollkeeper_keys_evicted_total", "Counters that gave way to others.", usage.evicted));
}

fn in_redis(each: &mut dyn FnMut(Family), redis: RedisStats) {
    each(
        Family::new(
            "tollkeeper_store_duration_seconds",
            MetricKind::Histogram,
            "How long the charges of a request waited for Redis; those answered here are not in it.",
        )
        .with(Series::of(MetricValue::Histogram(Box::new(redis.latency.clone())))),
    );
    each(counter("tollkeeper_draws_total", "Charges that were asked for.", redis.charges));
    each(counter("tollkeeper_store_calls_total", "Calls of Redis that they took.", redis.calls));
    let help = "Charges that nobody waited for to the end; they may have been charged.";
    each(counter("tollkeeper_draws_abandoned_total", help, redis.abandoned));
    let help = "Charges that were refused here by what Redis had just said.";
    each(counter("tollkeeper_known_over_hits_total", help, redis.refused_locally));
    eventual(each, &redis);
    let RedisStats { main, per_second, .. } = redis;
    let mut breakers =
        Family::new("tollkeeper_breaker_open", MetricKind::Gauge, "Whether nothing is sent to a server that failed.");
    let nodes = main.nodes.iter().chain(per_second.iter().flat_map(|deployment| &deployment.nodes));
    let mut nodes: Vec<&(String, bool)> = nodes.collect();
    nodes.sort_unstable();
    nodes.dedup_by(|a, b| a.0 == b.0);
    breakers.series.extend(
        nodes.into_iter().map(|(node, open)| Series::of(level_of(u8::from(*open))).label("node", node.clone())),
    );
    each(breakers);
    pool(each, "redis_pool", &main);
    if let Some(condition) = &per_second {
        pool(each, "redis_per_second_pool", condition);
    }
}

/// Eventual rules.
fn eventual(each: &mut dyn FnMut(Family), redis: &RedisStats) {
    let usage = redis.eventual;
    let from = |from: &'static str, count| Series::of(MetricValue::Counter(count)).label("from", from);
    each(
        Family::new(
            "tollkeeper_eventual_hits_total",
            MetricKind::Counter,
            "Hits of eventual rules that were admitted here, by what allowed it.",
        )
        .with(from("share", usage.shared))
        .with(from("lease", usage.leased)),
    );
    each(counter("tollkeeper_leased_hits_total", "Hits that were charged ahead.", usage.lent));
    each(counter("tollkeeper_lease_hits_left_total", "Hits that were left of leases when they ended.", usage.returned));
    if let Some(live) = redis.live_replicas {
        each(gauge("tollkeeper_live_replicas", "Processes that share this Redis, as last counted.", live));
    }
    if let Some(slot) = redis.slot {
        each(gauge("tollkeeper_slot", "The slot whose share of eventual limits this process may use.", slot));
    }
}

/// Connections, under the names that envoyproxy/ratelimit has for them.
fn pool(each: &mut dyn FnMut(Family), of: &'static str, deployment: &DeploymentStats) {
    let stats = |what: &str| format!("ratelimit.{of}.{what}");
    let name = |what: &str| format!("ratelimit_{of}_{what}");
    let closed = deployment.opened.saturating_sub(deployment.connections as u64);
    let counted = |what, help, count| {
        Family::new(name(what), MetricKind::Counter, help)
            .with(Series::of(MetricValue::Counter(count)).stats(stats(what)))
    };
    each(
        Family::new(name("cx_active"), MetricKind::Gauge, "Connections to Redis in use.")
            .with(Series::of(level_of(deployment.connections)).stats(stats("cx_active"))),
    );
    each(counted("cx_total", "Connections to Redis that were opened.", deployment.opened));
    each(counted("cx_local_close", "Connections to Redis that ended.", closed));
}
