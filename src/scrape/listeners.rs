//! Metrics of the listeners.

use crate::telemetry::http2_refusals::{HTTP2_REFUSALS, RefusalReason};
use crate::telemetry::listener_stats::{RefusedLimit, ServerStats};
use crate::telemetry::metrics::family::{Family, MetricKind, MetricValue, Series};

/// Emits the metrics of the listeners.
pub(super) fn collect(stats: &ServerStats, emit: &mut dyn FnMut(Family)) {
    let mut connections = Family::new("tollkeeper_connections", MetricKind::Gauge, "Number of open connections.");
    let mut expiry = Family::new(
        "tollkeeper_certificate_not_after_seconds",
        MetricKind::Gauge,
        "Expiry of the listener's certificate, in seconds since the Unix epoch.",
    );
    for (name, listener) in stats.all() {
        let open = Series::new(MetricValue::level(listener.connections()));
        connections.series.push(open.label("listener", name));
        if let Some(seconds) = listener.certificate_not_after() {
            expiry.series.push(Series::new(MetricValue::level(seconds)).label("listener", name));
        }
    }
    emit(connections);
    emit(expiry);
    let help = "Total number of connections closed on accept because a limit was reached.";
    emit(Family::counter("tollkeeper_connections_refused_total", help, stats.rejected_connections()));
    let mut overload = Family::new(
        "tollkeeper_overload_refusals_total",
        MetricKind::Counter,
        "Total number of requests rejected, and of connections closed, because a limit on clients was reached.",
    );
    for limit in RefusedLimit::ALL {
        let count = MetricValue::Counter(stats.refusals(limit));
        overload.series.push(Series::new(count).label("reason", limit.name()));
    }
    emit(overload);
    let mut refusals = Family::new(
        "tollkeeper_http2_refusals_total",
        MetricKind::Counter,
        "Total number of calls and connections that were refused because of their HTTP/2 headers.",
    );
    for reason in RefusalReason::ALL {
        let count = MetricValue::Counter(HTTP2_REFUSALS.count(reason));
        refusals.series.push(Series::new(count).label("reason", reason.name()));
    }
    emit(refusals);
}
