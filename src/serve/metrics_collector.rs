//! Collects all metrics of the process.
//!
//! Prometheus, statsd and `/stats` get the same families, built one at a time. Each part of the process keeps its own
//! statistics; the collector reads them and keeps none. Collecting takes a few locks, each for a moment. Metrics of
//! requests, decisions, spans and the process are here, those of limits, quotas and the store in files of their own.
//!
//! Decides: which metrics there are, with which labels, which go to statsd (`with_statsd_name`); CPU, memory, version.
//! Decides: failed charges (`build_error_family`).

mod limits;
mod quota;
mod store;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use procfs::WithCurrentSystemInfo as _;
use procfs::process::{LimitValue, Process};
use tokio::time::Instant;

use self::limits::emit_limits;
use self::quota::emit_quota;
use self::store::emit_store;
use crate::base::clock::Clock;
use crate::decide::log::{DecisionLog, RecordCounts};
use crate::rules::live::LiveRules;
use crate::rules::plan_table::live::LiveTable;
use crate::rules::xds::status::StreamState;
use crate::serve::grpc::service::RateLimitService;
use crate::serve::health::Health;
use crate::serve::level_webhook::WEBHOOK_COUNTS;
use crate::serve::quota::service::QuotaService;
use crate::telemetry::http2_refusals::{HTTP2_REFUSALS, RefusalReason};
use crate::telemetry::listener_stats::{ExceededLimit, OutgoingTlsConnection, RESET_STREAMS, StatsByListener};
use crate::telemetry::metrics::{Family, MetricKind, MetricValue, Series};
use crate::telemetry::otlp_metrics::METRIC_EXPORT_COUNTS;
use crate::telemetry::scheduler_lag::SCHEDULER_LAG;
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::traces::{SpanCountsByOutcome, SpanQueue};

/// Collects all metrics of the process.
#[derive(Clone, Debug)]
pub struct MetricsCollector {
    /// Service, with its rules, store and tracer.
    pub service: Arc<RateLimitService>,
    /// Health of the process.
    pub health: Arc<Health>,
    /// Counters of the listeners.
    pub listeners: Arc<StatsByListener>,
    /// True if metrics of limits have a `path` label.
    pub path_label: bool,
    /// The quota service; `None` if it is off.
    pub quota: Option<Arc<QuotaService>>,
}

impl MetricsCollector {
    /// Passes each family to `emit`, once.
    pub fn collect(&self, emit: &mut dyn FnMut(Family)) {
        emit_limits(&self.service, self.path_label, emit);
        emit_service(&self.service, emit);
        emit_store(&self.service.decider, &self.health, emit);
        emit_loaded_rules(&self.service.rules, emit);
        emit_version_and_readiness(&self.health, emit);
        emit_listeners(&self.listeners, emit);
        emit_quota(self.quota.as_deref(), emit);
        emit_process_usage(emit);
    }
}

/// Emits the metrics of the loaded rules and of reloads.
fn emit_loaded_rules(rules: &LiveRules, emit: &mut dyn FnMut(Family)) {
    let status = rules.status();
    let loads = |name, outcome: &str, help, count| {
        let statsd_name = format!("ratelimit.service.config_load_{outcome}");
        Family::new(name, MetricKind::Counter, help)
            .add_series(Series::new(MetricValue::Counter(count)).with_statsd_name(statsd_name))
    };
    let help = "Total number of successful loads of the rules.";
    emit(loads("ratelimit_service_config_load_success", "success", help, status.version));
    let help = "Total number of failed loads of the rules.";
    emit(loads("ratelimit_service_config_load_error", "error", help, status.refused));
    let help = "Version of the loaded rules, from 1; 0 if none are loaded.";
    emit(Family::gauge("tollkeeper_config_version", help, status.version));
    let is_successful = u8::from(status.last_error.is_none() && status.version > 0);
    let help = "1 if the last load of the rules was successful.";
    emit(Family::gauge("tollkeeper_config_last_load_successful", help, is_successful));
    emit(Family::gauge("tollkeeper_domains", "Number of loaded domains.", status.domains));
    emit(Family::gauge("tollkeeper_rules", "Number of loaded rules.", status.rules));
    if let Some(defaults) = &status.rule_defaults {
        let help = "1 if the file of TOLLKEEPER_RULE_DEFAULTS can be used as it is now.";
        emit(Family::gauge("tollkeeper_rule_defaults_valid", help, u8::from(defaults.last_error.is_none())));
        let help = "Total number of contents of that file that could not be used.";
        emit(Family::counter("tollkeeper_rule_defaults_refused_total", help, defaults.refused));
        let help = "Number of its defaults that the loaded limits cannot have.";
        emit(Family::gauge("tollkeeper_rule_defaults_left_out", help, defaults.left_out));
    }
    if let Some(xds) = &status.xds {
        let help = "1 if the stream from the control plane is open and was answered.";
        emit(Family::gauge("tollkeeper_xds_stream_up", help, u8::from(xds.stream == StreamState::Up)));
        let help = "Time when the loaded rules, read from the cache, had been accepted, in Unix seconds; 0 for others.";
        let cached_s = xds.cached_at.map_or(0, |at| at.as_micros() / 1_000_000);
        emit(Family::gauge("tollkeeper_xds_cached_rules_timestamp_seconds", help, cached_s));
        emit(Family::counter(
            "tollkeeper_xds_streams_total",
            "Total number of streams to the control plane.",
            xds.streams,
        ));
        let help = "Total number of responses of the control plane that were accepted.";
        emit(Family::counter("tollkeeper_xds_accepted_total", help, xds.accepted));
        let help = "Total number of refusals sent to the control plane, repeated ones included.";
        emit(Family::counter("tollkeeper_xds_refused_total", help, xds.refused));
        let help = "Number of domains with older rules, or none, because the control plane's last ones were refused.";
        emit(Family::gauge("tollkeeper_xds_refused_domains", help, xds.refused_domains.len()));
    }
    emit_tables(rules, emit);
    if let Some(loaded) = rules.current_rules().as_ref() {
        let seconds = loaded.loaded_at.as_micros() / 1_000_000;
        let help = "Time when the rules were loaded, in seconds since the Unix epoch.";
        emit(Family::gauge("tollkeeper_config_last_load_timestamp_seconds", help, seconds));
        let help = "First 48 bits of the hash of the loaded rules; replicas with the same rules have the same.";
        let first_digits = loaded.rules.contents_hash.get(..12).unwrap_or_default();
        emit(Family::gauge("tollkeeper_config_hash", help, u64::from_str_radix(first_digits, 16).unwrap_or(0)));
    }
}

/// Emits the metrics of tables that choose plans; none without tables.
fn emit_tables(rules: &LiveRules, emit: &mut dyn FnMut(Family)) {
    let Some(loaded) = rules.current_rules_owned() else { return };
    let mut domains: Vec<_> = loaded.rules.domains().filter(|domain| !domain.tables.is_empty()).collect();
    if domains.is_empty() {
        return;
    }
    domains.sort_by(|one, other| one.name.cmp(&other.name));
    let mut emit_family = |name, kind, help, value_of: &dyn Fn(&LiveTable) -> MetricValue| {
        let mut family = Family::new(name, kind, help);
        for domain in &domains {
            family.series.extend(domain.tables.iter().map(|table| {
                let series = Series::new(value_of(table)).with_label("domain", domain.name.clone());
                series.with_label("table", table.name.to_string())
            }));
        }
        emit(family);
    };
    let help = "Number of rows of a table that chooses plans.";
    emit_family("tollkeeper_table_rows", MetricKind::Gauge, help, &|table| MetricValue::gauge_from(table.row_count()));
    let help = "Memory of the rows, in bytes.";
    emit_family("tollkeeper_table_bytes", MetricKind::Gauge, help, &|table| {
        MetricValue::gauge_from(table.stats.memory_bytes())
    });
    let help = "Time when the rows were loaded, in seconds since the Unix epoch.";
    emit_family("tollkeeper_table_loaded_timestamp_seconds", MetricKind::Gauge, help, &|table| {
        MetricValue::gauge_from(table.stats.loaded_at().map_or(0, |at| at.as_micros() / 1_000_000))
    });
    let help = "Total number of loads of the table that failed; the last good rows stay.";
    emit_family("tollkeeper_table_load_errors_total", MetricKind::Counter, help, &|table| {
        MetricValue::Counter(table.stats.failed_loads())
    });
    let help = "Total number of decisions by the default plan, because the table has no row for the value.";
    emit_family("tollkeeper_table_default_plan_total", MetricKind::Counter, help, &|table| {
        MetricValue::Counter(table.stats.absent_row_decisions())
    });
    let help = "Total number of decisions by the default plan, because a row could not be read from Redis in time.";
    emit_family("tollkeeper_table_unread_total", MetricKind::Counter, help, &|table| {
        MetricValue::Counter(table.stats.unread_row_decisions())
    });
    let help = "Total number of rows read from Redis.";
    emit_family("tollkeeper_table_reads_total", MetricKind::Counter, help, &|table| {
        MetricValue::Counter(table.stats.reads())
    });
    let help = "Total number of reads of rows from Redis that failed.";
    emit_family("tollkeeper_table_read_errors_total", MetricKind::Counter, help, &|table| {
        MetricValue::Counter(table.stats.failed_reads())
    });
}

/// Emits the version and the readiness.
fn emit_version_and_readiness(health: &Health, emit: &mut dyn FnMut(Family)) {
    let version = Series::new(MetricValue::Gauge(1.0)).with_label("version", env!("CARGO_PKG_VERSION"));
    emit(
        Family::new("tollkeeper_build_info", MetricKind::Gauge, "Version of tollkeeper; always 1.").add_series(version),
    );
    emit(Family::gauge("tollkeeper_ready", "1 if the process is ready, as /readyz says.", u8::from(health.is_ready())));
}

/// Emits the metrics of the listeners.
fn emit_listeners(stats: &StatsByListener, emit: &mut dyn FnMut(Family)) {
    let mut connections = Family::new("tollkeeper_connections", MetricKind::Gauge, "Number of open connections.");
    let mut expiry = Family::new(
        "tollkeeper_certificate_not_after_seconds",
        MetricKind::Gauge,
        "Expiry of the certificate of a listener or client, in seconds since the Unix epoch.",
    );
    for (name, listener) in stats.named_listeners() {
        let open = Series::new(MetricValue::gauge_from(listener.open_connection_count()));
        connections.series.push(open.with_label("listener", name));
        if let Some(seconds) = listener.certificate_not_after() {
            expiry.series.push(Series::new(MetricValue::gauge_from(seconds)).with_label("listener", name));
        }
    }
    for client in OutgoingTlsConnection::ALL {
        if let Some(seconds) = stats.presented_certificate_not_after(client) {
            expiry.series.push(Series::new(MetricValue::gauge_from(seconds)).with_label("client", client.name()));
        }
    }
    emit(connections);
    emit(expiry);
    let help = "Total number of connections closed on accept because a limit was reached.";
    emit(Family::counter("tollkeeper_connections_refused_total", help, stats.rejected_connection_count()));
    let help = "Total number of requests rejected, and of connections closed, because a limit on clients was reached.";
    let counts = ExceededLimit::ALL.map(|limit| (limit.name(), stats.refusal_count(limit)));
    emit(Family::counter_by_label("tollkeeper_overload_refusals_total", help, "reason", counts));
    let help = "Total number of streams that clients reset, before or after the answer: calls that were given up.";
    emit(Family::counter("tollkeeper_streams_reset_total", help, RESET_STREAMS.load(Ordering::Relaxed)));
    let help = "Total number of calls and connections that were refused because of their HTTP/2 headers.";
    let counts = RefusalReason::ALL.map(|reason| (reason.name(), HTTP2_REFUSALS.refusal_count(reason)));
    emit(Family::counter_by_label("tollkeeper_http2_refusals_total", help, "reason", counts));
}

/// Emits what `/proc` has about the process; values that cannot be read are left out.
fn emit_process_usage(emit: &mut dyn FnMut(Family)) {
    let lag = SCHEDULER_LAG.recent_maximum(Instant::now());
    let help = "Largest delay of a due task by this process in the last 5 to 10 seconds, in seconds.";
    let series = Series::new(MetricValue::Gauge(lag.as_secs_f64()));
    emit(Family::new("tollkeeper_scheduler_lag_seconds", MetricKind::Gauge, help).add_series(series));
    let help = "Time of this process, in seconds since the Unix epoch.";
    let now = Duration::from_micros(Clock::System.now().as_micros()).as_secs_f64();
    emit(
        Family::new("tollkeeper_time_seconds", MetricKind::Gauge, help)
            .add_series(Series::new(MetricValue::Gauge(now))),
    );
    let Ok(process) = Process::myself() else { return };
    if let Ok(stat) = process.stat() {
        let ticks_per_second = procfs::ticks_per_second().max(1);
        let cpu_ticks = stat.utime.saturating_add(stat.stime);
        let cpu = Duration::from_millis(cpu_ticks.saturating_mul(1000) / ticks_per_second).as_secs_f64();
        emit(
            Family::new(
                "process_cpu_seconds_total",
                MetricKind::Counter,
                "Total user and system CPU time spent in seconds.",
            )
            .add_series(Series::new(MetricValue::Gauge(cpu))),
        );
        emit(Family::gauge("process_resident_memory_bytes", "Resident memory size in bytes.", stat.rss_bytes().get()));
        emit(Family::gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", stat.vsize));
        emit(Family::gauge("process_threads", "Number of threads.", stat.num_threads));
        if let Ok(boot) = procfs::boot_time_secs() {
            let start = boot.saturating_add(stat.starttime / ticks_per_second);
            let help = "Start time of the process, in seconds since the Unix epoch.";
            emit(Family::gauge("process_start_time_seconds", help, start));
        }
    }
    if let Ok(count) = process.fd_count() {
        emit(Family::gauge("process_open_fds", "Number of open file descriptors.", count));
    }
    if let Ok(limits) = process.limits()
        && let LimitValue::Value(max) = limits.max_open_files.soft_limit
    {
        emit(Family::gauge("process_max_fds", "Maximum number of open file descriptors.", max));
    }
}

/// Emits the metrics of requests, decisions and spans.
fn emit_service(service: &RateLimitService, emit: &mut dyn FnMut(Family)) {
    let metrics = &service.decider.metrics;
    emit_calls(metrics, emit);
    let decisions = Series::new(MetricValue::Histogram(Box::new(metrics.decisions.snapshot())));
    let help = "Duration of decisions in seconds, including the store, without the delay of responses.";
    emit(Family::new("tollkeeper_decision_duration_seconds", MetricKind::Histogram, help).add_series(decisions));
    let help = "Total number of calls of gRPC methods that are not offered, by service.";
    emit(Family::counter_by_label(
        "tollkeeper_unknown_grpc_calls_total",
        help,
        "service",
        service.refused_calls.counts(),
    ));
    emit(build_error_family(service));
    let shadow = Series::new(MetricValue::Counter(metrics.global_shadow_mode_count()));
    let help = "Total number of requests admitted because of SHADOW_MODE.";
    emit(
        Family::new("ratelimit_service_global_shadow_mode", MetricKind::Counter, help)
            .add_series(shadow.with_statsd_name("ratelimit.service.global_shadow_mode")),
    );
    emit(build_blocked_family(service));
    let help = "Number of blocked values.";
    let blocked = service.decider.blocks.list(service.clock.now()).len();
    emit(Family::gauge("tollkeeper_blocked_values", help, blocked));
    if let Some(tracer) = &service.tracer {
        emit(build_span_family(&tracer.span_queue));
    }
    if let Some(exports) = METRIC_EXPORT_COUNTS.counts_by_outcome() {
        let help = "Total number of requests to the collector of metrics: sent, or failed to send.";
        emit(Family::counter_by_label("tollkeeper_otlp_metric_exports_total", help, "outcome", exports));
    }
    if let Some(log) = &service.decider.log {
        emit(build_decision_log_family(log));
    }
    if let Some(counts) = WEBHOOK_COUNTS.counts_by_outcome() {
        let help = "Total number of requests to the webhook of levels: sent, failed, or dropped by the full queue.";
        emit(Family::counter_by_label("tollkeeper_level_webhook_requests_total", help, "outcome", counts));
    }
    if let Some(levels) = &service.decider.reached_levels {
        let help = "Total number of levels of `notify` that keys reached, by what became of them.";
        let counts = levels.counts_by_outcome().map(|(outcome, count)| (outcome.name(), count));
        emit(Family::counter_by_label("tollkeeper_reached_levels_total", help, "outcome", counts));
    }
    emit(Family::gauge(
        "tollkeeper_answers_held",
        "Number of responses that are delayed now.",
        service.delayed_response_count(),
    ));
}

/// Emits calls by gRPC method.
fn emit_calls(metrics: &ServiceMetrics, emit: &mut dyn FnMut(Family)) {
    let mut requests = Family::new(
        "ratelimit_service_total_requests",
        MetricKind::Counter,
        "Total number of calls of the rate limit service and the health service.",
    );
    let mut times = Family::new(
        "ratelimit_service_response_time_seconds",
        MetricKind::Histogram,
        "Duration of calls in seconds, including the delay of responses.",
    );
    let methods = [("ShouldRateLimit", metrics.calls.snapshot()), ("Check", metrics.health_checks.snapshot())];
    for (method, snapshot) in methods {
        let series = |value| Series::new(value).with_label("grpc_method", method);
        let statsd_name = |metric: &str| format!("ratelimit_server.{method}.{metric}");
        let count = series(MetricValue::Counter(snapshot.observation_count()));
        requests.series.push(count.with_statsd_name(statsd_name("total_requests")));
        let time = series(MetricValue::Histogram(Box::new(snapshot)));
        times.series.push(time.with_statsd_name(statsd_name("response_time")));
    }
    emit(requests);
    emit(times);
}

fn build_error_family(service: &RateLimitService) -> Family {
    let failed: u64 = service.decider.failed_charge_counts().map(|(_, count)| count).sum();
    let series = |kind: &'static str, count| {
        let statsd_name = format!("ratelimit.service.call.should_rate_limit.{kind}");
        Series::new(MetricValue::Counter(count)).with_label("err_type", kind).with_statsd_name(statsd_name)
    };
    Family::new(
        "ratelimit_service_should_rate_limit_error",
        MetricKind::Counter,
        "Total number of charges that failed in the store, and of requests that failed for another reason.",
    )
    .add_series(series("redis_error", failed))
    .add_series(series("service_error", service.decider.metrics.service_error_count()))
}

fn build_span_family(span_queue: &SpanQueue) -> Family {
    let SpanCountsByOutcome { sent, dropped, failed } = span_queue.span_counts_by_outcome();
    let help = "Total number of ended spans: sent to the collector, dropped by the full queue, or failed to send.";
    let counts = [("sent", sent), ("dropped", dropped), ("failed", failed)];
    Family::counter_by_label("tollkeeper_spans_total", help, "outcome", counts)
}

fn build_decision_log_family(log: &DecisionLog) -> Family {
    let help = "Total number of records of the decision log: written, dropped by the full queue, or failed to write.";
    let mut family = Family::new("tollkeeper_decision_log_records_total", MetricKind::Counter, help);
    for RecordCounts { sink, written, dropped, failed } in log.counts_by_sink() {
        for (outcome, count) in [("written", written), ("dropped", dropped), ("failed", failed)] {
            let series =
                Series::new(MetricValue::Counter(count)).with_label("sink", sink).with_label("outcome", outcome);
            family.series.push(series);
        }
    }
    family
}

/// Requests that blocked values rejected, by domain.
fn build_blocked_family(service: &RateLimitService) -> Family {
    let help = "Total number of requests rejected because of a blocked value, by domain.";
    let mut family = Family::new("tollkeeper_blocked_requests_total", MetricKind::Counter, help);
    for (domain, count) in service.decider.blocks.rejection_counts() {
        family = family.add_series(Series::new(MetricValue::Counter(count)).with_label("domain", domain));
    }
    family
}
