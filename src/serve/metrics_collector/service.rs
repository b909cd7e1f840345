//! Metrics of requests, decisions and spans.

use crate::decide::log::{DecisionLog, RecordCounts};
use crate::serve::grpc::service::RateLimitService;
use crate::telemetry::metrics::{Family, MetricKind, MetricValue, Series};
use crate::telemetry::otlp_metrics::METRIC_EXPORT_COUNTS;
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::traces::{SpanCountsByOutcome, SpanQueue};

/// Emits the metrics of requests, decisions and spans.
pub(super) fn emit_service(service: &RateLimitService, emit: &mut dyn FnMut(Family)) {
    let metrics = &service.decider.metrics;
    emit_calls(metrics, emit);
    let decisions = Series::new(MetricValue::Histogram(Box::new(metrics.decisions.snapshot())));
    let help = "Duration of decisions in seconds, including the store, without the delay of responses.";
    emit(Family::new("tollkeeper_decision_duration_seconds", MetricKind::Histogram, help).add_series(decisions));
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
