//! `/json` decides a request, `/explain` shows how it would be decided.
//!
//! Decides: HTTP status of `/json` (200, 429, 500), an empty body (400).
//! Decides: how many descriptors and entries `/explain` takes.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::Response;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::app_state::AppState;
use super::response::{
    WholeBody, respond_error, respond_internal_error, respond_json, respond_no_rules, respond_pretty_json, respond_text,
};
use crate::base::pb::proto_json;
use crate::base::pb::rate_limit_response::Code;
use crate::base::pb::{RateLimitRequest, RateLimitResponse};
use crate::decide::explain::Explanation;
use crate::limit::request::Descriptor;
use crate::serve::grpc::decode;
use crate::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
use crate::settings::decisions::DecisionSettings;
use crate::telemetry::traces::Span;

/// Time that reading slots may take.
const SLOT_SUMMARY_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of descriptors that `/explain` accepts.
const MAX_EXPLAINED_DESCRIPTORS: usize = 100;

/// Maximum number of entries of all descriptors that `/explain` accepts.
const MAX_EXPLAINED_ENTRIES: usize = 2048;

/// `/json`
pub(super) async fn answer_json(
    State(state): State<AppState>,
    method: Method,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Response {
    let name = if method == Method::POST { "POST /json" } else { "/json" };
    let service = &state.collector.service;
    let header = |name| headers.get(name).map(HeaderValue::as_bytes);
    let trace = service.tracer.as_ref().and_then(|tracer| tracer.sample_trace(header));
    let span = service.start_request_span(name, trace.as_ref());
    let response = decide_json_body(&state, &body, span.as_ref()).await;
    if let Some(mut span) = span {
        span.set_text_attribute("http.request.method", method.as_str());
        span.set_attribute("http.route", "/json");
        span.set_attribute("http.response.status_code", i64::from(response.status().as_u16()));
        if response.status().is_server_error() {
            span.set_error("500", "the response cannot be encoded as JSON");
        }
    }
    response
}

async fn decide_json_body(state: &AppState, body: &[u8], span: Option<&Span>) -> Response {
    let request = match proto_json::request_from_json(body) {
        Ok(request) => request,
        Err(error) => return respond_bad_request(error),
    };
    let request = decode::convert_request(&request);
    let service = &state.collector.service;
    let response = match service.answer_request(&request, DEFAULT_CALLER_DEADLINE, span).await {
        Ok(response) => response,
        Err(error) => return respond_bad_request(error),
    };
    let status = match response.overall_code() {
        Code::Ok => StatusCode::OK,
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
        Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
    };
    match proto_json::response_to_json(&response) {
        Ok(body) => {
            let mut page = respond_json(status, body);
            page.headers_mut().extend(build_retry_after_header(&response, &service.decider.behaviour));
            page
        }
        Err(_) => respond_error(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error\n"),
    }
}

/// Status 400 with the reason, also for errors of the service, as in envoyproxy/ratelimit.
fn respond_bad_request(reason: impl Display) -> Response {
    respond_error(StatusCode::BAD_REQUEST, format!("Bad Request: {reason}\n"))
}

/// Builds the header of a rejected page with the seconds until a retry, which the response has for Envoy.
fn build_retry_after_header(
    response: &RateLimitResponse,
    behaviour: &DecisionSettings,
) -> Option<(HeaderName, HeaderValue)> {
    let name = behaviour.retry_after_header.as_deref()?;
    let header = response.response_headers_to_add.iter().find(|header| header.key == name)?;
    Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_str(&header.value).ok()?))
}

/// `/explain`, whose request is read and explained as pages are built.
pub(super) async fn show_explanation(State(state): State<AppState>, WholeBody(body): WholeBody) -> Response {
    static EXPLAIN_SEMAPHORE: Semaphore = Semaphore::const_new(1);
    let Ok(_permit) = EXPLAIN_SEMAPHORE.acquire().await else { return respond_internal_error() };
    let request = match state.pages.run_one_at_a_time(move || parse_request_to_explain(&body)).await {
        Some(Ok(request)) => request,
        Some(Err(problem)) => return respond_text(StatusCode::BAD_REQUEST, problem),
        None => return respond_internal_error(),
    };
    let service = Arc::clone(&state.collector.service);
    let Some(loaded) = service.rules.current_rules_owned() else { return respond_no_rules() };
    let context = service.build_decision_context(Some(&loaded), DEFAULT_CALLER_DEADLINE);
    let now = context.store.now;
    let converted = decode::convert_request(&request);
    let counters = service.decider.peek_counters(context, &converted).await;
    let deadline = Instant::now() + SLOT_SUMMARY_TIMEOUT;
    let slots = service.decider.explain_slots(context, &converted, deadline).await;
    let blocked = service.decider.explain_blocks(context, &converted);
    let explain_quota = |descriptor: &Descriptor<'_>| {
        state.collector.quota.as_ref()?.explain_proxy_shares(context, converted.domain, &descriptor.entries)
    };
    let quotas: Vec<_> = converted.descriptors.iter().map(explain_quota).collect();
    drop(converted);
    // The search for near misses visits all rules of a level.
    let explain = move || {
        let behaviour = &service.decider.behaviour;
        let mut explained =
            Explanation::explain_request(behaviour, &loaded.rules, &decode::convert_request(&request), &counters, now);
        explained.descriptors.iter_mut().zip(slots).for_each(|(descriptor, slots)| descriptor.slots = slots);
        explained.descriptors.iter_mut().zip(quotas).for_each(|(descriptor, quota)| descriptor.quota = quota);
        let source_version = service.rules.source_version().map(|version| version.to_string());
        let region = service.decider.explain_own_region();
        respond_pretty_json(&Explanation { source_version, region, blocked, ..explained })
    };
    state.pages.run_one_at_a_time(explain).await.unwrap_or_else(respond_internal_error)
}

/// Reads a request that is small enough to be explained.
fn parse_request_to_explain(body: &[u8]) -> Result<RateLimitRequest, String> {
    let request = proto_json::request_from_json(body).map_err(|error| format!("{error}\n"))?;
    let entries: usize = request.descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
    if request.descriptors.len() > MAX_EXPLAINED_DESCRIPTORS || entries > MAX_EXPLAINED_ENTRIES {
        return Err(format!(
            "the request is too large: at most {MAX_EXPLAINED_DESCRIPTORS} descriptors, and {MAX_EXPLAINED_ENTRIES} \
             entries in total\n"
        ));
    }
    Ok(request)
}
