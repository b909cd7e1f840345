//! Routes of the HTTP and debug listeners.
//!
//! Pages that envoyproxy/ratelimit has are identical to its pages: `/json` and `/healthcheck` on the HTTP listener,
//! `/rlconfig` on the debug listener. Unknown pages are 404. Pages that change state or show keys need the admin
//! token. Request bodies are bounded in size and time.

use std::fmt::Write as _;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{any, get, post};

use super::app_state::AppState;
use super::response::error;
use super::{admin_pages, decision_pages, metrics_pages, report_pages, status_pages};
use crate::grpc::service::DEFAULT_DEADLINE;

/// Routes of the HTTP listener, for clients and health probes.
pub fn public(state: AppState) -> Router {
    health_pages()
        .route("/json", any(decision_pages::decide))
        .fallback(not_found)
        .layer(DefaultBodyLimit::max(state.max_body_bytes))
        .layer(middleware::from_fn(with_timeout))
        .with_state(state)
}

/// Routes of the debug listener, for operators.
pub fn debug(state: AppState) -> Router {
    health_pages()
        .route("/", get(index))
        .route("/rlconfig", get(status_pages::rlconfig))
        .route("/rlconfig/status", get(status_pages::rlconfig_status))
        .route("/explain", any(decision_pages::explain))
        .route("/stats", get(metrics_pages::stats))
        .route("/store", get(status_pages::store))
        .route("/top", get(report_pages::top))
        .route("/rules", get(report_pages::rules))
        .route("/settings", get(admin_pages::settings))
        .route("/counters", get(admin_pages::counters))
        .route("/reset", post(admin_pages::reset))
        .route("/log_level", get(admin_pages::log_level).put(admin_pages::set_log_level))
        .fallback(not_found)
        .layer(DefaultBodyLimit::max(state.max_body_bytes))
        .layer(middleware::from_fn(with_timeout))
        .with_state(state)
}

/// Pages for probes, the same on both listeners.
fn health_pages() -> Router<AppState> {
    Router::new()
        .route("/healthcheck", any(status_pages::health))
        .route("/readyz", any(status_pages::ready))
        .route("/livez", any(|| async { "OK" }))
}

async fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// Maximum time to read a request and answer it. A client that sends its body slowly occupies memory.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2 * DEFAULT_DEADLINE.as_secs());

async fn with_timeout(request: Request, next: Next) -> Response {
    let response = tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await;
    response.unwrap_or_else(|_| error(StatusCode::REQUEST_TIMEOUT, "Request Timeout\n"))
}

/// Pages of the debug listener with their descriptions, by path.
const DEBUG_PAGES: [(&str, &str); 14] = [
    ("/counters?domain=D&rule=R", "counters of a rule as JSON; `most=N` (default 100); needs the token"),
    ("/explain", "rules and counters that a request (as for /json) matches, as JSON; charges nothing"),
    ("/healthcheck", "200 if the process accepts traffic, as on the HTTP listener"),
    ("/livez", "200 while the process runs"),
    ("/log_level", "current log level; PUT a level's name to change it until the process ends, needs the token"),
    ("/readyz", "200 if the process can decide requests, otherwise the reason"),
    ("/reset", "POST a request (as for /json) to delete its counters; needs the token"),
    ("/rlconfig", "print out the currently loaded configuration for debugging"),
    ("/rlconfig/status", "version, files and last error of the configuration as JSON"),
    ("/rules", "decisions and findings by limit as JSON; `format=text`, `rule=NAME`, `finding=KIND`, `most=N`"),
    ("/settings", "effective settings as JSON, secrets masked"),
    ("/stats", "all metrics as text, under their statsd names, or else their Prometheus names"),
    ("/store", "store statistics as JSON: failed charges, failure policies, leases, replicas"),
    ("/top", "keys that are rejected most as JSON; `format=text`, `minutes=1..10`, `rule=NAME`, `most=N`"),
];

async fn index() -> String {
    DEBUG_PAGES.iter().fold(String::new(), |mut page, (path, description)| {
        let _ = writeln!(page, "{path}: {description}");
        page
    })
}
