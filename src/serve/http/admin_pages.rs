//! Pages for administration: settings, counters, log level, live decisions.
//!
//! All but `/settings` and reading the log level need the admin token and write a line to the audit log, which names
//! the client, the page and the domain, rule or descriptors.
//!
//! Decides: `/log_level`; when `/reset` and `/counters` answer 404, how many counters are listed.
//! Decides: what a reset says of other replicas; audit lines.

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use serde::{Deserialize, Serialize};

use super::admin_token::AuthenticatedAdmin;
use super::app_state::AppState;
use super::page_builder::Page;
use super::response::{WholeBody, respond_no_rules, respond_pretty_json, respond_text};
use crate::base::pb::proto_json;
use crate::base::text::to_pretty_json;
use crate::decide::counter_commands::RuleRef;
use crate::decide::log::record::RecordedVerdict;
use crate::decide::tap::{MAX_LISTENERS, TapFilter};
use crate::serve::grpc::decode;
use crate::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
use crate::settings::report::list_effective_settings;
use crate::telemetry::logs::{self, AUDIT_TARGET, Level};

/// Query of `/counters`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CountersQuery {
    domain: String,
    rule: String,
    most: Option<usize>,
}

/// Result of `/reset`.
#[derive(Debug, Serialize)]
struct ResetReport {
    /// Number of deleted counters, by descriptor.
    reset: Vec<u64>,
    /// True if the other replicas were told; absent if there is no Redis to tell them through.
    #[serde(skip_serializing_if = "Option::is_none")]
    announced: Option<bool>,
}

const DEFAULT_LISTED_COUNTERS: usize = 100;
const MAX_LISTED_COUNTERS: usize = 1000;
const MAX_RESET_DESCRIPTORS: usize = 100;

/// `/settings`: all effective settings, secrets masked.
pub(super) async fn show_settings(State(state): State<AppState>, uri: Uri) -> Response {
    let build = || to_pretty_json(&list_effective_settings(std::env::vars_os())).ok().map(Page::json);
    state.pages.respond_with_page(&uri, build).await
}

/// `/counters`: the counters of a rule.
pub(super) async fn show_counters(
    admin: AuthenticatedAdmin,
    State(state): State<AppState>,
    query: Result<Query<CountersQuery>, QueryRejection>,
) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(rejection) => return admin.reject_with_audit_log(StatusCode::BAD_REQUEST, rejection.body_text()),
    };
    let AuthenticatedAdmin { peer, path } = &admin;
    tracing::warn!(target: AUDIT_TARGET, peer, path, domain = query.domain, rule = query.rule, "counters listed");
    let service = &state.collector.service;
    let Some(loaded) = service.rules.current_rules_owned() else { return respond_no_rules() };
    let Some(domain) = loaded.rules.domain(&query.domain) else {
        return respond_text(StatusCode::NOT_FOUND, "domain not found\n");
    };
    let Some(rule) = loaded.rules.rules().find(|rule| rule.rule.path == query.rule) else {
        return respond_text(StatusCode::NOT_FOUND, "rule not found (/rlconfig and /rules list the names)\n");
    };
    let most = query.most.unwrap_or(DEFAULT_LISTED_COUNTERS).clamp(1, MAX_LISTED_COUNTERS);
    let context = service.build_decision_context(Some(&loaded), DEFAULT_CALLER_DEADLINE);
    match service.decider.list_counters(context, RuleRef { rules: &loaded.rules, domain, rule }, most).await {
        Ok(listing) => respond_pretty_json(&listing),
        Err(error) => respond_text(StatusCode::BAD_GATEWAY, format!("{error}\n")),
    }
}

/// `POST /reset`: deletes the counters that a request, as for `/json`, would charge.
pub(super) async fn reset_counters(
    admin: AuthenticatedAdmin,
    State(state): State<AppState>,
    WholeBody(body): WholeBody,
) -> Response {
    let request = match proto_json::request_from_json(&body) {
        Ok(request) => request,
        Err(error) => return admin.reject_with_audit_log(StatusCode::BAD_REQUEST, error),
    };
    if request.descriptors.len() > MAX_RESET_DESCRIPTORS {
        let problem = format!("the request is too large: at most {MAX_RESET_DESCRIPTORS} descriptors");
        return admin.reject_with_audit_log(StatusCode::BAD_REQUEST, problem);
    }
    let service = &state.collector.service;
    let Some(loaded) = service.rules.current_rules_owned() else { return respond_no_rules() };
    let context = service.build_decision_context(Some(&loaded), DEFAULT_CALLER_DEADLINE);
    let request = decode::convert_request(&request);
    if loaded.rules.domain(request.domain).is_none() {
        return admin.reject_with_audit_log(StatusCode::NOT_FOUND, "domain not found");
    }
    let result = service.decider.reset_counters(context, &request).await;
    let counters = result.as_ref().map_or(0, |reset| reset.iter().sum::<u64>());
    let descriptors = request.descriptors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let domain = request.domain;
    let AuthenticatedAdmin { peer, path } = &admin;
    tracing::warn!(target: AUDIT_TARGET, peer, path, domain, descriptors, counters, "counters reset");
    // After a failure too: some counters may be deleted.
    let announced = state.fleet.announce_counter_reset(&request).await;
    match result {
        Ok(reset) => respond_pretty_json(&ResetReport { reset, announced }),
        Err(error) => respond_text(StatusCode::BAD_GATEWAY, format!("{error}\n")),
    }
}

/// `/tap`: decisions as they are made, until the client leaves or the process begins to stop.
pub(super) async fn tap_decisions(
    admin: AuthenticatedAdmin,
    State(state): State<AppState>,
    query: Result<Query<TapFilter>, QueryRejection>,
) -> Response {
    let Query(filter) = match query {
        Ok(query) => query,
        Err(rejection) => return admin.reject_with_audit_log(StatusCode::BAD_REQUEST, rejection.body_text()),
    };
    let Some(lines) = state.collector.service.decider.tap.listen(filter.clone()) else {
        let what = format!("there are {MAX_LISTENERS} taps already (end one and retry)");
        return admin.reject_with_audit_log(StatusCode::SERVICE_UNAVAILABLE, what);
    };
    let AuthenticatedAdmin { peer, path } = &admin;
    let TapFilter { domain, entry, verdict } = &filter;
    let verdict = verdict.map(RecordedVerdict::name);
    tracing::warn!(target: AUDIT_TARGET, peer, path, domain, entry, verdict, "decisions tapped");
    let stream = stream::unfold((lines, state.live.stopping()), |(mut lines, mut stopping)| async move {
        let line = tokio::select! {
            _ = stopping.wait_for(|stop| *stop) => None,
            line = lines.next_lines() => line,
        }?;
        Some((Ok::<_, Infallible>(line), (lines, stopping)))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(stream)).into_response()
}

/// `GET /log_level`: the current log level.
pub(super) async fn show_log_level() -> Response {
    respond_text(StatusCode::OK, format!("{}\n", logs::current_level().name()))
}

/// `PUT /log_level`: sets the log level, until the process ends.
pub(super) async fn set_log_level(admin: AuthenticatedAdmin, WholeBody(body): WholeBody) -> Response {
    let Some(level) = std::str::from_utf8(body.trim_ascii()).ok().and_then(Level::parse) else {
        let names = Level::ACCEPTED_WORDS.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
        return admin
            .reject_with_audit_log(StatusCode::BAD_REQUEST, format_args!("the body must be a log level: {names}"));
    };
    // Logged before the change, so that the log shows where it begins.
    let AuthenticatedAdmin { peer, path } = &admin;
    let (from, to) = (logs::current_level().name(), level.name());
    tracing::warn!(target: AUDIT_TARGET, peer, path, from, to, "log level changed");
    match logs::set_level(level) {
        Ok(()) => show_log_level().await,
        Err(error) => respond_text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}
