//! Report of the decisions of each limit, with findings.
//!
//! Seven things are found: a limit that no request matched, one that never rejected, one whose keys are nearly all seen
//! once, one that mostly rejects short bursts, which a token bucket would admit at the same long-term rate, a
//! concurrent one whose slots are never released, reservations that are never settled, and a default that a limit
//! cannot have. A finding is advice and names what it is based on.
//!
//! Decides: when `/rules` calls a limit useless or too low, or advises a token bucket (`advise_token_bucket`).
//! Decides: slots that are never released; how many are shown.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::SearchWords;
use crate::base::clock::Time;
use crate::base::named_enum::named_enum;
use crate::base::text::escape_unprintable;
use crate::base::text_table::{Format, NumberAlignment, format_table};
use crate::limit::Limit;
use crate::limit::algorithm::CapacityRuleKey;
use crate::rules::rule::set::{CompiledRule, RuleSet};
use crate::serve::quota::page::RuleQuotaCounts;
use crate::serve::quota::service::QuotaService;
use crate::telemetry::decision_history::MinuteCounts;
use crate::telemetry::hyperloglog::RELATIVE_STANDARD_ERROR;
use crate::telemetry::metrics::limit_stats::{DecisionCounts, LimitName, LimitStat, LimitStats};
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::top_keys::{KEPT_MINUTES, MAX_BURST_SECONDS, TopKeysSnapshot};

/// Query of `/rules`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RulesQuery {
    /// Format of the report.
    pub format: Format,
    /// Maximum number of limits: 1 to 10 000, default 100.
    pub most: Option<usize>,
    /// Number of limits that are skipped, in the order of the report.
    pub offset: usize,
    /// Order of the limits.
    pub order: LimitOrder,
    /// Name of a limit, `domain.key_value.key`, or the start of one up to a dot.
    pub rule: Option<String>,
    /// True if `rule` is the whole name.
    pub exact: bool,
    /// Words that name, position or description of a limit must contain, in any case.
    pub search: SearchWords,
    /// True for limits with findings only.
    pub found: bool,
    /// Finding that limits must have.
    pub finding: Option<LimitFindingKind>,
    /// True for limits that rejected, in shadow mode too.
    pub rejecting: bool,
}

/// Order of limits in a report.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitOrder {
    /// By rejected and then by matched decisions of the last ten minutes, the most first; then as `Rejected`.
    #[default]
    Recent,
    /// By rejected and then by matched decisions, the most first.
    Rejected,
    /// By the number of decisions, the most first.
    Matched,
    /// By the share of decisions that rejected, the largest first.
    Share,
    /// By hits near the limit, the most first.
    Near,
    /// By the number of distinct keys, the most first.
    Keys,
    /// By name.
    Name,
    /// As in the files, candidates behind the limit that they stand beside.
    File,
}

const DEFAULT_SHOWN_LIMITS: usize = 100;
const MAX_SHOWN_LIMITS: usize = 10_000;
/// Minimum number of decisions for findings about keys.
const MIN_DECISIONS_FOR_KEY_FINDINGS: u64 = 100;
/// Minimum share of distinct keys per decision for keys that are seen once, in percent: 90 less twice the estimate's
/// error.
const MIN_DISTINCT_KEY_PERCENT: u64 = 80;
/// Minimum number of slots for findings about releases.
const MIN_SLOTS_FOR_FINDINGS: u64 = 20;
/// Minimum number of rejected hits for findings about bursts.
const MIN_REJECTED_HITS_FOR_BURSTS: u64 = 20;
/// Maximum period for findings about bursts; a limit with a longer period is a budget.
const MAX_BURST_PERIOD_US: u64 = 3_600_000_000;

/// Decisions and findings by limit.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RuleUsageReport {
    /// Number of limits that match the query, in the report or not.
    pub limits: usize,
    /// Relative standard error of the numbers of distinct keys.
    pub distinct_standard_error: f64,
    /// Number of minutes in which bursts are counted.
    pub burst_minutes: u64,
    /// Limits, in the order of the query.
    pub rules: Vec<LimitReport>,
}

/// Decisions and findings of one limit, since it was loaded.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct LimitReport {
    /// Name: `domain.key_value.key`.
    pub rule: String,
    /// Name of its rule in `/rlconfig` and for `/counters`.
    #[serde(default)]
    pub rule_path: String,
    /// Position in the rule files: `file:line:column`.
    pub origin: String,
    /// File of the limit.
    #[serde(default)]
    pub file: String,
    /// Line in the file, from 1.
    #[serde(default)]
    pub line: u64,
    /// Domain.
    #[serde(default)]
    pub domain: String,
    /// Keys, or keys with values, from the domain to the rule, as in the name.
    #[serde(default)]
    pub path: Vec<String>,
    /// Description of the limit.
    pub limit: String,
    /// True in shadow mode: rejections were only counted.
    pub shadow_mode: bool,
    /// `enforced_share` of the rule, such as `10%`: for other keys the limit is in shadow mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforced_share: Option<String>,
    /// True for a candidate: charged as if it were the only limit of the rule.
    #[serde(default)]
    pub candidate: bool,
    /// Name of the limit that is enforced beside a candidate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// Time since counting began, in seconds.
    pub age_s: u64,
    /// Number of decisions in the last ten minutes.
    #[serde(default)]
    pub recently_matched: u64,
    /// Number of decisions in the last ten minutes that rejected, in shadow mode too.
    #[serde(default)]
    pub recently_rejected: u64,
    /// Number of decisions.
    pub matched: u64,
    /// Number of decisions that rejected, by a policy and in shadow mode too.
    pub rejected: u64,
    /// Part of `rejected` that passed, because of shadow mode or as a candidate.
    #[serde(default)]
    pub rejected_in_shadow: u64,
    /// Hits within the limit and above NEAR_LIMIT_RATIO of it.
    pub near_limit_hits: u64,
    /// Estimated number of distinct keys.
    pub distinct_keys: u64,
    /// Estimated number of distinct keys that were rejected.
    pub distinct_rejected_keys: u64,
    /// Share of the recently rejected hits that came in bursts, 0 to 1; null if none were rejected.
    pub burst_share: Option<f64>,
    /// Slots of a concurrent limit; absent of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<SlotCounts>,
    /// Keys of the rule that proxies decide by themselves, at this replica; absent without them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<RuleQuotaCounts>,
    /// Findings.
    pub findings: Vec<LimitFinding>,
}

/// Slots of a concurrent limit since it was loaded.
///
/// Taken less freed, summed over all replicas, is about what is in use: releases may reach another replica, and slots
/// whose requests gave up before the answer are not counted.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct SlotCounts {
    /// Slots that requests took.
    pub taken: u64,
    /// Slots that releases freed.
    pub freed: u64,
    /// Seats that were never released.
    pub expired_seats: u64,
    /// Releases that came before their requests.
    pub early_releases: u64,
    /// Requests that came after their releases.
    #[serde(default)]
    pub late_requests: u64,
}

impl SlotCounts {
    /// Counts of a limit; all zero if it is not concurrent.
    pub fn of_stats(stats: &LimitStats) -> Self {
        Self {
            taken: stats.counter_value(LimitStat::SlotsTaken),
            freed: stats.counter_value(LimitStat::SlotsFreed),
            expired_seats: stats.counter_value(LimitStat::SeatsExpired),
            early_releases: stats.counter_value(LimitStat::EarlyReleases),
            late_requests: stats.counter_value(LimitStat::LateRequests),
        }
    }

    /// The counts as a line of a report.
    pub fn format_text(&self) -> String {
        let Self { taken, freed, expired_seats, early_releases, late_requests } = self;
        format!(
            "slots: {taken} taken, {freed} freed, {expired_seats} seats never released; {early_releases} releases came \
             before their requests, {late_requests} requests after their releases"
        )
    }
}

/// A finding about a limit.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct LimitFinding {
    /// Kind of the finding.
    pub kind: LimitFindingKind,
    /// Numbers that the finding is based on, and a remedy.
    pub advice: String,
}

named_enum! {
    /// Kind of a finding.
    #[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum LimitFindingKind {
        /// No request matched the limit.
        NeverMatched = "never_matched",
        /// The limit rejected nothing.
        NeverRejected = "never_rejected" | "never_refused",
        /// Nearly every request has another key.
        KeysSeenOnce = "keys_seen_once",
        /// Most rejected hits came in short bursts.
        TokenBucket = "token_bucket",
        /// Slots of a concurrent limit are taken and never released.
        SlotsNotReleased = "slots_not_released",
        /// Estimates are reserved and never settled.
        ReservationsNotSettled = "reservations_not_settled",
        /// A default of `TOLLKEEPER_RULE_DEFAULTS` was left out.
        DefaultLeftOut = "default_left_out",
    }
}

/// Rejected hits of a limit in the last minutes.
#[derive(Clone, Copy, Debug, Default)]
struct BurstStats {
    rejected: u64,
    in_bursts: u64,
    largest: u64,
}

impl RuleUsageReport {
    /// Computes the report for the limits of `rules`.
    pub fn new(rules: &RuleSet, metrics: &ServiceMetrics, now: Time, query: &RulesQuery) -> Self {
        let bursts =
            sum_burst_stats(&metrics.top_keys.snapshot(now, KEPT_MINUTES, |name| query.matches_limit_name(name)));
        let bursts_of = |stats: &LimitStats| bursts.get(stats.name_arc()).copied().unwrap_or_default();
        let needs_findings = query.found || query.finding.is_some();
        let recent = LimitOfRule::all(rules).map(LimitOfRule::stats);
        let recent = metrics.history.sum_last_minutes(now, KEPT_MINUTES, recent);
        let limits = LimitOfRule::all(rules)
            .zip(recent)
            .map(|(limit, recent)| LimitOfRule { recent: decisions_of_minutes(recent), ..limit });
        let mut found: Vec<LimitOfRule<'_>> = limits
            .filter(|limit| query.matches_limit_name(limit.stats().name()) && limit.contains_words(&query.search))
            .filter(|limit| !query.rejecting || limit.stats().total_decision_counts().rejected > 0)
            // Findings take the most time, so they are computed of all limits only if the query asks for them.
            .filter(|limit| !needs_findings || query.has_finding(&limit.report(bursts_of(limit.stats()))))
            .collect();
        if query.order != LimitOrder::File {
            found.sort_by_cached_key(|limit| (limit.sort_key(query.order), limit.stats().name().as_str()));
        }
        let most = query.most.unwrap_or(DEFAULT_SHOWN_LIMITS).clamp(1, MAX_SHOWN_LIMITS);
        let page = found.iter().skip(query.offset).take(most).map(|limit| limit.report(bursts_of(limit.stats())));
        Self {
            limits: found.len(),
            distinct_standard_error: RELATIVE_STANDARD_ERROR,
            burst_minutes: KEPT_MINUTES,
            rules: page.collect(),
        }
    }

    /// Adds how the limits are divided among proxies.
    pub fn add_quotas(&mut self, quota: &QuotaService) {
        let counts = quota.count_by_rule();
        for limit in &mut self.rules {
            limit.quota = counts.get(&*limit.rule_path).copied();
        }
    }

    /// Formats the report as text.
    pub fn format_text(&self) -> String {
        if self.rules.is_empty() {
            return "no limit matches\n".to_owned();
        }
        let headings = ["10 MIN", "REJECTED", "MATCHED", "REJECTED", "NEAR", "KEYS", "REJECTED KEYS", "BURSTS", "RULE"];
        let mut page = format_table(&headings, self.rules.iter().map(LimitReport::format_row), NumberAlignment::Right);
        // Most limits reject nothing most of the time: this is told once, below.
        let is_told = |finding: &&LimitFinding| finding.kind != LimitFindingKind::NeverRejected;
        let has_more = |limit: &&LimitReport| limit.slots.is_some() || limit.findings.iter().any(|it| is_told(&it));
        for limit in self.rules.iter().filter(has_more) {
            page += &format!(
                "\n{} ({}), {}\n",
                escape_unprintable(&limit.rule),
                escape_unprintable(&limit.limit),
                escape_unprintable(&limit.origin)
            );
            if let Some(slots) = &limit.slots {
                page += &format!("  {}\n", slots.format_text());
            }
            for finding in limit.findings.iter().filter(is_told) {
                page += &format!("  {}\n", escape_unprintable(&finding.advice));
            }
        }
        for limit in &self.rules {
            if let Some(RuleQuotaCounts { keys, proxies, ends_s }) = limit.quota {
                page += &format!(
                    "\n{}: {keys} keys are divided among proxies, in {proxies} parts; the last ends in {ends_s} s\n",
                    escape_unprintable(&limit.rule)
                );
            }
        }
        page += &self.format_never_rejected();
        if self.limits > self.rules.len() {
            page += &format!("\n{} of {} limits\n", self.rules.len(), self.limits);
        }
        page
    }

    /// Formats how many limits rejected nothing, if any; the table has 0 for each.
    fn format_never_rejected(&self) -> String {
        let has_it = |limit: &&LimitReport| limit.findings.iter().any(|it| it.kind == LimitFindingKind::NeverRejected);
        let (mut count, mut far) = (0, 0);
        for limit in self.rules.iter().filter(has_it) {
            count += 1;
            far += usize::from(limit.near_limit_hits == 0);
        }
        match count {
            0 => String::new(),
            1 => "\n1 limit with decisions rejected nothing: fine for a safety net, else lower it\n".to_owned(),
            count => format!(
                "\n{count} limits with decisions rejected nothing, {far} of them had no hit near the limit either: \
                 fine for safety nets, else lower them\n"
            ),
        }
    }
}

impl RulesQuery {
    fn matches_limit_name(&self, name: &LimitName) -> bool {
        self.rule.as_ref().is_none_or(|rule| name.is_selected_by(rule, self.exact))
    }

    /// True if the limit has the finding that the query asks for.
    fn has_finding(&self, limit: &LimitReport) -> bool {
        let is_asked_for = |found: &LimitFinding| self.finding.is_none_or(|kind| found.kind == kind);
        limit.findings.iter().any(is_asked_for)
    }
}

/// A limit of a rule.
#[derive(Clone, Copy)]
struct LimitOfRule<'r> {
    rule: &'r CompiledRule,
    index: usize,
    /// Decisions of the last ten minutes.
    recent: DecisionCounts,
}

fn decisions_of_minutes(counts: MinuteCounts) -> DecisionCounts {
    let MinuteCounts { matched, rejected, exceeded_in_shadow, .. } = counts;
    DecisionCounts { total: matched.into(), rejected: u64::from(rejected) + u64::from(exceeded_in_shadow) }
}

impl<'r> LimitOfRule<'r> {
    /// All limits, without their recent decisions.
    fn all(rules: &'r RuleSet) -> impl Iterator<Item = Self> {
        let limits_of = |rule: &'r CompiledRule| (0..rule.limits.len()).map(move |index| (rule, index));
        let recent = DecisionCounts::default();
        rules.rules().flat_map(limits_of).map(move |(rule, index)| Self { rule, index, recent })
    }

    fn stats(self) -> &'r LimitStats {
        &self.rule.limits[self.index].stats
    }

    /// Values by which the limit is sorted before its name.
    fn sort_key(self, order: LimitOrder) -> [Reverse<u64>; 4] {
        let DecisionCounts { total: matched, rejected } = self.stats().total_decision_counts();
        let first = match order {
            LimitOrder::Recent => {
                return [self.recent.rejected, self.recent.total, rejected, matched].map(Reverse);
            }
            LimitOrder::Rejected => rejected,
            LimitOrder::Matched => matched,
            LimitOrder::Share => rejected.saturating_mul(1_000_000) / matched.max(1),
            LimitOrder::Near => self.stats().counter_value(LimitStat::NearLimit),
            LimitOrder::Keys => self.rule.limits.first().map_or(0, |first| first.stats.keys.estimate()),
            LimitOrder::Name | LimitOrder::File => return [Reverse(0); 4],
        };
        [first, matched, 0, 0].map(Reverse)
    }

    fn report(self, bursts: BurstStats) -> LimitReport {
        let DecisionCounts { total, rejected } = self.recent;
        let report = LimitReport::new(self.rule, self.index, bursts);
        LimitReport { recently_matched: total, recently_rejected: rejected, ..report }
    }

    /// True if name, position and description together contain these words.
    fn contains_words(self, words: &SearchWords) -> bool {
        let (name, limit) = (self.stats().name().as_str(), &self.rule.limits[self.index].limit);
        words.is_empty() || words.are_in(&format!("{name} {} {limit}", self.rule.rule.location))
    }
}

impl LimitReport {
    fn new(rule: &CompiledRule, index: usize, bursts: BurstStats) -> Self {
        let limit = &rule.limits[index];
        let stats = &limit.stats;
        // Keys of a rule are counted with its first limit.
        let first = rule.limits.first().map_or(stats, |first| &first.stats);
        let enforced = rule.limits.first().filter(|first| limit.candidate && !first.candidate);
        let decisions = stats.decisions_by_result();
        #[expect(clippy::cast_precision_loss, reason = "a share needs no more digits")]
        let burst_share = (bursts.rejected > 0).then(|| bursts.in_bursts as f64 / bursts.rejected as f64);
        let mut report = Self {
            rule: stats.name().as_str().to_owned(),
            rule_path: rule.rule.path.clone(),
            origin: rule.rule.location.to_string(),
            file: rule.rule.location.file.to_string(),
            line: u64::from(rule.rule.location.line),
            domain: stats.name().known_domain().unwrap_or_default().to_owned(),
            path: stats.name().parts().skip(1).map(str::to_owned).collect(),
            limit: limit.limit.to_string(),
            shadow_mode: limit.shadow,
            enforced_share: rule.rule.enforced_share.map(|share| share.to_string()),
            candidate: limit.candidate,
            of: enforced.map(|enforced| enforced.stats.name().as_str().to_owned()),
            age_s: stats.age().as_secs(),
            recently_matched: 0,
            recently_rejected: 0,
            matched: decisions.matched,
            rejected: decisions.rejected + decisions.exceeded_in_shadow,
            rejected_in_shadow: decisions.exceeded_in_shadow,
            near_limit_hits: stats.counter_value(LimitStat::NearLimit),
            distinct_keys: first.keys.estimate(),
            distinct_rejected_keys: stats.rejected_keys.estimate(),
            burst_share,
            slots: limit.limit.is_concurrent().then(|| SlotCounts::of_stats(stats)),
            quota: None,
            findings: Vec::new(),
        };
        report.findings = report.find_findings(&limit.limit, bursts);
        if limit.limit.reservations().is_some() {
            let advice = find_reservations_not_settled(stats);
            let kind = LimitFindingKind::ReservationsNotSettled;
            report.findings.extend(advice.map(|advice| LimitFinding { kind, advice }));
        }
        let left_out = rule.left_out_defaults(index).iter();
        report
            .findings
            .extend(left_out.map(|text| LimitFinding { kind: LimitFindingKind::DefaultLeftOut, advice: text.clone() }));
        report
    }

    /// Cells of the text form.
    fn format_row(&self) -> [String; 9] {
        let share = self.burst_share.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", share * 100.0));
        let recent = [self.recently_matched, self.recently_rejected].map(|number| number.to_string());
        let numbers =
            [self.matched, self.rejected, self.near_limit_hits, self.distinct_keys, self.distinct_rejected_keys];
        let [matched, rejected, near, keys, rejected_keys] = numbers.map(|number| number.to_string());
        let [recently_matched, recently_rejected] = recent;
        let in_shadow = self.rejected_in_shadow;
        let enforced = self.rejected.saturating_sub(in_shadow);
        let mode = match (self.candidate, self.shadow_mode, &self.enforced_share) {
            (true, ..) => " (candidate)".to_owned(),
            (false, true, _) if enforced > 0 => format!(" (shadow mode, {enforced} rejected before)"),
            (false, true, _) => " (shadow mode)".to_owned(),
            (false, false, Some(share)) => format!(" (for {share} of the keys)"),
            (false, false, None) if in_shadow > 0 => format!(" ({in_shadow} of the rejected in shadow mode)"),
            (false, false, None) => String::new(),
        };
        let rule = format!("{}{mode}", escape_unprintable(&self.rule));
        [recently_matched, recently_rejected, matched, rejected, near, keys, rejected_keys, share, rule]
    }

    fn find_findings(&self, limit: &Limit, bursts: BurstStats) -> Vec<LimitFinding> {
        if self.matched == 0 {
            let advice = format!(
                "no request matched for {} s: `tollkeeper explain` shows which rule a request matches, and why",
                self.age_s
            );
            return vec![LimitFinding { kind: LimitFindingKind::NeverMatched, advice }];
        }
        let found = [
            (LimitFindingKind::NeverRejected, self.find_never_rejected()),
            (LimitFindingKind::KeysSeenOnce, self.find_keys_seen_once()),
            (LimitFindingKind::TokenBucket, advise_token_bucket(limit, bursts)),
            (LimitFindingKind::SlotsNotReleased, self.find_slots_not_released()),
        ];
        found.into_iter().filter_map(|(kind, advice)| Some(LimitFinding { kind, advice: advice? })).collect()
    }

    fn find_slots_not_released(&self) -> Option<String> {
        let SlotCounts { taken, freed, .. } = self.slots?;
        (taken >= MIN_SLOTS_FOR_FINDINGS && freed == 0).then(|| {
            format!(
                "{taken} slots were taken and none was released: Envoy needs a second rate limit filter in front, with \
                 apply_on_stream_done and the entry `release`"
            )
        })
    }

    fn find_never_rejected(&self) -> Option<String> {
        let near = match self.near_limit_hits {
            0 => "no hit came near the limit".to_owned(),
            hits => format!("{hits} hits came near the limit"),
        };
        (self.rejected == 0).then(|| {
            format!(
                "nothing was rejected in {} decisions, and {near}: fine for a safety net, else lower it",
                self.matched
            )
        })
    }

    fn find_keys_seen_once(&self) -> Option<String> {
        let is_mostly_distinct =
            self.distinct_keys.saturating_mul(100) >= self.matched.saturating_mul(MIN_DISTINCT_KEY_PERCENT);
        (self.matched >= MIN_DECISIONS_FOR_KEY_FINDINGS && is_mostly_distinct).then(|| {
            format!(
                "about {} distinct keys in {} decisions: nearly every request has its own key, so the limit rejects \
                 no one; check whether the key contains a request id or a time",
                self.distinct_keys, self.matched
            )
        })
    }
}

fn find_reservations_not_settled(stats: &LimitStats) -> Option<String> {
    let reserved = stats.counter_value(LimitStat::Reservations);
    let is_found = reserved >= MIN_SLOTS_FOR_FINDINGS && stats.counter_value(LimitStat::ReservationsSettled) == 0;
    is_found.then(|| {
        format!(
            "{reserved} requests reserved an estimate and none was settled: Envoy needs a second rate limit filter in \
             front, with apply_on_stream_done, the entry `release` and the cost as hits_addend"
        )
    })
}

fn advise_token_bucket(limit: &Limit, bursts: BurstStats) -> Option<String> {
    let has_bucket =
        limit.is_concurrent() || limit.algorithm().properties().capacity != CapacityRuleKey::RequestsPerUnit;
    let is_short = limit.period_us() <= MAX_BURST_PERIOD_US && limit.requests_per_unit() > 0;
    let is_mostly_bursts = bursts.rejected >= MIN_REJECTED_HITS_FOR_BURSTS && bursts.in_bursts * 2 >= bursts.rejected;
    (!has_bucket && is_short && is_mostly_bursts).then(|| {
        let bucket_size = limit.requests_per_unit().saturating_add(bursts.largest);
        format!(
            "{} of {} hits rejected in {KEPT_MINUTES} minutes came in bursts of at most {MAX_BURST_SECONDS} s: `algorithm: \
             token_bucket` with `bucket_size: {bucket_size}` would admit a burst as large as the largest of them, at \
             the same long-term rate",
            bursts.in_bursts, bursts.rejected
        )
    })
}

fn sum_burst_stats(snapshot: &TopKeysSnapshot) -> HashMap<Arc<LimitName>, BurstStats> {
    let mut by_limit: HashMap<Arc<LimitName>, BurstStats> = HashMap::new();
    for key in &snapshot.keys {
        let bursts = by_limit.entry(Arc::clone(&key.limit)).or_default();
        bursts.rejected += key.at_least;
        bursts.in_bursts += key.in_bursts;
        bursts.largest = bursts.largest.max(key.largest_burst);
    }
    by_limit
}
