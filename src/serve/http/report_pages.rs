//! The pages of reports: `/top`, `/unmatched`, `/rules` and `/fleet`, and `/live` as server-sent events.
//!
//! They are JSON, or, all but `/live`, text with `format=text`. A report reads the statistics of every limit, so it is
//! built by the page builder like metrics. The `/live` stream of a slow client skips events instead of queueing them,
//! and ends when the process begins to stop.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use serde::{Deserialize, Serialize};

use super::admin_token::ClientAddress;
use super::app_state::AppState;
use super::page_builder::Page;
use super::page_query::{CountsPageQuery, PageQuery};
use super::response::{respond_metrics_off, respond_no_rules, respond_text};
use crate::base::text::to_pretty_json;
use crate::decide::log::value_form::ValueForm;
use crate::serve::fleet::report::{FleetQuery, FleetReport};
use crate::serve::quota::page::{QuotaReport, ReportScope};
use crate::serve::report::Format;
use crate::serve::report::domain_names::DomainsByMetricName;
use crate::serve::report::rules::{RuleUsageReport, RulesQuery};
use crate::serve::report::top::{TopQuery, TopReport};
use crate::serve::report::unmatched::{UnmatchedQuery, UnmatchedReport};

/// `/top`
pub(super) async fn show_top(
    State(state): State<AppState>,
    uri: Uri,
    CountsPageQuery(query): CountsPageQuery<TopQuery>,
) -> Response {
    let (service, format) = (Arc::clone(&state.collector.service), query.format);
    if !service.decider.metrics.top_keys.is_tracking() {
        let what = "TOLLKEEPER_TOP_KEYS=0: rejected keys are not tracked (unset it and restart)\n";
        return respond_text(StatusCode::SERVICE_UNAVAILABLE, what);
    }
    let render = move || {
        let loaded = service.rules.current_rules_owned();
        let domains = DomainsByMetricName::new(loaded.as_ref().map(|loaded| &loaded.rules));
        let (metrics, now) = (&service.decider.metrics, service.clock.now());
        let minutes = TopReport::covered_minutes(&query);
        let busiest = metrics.busiest_keys.snapshot(now, minutes, |name| query.matches_limit_name(name));
        let mut report =
            TopReport::new(&metrics.top_keys, &domains, now, &query).with_busiest_keys(&busiest, &domains, &query);
        if !matches!(service.decider.key_values, ValueForm::Plain) {
            report = report.without_values();
        }
        build_report_page(format, &report, |report| report.format_text(query.show))
    };
    state.pages.respond_with_page(&uri, render).await
}

/// `/unmatched`
pub(super) async fn show_unmatched(
    State(state): State<AppState>,
    uri: Uri,
    CountsPageQuery(query): CountsPageQuery<UnmatchedQuery>,
) -> Response {
    let (service, format) = (Arc::clone(&state.collector.service), query.format);
    let render = move || {
        let loaded = service.rules.current_rules_owned();
        let rules = loaded.as_ref().map(|loaded| &loaded.rules);
        let has_values = matches!(service.decider.key_values, ValueForm::Plain);
        let report = UnmatchedReport::new(&service.decider.metrics, rules, service.clock.now(), &query, has_values);
        build_report_page(format, &report, UnmatchedReport::format_text)
    };
    state.pages.respond_with_page(&uri, render).await
}

/// `/rules`
pub(super) async fn show_rules(
    State(state): State<AppState>,
    uri: Uri,
    CountsPageQuery(query): CountsPageQuery<RulesQuery>,
) -> Response {
    let (service, format) = (Arc::clone(&state.collector.service), query.format);
    let Some(loaded) = service.rules.current_rules_owned() else { return respond_no_rules() };
    let quota = state.collector.quota.clone();
    let render = move || {
        let top_keys = &service.decider.metrics.top_keys;
        let mut report = RuleUsageReport::new(&loaded.rules, top_keys, service.clock.now(), &query);
        if let Some(quota) = &quota {
            report.add_quotas(quota);
        }
        build_report_page(format, &report, RuleUsageReport::format_text)
    };
    state.pages.respond_with_page(&uri, render).await
}

/// Query of `/quota`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct QuotaQuery {
    /// Format of the report.
    format: Format,
    /// Maximum number of streams, and of keys.
    most: Option<usize>,
    /// Name of a rule, whose keys are shown.
    rule: Option<String>,
}

/// `/quota`
pub(super) async fn show_quota(
    State(state): State<AppState>,
    uri: Uri,
    PageQuery(QuotaQuery { format, most, rule }): PageQuery<QuotaQuery>,
) -> Response {
    let Some(quota) = state.collector.quota.clone() else {
        let what = "the rate limit quota service is off (set TOLLKEEPER_RLQS=true and restart)\n";
        return respond_text(StatusCode::SERVICE_UNAVAILABLE, what);
    };
    let scope = ReportScope { most, rule };
    let render = move || build_report_page(format, &quota.build_report(&scope), QuotaReport::format_text);
    state.pages.respond_with_page(&uri, render).await
}

/// `/fleet`
pub(super) async fn show_fleet(
    State(state): State<AppState>,
    uri: Uri,
    CountsPageQuery(query): CountsPageQuery<FleetQuery>,
) -> Response {
    let (service, format) = (Arc::clone(&state.collector.service), query.format);
    let view = state.fleet.get_or_refresh_fleet_view().await;
    let loaded = service.rules.current_rules_owned();
    let render = move || {
        let report = FleetReport::new(&view, loaded.as_ref().map(|loaded| &loaded.rules), &query);
        let report = report.with_blocks(service.decider.blocks.list(service.clock.now()), &query);
        build_report_page(format, &report, |report| report.format_text(query.show))
    };
    state.pages.respond_with_page(&uri, render).await
}

/// `/live`
pub(super) async fn show_live(State(state): State<AppState>, address: Option<Extension<ClientAddress>>) -> Response {
    if state.collector.service.decider.metrics.is_off() {
        return respond_metrics_off();
    }
    let peer = address.map_or(Ipv4Addr::LOCALHOST.into(), |Extension(ClientAddress(address))| address.ip());
    let listener = match state.live.subscribe(peer) {
        Ok(listener) => listener,
        Err(too_many) => {
            let what = format!("/live has {too_many} already (close a console and retry)\n");
            return respond_text(StatusCode::SERVICE_UNAVAILABLE, what);
        }
    };
    let events = stream::unfold(listener, |mut listener| async move {
        let event = listener.next_event().await?;
        Some((Ok::<_, Infallible>(Event::default().data(&*event)), listener))
    });
    Sse::new(events).into_response()
}

fn build_report_page<T: Serialize>(format: Format, report: &T, as_text: impl FnOnce(&T) -> String) -> Option<Page> {
    match format {
        Format::Json => to_pretty_json(report).ok().map(Page::json),
        Format::Text => Some(Page::text(as_text(report))),
    }
}
