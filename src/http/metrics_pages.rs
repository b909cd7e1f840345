//! The page for Prometheus, and `/stats` for people.
//!
//! A page with ten thousand rules is work for some tens of milliseconds: it is made on a thread of its own that
//! decisions go before, one page at a time, and whoever asks more often waits.

use std::fmt::Write as _;
use std::sync::Arc;
use std::thread;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use tokio::sync::{Semaphore, oneshot};

use super::routes::{AppState, text};
use crate::scrape::MetricsCollector;
use crate::settings::metrics::PrometheusSettings;
use crate::telemetry::metrics::family::{MetricValue, Series};
use crate::telemetry::metrics::mapper::Mapper;
use crate::telemetry::metrics::prometheus::{ExpositionOptions, TextPage};
use crate::thread_priority;

/// How Prometheus gets the metrics.
#[derive(Debug)]
pub struct Exposition {
    path: String,
    options: Arc<ExpositionOptions>,
}

impl Exposition {
    /// As the settings say.
    ///
    /// # Errors
    /// Names the file with the mapping of names and says why it can not be used.
    pub fn new(settings: &PrometheusSettings, tags: &[(String, String)]) -> Result<Self, String> {
        let read = |path: &std::path::PathBuf| {
            Mapper::read(path).map_err(|error| format!("{}: {error}; mend it or unset it", path.display()))
        };
        let mapper = settings.mapper.as_ref().map(read).transpose()?;
        let options = ExpositionOptions { tags: tags.to_vec(), mapper, milliseconds: settings.milliseconds };
        Ok(Self { path: settings.path.clone(), options: Arc::new(options) })
    }
}

/// The page of the listener for Prometheus.
pub fn routes(state: &AppState) -> Router {
    let Some(exposition) = state.exposition.clone() else { return Router::new() };
    let options = Arc::clone(&exposition.options);
    let state = (state.collector.clone(), options);
    Router::new().route(&exposition.path, get(metrics)).with_state(state)
}

async fn metrics(State((collector, options)): State<(MetricsCollector, Arc<ExpositionOptions>)>) -> Response {
    let page = render_off_thread(move || {
        let mut page = TextPage::new(&options);
        collector.read(&mut |family| page.add(family));
        page.finish()
    });
    match page.await {
        Some(page) => (StatusCode::OK, [(header::CONTENT_TYPE, "text/plain; version=0.0.4")], page).into_response(),
        None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// `name: value`, a line each; what is 0 too.
pub(super) async fn stats(State(state): State<AppState>) -> Response {
    let lines = render_off_thread(move || {
        let mut lines = Vec::new();
        state.collector.read(&mut |family| {
            for series in &family.series {
                lines.push(format!("{}: {}\n", name(&family.name, series), value(&series.value)));
            }
        });
        lines.sort_unstable();
        lines.concat()
    });
    lines.await.map_or_else(|| StatusCode::INTERNAL_SERVER_ERROR.into_response(), |page| text(StatusCode::OK, page))
}

fn name(family: &str, series: &Series) -> String {
    if let Some(stats) = &series.stats {
        return stats.clone();
    }
    let mut name = family.to_owned();
    for (place, (label, value)) in series.labels.iter().enumerate() {
        let _ = write!(name, "{}{label}={value:?}", if place == 0 { '{' } else { ',' });
    }
    name.push_str(if series.labels.is_empty() { "" } else { "}" });
    name
}

fn value(value: &MetricValue) -> String {
    match value {
        MetricValue::Counter(count) => count.to_string(),
        MetricValue::Gauge(level) => level.to_string(),
        MetricValue::Histogram(times) => format!("count {} sum_ms {}", times.count(), times.sum_ns / 1_000_000),
    }
}

/// Makes a page where it is in nobody's way.
pub(super) async fn render_off_thread(make: impl FnOnce() -> String + Send + 'static) -> Option<String> {
    static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);
    let _turn = ONE_AT_A_TIME.acquire().await.ok()?;
    let (done, made) = oneshot::channel();
    let work = move || {
        thread_priority::lower();
        let _ = done.send(make());
    };
    thread::Builder::new().name("metrics".to_owned()).spawn(work).ok()?;
    made.await.ok()
}
