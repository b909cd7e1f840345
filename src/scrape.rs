//! Everything that is measured, read when somebody asks.
//!
//! Prometheus, statsd and `/stats` get the same families, made one after the other. Each number is kept by whoever
//! knows it: this is the only place that knows them all, and it keeps none. A reading takes a few locks for a moment,
//! and none that is held while it waits.

mod limits;
mod process;
mod store;

use std::sync::Arc;

use crate::grpc::service::Service;
use crate::health::Health;
use crate::telemetry::listener_stats::ServerStats;
use crate::telemetry::metrics::family::{Family, MetricKind, MetricValue, Series};
use crate::telemetry::traces::span_queue::ExportCounts;

/// What is read.
#[derive(Clone, Debug)]
pub struct MetricsCollector {
    /// What decides.
    pub service: Arc<Service>,
    /// How the process is.
    pub health: Arc<Health>,
    /// What is counted at the listeners.
    pub listeners: Arc<ServerStats>,
    /// Whether the metrics of limits have a label with the whole path.
    pub path_label: bool,
}

impl MetricsCollector {
    /// Reads everything; `each` gets one family after the other, none of which it has had before.
    pub fn read(&self, each: &mut dyn FnMut(Family)) {
        self.limits(each);
        self.calls(each);
        self.store(each);
        self.rules(each);
        self.listeners(each);
        process::read(each);
    }

    /// Requests, whichever way they went.
    fn calls(&self, each: &mut dyn FnMut(Family)) {
        let metrics = &self.service.decider.metrics;
        let methods = [("ShouldRateLimit", metrics.calls.snapshot()), ("Check", metrics.health_checks.snapshot())];
        let mut requests = Family::new(
            "ratelimit_service_total_requests",
            MetricKind::Counter,
            "Calls of the rate limit service and of its health service.",
        );
        let mut times = Family::new(
            "ratelimit_service_response_time_seconds",
            MetricKind::Histogram,
            "How long they took, the time included that an answer was held.",
        );
        for (method, observed) in methods {
            let of = |value| Series::of(value).label("grpc_method", method);
            let stats = |what: &str| format!("ratelimit_server.{method}.{what}");
            requests.series.push(of(MetricValue::Counter(observed.count())).stats(stats("total_requests")));
            times.series.push(of(MetricValue::Histogram(Box::new(observed))).stats(stats("response_time")));
        }
        each(requests);
        each(times);
        each(
            Family::new(
                "tollkeeper_decision_duration_seconds",
                MetricKind::Histogram,
                "How long decisions took, the store included, without the time that an answer was held.",
            )
            .with(Series::of(MetricValue::Histogram(Box::new(metrics.decisions.snapshot())))),
        );
        let failed: u64 = self.service.decider.failed_charges().map(|(_, count)| count).sum();
        let error = |kind: &'static str, count| {
            let stats = format!("ratelimit.service.call.should_rate_limit.{kind}");
            Series::of(MetricValue::Counter(count)).label("err_type", kind).stats(stats)
        };
        each(
            Family::new(
                "ratelimit_service_should_rate_limit_error",
                MetricKind::Counter,
                "Charges that the store failed, answered by policy or not; requests that could not be decided at all.",
            )
            .with(error("redis_error", failed))
            .with(error("service_error", metrics.service_errors())),
        );
        each(
            Family::new(
                "ratelimit_service_global_shadow_mode",
                MetricKind::Counter,
                "Requests that were let pass because of SHADOW_MODE.",
            )
            .with(
                Series::of(MetricValue::Counter(metrics.global_shadow_mode()))
                    .stats("ratelimit.service.global_shadow_mode"),
            ),
        );
        if let Some(tracer) = &self.service.tracer {
            let ExportCounts { sent, dropped, failed } = tracer.span_queue.export_counts();
            let of = |outcome: &'static str, count| Series::of(MetricValue::Counter(count)).label("outcome", outcome);
            let help =
                "Spans that ended: sent to the collector, dropped for want of room, or not taken by the collector.";
            let spans = Family::new("tollkeeper_spans_total", MetricKind::Counter, help);
            each(spans.with(of("sent", sent)).with(of("dropped", dropped)).with(of("failed", failed)));
        }
        each(gauge("tollkeeper_answers_held", "Answers that wait for their time.", self.service.held()));
    }

    /// The rules, and what became of the last attempts to replace them.
    fn rules(&self, each: &mut dyn FnMut(Family)) {
        let status = self.service.rules.status();
        let loads = |name, outcome: &str, help, count| {
            let stats = format!("ratelimit.service.config_load_{outcome}");
            Family::new(name, MetricKind::Counter, help).with(Series::of(MetricValue::Counter(count)).stats(stats))
        };
        let (success, error) = ("ratelimit_service_config_load_success", "ratelimit_service_config_load_error");
        each(loads(success, "success", "Sets of rules that were put in force.", status.version));
        each(loads(error, "error", "Sets of rules that were refused.", status.refused));
        each(gauge("tollkeeper_config_version", "Number of the set of rules in force; 0: none.", status.version));
        let is_good = u8::from(status.last_error.is_none() && status.version > 0);
        each(gauge("tollkeeper_config_last_load_successful", "Whether the last set was put in force.", is_good));
        each(gauge("tollkeeper_domains", "Domains in force.", status.domains));
        each(gauge("tollkeeper_rules", "Rules in force.", status.rules));
        if let Some(loaded) = self.service.rules.load().as_ref() {
            let seconds = loaded.loaded_at.as_micros() / 1_000_000;
            let help = "When the set in force was put there, in seconds since 1970.";
            each(gauge("tollkeeper_config_last_load_timestamp_seconds", help, seconds));
        }
        let version = Series::of(MetricValue::Gauge(1.0)).label("version", env!("CARGO_PKG_VERSION"));
        each(Family::new("tollkeeper_build_info", MetricKind::Gauge, "The program; always 1.").with(version));
        let ready = u8::from(self.health.is_ready());
        each(gauge("tollkeeper_ready", "Whether /readyz says yes.", ready));
    }
}

impl MetricsCollector {
    /// Connections, and who was turned away.
    fn listeners(&self, each: &mut dyn FnMut(Family)) {
        let mut open = Family::new("tollkeeper_connections", MetricKind::Gauge, "Open connections.");
        let mut ends = Family::new(
            "tollkeeper_certificate_not_after_seconds",
            MetricKind::Gauge,
            "When the certificate of a listener ends, in seconds since 1970.",
        );
        for (listener, stats) in self.listeners.all() {
            open.series.push(Series::of(level_of(stats.connections())).label("listener", listener));
            if let Some(seconds) = stats.not_after() {
                ends.series.push(Series::of(level_of(seconds)).label("listener", listener));
            }
        }
        each(open);
        each(ends);
        let help = "Connections that were closed at once because there were too many.";
        each(counter("tollkeeper_connections_refused_total", help, self.listeners.refused_connections()));
        let help = "Requests that were refused at once because there were too many.";
        each(counter("tollkeeper_overload_refusals_total", help, self.listeners.refused_requests()));
    }
}

/// A family of one gauge.
fn gauge(name: &'static str, help: &'static str, level: impl TryInto<u64>) -> Family {
    Family::new(name, MetricKind::Gauge, help).with(Series::of(level_of(level)))
}

/// A family of one counter.
fn counter(name: &'static str, help: &'static str, count: u64) -> Family {
    Family::new(name, MetricKind::Counter, help).with(Series::of(MetricValue::Counter(count)))
}

/// The value of a gauge that counts something.
fn level_of(level: impl TryInto<u64>) -> MetricValue {
    let level: u64 = level.try_into().unwrap_or(u64::MAX);
    #[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
    {
        MetricValue::Gauge(level as f64)
    }
}
