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

use std::sync::LazyLock;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{MethodRouter, any, get, post};

use self::app_state::AppState;
use self::report_pages::{ReportPage, show_report};
use self::response::respond_error;
use self::status_pages::ProblemsReport;
use crate::decide::store_totals::StoreTotals;
use crate::rules::live::LoadStatus;
use crate::serve::fleet::report::{AlarmReport, FleetReport};
use crate::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
use crate::serve::quota::page::QuotaReport;
use crate::serve::report::history::HistoryReport;
use crate::serve::report::rejections::RejectionsReport;
use crate::serve::report::rule_text::RuleTextReport;
use crate::serve::report::rules::RuleUsageReport;
use crate::serve::report::top::TopReport;
use crate::serve::report::unmatched::UnmatchedReport;

/// Builds the routes of the HTTP listener, for clients and health probes.
pub fn build_http_router(state: AppState) -> Router {
    add_pages(Router::new(), probe_pages())
        .route("/json", any(decision_pages::answer_json))
        .fallback(respond_not_found)
        .layer(DefaultBodyLimit::max(state.max_body_bytes))
        .layer(middleware::from_fn(limit_request_time))
        .layer(middleware::from_fn_with_state(state.debug_hosts.clone(), browser_protection::refuse_other_sites))
        .with_state(state)
}

/// Maximum size of a body on the debug listener, in bytes: many operators may send one at once, and none is counted.
const MAX_DEBUG_BODY_BYTES: usize = 1 << 20;

/// A page: path with required parameters, what it shows, handler.
type PageRoute = (&'static str, &'static str, MethodRouter<AppState>);

/// Pages for probes, the same on both listeners.
fn probe_pages() -> [PageRoute; 3] {
    [
        ("/healthcheck", "200 if the process accepts traffic, as on the HTTP listener", any(status_pages::show_health)),
        ("/livez", "200 while the process runs", any(|| async { "OK" })),
        ("/readyz", "200 if the process can decide requests, otherwise the reason", any(status_pages::show_ready)),
    ]
}

/// Reports, which the debug listener shows.
fn report_pages() -> [PageRoute; 12] {
    [
        report_page::<AlarmReport>(),
        report_page::<FleetReport>(),
        report_page::<HistoryReport>(),
        report_page::<ProblemsReport>(),
        report_page::<QuotaReport>(),
        report_page::<RejectionsReport>(),
        report_page::<LoadStatus>(),
        report_page::<RuleTextReport>(),
        report_page::<RuleUsageReport>(),
        report_page::<StoreTotals>(),
        report_page::<TopReport>(),
        report_page::<UnmatchedReport>(),
    ]
}

/// The page of a report.
fn report_page<R: ReportPage>() -> PageRoute {
    (R::PATH, R::ABOUT, get(show_report::<R>))
}

/// Other pages of the debug listener.
fn other_debug_pages() -> [PageRoute; 11] {
    [
        (
            "/block",
            "POST a value to block it, DELETE to undo it; needs the token",
            post(block_pages::block_value).delete(block_pages::unblock_value),
        ),
        ("/blocks", "blocked values as JSON; needs the token", get(block_pages::show_blocks)),
        (
            "/counters?domain=D&rule=R",
            "counters of a rule as JSON; `most=N` (default 100); needs the token",
            get(admin_pages::show_counters),
        ),
        (
            "/explain",
            "rules and counters that a request (as for /json) matches, as JSON; charges nothing",
            any(decision_pages::show_explanation),
        ),
        (
            "/live",
            "requests, verdicts, latency, store and rules as server-sent events, one a second",
            get(report_pages::show_live),
        ),
        (
            "/log_level",
            "current log level; PUT a level's name to change it until the process ends, needs the token",
            get(admin_pages::show_log_level).put(admin_pages::set_log_level),
        ),
        (
            "/reset",
            "POST a request (as for /json) to delete its counters; needs the token",
            post(admin_pages::reset_counters),
        ),
        ("/rlconfig", "print out the currently loaded configuration for debugging", get(status_pages::show_rlconfig)),
        ("/settings", "effective settings as JSON, secrets masked", get(admin_pages::show_settings)),
        (
            "/stats",
            "all metrics as text, under their statsd names, or else their Prometheus names",
            get(metrics_pages::show_stats),
        ),
        (
            "/tap",
            "decisions as they are made, as lines of the decision log, 100 a second at most; `domain=NAME`, `entry=KEY=VALUE`, `verdict=VERDICT`; needs the token",
            get(admin_pages::tap_decisions),
        ),
    ]
}

/// List of the pages of the debug listener.
static DEBUG_PAGE_LIST: LazyLock<String> = LazyLock::new(|| {
    let pages = probe_pages().into_iter().chain(report_pages()).chain(other_debug_pages());
    let mut pages: Vec<(&str, &str)> = pages.map(|(path, about, _)| (path, about)).collect();
    pages.push(("/", "the console in a browser, this list elsewhere"));
    pages.sort_unstable();
    pages.iter().fold(String::new(), |list, (path, about)| list + path + ": " + about + "\n")
});

fn add_pages(router: Router<AppState>, pages: impl IntoIterator<Item = PageRoute>) -> Router<AppState> {
    pages.into_iter().fold(router, |router, (path, _, handler)| {
        router.route(path.split_once('?').map_or(path, |(path, _)| path), handler)
    })
}

/// Builds the routes of the debug listener, for operators.
pub fn build_debug_router(state: AppState) -> Router {
    let pages = probe_pages().into_iter().chain(report_pages()).chain(other_debug_pages());
    add_pages(Router::new(), pages)
        .route("/", get(|headers: HeaderMap| console_pages::show_index(headers, &DEBUG_PAGE_LIST)))
        .route("/console.css", get(console_pages::show_style))
        .route("/console.js", get(console_pages::show_script))
        .route("/console/{module}", get(console_pages::show_module))
        .route("/what_if", get(respond_what_if_was_removed))
        .fallback(respond_page_not_found)
        .layer(DefaultBodyLimit::max(state.max_body_bytes.min(MAX_DEBUG_BODY_BYTES)))
        .layer(middleware::from_fn(limit_request_time))
        .layer(middleware::from_fn_with_state(state.debug_hosts.clone(), browser_protection::protect_from_other_sites))
        .with_state(state)
}

/// Status 404, with the list of pages.
async fn respond_page_not_found() -> Response {
    respond_error(StatusCode::NOT_FOUND, format!("404 page not found\n\n{}", *DEBUG_PAGE_LIST))
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
