//! `/json` decides a request, `/explain` shows how it would be decided.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::Response;
use tokio::sync::Semaphore;

use super::app_state::AppState;
use super::json;
use super::response::{self, error, internal_error, no_rules, pretty_json, text};
use crate::decide::explain::Explanation;
use crate::grpc::decode;
use crate::grpc::service::DEFAULT_DEADLINE;
use crate::pb::rate_limit_response::Code;
use crate::telemetry::traces::Span;

/// Maximum number of descriptors, and of entries of all descriptors, that `/explain` accepts.
const MAX_EXPLAINED: usize = 100;

/// `/json`
pub(super) async fn decide(State(state): State<AppState>, method: Method, headers: HeaderMap, body: Bytes) -> Response {
    let name = if method == Method::POST { "POST /json" } else { "/json" };
    let span = state.collector.service.start_span(name, |name| headers.get(name).map(HeaderValue::as_bytes));
    let response = decide_body(&state, &body, span.as_ref()).await;
    if let Some(mut span) = span {
        span.set_text("http.request.method", method.as_str());
        span.set("http.route", "/json");
        span.set("http.response.status_code", i64::from(response.status().as_u16()));
        if response.status().is_server_error() {
            span.fail("500", "the response cannot be encoded as JSON");
        }
    }
    response
}

async fn decide_body(state: &AppState, body: &[u8], span: Option<&Span>) -> Response {
    let bad_request = || error(StatusCode::BAD_REQUEST, "Bad Request\n");
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
        Ok(body) => response::json(status, body),
        Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error\n"),
    }
}

/// `/explain`
pub(super) async fn explain(State(state): State<AppState>, body: Bytes) -> Response {
    let request = match json::request_from_json(&body) {
        Ok(request) => request,
        Err(error) => return text(StatusCode::BAD_REQUEST, format!("{error}\n")),
    };
    let entries: usize = request.descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
    if request.descriptors.len() > MAX_EXPLAINED || entries > MAX_EXPLAINED {
        let problem = format!("the request is too large: at most {MAX_EXPLAINED} descriptors and entries in total\n");
        return text(StatusCode::BAD_REQUEST, problem);
    }
    // The search for near misses visits all rules of a level, so it runs on a blocking thread, one request at a time.
    static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);
    let Ok(_permit) = ONE_AT_A_TIME.acquire().await else { return internal_error() };
    let service = Arc::clone(&state.collector.service);
    let Some(loaded) = service.rules.load_full() else { return no_rules() };
    let context = service.context(Some(&loaded), DEFAULT_DEADLINE);
    let counters = service.decider.peek(context, &decode::request(&request)).await;
    let explain = move || {
        let behaviour = &service.decider.behaviour;
        pretty_json(&Explanation::of(behaviour, &loaded.rules, &decode::request(&request), &counters))
    };
    tokio::task::spawn_blocking(explain).await.unwrap_or_else(|_| internal_error())
}
