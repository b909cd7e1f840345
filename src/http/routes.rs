//! The pages of both HTTP listeners, and how each answers.
//!
//! What envoyproxy/ratelimit serves, it serves alike: `/json` and `/healthcheck` to everyone, `/rlconfig` on the debug
//! listener. What writes, or shows whose counters there are, needs the token. Bodies are bounded; what can not be read
//! gets a status and no page of its own.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use serde::Serialize;
use tokio::sync::Semaphore;

use super::metrics_pages::{Exposition, stats};
use super::{admin, json, report_pages};
use crate::decide::explain::Explanation;
use crate::grpc::decode;
use crate::grpc::service::DEFAULT_DEADLINE;
use crate::pb::rate_limit_response::Code;
use crate::rule::render;
use crate::scrape::MetricsCollector;
use crate::settings::listeners::AdminToken;
use crate::telemetry::traces::Span;

/// What the pages show.
#[derive(Clone, Debug)]
pub struct AppState {
    /// Answers requests, knows whether traffic is welcome, and is measured.
    pub collector: MetricsCollector,
    /// The largest body that is read, in bytes.
    pub max_body_bytes: usize,
    /// How Prometheus gets it, if it does.
    pub exposition: Option<Arc<Exposition>>,
    /// What proves that a caller may do more than look.
    pub admin: Option<AdminToken>,
}

/// The pages for callers and probes.
pub fn public(state: AppState) -> Router {
    Router::new()
        .route("/json", any(decide_json))
        .route("/healthcheck", any(health))
        .route("/readyz", any(ready))
        .route("/livez", any(|| async { "OK" }))
        .fallback(|| async { failure(StatusCode::NOT_FOUND, "404 page not found\n") })
        .layer(DefaultBodyLimit::max(state.max_body_bytes))
        .layer(middleware::from_fn(in_time))
        .with_state(state)
}

/// The pages for operators.
pub fn debug(state: AppState) -> Router {
    Router::new()
        .route("/rlconfig", get(rlconfig))
        .route("/rlconfig/status", get(rlconfig_status))
        .route("/explain", any(explain))
        .route("/stats", get(stats))
        .route("/store", get(store))
        .route("/top", get(report_pages::top))
        .route("/rules", get(report_pages::rules))
        .route("/settings", get(admin::settings))
        .route("/counters", get(admin::counters))
        .route("/reset", post(admin::reset))
        .route("/log_level", get(admin::log_level).put(admin::set_log_level))
        .fallback(index)
        .layer(DefaultBodyLimit::max(state.max_body_bytes))
        .layer(middleware::from_fn(in_time))
        .with_state(state)
}

/// The longest that reading a request and answering it take: whoever sends a body drop by drop holds its memory.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2 * DEFAULT_DEADLINE.as_secs());

async fn in_time(request: Request, next: Next) -> Response {
    let answer = tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await;
    answer.unwrap_or_else(|_| failure(StatusCode::REQUEST_TIMEOUT, "Request Timeout\n"))
}

/// The pages of the debug listener, by name.
const PAGES: [(&str, &str); 11] = [
    ("/counters?domain=D&rule=R", "the counters of a rule, as json; `most=N`, 100 if it is not said; needs the token"),
    ("/explain", "what a request (as for /json) would meet, and its counters, charging nothing"),
    ("/log_level", "what is logged; a PUT of a level's name changes it until the process ends, and needs the token"),
    ("/reset", "a POST of a request (as for /json) lets go of its counters; needs the token"),
    ("/rlconfig", "print out the currently loaded configuration for debugging"),
    ("/rlconfig/status", "version, files and last error of the configuration, as json"),
    (
        "/rules",
        "what each limit did, and which seem wrong, as json; `format=text`, `rule=NAME`, `finding=KIND`, `most=N`",
    ),
    ("/settings", "every setting as it is in force, secrets masked, as json"),
    ("/stats", "all counters, as text: names as statsd gets them, or those of prometheus"),
    (
        "/store",
        "what became of charges since the start: failures, local refusals, shares and leases, replicas, as json",
    ),
    ("/top", "the keys that are refused most, as json; `format=text`, `minutes=1..10`, `rule=NAME`, `most=N`"),
];

async fn index() -> String {
    PAGES.iter().fold(String::new(), |mut page, (path, help)| {
        let _ = writeln!(page, "{path}: {help}");
        page
    })
}

async fn decide_json(State(state): State<AppState>, method: Method, headers: HeaderMap, body: Bytes) -> Response {
    let name = if method == Method::POST { "POST /json" } else { "/json" };
    let span = state.collector.service.begin(name, |name| headers.get(name).map(HeaderValue::as_bytes));
    let response = answer_json(&state, &body, span.as_ref()).await;
    if let Some(mut span) = span {
        span.note_text("http.request.method", method.as_str());
        span.note("http.route", "/json");
        span.note("http.response.status_code", i64::from(response.status().as_u16()));
        if response.status().is_server_error() {
            span.fail("500", "the answer has no form in json");
        }
    }
    response
}

async fn answer_json(state: &AppState, body: &[u8], span: Option<&Span>) -> Response {
    let bad_request = || failure(StatusCode::BAD_REQUEST, "Bad Request\n");
    let Ok(request) = json::request_from_json(body) else { return bad_request() };
    let request = decode::request(&request);
    let answer = state.collector.service.answer(&request, DEFAULT_DEADLINE, span).await;
    let Ok(response) = answer else { return bad_request() };
    let status = match response.overall_code() {
        Code::Ok => StatusCode::OK,
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
        Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
    };
    match json::response_to_json(&response) {
        Ok(body) => json_page(status, body),
        Err(_) => failure(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error\n"),
    }
}

async fn health(State(state): State<AppState>) -> Response {
    probed(state.collector.health.is_healthy())
}

async fn ready(State(state): State<AppState>) -> Response {
    match state.collector.health.unready() {
        None => probed(true),
        Some(why) => failure(StatusCode::INTERNAL_SERVER_ERROR, format!("{why}\n")),
    }
}

fn probed(well: bool) -> Response {
    match well {
        true => text(StatusCode::OK, "OK"),
        false => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn rlconfig(State(state): State<AppState>) -> Response {
    let loaded = state.collector.service.rules.load();
    let lines = loaded.as_ref().map(|loaded| render::rlconfig_lines(&loaded.rules)).unwrap_or_default();
    text(StatusCode::OK, lines.into_iter().fold(String::new(), |page, line| page + &line + "\n"))
}

async fn rlconfig_status(State(state): State<AppState>) -> Response {
    pretty(&state.collector.service.rules.status())
}

async fn store(State(state): State<AppState>) -> Response {
    pretty(&state.collector.service.decider.store_report())
}

pub(super) fn pretty(what: &impl Serialize) -> Response {
    match serde_json::to_string_pretty(what) {
        Ok(page) => json_page(StatusCode::OK, page),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn explain(State(state): State<AppState>, body: Bytes) -> Response {
    let request = match json::request_from_json(&body) {
        Ok(request) => request,
        Err(error) => return text(StatusCode::BAD_REQUEST, format!("{error}\n")),
    };
    let entries: usize = request.descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
    if request.descriptors.len() > MAX_EXPLAINED || entries > MAX_EXPLAINED {
        let most = format!("at most {MAX_EXPLAINED} descriptors and as many entries in all are explained at once\n");
        return text(StatusCode::BAD_REQUEST, most);
    }
    // Near misses are looked for among all rules of a level: work for a thread of its own, one question at a time.
    static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);
    let Ok(_turn) = ONE_AT_A_TIME.acquire().await else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    let service = Arc::clone(&state.collector.service);
    let Some(loaded) = service.rules.load_full() else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "no rate limit configuration loaded\n");
    };
    let context = service.context(Some(&loaded), DEFAULT_DEADLINE);
    let counters = service.decider.peek(context, &decode::request(&request)).await;
    let explain = move || {
        let behaviour = &state.collector.service.decider.behaviour;
        explanation_page(&Explanation::of(behaviour, &loaded.rules, &decode::request(&request), &counters))
    };
    let page = tokio::task::spawn_blocking(explain).await;
    page.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

/// Descriptors, and entries of all of them, that one question to `/explain` may have.
const MAX_EXPLAINED: usize = 100;

fn explanation_page(explanation: &Explanation) -> Response {
    match serde_json::to_string_pretty(explanation) {
        Ok(page) => json_page(StatusCode::OK, page),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// A page that says what went wrong, as Go's library for HTTP writes it.
pub(super) fn failure(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = text(status, body);
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

pub(super) fn text(status: StatusCode, body: impl Into<Body>) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body.into()).into_response()
}

pub(super) fn json_page(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
