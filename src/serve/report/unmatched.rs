//! Report of descriptors that matched no rule, with the rules for which they were probably meant.
//!
//! Descriptors with the same domain and keys are one row. The reason is found when the report is made, from the example
//! of the row and the rules of that moment; hidden values count as unknown.
//!
//! Decides: what `/unmatched` and `top --unmatched` print, and how many.

use serde::{Deserialize, Serialize};

use super::top::parse_shown_entries;
use crate::base::clock::Time;
use crate::base::text::{escape_unprintable, truncate_and_escape};
use crate::base::text_table::{Format, NumberAlignment, format_table};
use crate::decide::key_text::KeyEntry;
use crate::rules::rule::near_miss::{MissReason, NearMiss, PossibleEntry};
use crate::rules::rule::set::{DomainRules, RuleSet};
use crate::telemetry::metrics::limit_stats::LimitStat;
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::unmatched_descriptors::UnmatchedPath;

/// Query of `/unmatched`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UnmatchedQuery {
    /// Format of the report.
    pub format: Format,
    /// Maximum number of rows: 1 to 100, default 20.
    pub most: Option<usize>,
    /// Show only this domain.
    pub domain: Option<String>,
}

const DEFAULT_SHOWN_ROWS: usize = 20;
/// Maximum number of rows: the reason of each is searched for.
const MAX_SHOWN_ROWS: usize = 100;
/// Maximum number of domains in [`UnmatchedReport::domains`].
const MAX_SHOWN_DOMAINS: usize = 1000;
const MAX_DOMAIN_CHARS: usize = 60;

/// Descriptors that matched no rule.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct UnmatchedReport {
    /// False if descriptors are not tracked: only `domains` is filled.
    pub is_tracking: bool,
    /// Findings about domains.
    pub findings: Vec<UnmatchedFinding>,
    /// Domains with such descriptors, the most first.
    pub domains: Vec<UnmatchedDomain>,
    /// Descriptors of the last five to ten minutes by domain and keys, the most frequent first.
    pub descriptors: Vec<UnmatchedRow>,
}

/// A finding about a domain.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct UnmatchedFinding {
    /// Kind.
    pub kind: UnmatchedFindingKind,
    /// Domain.
    pub domain: String,
    /// What is wrong, and a remedy.
    pub advice: String,
}

/// Kind of a finding.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UnmatchedFindingKind {
    /// No rule has the domain.
    UnknownDomain,
    /// The domain has rules, and none of them has matched any descriptor.
    NothingMatches,
}

/// Descriptors of one domain.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct UnmatchedDomain {
    /// Name, as metrics have it.
    pub domain: String,
    /// The domain has rules.
    pub has_rules: bool,
    /// Descriptors that matched no rule, since the start.
    pub unmatched: u64,
    /// Decisions of its limits, since the start.
    pub matched: u64,
}

/// Descriptors with the same domain and keys.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct UnmatchedRow {
    /// Domain; cut to 128 bytes.
    pub domain: String,
    /// Entries of one of them, as keys of `/top` are written.
    pub example: String,
    /// Entries; absent if the example was cut or is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Vec<KeyEntry>>,
    /// Estimated number of descriptors.
    pub about: u64,
    /// What differs from the nearest rule; absent if no rule is near. `unknown_domain` if the domain has no rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Path of the nearest rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Its location.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Descriptor, or domain, that would match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<String>,
    /// The reason in a sentence.
    pub why: String,
}

impl UnmatchedReport {
    /// Computes the report of this process. `has_values` is false if the values of examples are hashes.
    pub fn new(
        metrics: &ServiceMetrics,
        rules: Option<&RuleSet>,
        now: Time,
        query: &UnmatchedQuery,
        has_values: bool,
    ) -> Self {
        let max_rows = query.most.unwrap_or(DEFAULT_SHOWN_ROWS).clamp(1, MAX_SHOWN_ROWS);
        let is_shown = |domain: &str| query.domain.as_ref().is_none_or(|shown| shown == domain);
        let paths = metrics.unmatched.snapshot(now);
        let shown = paths.iter().filter(|path| is_shown(&path.domain)).take(max_rows);
        let domains: Vec<_> = sum_by_domain(metrics).into_iter().filter(|domain| is_shown(&domain.domain)).collect();
        Self {
            is_tracking: metrics.top_keys.is_tracking(),
            findings: domains.iter().filter_map(|domain| find_problem(domain, rules)).collect(),
            domains,
            descriptors: shown.map(|path| build_row(path, rules, has_values)).collect(),
        }
    }

    /// Formats the report as text.
    pub fn format_text(&self) -> String {
        if self.domains.is_empty() {
            return "every descriptor matched a rule, or there was none\n".to_owned();
        }
        let mut page = String::new();
        for finding in &self.findings {
            page += &format!("! {}\n", escape_unprintable(&finding.advice));
        }
        page += if page.is_empty() { "" } else { "\n" };
        let row = |domain: &UnmatchedDomain| {
            let name = escape_unprintable(&domain.domain);
            let note = if domain.has_rules { "" } else { " (no rules)" };
            [domain.unmatched.to_string(), domain.matched.to_string(), format!("{name}{note}")]
        };
        let headings = ["UNMATCHED", "MATCHED", "DOMAIN"];
        page += &format_table(&headings, self.domains.iter().map(row), NumberAlignment::Right);
        if !self.is_tracking {
            return page + "\nTOLLKEEPER_TOP_KEYS=0: single descriptors are not tracked\n";
        }
        if self.descriptors.is_empty() {
            return page + "\nnone of them in the last minutes\n";
        }
        page += "\nThe last five to ten minutes by keys, with an example; numbers are estimates.\n";
        for row in &self.descriptors {
            let (domain, example) = (escape_unprintable(&row.domain), escape_unprintable(&row.example));
            let example = if example.is_empty() { "no entries but `slot` and `release`" } else { &example };
            page += &format!("\n{} of {domain}: {example}\n  {}\n", row.about, escape_unprintable(&row.why));
            if let Some(origin) = &row.origin {
                page += &format!("  at {}\n", escape_unprintable(origin));
            }
        }
        page
    }
}

/// Sums up the descriptors of each domain since the start.
fn sum_by_domain(metrics: &ServiceMetrics) -> Vec<UnmatchedDomain> {
    let mut domains: Vec<UnmatchedDomain> = Vec::new();
    let limits = metrics.limits.all_limit_stats();
    for stats in limits.iter().filter(|stats| stats.counter_value(LimitStat::Unmatched) > 0) {
        let domain = stats.name().domain().to_owned();
        let of_domain = limits.iter().filter(|limit| limit.name().domain() == domain);
        let matched = of_domain.map(|limit| limit.total_decision_counts().total).sum();
        let unmatched = stats.counter_value(LimitStat::Unmatched);
        domains.push(UnmatchedDomain { domain, has_rules: true, unmatched, matched });
    }
    let unknown = metrics.limits.unknown_domain_counts().into_iter();
    domains.extend(unknown.map(|(domain, unmatched)| UnmatchedDomain {
        domain,
        has_rules: false,
        unmatched,
        matched: 0,
    }));
    domains.sort_by(|a, b| (b.unmatched, &a.domain).cmp(&(a.unmatched, &b.domain)));
    domains.truncate(MAX_SHOWN_DOMAINS);
    domains
}

fn find_problem(domain: &UnmatchedDomain, rules: Option<&RuleSet>) -> Option<UnmatchedFinding> {
    let name = truncate_and_escape(&domain.domain, MAX_DOMAIN_CHARS);
    let (kind, advice) = if !domain.has_rules {
        let near = rules.and_then(|rules| rules.find_similar_domain(&domain.domain));
        let near = near.map_or_else(String::new, |near| format!(": did you mean {near}?"));
        let advice = format!("no rules for domain {name}, so all its requests pass{near}");
        (UnmatchedFindingKind::UnknownDomain, advice)
    } else if domain.matched == 0 {
        let advice = format!("no descriptor of domain {name} has matched a rule, so nothing of it is limited");
        (UnmatchedFindingKind::NothingMatches, advice)
    } else {
        return None;
    };
    Some(UnmatchedFinding { kind, domain: domain.domain.clone(), advice })
}

fn build_row(path: &UnmatchedPath, rules: Option<&RuleSet>, has_values: bool) -> UnmatchedRow {
    let mut row = UnmatchedRow {
        domain: path.domain.clone(),
        example: path.example.clone(),
        entries: parse_shown_entries(&path.example, has_values),
        about: path.count,
        reason: None,
        rule: None,
        origin: None,
        suggestion: None,
        why: "no rule is similar".to_owned(),
    };
    let Some(rules) = rules else { return row };
    match rules.domain(&path.domain) {
        None => {
            row.reason = Some("unknown_domain".to_owned());
            row.suggestion = rules.find_similar_domain(&path.domain).map(str::to_owned);
            row.why = match &row.suggestion {
                Some(near) => format!("no rules have this domain: did you mean {near}?"),
                None => "no rules have this domain".to_owned(),
            };
        }
        Some(domain) => explain_row(&mut row, domain, rules),
    }
    row
}

fn explain_row(row: &mut UnmatchedRow, domain: &DomainRules, rules: &RuleSet) {
    let Some(entries) = &row.entries else { return };
    let possible: Vec<PossibleEntry<'_>> = entries
        .iter()
        .map(|entry| PossibleEntry {
            key: entry.key.as_bytes(),
            value: entry.value.as_deref().map(str::as_bytes),
            is_optional: false,
        })
        .collect();
    if rules.can_match(domain, &possible) {
        let is_known = possible.iter().all(|entry| entry.value.is_some());
        row.why = match is_known {
            true => "a rule matches it by now".to_owned(),
            false => "a rule has these keys, and other values".to_owned(),
        };
        row.reason = (!is_known).then(|| MissReason::Value.name().to_owned());
        return;
    }
    if let Some(near) = rules.find_near_miss(domain, &possible) {
        row.why = near.describe();
        let NearMiss { reason, rule, location, suggestion } = near;
        row.reason = Some(reason.name().to_owned());
        row.rule = Some(rule);
        row.origin = location.map(|location| location.to_string());
        row.suggestion = Some(suggestion);
    }
}
