//! Pages over HTTP: decisions as JSON, health, debug pages and metrics.
//!
//! The routes of the HTTP listener and of the debug listener are built here; that of the Prometheus listener is in
//! `metrics_pages`.
//!
//! Decides: which pages there are, on which listener; methods (405), unknown paths (404).
//! Decides: size of a body, also of `/json`, `/block`, `/reset`, `/log_level`.
//! Decides: the time for a request (`REQUEST_TIMEOUT`, 408); that `/livez` depends on nothing.

mod response;
pub mod page_builder;
pub mod browser_protection;
pub mod live_events;
pub mod app_state;
pub mod admin_token;
mod decision_pages;
mod status_pages;
pub mod report_pages;
pub mod metrics_pages;
mod admin_pages;
pub mod block_pages;
mod console_pages;

use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{any, get, post};

use self::app_state::AppState;
use self::response::respond_error;
use crate::serve::grpc::service::DEFAULT_CALLER_DEADLINE;

/// Builds the routes of the HTTP listener, for clients and health probes.
pub fn build_http_router(state: AppState) -> Router {
    build_probe_router()
        .route("/json", any(decision_pages::answer_json))
        .fallback(respond_not_found)
        .layer(DefaultBodyLimit::max(state.max_body_bytes))
        .layer(middleware::from_fn(limit_request_time))
        .layer(middleware::from_fn_with_state(state.debug_hosts.clone(), browser_protection::refuse_other_sites))
        .with_state(state)
}

/// Builds the routes of the debug listener, for operators.
pub fn build_debug_router(state: AppState) -> Router {
    build_probe_router()
        .route("/", get(console_pages::show_index))
        .route("/console.css", get(console_pages::show_style))
        .route("/console.js", get(console_pages::show_script))
        .route("/console/{module}", get(console_pages::show_module))
        .route("/live", get(report_pages::show_live))
        .route("/rlconfig", get(status_pages::show_rlconfig))
        .route("/rlconfig/status", get(status_pages::show_rlconfig_status))
        .route("/explain", any(decision_pages::show_explanation))
        .route("/stats", get(metrics_pages::show_stats))
        .route("/problems", get(status_pages::show_problems))
        .route("/store", get(status_pages::show_store))
        .route("/top", get(report_pages::show_top))
        .route("/rejections", get(report_pages::show_rejections))
        .route("/unmatched", get(report_pages::show_unmatched))
        .route("/rules", get(report_pages::show_rules))
        .route("/fleet", get(report_pages::show_fleet))
        .route("/history", get(report_pages::show_history))
        .route("/alarms", get(report_pages::show_alarms))
        .route("/rule_text", get(report_pages::show_rule_text))
        .route("/what_if", get(respond_what_if_was_removed))
        .route("/quota", get(report_pages::show_quota))
        .route("/settings", get(admin_pages::show_settings))
        .route("/counters", get(admin_pages::show_counters))
        .route("/reset", post(admin_pages::reset_counters))
        .route("/tap", get(admin_pages::tap_decisions))
        .route("/blocks", get(block_pages::show_blocks))
        .route("/block", post(block_pages::block_value).delete(block_pages::unblock_value))
        .route("/log_level", get(admin_pages::show_log_level).put(admin_pages::set_log_level))
        .fallback(console_pages::respond_page_not_found)
        .layer(DefaultBodyLimit::max(state.max_body_bytes))
        .layer(middleware::from_fn(limit_request_time))
        .layer(middleware::from_fn_with_state(state.debug_hosts.clone(), browser_protection::protect_from_other_sites))
        .with_state(state)
}

/// Builds the pages for probes, the same on both listeners.
fn build_probe_router() -> Router<AppState> {
    Router::new()
        .route("/healthcheck", any(status_pages::show_health))
        .route("/readyz", any(status_pages::show_ready))
        .route("/livez", any(|| async { "OK" }))
}

async fn respond_not_found() -> Response {
    respond_error(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// For one version: a page that is no more.
async fn respond_what_if_was_removed() -> Response {
    let what = "/what_if was removed (`tollkeeper simulate --rules NEW.yaml` decides on a decision log what other limits reject)\n";
    respond_error(StatusCode::GONE, what)
}

/// Maximum time to read a request and answer it. A client that sends its body slowly occupies memory.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2 * DEFAULT_CALLER_DEADLINE.as_secs());

async fn limit_request_time(request: Request, next: Next) -> Response {
    let response = tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await;
    response.unwrap_or_else(|_| respond_error(StatusCode::REQUEST_TIMEOUT, "Request Timeout\n"))
}
