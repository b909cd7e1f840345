//! `/top` and `/rules`: the keys that limits reject, and findings about the limits.
//!
//! Both are JSON, or text with `format=text`. A report reads the statistics of every limit, so it is rendered off
//! thread like metrics.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;

use super::app_state::AppState;
use super::off_thread::render_off_thread;
use super::response::{bad_query, internal_error, json, no_rules, text};
use crate::base::text::to_pretty_json;
use crate::decide::log::values::ValueForm;
use crate::serve::fleet::report::{FleetQuery, FleetReport};
use crate::serve::report::ReportFormat;
use crate::serve::report::rules::{RuleUsageReport, RulesQuery};
use crate::serve::report::top::{TopQuery, TopReport};

/// `/top`
pub(super) async fn top(State(state): State<AppState>, query: Result<Query<TopQuery>, QueryRejection>) -> Response {
    let query = match query {
        Ok(Query(query)) => query,
        Err(rejection) => return bad_query(&rejection),
    };
    let (service, format) = (state.collector.service, query.format);
    if service.decider.metrics.is_off() {
        return metrics_are_off();
    }
    if !service.decider.metrics.top_keys.is_on() {
        let what = "TOLLKEEPER_TOP_KEYS=0: rejected keys are not tracked (unset it and restart)\n";
        return text(StatusCode::SERVICE_UNAVAILABLE, what);
    }
    let render = move || {
        let mut report = TopReport::new(&service.decider.metrics.top_keys, service.clock.now(), &query);
        if !matches!(service.decider.key_values, ValueForm::Plain) {
            report = report.without_values();
        }
        encode(format, &report, TopReport::text)
    };
    page(format, render_off_thread(render).await)
}

/// `/rules`
pub(super) async fn rules(State(state): State<AppState>, query: Result<Query<RulesQuery>, QueryRejection>) -> Response {
    let query = match query {
        Ok(Query(query)) => query,
        Err(rejection) => return bad_query(&rejection),
    };
    let (service, format) = (state.collector.service, query.format);
    if service.decider.metrics.is_off() {
        return metrics_are_off();
    }
    let Some(loaded) = service.rules.load_full() else { return no_rules() };
    let render = move || {
        let top_keys = &service.decider.metrics.top_keys;
        let report = RuleUsageReport::new(&loaded.rules, top_keys, service.clock.now(), &query);
        encode(format, &report, RuleUsageReport::text)
    };
    page(format, render_off_thread(render).await)
}

/// `/fleet`
pub(super) async fn fleet(State(state): State<AppState>, query: Result<Query<FleetQuery>, QueryRejection>) -> Response {
    let query = match query {
        Ok(Query(query)) => query,
        Err(rejection) => return bad_query(&rejection),
    };
    let (service, format) = (state.collector.service, query.format);
    if service.decider.metrics.is_off() {
        return metrics_are_off();
    }
    let view = state.fleet.view().await;
    let loaded = service.rules.load_full();
    let render = move || {
        let report = FleetReport::new(&view, loaded.as_ref().map(|loaded| &loaded.rules), &query);
        encode(format, &report, |report| report.text(query.show))
    };
    page(format, render_off_thread(render).await)
}

/// Status 503 instead of a report of zeros, which would show every rule as unused.
pub(super) fn metrics_are_off() -> Response {
    let what = "DISABLE_STATS=true: keys and rules are not counted (unset it and restart)\n";
    text(StatusCode::SERVICE_UNAVAILABLE, what)
}

fn encode<T: Serialize>(format: ReportFormat, report: &T, as_text: impl FnOnce(&T) -> String) -> String {
    match format {
        ReportFormat::Json => to_pretty_json(report).unwrap_or_default(),
        ReportFormat::Text => as_text(report),
    }
}

fn page(format: ReportFormat, page: Option<String>) -> Response {
    match (format, page) {
        (_, None) => internal_error(),
        (ReportFormat::Json, Some(page)) => json(StatusCode::OK, page),
        (ReportFormat::Text, Some(page)) => text(StatusCode::OK, page),
    }
}
