//! Pages of reports, and `/live` as server-sent events. They charge and change nothing.
//!
//! They are JSON; some are text with `format=text`. A report reads the statistics of every limit, so it is built by the
//! page builder like metrics. The parameters of a page, with their defaults and maxima, are in the `...Query` beside its
//! report; an invalid one is answered with status 400 before the page is built. The `/live` stream of a slow client skips
//! events instead of queueing them, and ends when the process begins to stop.
//!
//! Decides: pages with `DISABLE_STATS` or without keys (503), and `/quota` without RLQS.
//! Decides: unknown parameters (400, `show_report`); when a minute of history is recorded.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{StatusCode, Uri};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::time::{Duration, sleep};

use super::app_state::AppState;
use super::page_builder::{Page, PageBuilder};
use super::response::{METRICS_OFF, NO_RULES_TEXT, respond_bad_query, respond_text};
use super::status_pages::ProblemsReport;
use crate::base::text::to_pretty_json;
use crate::base::text_table::Format;
use crate::decide::log::value_form::ValueForm;
use crate::decide::store_totals::StoreTotals;
use crate::limit::StoreFailurePolicy;
use crate::rules::live::{LoadStatus, LoadedRules};
use crate::rules::rule::set::RuleSet;
use crate::serve::fleet::report::{AlarmReport, FleetQuery, FleetReport};
use crate::serve::fleet::view::FleetView;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::quota::page::{QuotaQuery, QuotaReport};
use crate::serve::report::history::{HistoryQuery, HistoryReport};
use crate::serve::report::rejections::{RejectionsQuery, RejectionsReport};
use crate::serve::report::rule_text::{RuleTextQuery, RuleTextReport};
use crate::serve::report::rules::{RuleUsageReport, RulesQuery};
use crate::serve::report::top::{TopQuery, TopReport};
use crate::serve::report::unmatched::{UnmatchedQuery, UnmatchedReport};
use crate::serve::status::read_request_totals;

/// A report that a page shows.
pub(super) trait ReportPage: Serialize + Sized + 'static {
    /// Path, with required parameters.
    const PATH: &str;
    /// What it shows, with its other parameters.
    const ABOUT: &str;
    /// Its parameters.
    type Query: DeserializeOwned + Send + 'static;
    /// Data that it needs.
    const REQUIRES: RequiredData;

    /// Computes the report. Takes up to tens of milliseconds.
    ///
    /// # Errors
    /// Why there is no report.
    fn build(sources: &Sources, query: &Self::Query) -> Result<Self, NoReport>;

    /// The report as text, if the query asks for it; `None`: as JSON.
    fn text(&self, _: &Self::Query) -> Option<String> {
        None
    }
}

/// Why there is no report, with the status of the page that says so.
pub(super) struct NoReport(StatusCode, String);

impl NoReport {
    /// There may be one later: status 503.
    fn for_now(reason: &str) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, reason.to_owned())
    }
}

/// Data that a report needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequiredData {
    /// State of this process, which is always known.
    State,
    /// Counts of this process; status 503 if nothing is counted.
    Counts,
    /// Rejected keys of this process; status 503 if they are not tracked.
    Keys,
    /// State of all replicas.
    FleetState,
    /// Counts of all replicas; status 503 if nothing is counted.
    FleetCounts,
}

/// What reports are built from.
pub(super) struct Sources {
    collector: MetricsCollector,
    loaded: Option<Arc<LoadedRules>>,
    /// All replicas, for reports about them.
    view: Option<Arc<FleetView>>,
}

impl Sources {
    fn rules(&self) -> Option<&RuleSet> {
        self.loaded.as_ref().map(|loaded| &loaded.rules)
    }

    fn loaded(&self) -> Result<&LoadedRules, NoReport> {
        self.loaded.as_deref().ok_or_else(|| NoReport::for_now(NO_RULES_TEXT))
    }

    fn view(&self) -> Result<&FleetView, NoReport> {
        self.view.as_deref().ok_or_else(|| NoReport::for_now("the replicas are not known\n"))
    }

    /// True if keys have values as sent, not hashes of them.
    fn has_values(&self) -> bool {
        matches!(self.collector.service.decider.key_values, ValueForm::Plain)
    }
}

/// Shows a report.
pub(super) async fn show_report<R: ReportPage>(
    State(state): State<AppState>,
    uri: Uri,
    query: Result<Query<R::Query>, QueryRejection>,
) -> Response {
    let query = match query {
        Ok(Query(query)) => query,
        Err(rejection) => return respond_bad_query(&rejection),
    };
    let metrics = &state.collector.service.decider.metrics;
    let is_about_state = matches!(R::REQUIRES, RequiredData::State | RequiredData::FleetState);
    if metrics.is_off() && !is_about_state {
        return respond_text(StatusCode::SERVICE_UNAVAILABLE, METRICS_OFF);
    }
    if R::REQUIRES == RequiredData::Keys && !metrics.top_keys.is_tracking() {
        let what = "TOLLKEEPER_TOP_KEYS=0: rejected keys are not tracked (unset it and restart)\n";
        return respond_text(StatusCode::SERVICE_UNAVAILABLE, what);
    }
    let view = match R::REQUIRES {
        RequiredData::FleetState | RequiredData::FleetCounts => Some(state.fleet.get_or_refresh_fleet_view().await),
        RequiredData::State | RequiredData::Counts | RequiredData::Keys => None,
    };
    let collector = state.collector;
    let build = move || {
        let loaded = collector.service.rules.current_rules_owned();
        match R::build(&Sources { collector, loaded, view }, &query) {
            Ok(report) => match report.text(&query) {
                Some(text) => Some(Page::text(text)),
                None => to_pretty_json(&report).ok().map(Page::json),
            },
            Err(NoReport(status, reason)) => Some(Page::error(status, reason)),
        }
    };
    state.pages.respond_with_page(&uri, build).await
}

impl ReportPage for TopReport {
    const PATH: &str = "/top";
    const ABOUT: &str = "most rejected and busiest keys as JSON; `format=text` (`show=busiest`), `minutes=1..10`, \
                         `rule=NAME`, `most=N`";
    type Query = TopQuery;
    const REQUIRES: RequiredData = RequiredData::Keys;

    fn build(sources: &Sources, query: &TopQuery) -> Result<Self, NoReport> {
        let service = &sources.collector.service;
        let (metrics, now) = (&service.decider.metrics, service.clock.now());
        let minutes = Self::covered_minutes(query);
        let busiest = metrics.busiest_keys.snapshot(now, minutes, |name| query.matches_limit_name(name));
        let mut report = Self::new(&metrics.top_keys, now, query).with_busiest_keys(&busiest, query);
        let history = metrics.history.requests_by_minute(now, &read_request_totals(&sources.collector));
        let recent = history.iter().rev().take(usize::try_from(minutes).unwrap_or(usize::MAX));
        let deny = StoreFailurePolicy::ALL.iter().position(|policy| *policy == StoreFailurePolicy::Deny);
        report.denied_by_failure_policy = recent.map(|(_, of)| deny.map_or(0, |at| of.failed_by_policy[at])).sum();
        Ok(if sources.has_values() { report } else { report.without_values() })
    }

    fn text(&self, query: &TopQuery) -> Option<String> {
        (query.format == Format::Text).then(|| self.format_text(query.show))
    }
}

impl ReportPage for RejectionsReport {
    const PATH: &str = "/rejections";
    const ABOUT: &str = "rejections of the last hour by minute and key as JSON; `format=text`, `key=TEXT`, `at=14:05`, \
                         `rule=NAME`, `most=N`";
    type Query = RejectionsQuery;
    const REQUIRES: RequiredData = RequiredData::Keys;

    fn build(sources: &Sources, query: &RejectionsQuery) -> Result<Self, NoReport> {
        let service = &sources.collector.service;
        Self::new(&service.decider.metrics.top_keys, service.clock.now(), query, sources.has_values())
            .map_err(|error| NoReport(StatusCode::BAD_REQUEST, format!("{error}\n")))
    }

    fn text(&self, query: &RejectionsQuery) -> Option<String> {
        (query.format == Format::Text).then(|| self.format_text())
    }
}

impl ReportPage for UnmatchedReport {
    const PATH: &str = "/unmatched";
    const ABOUT: &str =
        "descriptors without a rule and the nearest rule, as JSON; `format=text`, `domain=NAME`, `most=N`";
    type Query = UnmatchedQuery;
    const REQUIRES: RequiredData = RequiredData::Counts;

    fn build(sources: &Sources, query: &UnmatchedQuery) -> Result<Self, NoReport> {
        let service = &sources.collector.service;
        let metrics = &service.decider.metrics;
        Ok(Self::new(metrics, sources.rules(), service.clock.now(), query, sources.has_values()))
    }

    fn text(&self, query: &UnmatchedQuery) -> Option<String> {
        (query.format == Format::Text).then(|| self.format_text())
    }
}

impl ReportPage for RuleUsageReport {
    const PATH: &str = "/rules";
    const ABOUT: &str = "decisions and findings by limit as JSON; `format=text`, `rule=NAME`, `search=WORDS`, \
                         `rejecting=true`, `finding=KIND`, \
                         `order=recent|rejected|matched|share|near|keys|name|file`, `most=N`, `offset=N`";
    type Query = RulesQuery;
    const REQUIRES: RequiredData = RequiredData::Counts;

    fn build(sources: &Sources, query: &RulesQuery) -> Result<Self, NoReport> {
        let service = &sources.collector.service;
        let rules = &sources.loaded()?.rules;
        let mut report = Self::new(rules, &service.decider.metrics, service.clock.now(), query);
        if let Some(quota) = &sources.collector.quota {
            report.add_quotas(quota);
        }
        Ok(report)
    }

    fn text(&self, query: &RulesQuery) -> Option<String> {
        (query.format == Format::Text).then(|| self.format_text())
    }
}

impl ReportPage for QuotaReport {
    const PATH: &str = "/quota";
    const ABOUT: &str =
        "streams of quotas, and what each proxy has of each key as JSON; `format=text`, `rule=NAME`, `most=N`";
    type Query = QuotaQuery;
    const REQUIRES: RequiredData = RequiredData::State;

    fn build(sources: &Sources, query: &QuotaQuery) -> Result<Self, NoReport> {
        let off = "the rate limit quota service is off (set TOLLKEEPER_RLQS=true and restart)\n";
        let quota = sources.collector.quota.as_ref().ok_or_else(|| NoReport::for_now(off))?;
        Ok(quota.build_report(query))
    }

    fn text(&self, query: &QuotaQuery) -> Option<String> {
        (query.format == Format::Text).then(|| self.format_text())
    }
}

impl ReportPage for FleetReport {
    const PATH: &str = "/fleet";
    const ABOUT: &str =
        "all replicas, what is wrong with them, and the keys rejected most, as JSON; `format=text`, as for /top";
    type Query = FleetQuery;
    const REQUIRES: RequiredData = RequiredData::FleetCounts;

    fn build(sources: &Sources, query: &FleetQuery) -> Result<Self, NoReport> {
        let service = &sources.collector.service;
        let blocks = service.decider.blocks.list(service.clock.now());
        Ok(Self::new(sources.view()?, query).with_blocks(blocks, query))
    }

    fn text(&self, query: &FleetQuery) -> Option<String> {
        (query.format == Format::Text).then(|| self.format_text(query.show))
    }
}

impl ReportPage for AlarmReport {
    const PATH: &str = "/alarms";
    const ABOUT: &str = "what is wrong now, with this process and between replicas, as JSON";
    type Query = IgnoredAny;
    const REQUIRES: RequiredData = RequiredData::FleetState;

    fn build(sources: &Sources, _: &IgnoredAny) -> Result<Self, NoReport> {
        Ok(Self::new(sources.view()?))
    }
}

impl ReportPage for HistoryReport {
    const PATH: &str = "/history";
    const ABOUT: &str = "the last hour by minute as JSON: requests, or decisions of the limits of `rule=NAME`";
    type Query = HistoryQuery;
    const REQUIRES: RequiredData = RequiredData::Counts;

    fn build(sources: &Sources, query: &HistoryQuery) -> Result<Self, NoReport> {
        Ok(Self::new(&sources.collector, sources.rules(), query))
    }
}

impl ReportPage for RuleTextReport {
    const PATH: &str = "/rule_text?origin=FILE:LINE:COLUMN";
    const ABOUT: &str = "limits of a loaded rule as a rule file has them, as JSON";
    type Query = RuleTextQuery;
    const REQUIRES: RequiredData = RequiredData::State;

    fn build(sources: &Sources, query: &RuleTextQuery) -> Result<Self, NoReport> {
        let what = "no loaded rule has this origin: file:line:column, as in /rules (the rules may have changed)\n";
        Self::find(sources.loaded()?, &query.origin).ok_or_else(|| NoReport(StatusCode::NOT_FOUND, what.to_owned()))
    }
}

impl ReportPage for ProblemsReport {
    const PATH: &str = "/problems";
    const ABOUT: &str =
        "last warnings and errors of the log, errors in rule files with their lines, failures of the store as JSON";
    type Query = IgnoredAny;
    const REQUIRES: RequiredData = RequiredData::State;

    fn build(sources: &Sources, _: &IgnoredAny) -> Result<Self, NoReport> {
        Ok(Self::new(&sources.collector))
    }
}

impl ReportPage for StoreTotals {
    const PATH: &str = "/store";
    const ABOUT: &str = "store statistics as JSON: failed charges, failure policies, leases, replicas";
    type Query = IgnoredAny;
    const REQUIRES: RequiredData = RequiredData::State;

    fn build(sources: &Sources, _: &IgnoredAny) -> Result<Self, NoReport> {
        Ok(sources.collector.service.decider.build_store_totals())
    }
}

impl ReportPage for LoadStatus {
    const PATH: &str = "/rlconfig/status";
    const ABOUT: &str = "version, files and last error of the configuration as JSON";
    type Query = IgnoredAny;
    const REQUIRES: RequiredData = RequiredData::State;

    fn build(sources: &Sources, _: &IgnoredAny) -> Result<Self, NoReport> {
        Ok(sources.collector.service.rules.status())
    }
}

/// `/live`
pub(super) async fn show_live(State(state): State<AppState>) -> Response {
    if state.collector.service.decider.metrics.is_off() {
        return respond_text(StatusCode::SERVICE_UNAVAILABLE, METRICS_OFF);
    }
    let events = stream::unfold(state.live.subscribe(), |mut listener| async move {
        let event = listener.next_event().await?;
        Some((Ok::<_, Infallible>(Event::default().data(&*event)), listener))
    });
    Sse::new(events).into_response()
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
