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
    let help = "Total number of requests rejected, and of connections closed, because a limit on clients was reached.";
    let counts = RefusedLimit::ALL.map(|limit| (limit.name(), stats.refusals(limit)));
    emit(Family::counters("tollkeeper_overload_refusals_total", help, "reason", counts));
    let help = "Total number of calls and connections that were refused because of their HTTP/2 headers.";
    let counts = RefusalReason::ALL.map(|reason| (reason.name(), HTTP2_REFUSALS.count(reason)));
    emit(Family::counters("tollkeeper_http2_refusals_total", help, "reason", counts));
}
