//! Routes of the HTTP and debug listeners.
//!
//! Pages that envoyproxy/ratelimit has are identical to its pages: `/json` and `/healthcheck` on the HTTP listener,
//! `/rlconfig` on the debug listener. Unknown pages are 404. Pages that change state or show keys need the admin
//! token. Request bodies are bounded in size and time.

use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{any, get, post};

use super::app_state::AppState;
use super::browser;
use super::response::error;
use super::{admin_pages, console_pages, decision_pages, live_page, metrics_pages, report_pages, status_pages};
use crate::serve::grpc::service::DEFAULT_DEADLINE;

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
        .route("/", get(console_pages::index))
        .route("/console.css", get(console_pages::style))
        .route("/console.js", get(console_pages::script))
        .route("/live", get(live_page::live))
        .route("/rlconfig", get(status_pages::rlconfig))
        .route("/rlconfig/status", get(status_pages::rlconfig_status))
        .route("/explain", any(decision_pages::explain))
        .route("/stats", get(metrics_pages::stats))
        .route("/problems", get(status_pages::problems))
        .route("/store", get(status_pages::store))
        .route("/top", get(report_pages::top))
        .route("/rules", get(report_pages::rules))
        .route("/fleet", get(report_pages::fleet))
        .route("/settings", get(admin_pages::settings))
        .route("/counters", get(admin_pages::counters))
        .route("/reset", post(admin_pages::reset))
        .route("/log_level", get(admin_pages::log_level).put(admin_pages::set_log_level))
        .fallback(not_found)
        .layer(DefaultBodyLimit::max(state.max_body_bytes))
        .layer(middleware::from_fn(with_timeout))
        .layer(middleware::from_fn_with_state(state.debug_hosts.clone(), browser::protect))
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
