//! Pages that look closer: `/history`, `/alarms`, `/rule_text` and `/what_if`. They charge and change nothing.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;

use super::app_state::AppState;
use super::page_builder::{Page, PageBuilder};
use super::page_query::{CountsPageQuery, PageQuery};
use super::response::{respond_no_rules, respond_text};
use crate::base::text::to_pretty_json;
use crate::decide::log::value_form::ValueForm;
use crate::serve::fleet::alarms::AlarmReport;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::report::history::{HistoryQuery, HistoryReport, read_request_totals};
use crate::serve::report::rule_text::{RuleTextQuery, RuleTextReport};
use crate::serve::report::what_if::{WhatIfQuery, WhatIfReport, WhatIfSources};
use tokio::time::{Duration, sleep};

const US_PER_MINUTE: u64 = 60_000_000;

/// Records the minute that ended, at the start of each minute, on the thread that builds pages.
pub async fn record_history_each_minute(collector: MetricsCollector, pages: PageBuilder) {
    if collector.service.decider.metrics.is_off() {
        return;
    }
    loop {
        let now_us = collector.service.clock.now().as_micros();
        // Not before the minute ended, by a clock that is a little slow.
        sleep(Duration::from_micros(US_PER_MINUTE - now_us % US_PER_MINUTE) + Duration::from_millis(5)).await;
        let collector = collector.clone();
        let record = move || {
            let metrics = &collector.service.decider.metrics;
            let limits = metrics.limits.rule_limit_stats();
            metrics.history.record_minute(collector.service.clock.now(), &limits, read_request_totals(&collector));
        };
        // Without a thread the next minute has the counts of both.
        let _ = pages.run_one_at_a_time(record).await;
    }
}

/// `/history`
pub(super) async fn show_history(
    State(state): State<AppState>,
    uri: Uri,
    CountsPageQuery(query): CountsPageQuery<HistoryQuery>,
) -> Response {
    let collector = state.collector.clone();
    let build = move || {
        let loaded = collector.service.rules.current_rules_owned();
        let report = HistoryReport::new(&collector, loaded.as_ref().map(|loaded| &loaded.rules), &query);
        serde_json::to_string(&report).ok().map(Page::json)
    };
    state.pages.respond_with_page(&uri, build).await
}

/// `/alarms`
pub(super) async fn show_alarms(State(state): State<AppState>, uri: Uri) -> Response {
    let view = state.fleet.get_or_refresh_fleet_view().await;
    let collector = state.collector.clone();
    let build = move || to_pretty_json(&AlarmReport::new(&collector, &view)).ok().map(Page::json);
    state.pages.respond_with_page(&uri, build).await
}

/// `/rule_text`
pub(super) async fn show_rule_text(
    State(state): State<AppState>,
    uri: Uri,
    PageQuery(query): PageQuery<RuleTextQuery>,
) -> Response {
    let Some(loaded) = state.collector.service.rules.current_rules_owned() else { return respond_no_rules() };
    let build = move || match RuleTextReport::find(&loaded, &query.origin) {
        Some(report) => to_pretty_json(&report).ok().map(Page::json),
        None => {
            let what = "no loaded rule has this origin: file:line:column, as in /rules (the rules may have changed)\n";
            Some(Page::error(StatusCode::NOT_FOUND, what.to_owned()))
        }
    };
    state.pages.respond_with_page(&uri, build).await
}

/// `/what_if`
pub(super) async fn show_what_if(
    State(state): State<AppState>,
    uri: Uri,
    CountsPageQuery(query): CountsPageQuery<WhatIfQuery>,
) -> Response {
    let service = Arc::clone(&state.collector.service);
    if !service.decider.metrics.top_keys.is_tracking() {
        let what = "TOLLKEEPER_TOP_KEYS=0: busy keys are not tracked (unset it and restart)\n";
        return respond_text(StatusCode::SERVICE_UNAVAILABLE, what);
    }
    let Some(loaded) = service.rules.current_rules_owned() else { return respond_no_rules() };
    let build = move || {
        let has_values = matches!(service.decider.key_values, ValueForm::Plain);
        let busiest = &service.decider.metrics.busiest_keys;
        let replicas = service.decider.store.stats().shared.and_then(|shared| shared.eventual?.live_replicas);
        let sources = WhatIfSources { loaded: &loaded, replicas, busiest, has_values };
        match WhatIfReport::new(sources, service.clock.now(), &query) {
            Ok(report) => to_pretty_json(&report).ok().map(Page::json),
            Err(error) => Some(Page::error(StatusCode::BAD_REQUEST, format!("{error}\n"))),
        }
    };
    state.pages.respond_with_page(&uri, build).await
}
