//! `/metrics` for Prometheus, and `/stats` for people.
//!
//! Decides: path and format of metrics; that they need no token.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use axum::routing::get;

use super::app_state::{AppState, PrometheusPageConfig};
use super::page_builder::{Page, PageBuilder};
use crate::serve::metrics_collector::MetricsCollector;
use crate::telemetry::metrics::prometheus::TextPage;
use crate::telemetry::metrics::{MetricValue, Series};

/// State of the page for Prometheus.
#[derive(Clone)]
struct PrometheusPageState {
    collector: MetricsCollector,
    prometheus_page: Arc<PrometheusPageConfig>,
    pages: PageBuilder,
}

/// Builds the routes of the Prometheus listener.
pub fn build_metrics_router(state: &AppState) -> Router {
    let Some(prometheus_page) = state.prometheus_page.clone() else { return Router::new() };
    let path = prometheus_page.path.clone();
    let state = PrometheusPageState { collector: state.collector.clone(), prometheus_page, pages: state.pages.clone() };
    Router::new().route(&path, get(show_metrics)).with_state(state)
}

async fn show_metrics(State(state): State<PrometheusPageState>, uri: Uri) -> Response {
    let PrometheusPageState { collector, prometheus_page, pages } = state;
    let build = move || {
        let mut page = TextPage::new(&prometheus_page.options);
        collector.collect(&mut |family| page.add_family(family));
        Some(Page { content_type: "text/plain; version=0.0.4", ..Page::text(page.into_text()) })
    };
    pages.respond_with_page(&uri, build).await
}

/// `/stats`: a line `name: value` for each series, zeros included, sorted.
pub(super) async fn show_stats(State(state): State<AppState>, uri: Uri) -> Response {
    let build = move || {
        let mut lines = Vec::new();
        state.collector.collect(&mut |family| {
            for series in &family.series {
                lines.push(format!(
                    "{}: {}\n",
                    format_series_name(&family.name, series),
                    format_metric_value(&series.value)
                ));
            }
        });
        lines.sort_unstable();
        Some(Page::text(lines.concat()))
    };
    state.pages.clone().respond_with_page(&uri, build).await
}

/// Name of a series: in statsd if it has one there, otherwise in Prometheus.
fn format_series_name(family: &str, series: &Series) -> String {
    if let Some(name) = &series.statsd_name {
        return name.clone();
    }
    let mut name = family.to_owned();
    for (index, (label, value)) in series.labels.iter().enumerate() {
        let _ = write!(name, "{}{label}={value:?}", if index == 0 { '{' } else { ',' });
    }
    name.push_str(if series.labels.is_empty() { "" } else { "}" });
    name
}

fn format_metric_value(value: &MetricValue) -> String {
    match value {
        MetricValue::Counter(count) => count.to_string(),
        MetricValue::Gauge(level) => level.to_string(),
        MetricValue::Histogram(times) => {
            format!("count {} sum_ms {}", times.observation_count(), times.sum_ns / 1_000_000)
        }
    }
}
