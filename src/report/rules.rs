//! Whether the limits are the right ones: what each did, and what stands out.
//!
//! Four things are found: a limit that nothing ever met, one that never refused, one whose keys are nearly all seen
//! once, and one that mostly refuses short bursts, which a token bucket would let pass at the same long-term rate. A
//! finding is advice, never a verdict, and says what it rests on.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Format;
use super::text::{columns, plain};
use crate::clock::Time;
use crate::decide::explain::limit_text;
use crate::limit::Limit;
use crate::limit::algorithm::Capacity;
use crate::rule::set::{CompiledLimit, CompiledRule, RuleSet};
use crate::telemetry::hyperloglog::STANDARD_ERROR;
use crate::telemetry::metrics::limit_stats::{LimitName, LimitStat};
use crate::telemetry::top_keys::{BURST_SECONDS, MINUTES, TopKeys, TopKeysSnapshot};

/// What to tell.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RulesQuery {
    /// How it is written.
    pub format: Format,
    /// How many limits: 1 to 10 000; 100 if it is not said.
    pub most: Option<usize>,
    /// Only limits whose name, `domain.key_value.key`, is this or begins with it and a dot.
    pub rule: Option<String>,
    /// Only limits with this finding.
    pub finding: Option<FindingKind>,
}

const MAX_LIMITS: usize = 10_000;

/// What limits did.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RulesReport {
    /// Limits that are query, told of here or not.
    pub limits: usize,
    /// The relative standard error of the counts of distinct keys.
    pub distinct_standard_error: f64,
    /// Over how many minutes bursts are looked for.
    pub burst_minutes: u64,
    /// Those that refused most first, then those that were met most.
    pub rules: Vec<LimitReport>,
}

/// What one limit did since it was loaded.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct LimitReport {
    /// Its name: `domain.key_value.key`.
    pub rule: String,
    /// `file:line:column`.
    pub origin: String,
    /// The limit in words.
    pub limit: String,
    /// It refuses nothing: what is told as refused would have been.
    pub trial: bool,
    /// For how long it has been counted, in seconds.
    pub age_s: u64,
    /// Decisions in which it was met.
    pub matched: u64,
    /// Decisions in which it refused.
    pub refused: u64,
    /// Hits that passed when the limit was nearly used up.
    pub near_hits: u64,
    /// About how many different keys met it.
    pub distinct_keys: u64,
    /// About how many different keys it refused.
    pub distinct_refused_keys: u64,
    /// The share of what it refused in the last minutes that came in short bursts, 0 to 1; nothing if it refused none.
    pub burst_share: Option<f64>,
    /// What stands out.
    pub findings: Vec<Finding>,
}

/// Something that stands out.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Finding {
    /// What it is.
    pub kind: FindingKind,
    /// What it rests on, and what to do.
    pub advice: String,
}

/// What can stand out.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// No request has met it.
    NeverMatched,
    /// It has refused nothing.
    NeverRefused,
    /// Nearly every request brings a key of its own.
    KeysSeenOnce,
    /// What it refuses are mostly short bursts.
    TokenBucket,
}

/// What a limit refused in the last minutes.
#[derive(Clone, Copy, Debug, Default)]
struct Bursts {
    refused: u64,
    in_bursts: u64,
    largest: u64,
}

impl RulesReport {
    /// What the limits of `rules` did until `now`; `top` is what they refused.
    pub fn of(rules: &RuleSet, top: &TopKeys, now: Time, query: &RulesQuery) -> Self {
        let bursts = bursts(&top.snapshot(now, MINUTES, |name| query.matches(name)));
        let each = rules.rules().flat_map(|rule| rule.limits.iter().map(move |limit| (rule, limit)));
        let mut told: Vec<LimitReport> = each
            .filter(|(_, limit)| query.matches(limit.stats.name()))
            .map(|(rule, limit)| {
                let bursts = bursts.get(limit.stats.shared_name()).copied();
                LimitReport::of(rule, limit, bursts.unwrap_or_default())
            })
            .filter(|told| query.finding.is_none_or(|kind| told.findings.iter().any(|found| found.kind == kind)))
            .collect();
        told.sort_by(|a, b| (b.refused, b.matched, &a.rule).cmp(&(a.refused, a.matched, &b.rule)));
        let limits = told.len();
        told.truncate(query.most.unwrap_or(100).clamp(1, MAX_LIMITS));
        Self { limits, distinct_standard_error: STANDARD_ERROR, burst_minutes: MINUTES, rules: told }
    }

    /// As text.
    pub fn text(&self) -> String {
        if self.rules.is_empty() {
            return "there is no such limit\n".to_owned();
        }
        let row = |told: &LimitReport| {
            let share = told.burst_share.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", share * 100.0));
            let numbers = [told.matched, told.refused, told.near_hits, told.distinct_keys, told.distinct_refused_keys];
            let [matched, refused, near, keys, refused_keys] = numbers.map(|number| number.to_string());
            let trial = if told.trial { " (trial)" } else { "" };
            [matched, refused, near, keys, refused_keys, share, format!("{}{trial}", plain(&told.rule))]
        };
        let headings = ["MATCHED", "REFUSED", "NEAR", "KEYS", "REFUSED KEYS", "BURSTS", "RULE"];
        let mut page = columns(headings, self.rules.iter().map(row));
        for told in self.rules.iter().filter(|told| !told.findings.is_empty()) {
            page += &format!("\n{} ({}), {}\n", plain(&told.rule), plain(&told.limit), plain(&told.origin));
            for finding in &told.findings {
                page += &format!("  {}\n", plain(&finding.advice));
            }
        }
        if self.limits > self.rules.len() {
            page += &format!("\n{} of {} limits\n", self.rules.len(), self.limits);
        }
        page
    }
}

impl RulesQuery {
    fn matches(&self, name: &LimitName) -> bool {
        self.rule.as_ref().is_none_or(|rule| name.is_or_is_below(rule))
    }
}

impl LimitReport {
    fn of(rule: &CompiledRule, limit: &CompiledLimit, bursts: Bursts) -> Self {
        let stats = &limit.stats;
        // A rule's keys are counted with its first limit.
        let of_rule = rule.limits.first().map_or(stats, |first| &first.stats);
        let (matched, refused) = stats.all_decisions();
        let mut told = Self {
            rule: stats.name().key().to_owned(),
            origin: rule.rule.location.to_string(),
            limit: limit_text(&limit.limit),
            trial: limit.shadow,
            age_s: stats.age().as_secs(),
            matched,
            refused,
            near_hits: stats.get(LimitStat::NearLimit),
            distinct_keys: of_rule.keys.estimate(),
            distinct_refused_keys: stats.refused_keys.estimate(),
            burst_share: None,
            findings: Vec::new(),
        };
        #[expect(clippy::cast_precision_loss, reason = "it is a share")]
        if bursts.refused > 0 {
            told.burst_share = Some(bursts.in_bursts as f64 / bursts.refused as f64);
        }
        told.findings = told.findings(&limit.limit, bursts);
        told
    }

    fn findings(&self, limit: &Limit, bursts: Bursts) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut find = |kind, advice| findings.push(Finding { kind, advice });
        if self.matched == 0 {
            let advice = format!(
                "no request has met it for {} s: `tollkeeper explain` tells which rule a request meets, and why not this",
                self.age_s
            );
            find(FindingKind::NeverMatched, advice);
            return findings;
        }
        if self.refused == 0 {
            let near = match self.near_hits {
                0 => "and never came near its limit".to_owned(),
                hits => format!("and came near its limit with {hits} hits"),
            };
            let advice = format!("it has refused nothing in {} decisions {near}: perhaps it is too wide", self.matched);
            find(FindingKind::NeverRefused, advice);
        }
        // Nine of ten, less twice the error of the estimate.
        if self.matched >= MIN_DECISIONS && self.distinct_keys.saturating_mul(100) >= self.matched.saturating_mul(80) {
            let advice = format!(
                "about {} different keys in {} decisions: nearly every request brings a key of its own, so the limit \
                 holds nobody; is there a request's id or a time in its key?",
                self.distinct_keys, self.matched
            );
            find(FindingKind::KeysSeenOnce, advice);
        }
        let smooths = limit.algorithm().properties().capacity != Capacity::RequestsPerUnit;
        let is_short = limit.period_us() <= MAX_BURST_PERIOD_US && limit.requests_per_unit() > 0;
        if !smooths && is_short && bursts.refused >= MIN_REJECTED_HITS && bursts.in_bursts * 2 >= bursts.refused {
            let bucket = u64::from(limit.requests_per_unit()).saturating_add(bursts.largest);
            let advice = format!(
                "{} of {} hits refused in {MINUTES} minutes came in bursts of {BURST_SECONDS} s at most: `algorithm: \
                 token_bucket` with `bucket_size: {bucket}` would let a burst like the largest of them pass, at the \
                 same long-term rate",
                bursts.in_bursts, bursts.refused
            );
            find(FindingKind::TokenBucket, advice);
        }
        findings
    }
}

/// Fewer decisions tell nothing about keys.
const MIN_DECISIONS: u64 = 100;
/// Fewer refusals tell nothing about bursts.
const MIN_REJECTED_HITS: u64 = 20;
/// A quota of a longer period is a budget, and not a matter of bursts.
const MAX_BURST_PERIOD_US: u64 = 3_600_000_000;

fn bursts(found: &TopKeysSnapshot) -> HashMap<Arc<LimitName>, Bursts> {
    let mut by_limit: HashMap<Arc<LimitName>, Bursts> = HashMap::new();
    for refused in &found.keys {
        let bursts = by_limit.entry(Arc::clone(&refused.limit)).or_default();
        bursts.refused += refused.at_least;
        bursts.in_bursts += refused.in_bursts;
        bursts.largest = bursts.largest.max(refused.largest_burst);
    }
    by_limit
}
