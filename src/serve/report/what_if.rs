//! Report of the keys that another limit would have rejected in the last minutes.
//!
//! Hits are those of the busiest keys of this process, by minute, from a sample of the decisions. They are spread
//! evenly over their minute and charged to the limit as it decides, beginning with nothing counted, so a limit with a
//! longer period than the minutes that are known rejects at least what is said, and bursts within a minute are not
//! seen.
//!
//! Decides: what another limit would have rejected (`/what_if`); which limits cannot be tried, and how many keys are.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::DomainsByMetricName;
use super::rule_text::{format_rule_as_file, rule_limits};
use super::top::parse_shown_entries;
use crate::base::clock::Time;
use crate::decide::key_text::KeyEntry;
use crate::limit::active::ActiveTimes;
use crate::limit::algorithm::state::State;
use crate::limit::charge::ChargeRequest;
use crate::limit::request::Hits;
use crate::limit::{Limit, Scope};
use crate::rules::compile::options::CompileOptions;
use crate::rules::compile::{RuleText, compile_texts};
use crate::rules::live::LoadedRules;
use crate::rules::rule::decompile::{LimitPlace, format_limit_on_one_line};
use crate::rules::rule::set::CompiledRule;
use crate::rules::rule::{RuleAllowance, RuleLimit};
use crate::rules::yaml::DocumentSelection;
use crate::telemetry::metrics::limit_stats::LimitStats;
use crate::telemetry::top_keys::{KEPT_MINUTES, RejectedKeysInMinute, TopKeys};

/// Query of `/what_if`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WhatIfQuery {
    /// Name of a limit: `domain.key_value.key`.
    pub rule: String,
    /// Limit to try, as the value of `rate_limit` in a rule file, on one line or more.
    pub limit: String,
}

/// Maximum length of the limit to try, in bytes.
const MAX_LIMIT_BYTES: usize = 2000;
/// Maximum number of keys that are tried.
const MAX_TRIED_KEYS: usize = 50;
/// Maximum number of errors of a limit to try that are shown.
const MAX_SHOWN_ERRORS: usize = 5;
/// Number of equal parts of a minute; the hits of a part are assumed to come at its start.
const PARTS_PER_MINUTE: u64 = 240;
const US_PER_MINUTE: u64 = 60_000_000;

/// Effect of another limit.
#[derive(Clone, Debug, Serialize)]
pub struct WhatIfReport {
    /// Name of the limit that it is compared with.
    pub rule: String,
    /// That limit in words.
    pub now: String,
    /// The limit that was tried, in words.
    pub tried: String,
    /// Number of minutes of which hits are known, including the current one: 1 to 10.
    pub minutes: u64,
    /// Number of live replicas, which share the limit while the hits are of this one; `null`: unknown.
    pub replicas: Option<u32>,
    /// Busiest keys, the most rejected by the tried limit first.
    pub keys: Vec<WhatIfKey>,
    /// Number of these keys that it would have rejected.
    pub rejected_keys: usize,
    /// Number of these keys that only it would have rejected.
    pub newly_rejected_keys: usize,
    /// A rule file with the limit as a candidate beside the limits of the rule.
    pub candidate_yaml: Option<String>,
    /// What the figures are based on.
    pub basis: &'static str,
}

/// Effect on one key.
#[derive(Clone, Debug, Serialize)]
pub struct WhatIfKey {
    /// Domain, as requests name it; absent if it is not certain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// As in `/top`.
    pub key: String,
    /// Entries of the key; absent if it was cut or is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entries: Option<Vec<KeyEntry>>,
    /// Estimated number of hits.
    pub hits_about: u64,
    /// Hits that the present limit would have rejected, by the same estimate.
    pub rejected_now_about: u64,
    /// Hits that the tried limit would have rejected.
    pub rejected_tried_about: u64,
}

/// Reason why a limit cannot be tried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhatIfError {
    /// No limit has the name.
    #[error("no limit of the loaded rules has the name {0} (use a name of /rules)")]
    UnknownLimit(String),
    /// The limit to try is no `rate_limit`.
    #[error("limit: {0}")]
    InvalidLimit(String),
    /// What decides is not in the sample.
    #[error("{0}")]
    Unpredictable(&'static str),
}

/// The rules, and the keys with most hits.
#[derive(Clone, Copy, Debug)]
pub struct WhatIfSources<'a> {
    /// Loaded rules.
    pub loaded: &'a LoadedRules,
    /// Number of live replicas; `None`: unknown.
    pub replicas: Option<u32>,
    /// Keys with most hits.
    pub busiest: &'a TopKeys,
    /// Values of keys are shown.
    pub has_values: bool,
}

impl WhatIfReport {
    /// Computes the report.
    ///
    /// # Errors
    /// No such limit, an invalid limit to try, or a limit that cannot be tried.
    pub fn new(sources: WhatIfSources<'_>, now: Time, query: &WhatIfQuery) -> Result<Self, WhatIfError> {
        let WhatIfSources { loaded, replicas, busiest, has_values } = sources;
        let rules = &loaded.rules;
        let has_name = |rule: &CompiledRule| rule.limits.iter().position(|one| one.stats.name().as_str() == query.rule);
        let found = rules.rules().find_map(|rule| Some((rule, has_name(rule)?)));
        let (rule, index) = found.ok_or_else(|| WhatIfError::UnknownLimit(query.rule.clone()))?;
        let tried = parse_limit(&query.limit, &loaded.from.options)?;
        let (present, active) = (&rule.limits[index].limit, rule.limits[index].active);
        if let Some(reason) = [present, &tried.limit].into_iter().find_map(find_reason_not_to_try) {
            return Err(WhatIfError::Unpredictable(reason));
        }
        // The sample has keys under the first limit of their rule.
        let first = rule.limits[0].stats.name();
        let domain = DomainsByMetricName::new(Some(rules)).find_domain(first);
        let hits = top_key_hits_by_minute(&busiest.rejected_keys_by_minute(now), |name| name == first.as_str());
        let mut keys: Vec<WhatIfKey> = hits
            .into_iter()
            .map(|(text, by_minute)| WhatIfKey {
                domain: domain.clone(),
                key: text.to_string(),
                entries: parse_shown_entries(&text, has_values),
                hits_about: by_minute.values().sum(),
                rejected_now_about: count_rejected_hits(present, active, &by_minute),
                rejected_tried_about: count_rejected_hits(&tried.limit, tried.active, &by_minute),
            })
            .collect();
        keys.sort_by(|a, b| {
            (b.rejected_tried_about, b.hits_about, &a.key).cmp(&(a.rejected_tried_about, a.hits_about, &b.key))
        });
        Ok(Self {
            rule: query.rule.clone(),
            now: present.to_string(),
            tried: tried.limit.to_string(),
            minutes: count_known_minutes(now, &rule.limits[0].stats),
            replicas,
            rejected_keys: keys.iter().filter(|key| key.rejected_tried_about > 0).count(),
            newly_rejected_keys: keys
                .iter()
                .filter(|key| key.rejected_tried_about > 0 && key.rejected_now_about == 0)
                .count(),
            keys,
            candidate_yaml: format_rule_as_file(rules, rule, Some(format_as_candidate(rule, &tried))),
            basis: "busiest keys of this replica alone, from a sample; hits spread evenly over each minute; nothing \
                    counted before",
        })
    }
}

/// Reason why hits by minute do not tell what a limit rejects; `None` if they do.
pub const fn find_reason_not_to_try(limit: &Limit) -> Option<&'static str> {
    if limit.is_concurrent() {
        return Some("a concurrent limit cannot be tried: it depends on how long requests take");
    }
    if matches!(limit.scope(), Scope::Global(_)) {
        return Some("a limit with `scope: global` cannot be tried: it depends on what other regions count");
    }
    if limit.reservations().is_some() {
        return Some("a limit with `reservations` cannot be tried: it depends on what streams settle");
    }
    None
}

/// Number of minutes since the limit is counted, including the current one, at most [`KEPT_MINUTES`].
fn count_known_minutes(now: Time, stats: &LimitStats) -> u64 {
    let age_us = u64::try_from(stats.age().as_micros()).unwrap_or(u64::MAX);
    let begun_us = now.as_micros().saturating_sub(age_us);
    (now.as_micros() / US_PER_MINUTE - begun_us / US_PER_MINUTE + 1).min(KEPT_MINUTES)
}

/// Reads a limit as the value of `rate_limit`.
pub fn parse_limit(text: &str, options: &CompileOptions) -> Result<RuleLimit, WhatIfError> {
    let invalid = |what: String| WhatIfError::InvalidLimit(what);
    if text.trim().is_empty() || text.len() > MAX_LIMIT_BYTES {
        return Err(invalid(format!("1 to {MAX_LIMIT_BYTES} bytes, such as {{unit: minute, requests_per_unit: 50}}")));
    }
    // YAML ends lines at some of them, and what follows would not be in the place of the limit.
    let is_refused = |mark: char| mark.is_control() && !"\n\t".contains(mark) || "\u{2028}\u{2029}".contains(mark);
    if let Some(mark) = text.chars().find(|mark| is_refused(*mark)) {
        return Err(invalid(format!(
            "the character U+{:04X} cannot be in it (end lines with U+000A)",
            u32::from(mark)
        )));
    }
    let mut document = "domain: tried\ndescriptors:\n- key: tried\n  rate_limit:\n".to_owned();
    text.lines().for_each(|line| document += &format!("    {line}\n"));
    let text = RuleText { name: "limit".into(), bytes: document.into_bytes(), documents: DocumentSelection::FirstOnly };
    let compiled = compile_texts(&[text], options).map_err(|found| {
        let messages: Vec<String> =
            found.errors().iter().take(MAX_SHOWN_ERRORS).map(|error| error.message.to_string()).collect();
        invalid(messages.join("; "))
    })?;
    let nodes = compiled.domains.iter().flat_map(|domain| domain.descriptors.iter());
    let limits: Vec<RuleLimit> = nodes
        .filter_map(|node| node.rule.as_ref())
        .flat_map(|rule| match &rule.allowance {
            RuleAllowance::Limits(limits) => limits.clone(),
            RuleAllowance::Unlimited { .. } => Vec::new(),
        })
        .collect();
    <[RuleLimit; 1]>::try_from(limits)
        .map(|[limit]| limit)
        .map_err(|limits| invalid(format!("one limit is tried at a time, here are {}", limits.len())))
}

/// The tried limit as a candidate, under a name that no limit of the rule has.
fn format_as_candidate(rule: &CompiledRule, tried: &RuleLimit) -> String {
    let is_taken = |name: &str| rule_limits(rule).iter().any(|limit| limit.name == name);
    let names = std::iter::once("candidate".to_owned()).chain((2..).map(|number| format!("candidate_{number}")));
    let name = names.into_iter().find(|name| !is_taken(name)).unwrap_or_default();
    let candidate =
        RuleLimit { name, shadow: true, quota: false, candidate: true, replaces: Vec::new(), ..tried.clone() };
    format_limit_on_one_line(candidate.rule_file_keys(LimitPlace::Sole))
}

/// Hits by minute of the keys with most hits, at most [`MAX_TRIED_KEYS`].
fn top_key_hits_by_minute(
    minutes: &[RejectedKeysInMinute],
    filter: impl Fn(&str) -> bool,
) -> Vec<(Arc<str>, BTreeMap<u64, u64>)> {
    let mut by_key: BTreeMap<Arc<str>, BTreeMap<u64, u64>> = BTreeMap::new();
    for minute in minutes {
        for key in minute.keys.iter().filter(|key| filter(key.limit.as_str())) {
            *by_key.entry(Arc::clone(&key.text)).or_default().entry(minute.minute).or_default() += key.at_least;
        }
    }
    let mut keys: Vec<_> = by_key.into_iter().filter(|(_, hits)| hits.values().sum::<u64>() > 0).collect();
    keys.sort_by_key(|(_, hits)| std::cmp::Reverse(hits.values().sum::<u64>()));
    keys.truncate(MAX_TRIED_KEYS);
    keys
}

/// Number of hits that the limit rejects, if those of a minute come evenly; none in minutes that begin while it is not
/// active.
pub fn count_rejected_hits(limit: &Limit, active: Option<ActiveTimes>, by_minute: &BTreeMap<u64, u64>) -> u64 {
    let mut state = State::empty_for(limit);
    let mut rejected = 0;
    let is_active =
        |minute: u64| active.is_none_or(|active| active.contains(Time::from_micros(minute * US_PER_MINUTE)));
    for (minute, hits) in by_minute.iter().filter(|(minute, _)| is_active(**minute)) {
        let mut done = 0;
        for part in 1..=PARTS_PER_MINUTE {
            let due = (u128::from(*hits) * u128::from(part)).div_ceil(u128::from(PARTS_PER_MINUTE));
            let of_part = u64::try_from(due).unwrap_or(u64::MAX).saturating_sub(done);
            done += of_part;
            let at_us = minute * US_PER_MINUTE + (part - 1) * (US_PER_MINUTE / PARTS_PER_MINUTE);
            if of_part > 0 {
                rejected += charge_and_count_rejected(
                    &mut state,
                    limit,
                    HitsAt { at: Time::from_micros(at_us), hits: of_part },
                );
            }
        }
    }
    rejected
}

/// Hits that come at one time.
#[derive(Clone, Copy, Debug)]
struct HitsAt {
    at: Time,
    hits: u64,
}

/// Charges hits one by one, as far as they differ: those that pass at once, and the others.
fn charge_and_count_rejected(state: &mut State, limit: &Limit, HitsAt { at, hits }: HitsAt) -> u64 {
    let mut charge = |hits: Hits| state.charge(limit, at, ChargeRequest::new(hits, u64::MAX));
    let first = hits.min(u64::from(charge(Hits::Peek).remaining));
    [first, hits - first].into_iter().filter(|part| *part > 0 && !charge(Hits::Charge(*part)).admitted).sum()
}
