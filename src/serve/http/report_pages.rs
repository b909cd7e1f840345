//! Pages of reports: `/top`, `/rejections`, `/unmatched`, `/rules`, `/fleet`, `/quota`, `/history`, `/alarms`, `/rule_text`,
//! and `/live` as server-sent events. They charge and change nothing.
//!
//! They are JSON; the first six are text with `format=text`. A report reads the statistics of every limit, so it is
//! built by the page builder like metrics. The parameters of a page, with their defaults and maxima, are in the
//! `...Query` beside its report; an invalid one is answered with status 400 before the page is built. The `/live`
//! stream of a slow client skips events instead of queueing them, and ends when the process begins to stop.
//!
//! Decides: pages with `DISABLE_STATS` or without keys (503), and `/quota` without RLQS.
//! Decides: unknown parameters (400, `PageQuery`); when a minute of history is recorded.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;

use axum::Extension;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequestParts, Query, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::{Duration, sleep};

use super::admin_token::ClientAddress;
use super::app_state::AppState;
use super::page_builder::{Page, PageBuilder};
use super::response::{respond_bad_query, respond_metrics_off, respond_no_rules, respond_text};
use crate::base::clock::Time;
use crate::base::text::to_pretty_json;
use crate::decide::log::value_form::ValueForm;
use crate::limit::StoreFailurePolicy;
use crate::serve::fleet::report::{AlarmReport, FleetQuery, FleetReport};
use crate::serve::grpc::service::RateLimitService;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::quota::page::{QuotaReport, ReportScope};
use crate::serve::report::history::{HistoryQuery, HistoryReport, read_request_totals};
use crate::serve::report::rejections::{RejectionsQuery, RejectionsReport};
use crate::serve::report::rule_text::{RuleTextQuery, RuleTextReport};
use crate::serve::report::rules::{RuleUsageReport, RulesQuery};
use crate::serve::report::top::{TopQuery, TopReport};
use crate::serve::report::unmatched::{UnmatchedQuery, UnmatchedReport};
use crate::serve::report::{DomainsByMetricName, Format};

/// `/top`
pub(super) async fn show_top(
    State(state): State<AppState>,
    uri: Uri,
    CountsPageQuery(query): CountsPageQuery<TopQuery>,
) -> Response {
    let totals = read_request_totals(&state.collector);
    respond_with_rejected_keys(&state, &uri, move |RejectedKeySources { service, domains, now, has_values }| {
        let metrics = &service.decider.metrics;
        let minutes = TopReport::covered_minutes(&query);
        let busiest = metrics.busiest_keys.snapshot(now, minutes, |name| query.matches_limit_name(name));
        let mut report =
            TopReport::new(&metrics.top_keys, &domains, now, &query).with_busiest_keys(&busiest, &domains, &query);
        let history = metrics.history.requests_by_minute(now, &totals);
        let recent = history.iter().rev().take(usize::try_from(minutes).unwrap_or(usize::MAX));
        let deny = StoreFailurePolicy::ALL.iter().position(|policy| *policy == StoreFailurePolicy::Deny);
        report.denied_by_failure_policy = recent.map(|(_, of)| deny.map_or(0, |at| of.failed_by_policy[at])).sum();
        if !has_values {
            report = report.without_values();
        }
        build_report_page(query.format, &report, |report| report.format_text(query.show))
    })
    .await
}

/// `/rejections`
pub(super) async fn show_rejections(
    State(state): State<AppState>,
    uri: Uri,
    CountsPageQuery(query): CountsPageQuery<RejectionsQuery>,
) -> Response {
    respond_with_rejected_keys(&state, &uri, move |RejectedKeySources { service, domains, now, has_values }| {
        match RejectionsReport::new(&service.decider.metrics.top_keys, &domains, now, &query, has_values) {
            Ok(report) => build_report_page(query.format, &report, RejectionsReport::format_text),
            Err(error) => Some(Page::error(StatusCode::BAD_REQUEST, format!("{error}\n"))),
        }
    })
    .await
}

/// What pages about rejected keys are built from.
struct RejectedKeySources {
    service: Arc<RateLimitService>,
    domains: DomainsByMetricName,
    now: Time,
    /// Keys are tracked with their plain values.
    has_values: bool,
}

/// Responds with a page about rejected keys; status 503 if they are not tracked.
async fn respond_with_rejected_keys(
    state: &AppState,
    uri: &Uri,
    render: impl FnOnce(RejectedKeySources) -> Option<Page> + Send + 'static,
) -> Response {
    let service = Arc::clone(&state.collector.service);
    if !service.decider.metrics.top_keys.is_tracking() {
        let what = "TOLLKEEPER_TOP_KEYS=0: rejected keys are not tracked (unset it and restart)\n";
        return respond_text(StatusCode::SERVICE_UNAVAILABLE, what);
    }
    let build = move || {
        let loaded = service.rules.current_rules_owned();
        let domains = DomainsByMetricName::new(loaded.as_ref().map(|loaded| &loaded.rules));
        let (now, has_values) = (service.clock.now(), matches!(service.decider.key_values, ValueForm::Plain));
        render(RejectedKeySources { service, domains, now, has_values })
    };
    state.pages.respond_with_page(uri, build).await
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
        let metrics = &service.decider.metrics;
        let mut report = RuleUsageReport::new(&loaded.rules, metrics, service.clock.now(), &query);
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
    let events = stream::unfold(state.live.subscribe(peer), |mut listener| async move {
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
    let build = move || to_pretty_json(&AlarmReport::new(&view)).ok().map(Page::json);
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

/// Query of a page; an invalid one is responded to with status 400.
pub(super) struct PageQuery<Q>(Q);

/// Query of a page about counts: as [`PageQuery`], and status 503 if nothing is counted.
pub(super) struct CountsPageQuery<Q>(Q);

impl<Q: DeserializeOwned> FromRequestParts<AppState> for PageQuery<Q> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Self::Rejection> {
        let query: Result<Query<Q>, QueryRejection> = Query::try_from_uri(&parts.uri);
        query.map(|Query(query)| Self(query)).map_err(|rejection| respond_bad_query(&rejection))
    }
}

impl<Q: DeserializeOwned> FromRequestParts<AppState> for CountsPageQuery<Q> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Self::Rejection> {
        let PageQuery(query) = PageQuery::from_request_parts(parts, state).await?;
        match state.collector.service.decider.metrics.is_off() {
            true => Err(respond_metrics_off()),
            false => Ok(Self(query)),
        }
    }
}
