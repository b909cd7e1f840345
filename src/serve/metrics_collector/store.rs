//! Metrics of the store.
//!
//! Decides: metrics of the store, Redis and memcached.

use crate::decide::decider::Decider;
use crate::limit::StoreFailurePolicy;
use crate::serve::health::Health;
use crate::store::client::server_status::ServerStatus;
use crate::store::client::tokens::{TokenStats, token_stats};
use crate::store::stats::{
    CommandCount, EventualSharingStats, GrantTotals, MemoryUsage, PoolStats, RegionNotice, RegionStats,
    SharedStoreStats,
};
use crate::telemetry::metrics::{Family, MetricKind, MetricValue, Series};

/// Emits the metrics of the store.
pub(super) fn emit_store(decider: &Decider, health: &Health, emit: &mut dyn FnMut(Family)) {
    let stats = decider.store.stats();
    emit(
        Family::new("tollkeeper_store_info", MetricKind::Gauge, "Store of the counters; always 1.")
            .add_series(Series::new(MetricValue::Gauge(1.0)).with_label("store", stats.store)),
    );
    let help = "Total number of charges that failed in the store, by kind of failure.";
    emit(Family::counter_by_label("tollkeeper_store_errors_total", help, "kind", decider.failed_charge_counts()));
    let help = "Total number of charges that failed in the store, by the failure policy that decided.";
    let counts = StoreFailurePolicy::ALL.map(|policy| (policy.name(), decider.policy_decided_charge_count(policy)));
    emit(Family::counter_by_label("tollkeeper_policy_verdicts_total", help, "policy", counts));
    let help = "1 if no server of a deployment accepts charges.";
    emit(Family::gauge("tollkeeper_store_lost", help, u8::from(health.is_store_lost())));
    let help = "1 if the store is misconfigured.";
    emit(Family::gauge("tollkeeper_store_misconfigured", help, u8::from(health.is_store_misconfigured())));
    emit_counter_memory(stats.memory, emit);
    emit_store_login_tokens(emit);
    if let Some(shared) = stats.shared {
        emit_shared_store(shared, emit);
    }
}

/// Emits the metrics of tokens with which the process logs in to Redis; none without them.
fn emit_store_login_tokens(emit: &mut dyn FnMut(Family)) {
    let sources = token_stats();
    if sources.is_empty() {
        return;
    }
    let mut emit_family = |name, kind, help, value_of: &dyn Fn(&TokenStats) -> MetricValue| {
        let mut family = Family::new(name, kind, help);
        family
            .series
            .extend(sources.iter().map(|source| Series::new(value_of(source)).with_label("setting", source.setting)));
        emit(family);
    };
    let help = "Total number of tokens of an identity for Redis.";
    emit_family("tollkeeper_redis_token_renewals_total", MetricKind::Counter, help, &|source| {
        MetricValue::Counter(source.renewals)
    });
    let help = "Total number of failed attempts to renew a token.";
    emit_family("tollkeeper_redis_token_failures_total", MetricKind::Counter, help, &|source| {
        MetricValue::Counter(source.failures)
    });
    let help = "Expiry of the last token, in seconds since the Unix epoch; 0 without one.";
    emit_family("tollkeeper_redis_token_not_after_seconds", MetricKind::Gauge, help, &|source| {
        MetricValue::gauge_from(source.expires_at_s)
    });
}

/// Emits the metrics of the counters in this process: those of the memory store, or of the fallback.
fn emit_counter_memory(usage: MemoryUsage, emit: &mut dyn FnMut(Family)) {
    emit(Family::gauge("tollkeeper_keys", "Number of counters in this process.", usage.counters));
    emit(Family::gauge("tollkeeper_memory_bytes", "Memory used by in-process counters, in bytes.", usage.bytes));
    let help = "Maximum memory of in-process counters, in bytes.";
    emit(Family::gauge("tollkeeper_memory_capacity_bytes", help, usage.capacity_bytes));
    let help = "Total number of in-process counters evicted for lack of memory.";
    emit(Family::counter("tollkeeper_keys_evicted_total", help, usage.evicted));
}

/// Emits the metrics of a store that all replicas share.
fn emit_shared_store(stats: SharedStoreStats, emit: &mut dyn FnMut(Family)) {
    emit(
        Family::new(
            "tollkeeper_store_duration_seconds",
            MetricKind::Histogram,
            "Duration of charges that needed a round trip to the store, per request, in seconds.",
        )
        .add_series(Series::new(MetricValue::Histogram(Box::new(stats.latency)))),
    );
    // Charges were called draws when this name was published, as was `tollkeeper.draws` of spans: published names stay.
    emit(Family::counter("tollkeeper_draws_total", "Total number of requested charges and peeks.", stats.charges));
    emit(Family::counter("tollkeeper_store_calls_total", "Total number of calls to the store.", stats.calls));
    let help = "Total number of charges whose caller stopped waiting; they may have been charged.";
    emit(Family::counter("tollkeeper_draws_abandoned_total", help, stats.abandoned));
    if let Some(dropped) = stats.refunds_dropped {
        let help = "Total number of refunds dropped because Redis rejects their script.";
        emit(Family::counter("tollkeeper_refunds_dropped_total", help, dropped));
    }
    let help = "Total number of charges rejected by the over-limit cache, without a call to the store.";
    emit(Family::counter("tollkeeper_known_over_hits_total", help, stats.rejected_locally));
    if let Some(sharing) = &stats.eventual {
        emit_eventual_sharing(sharing, emit);
    }
    if let Some(regions) = &stats.regions {
        emit_region(regions, emit);
    }
    emit_breakers(stats.servers, emit);
    stats.pools.iter().for_each(|pool| emit_connection_pool(pool, emit));
    emit_memcache_commands(&stats.commands, emit);
}

/// Emits the state of this region among those that share global limits.
fn emit_region(stats: &RegionStats, emit: &mut dyn FnMut(Family)) {
    let help = "1 if the global Redis has answered within 5 s; 0: the region is cut off.";
    emit(Family::gauge("tollkeeper_region_connected", help, u8::from(stats.connected)));
    let help = "1 if this notice about the region holds, as in /store.";
    let mut notices = Family::new("tollkeeper_region_notice", MetricKind::Gauge, help);
    notices.series.extend(RegionNotice::NAMES.into_iter().map(|name| {
        let holds = stats.notices.iter().any(|notice| notice.name() == name);
        Series::new(MetricValue::gauge_from(u8::from(holds))).with_label("notice", name)
    }));
    emit(notices);
    let GrantTotals { requested, failed, dropped, granted, wasted, returned, .. } = stats.grants;
    let help = "Total number of grant requests to the global Redis, by outcome.";
    let outcomes = [("answered", requested - failed.min(requested)), ("failed", failed), ("dropped", dropped)];
    emit(Family::counter_by_label("tollkeeper_grant_requests_total", help, "outcome", outcomes));
    let help = "Total number of hits of grants: taken by a counter of the region, returned unused, or wasted.";
    let hits = [("granted", granted), ("returned", returned), ("wasted", wasted)];
    emit(Family::counter_by_label("tollkeeper_grant_hits_total", help, "kind", hits));
    let help = "Total number of hits of global limits that this process admitted, by what they were admitted from.";
    let sources = [("grant", stats.grants.admitted_from_grants), ("reserve", stats.grants.admitted_from_parts)];
    emit(Family::counter_by_label("tollkeeper_region_hits_total", help, "from", sources));
    if let Some(age) = stats.grants.since_last_grant {
        let help = "Time since the last grant to this process, in seconds.";
        let age_s = age.as_secs_f64();
        emit(
            Family::new("tollkeeper_grant_age_seconds", MetricKind::Gauge, help)
                .add_series(Series::new(MetricValue::Gauge(age_s))),
        );
    }
}

fn emit_breakers(servers: Vec<ServerStatus>, emit: &mut dyn FnMut(Family)) {
    let mut breakers = Family::new(
        "tollkeeper_breaker_open",
        MetricKind::Gauge,
        "1 if the circuit breaker of a server of the store is open.",
    );
    breakers.series.extend(servers.into_iter().map(|ServerStatus { address, is_breaker_open, .. }| {
        Series::new(MetricValue::gauge_from(u8::from(is_breaker_open))).with_label("node", address)
    }));
    emit(breakers);
}

/// Emits the shares and leases of eventual rules.
fn emit_eventual_sharing(sharing: &EventualSharingStats, emit: &mut dyn FnMut(Family)) {
    let usage = sharing.hits;
    let help = "Total number of hits that eventual rules admitted in this process, by source.";
    let counts = [("share", usage.from_shares), ("lease", usage.from_leases)];
    emit(Family::counter_by_label("tollkeeper_eventual_hits_total", help, "from", counts));
    emit(Family::counter("tollkeeper_leased_hits_total", "Total number of hits leased from Redis.", usage.leased));
    let help = "Total number of leased hits that were unused when their lease ended.";
    emit(Family::counter("tollkeeper_lease_hits_left_total", help, usage.returned));
    if let Some(live) = sharing.live_replicas {
        let help = "Number of processes that share this Redis, as last counted.";
        emit(Family::gauge("tollkeeper_live_replicas", help, live));
    }
    if let Some(place) = sharing.place {
        let help = "Place among the replicas whose share of eventual limits this process may use.";
        emit(Family::gauge("tollkeeper_slot", help, place));
    }
}

/// Emits the connections of a pool to the servers of the store, under the names of envoyproxy/ratelimit.
fn emit_connection_pool(stats: &PoolStats, emit: &mut dyn FnMut(Family)) {
    let PoolStats { name: prefix, open_connection_count, opened_connections_total } = *stats;
    let statsd_name = |metric: &str| format!("ratelimit.{prefix}.{metric}");
    let name = |metric: &str| format!("ratelimit_{prefix}_{metric}");
    let closed = opened_connections_total.saturating_sub(open_connection_count as u64);
    let counter = |metric, help, count| {
        Family::new(name(metric), MetricKind::Counter, help)
            .add_series(Series::new(MetricValue::Counter(count)).with_statsd_name(statsd_name(metric)))
    };
    emit(Family::new(name("cx_active"), MetricKind::Gauge, "Number of open connections to the store.").add_series(
        Series::new(MetricValue::gauge_from(open_connection_count)).with_statsd_name(statsd_name("cx_active")),
    ));
    emit(counter("cx_total", "Total number of connections to the store that were opened.", opened_connections_total));
    emit(counter("cx_local_close", "Total number of connections to the store that were closed.", closed));
}

/// Emits the commands to memcached, under the names of envoyproxy/ratelimit, which writes the outcome as a tag.
fn emit_memcache_commands(counts: &[CommandCount], emit: &mut dyn FnMut(Family)) {
    for counts in counts.chunk_by(|a, b| a.name == b.name) {
        let name = format!("ratelimit_{}", counts[0].name.replace('.', "_"));
        let mut family =
            Family::new(name, MetricKind::Counter, "Total number of commands to memcached, or of their keys.");
        family.series.extend(counts.iter().map(|CommandCount { name, code, count }| {
            let series = Series::new(MetricValue::Counter(*count));
            match code {
                None => series.with_statsd_name(format!("ratelimit.{name}")),
                Some(code) => {
                    series.with_label("code", *code).with_statsd_name(format!("ratelimit.{name}.__code={code}"))
                }
            }
        }));
        emit(family);
    }
}
