//! Pages about the process: health, loaded rules, and what is wrong (`/problems`).
//!
//! Decides: `/healthcheck`, `/readyz` and `/rlconfig` without rules.
//! Decides: the header with the version of the rules.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, StatusCode, Uri};
use axum::response::Response;
use serde::Serialize;

use super::app_state::AppState;
use super::page_builder::Page;
use super::response::{respond_error, respond_internal_error, respond_text};
use crate::base::text::escape_unprintable;
use crate::rules::live::RuleProblem;
use crate::rules::rule::rlconfig;
use crate::serve::metrics_collector::MetricsCollector;
use crate::store::client::server_status::ServerStatus;
use crate::telemetry::logs::{LoggedProblem, RECENT_PROBLEMS};

/// Header of `/rlconfig`: version of the rules at their source.
const RULES_VERSION_HEADER: HeaderName = HeaderName::from_static("x-tollkeeper-rules-version");

/// `/healthcheck`: 200 if the process accepts traffic.
pub(super) async fn show_health(State(state): State<AppState>) -> Response {
    match state.collector.health.is_healthy() {
        true => respond_text(StatusCode::OK, "OK"),
        false => respond_internal_error(),
    }
}

/// `/readyz`: 200 if the process can decide requests, otherwise 503 and the reason.
///
/// `/healthcheck` answers 500, as envoyproxy/ratelimit does, which has no `/readyz`.
pub(super) async fn show_ready(State(state): State<AppState>) -> Response {
    match state.collector.health.not_ready_reason() {
        None => respond_text(StatusCode::OK, "OK"),
        Some(reason) => respond_error(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

/// `/rlconfig`: the loaded limits, one line each, as envoyproxy/ratelimit prints them.
pub(super) async fn show_rlconfig(State(state): State<AppState>, uri: Uri) -> Response {
    let service = Arc::clone(&state.collector.service);
    let build = move || {
        let loaded = service.rules.current_rules_owned();
        let lines = loaded.as_ref().map(|loaded| rlconfig::format_rlconfig(&loaded.rules)).unwrap_or_default();
        let text = lines.iter().fold(String::new(), |page, line| page + &escape_unprintable(line) + "\n");
        let version = service.rules.source_version();
        let version = version.and_then(|version| HeaderValue::from_str(&version).ok());
        Some(Page { header: version.map(|version| (RULES_VERSION_HEADER, version)), ..Page::text(text) })
    };
    state.pages.respond_with_page(&uri, build).await
}

/// Warnings, errors and failures of this process.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ProblemsReport {
    /// Last warnings and errors of the log, the oldest first.
    log: Vec<LoggedProblem>,
    /// Errors of the last attempt to load rules, if it failed, with the lines around each.
    diagnostics: Vec<RuleProblem>,
    /// Charges that the store failed to decide, by kind of failure.
    failed_charges: BTreeMap<&'static str, u64>,
    /// The same charges by the failure policy that decided.
    decided_by_policy: BTreeMap<&'static str, u64>,
    /// False if no charge reaches the store.
    store_available: bool,
    /// Servers of the store.
    servers: Vec<ServerStatus>,
}

impl ProblemsReport {
    /// Computes the report of this moment.
    pub(super) fn new(collector: &MetricsCollector) -> Self {
        let service = &collector.service;
        let store = service.decider.build_store_totals();
        Self {
            log: RECENT_PROBLEMS.copy_lines(),
            diagnostics: service.rules.last_problems(),
            failed_charges: store.failed_charges,
            decided_by_policy: store.decided_by_policy,
            store_available: !collector.health.is_store_lost(),
            servers: store.shared.map(|shared| shared.servers).unwrap_or_default(),
        }
    }
}
