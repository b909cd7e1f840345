//! Pages about the process: health, loaded rules and the store.

use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::Response;

use super::app_state::AppState;
use super::response::{respond_error, respond_internal_error, respond_pretty_json, respond_text};
use crate::base::printable_text::escape_unprintable;
use crate::rules::rule::rlconfig;
use crate::serve::report::problems::ProblemsReport;

/// Header of `/rlconfig`: version of the rules at their source.
const RULES_VERSION_HEADER: HeaderName = HeaderName::from_static("x-tollkeeper-rules-version");

/// `/healthcheck`: 200 if the process accepts traffic.
pub(super) async fn show_health(State(state): State<AppState>) -> Response {
    match state.collector.health.is_healthy() {
        true => respond_text(StatusCode::OK, "OK"),
        false => respond_internal_error(),
    }
}

/// `/readyz`: 200 if the process can decide requests, otherwise 500 and the reason.
pub(super) async fn show_ready(State(state): State<AppState>) -> Response {
    match state.collector.health.not_ready_reason() {
        None => respond_text(StatusCode::OK, "OK"),
        Some(reason) => respond_error(StatusCode::INTERNAL_SERVER_ERROR, format!("{reason}\n")),
    }
}

/// `/rlconfig`: the loaded limits, one line each, as envoyproxy/ratelimit prints them.
pub(super) async fn show_rlconfig(State(state): State<AppState>) -> Response {
    let loaded = state.collector.service.rules.load();
    let lines = loaded.as_ref().map(|loaded| rlconfig::rlconfig_lines(&loaded.rules)).unwrap_or_default();
    let page = lines.iter().fold(String::new(), |page, line| page + &escape_unprintable(line) + "\n");
    let mut page = respond_text(StatusCode::OK, page);
    let version = state.collector.service.rules.source_version();
    if let Some(version) = version.and_then(|version| HeaderValue::from_str(&version).ok()) {
        page.headers_mut().insert(RULES_VERSION_HEADER, version);
    }
    page
}

/// `/rlconfig/status`: version and files of the loaded rules, and the last error.
pub(super) async fn show_rlconfig_status(State(state): State<AppState>) -> Response {
    respond_pretty_json(&state.collector.service.rules.status())
}

/// `/problems`: warnings, errors and failures.
pub(super) async fn show_problems(State(state): State<AppState>) -> Response {
    respond_pretty_json(&ProblemsReport::new(&state.collector.service))
}

/// `/store`: statistics of the store.
pub(super) async fn show_store(State(state): State<AppState>) -> Response {
    respond_pretty_json(&state.collector.service.decider.store_report())
}
