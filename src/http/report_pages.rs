//! `/top` and `/rules`: what the limits refuse, and whether they are the right ones.
//!
//! JSON, or text where the query says `format=text`. Making one looks at every limit: that is done where metrics are
//! read, render_off_thread from decisions and one at a time.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;

use super::metrics_pages::render_off_thread;
use super::routes::{AppState, json_page, text};
use crate::report::{Format, rules, top};

/// `/top`
pub(super) async fn top(
    State(state): State<AppState>,
    asked: Result<Query<top::TopQuery>, QueryRejection>,
) -> Response {
    let wanted = match asked {
        Ok(Query(wanted)) => wanted,
        Err(why) => return bad_query(&why),
    };
    let (service, format) = (state.collector.service, wanted.format);
    if service.decider.metrics.is_off() {
        return nothing_is_counted();
    }
    let make = move || {
        let report = top::TopReport::of(&service.decider.metrics.top_keys, service.clock.now(), &wanted);
        written(format, &report, top::TopReport::text)
    };
    page(format, render_off_thread(make).await)
}

/// `/rules`
pub(super) async fn rules(
    State(state): State<AppState>,
    asked: Result<Query<rules::RulesQuery>, QueryRejection>,
) -> Response {
    let wanted = match asked {
        Ok(Query(wanted)) => wanted,
        Err(why) => return bad_query(&why),
    };
    let (service, format) = (state.collector.service, wanted.format);
    if service.decider.metrics.is_off() {
        return nothing_is_counted();
    }
    let Some(loaded) = service.rules.load_full() else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "no rate limit configuration loaded\n");
    };
    let make = move || {
        let top = &service.decider.metrics.top_keys;
        let report = rules::RulesReport::of(&loaded.rules, top, service.clock.now(), &wanted);
        written(format, &report, rules::RulesReport::text)
    };
    page(format, render_off_thread(make).await)
}

/// No report is better than one of zeros, which would call every rule idle.
fn nothing_is_counted() -> Response {
    text(StatusCode::NOT_FOUND, "nothing is counted: unset DISABLE_STATS\n")
}

pub(super) fn bad_query(why: &QueryRejection) -> Response {
    text(StatusCode::BAD_REQUEST, format!("{}\n", why.body_text()))
}

fn written<T: Serialize>(format: Format, report: &T, as_text: impl FnOnce(&T) -> String) -> String {
    match format {
        Format::Json => serde_json::to_string_pretty(report).unwrap_or_default(),
        Format::Text => as_text(report),
    }
}

fn page(format: Format, page: Option<String>) -> Response {
    match (format, page) {
        (_, None) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        (Format::Json, Some(page)) => json_page(StatusCode::OK, page),
        (Format::Text, Some(page)) => text(StatusCode::OK, page),
    }
}
