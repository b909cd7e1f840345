//! What a request would meet, told to a person: the steps of matching, and the counters without charging them.
//!
//! It selects as a decision does and asks the same store, with looks in place of charges, so it can not tell another
//! story than the decision. The values are those of the request: whoever prints them escapes them.

use std::borrow::Cow;

use super::Decider;
use super::context::DecisionContext;
use super::selection::{SelectedLimit, Selection, select};
use crate::algorithm::ChargeResult;
use crate::counter::Charge;
use crate::limit::{Consistency, Limit, Overshoot};
use crate::request::{Descriptor, Entry, Request};
use crate::rule::matching::MatchKind;
use crate::rule::set::{DomainRules, RuleSet};
use crate::rule::trace::{NearMiss, NodeRef, TraceEnd, TraceStep};
use crate::settings::decisions::DecisionSettings;
use crate::store::error::ChargeError;
use crate::store::outcome::StoreOutcome;
use serde::{Deserialize, Serialize};

/// What a request would meet.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Explanation {
    /// The domain asked for.
    pub domain: String,
    /// Whether there are rules for it.
    pub known_domain: bool,
    /// One for each descriptor, in its order.
    pub descriptors: Vec<ExplainedDescriptor>,
}

/// What one descriptor would meet.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedDescriptor {
    /// `key=value,key=value`.
    pub descriptor: String,
    /// How each entry fared.
    pub steps: Vec<ExplainedStep>,
    /// How it ended, in a sentence.
    pub outcome: String,
    /// The rule that was met: its name and where it stands.
    pub rule: Option<ExplainedRule>,
    /// The limits that decide, with their counters.
    pub limits: Vec<ExplainedLimit>,
}

/// How one entry fared.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedStep {
    /// `key=value`.
    pub entry: String,
    /// `exact`, `wildcard` or `default`, the node's key and value, and where it stands; nothing if nothing matched.
    pub met: Option<[String; 3]>,
    /// Near misses: the node's key and value, where it stands, and why it did not match.
    pub misses: Vec<[String; 3]>,
    /// Near misses beyond those.
    pub more_misses: usize,
}

/// A rule.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedRule {
    /// Its name in `/rlconfig`.
    pub path: String,
    /// `file:line:column`.
    pub origin: String,
}

/// A limit, and its counter.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedLimit {
    /// Its name, if it has one.
    pub name: String,
    /// The limit in words.
    pub limit: String,
    /// What is promised over several replicas.
    pub guarantee: Cow<'static, str>,
    /// It refuses nothing.
    pub shadow_mode: bool,
    /// It refuses only together with all other quotas.
    pub quota_mode: bool,
    /// The counter; nothing if it could not be asked.
    pub counter: Option<ExplainedCounter>,
}

/// What a look at a counter found.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedCounter {
    /// Whether one more hit would pass.
    pub passes: bool,
    /// Hits counted.
    pub used: u64,
    /// Hits that could still pass.
    pub remaining: u32,
    /// Until the limit is full again, in microseconds.
    pub reset_us: u64,
    /// Until one more hit could pass, in microseconds.
    pub retry_after_us: Option<u64>,
}

impl Explanation {
    /// What `request` would meet, by these rules; `counters` are the results of each descriptor's limits, as far as they
    /// are known.
    pub fn of(
        behaviour: &DecisionSettings,
        rules: &RuleSet,
        request: &Request<'_>,
        counters: &[Vec<ChargeResult>],
    ) -> Self {
        let domain = rules.domain(request.domain);
        let selections = select(behaviour, rules, request);
        let descriptors =
            request.descriptors.iter().zip(&selections).enumerate().map(|(place, (descriptor, selection))| {
                let results = counters.get(place).map_or(&[][..], Vec::as_slice);
                let strict = selection.limits.iter().any(|one| one.limit.consistency() == Consistency::Strict);
                let limit = |(at, selected)| explained_limit(selected, strict, results.get(at));
                let limits = selection.limits.iter().enumerate().map(limit).collect();
                match domain {
                    None => unknown_domain(descriptor),
                    Some(domain) => explained(rules, domain, (descriptor, selection), limits),
                }
            });
        Self { domain: request.domain.to_owned(), known_domain: domain.is_some(), descriptors: descriptors.collect() }
    }
}

impl Decider {
    /// Peeks at the counters that `request` would charge: the results of each descriptor's limits, none where there are
    /// no limits or the store failed.
    pub async fn peek(&self, context: DecisionContext<'_>, request: &Request<'_>) -> Vec<Vec<ChargeResult>> {
        let mut counters = vec![Vec::new(); request.descriptors.len()];
        let Some(rules) = context.rules else { return counters };
        let selections = select(&self.behaviour, rules, request);
        let charges = selections.iter().enumerate();
        let charges = charges
            .filter_map(|(index, selection)| Some((index, selection.charge(request, index, context.max_delay_us)?)));
        let record = |index: usize, _: &Charge<'_>, outcome: Result<StoreOutcome, ChargeError>| {
            counters[index] = outcome.map(|outcome| outcome.results.into_vec()).unwrap_or_default();
        };
        self.store.peek_all(charges, context.of_store(), record).await;
        counters
    }
}

fn unknown_domain(descriptor: &Descriptor<'_>) -> ExplainedDescriptor {
    ExplainedDescriptor {
        descriptor: descriptor_text(descriptor),
        steps: Vec::new(),
        outcome: "no rule file has this domain, so everything passes".to_owned(),
        rule: None,
        limits: Vec::new(),
    }
}

fn explained(
    rules: &RuleSet,
    domain: &DomainRules,
    (descriptor, selection): (&Descriptor<'_>, &Selection<'_>),
    limits: Vec<ExplainedLimit>,
) -> ExplainedDescriptor {
    let trace = rules.trace(domain, &descriptor.entries);
    let rule = match trace.end {
        TraceEnd::Rule(compiled) if selection.rule.is_some() => Some(&compiled.rule),
        _ => None,
    };
    let outcome = match (&trace.end, selection.rule, descriptor.limit_override.is_some()) {
        (_, None, true) if !selection.limits.is_empty() => {
            "the limit that came with the request decides; the rules are passed over".to_owned()
        }
        (TraceEnd::Rule(_), _, _) if selection.unlimited => "this rule is unlimited: everything passes".to_owned(),
        (TraceEnd::Rule(_), _, _) if selection.limits.is_empty() => {
            "another rule of this request replaces this one, so it passes".to_owned()
        }
        (TraceEnd::Rule(_), _, _) => "this rule decides".to_owned(),
        (TraceEnd::NoEntries, _, _) => "it has no entries, so nothing limits it".to_owned(),
        (TraceEnd::NoMatch, _, _) => "this entry met nothing, so nothing limits it".to_owned(),
        (TraceEnd::NoLimit { children: 0 }, _, _) => {
            "it ends at a node without a rate_limit, so everything passes".to_owned()
        }
        (TraceEnd::NoLimit { children }, _, _) => {
            format!("it ends at a node without a rate_limit, above {children} others: nothing limits it")
        }
        (TraceEnd::TooLong { beyond }, _, _) => {
            format!(
                "it goes on for {beyond} more where the rules end, and a rule is for paths that end at it: nothing limits it"
            )
        }
    };
    ExplainedDescriptor {
        descriptor: descriptor_text(descriptor),
        steps: trace.steps.iter().zip(&descriptor.entries).map(explained_step).collect(),
        outcome,
        rule: rule.map(|rule| ExplainedRule { path: rule.path.clone(), origin: rule.location.to_string() }),
        limits,
    }
}

fn explained_step((step, entry): (&TraceStep<'_>, &Entry<'_>)) -> ExplainedStep {
    let node = |place: &NodeRef<'_>| String::from_utf8_lossy(place.composite).into_owned();
    let how = |met| match met {
        MatchKind::Exact => "exact",
        MatchKind::Wildcard => "wildcard",
        MatchKind::Default => "default",
    };
    let why = |miss| match miss {
        NearMiss::OtherValue => "its value is another",
        NearMiss::PatternDiffers => "its wildcard does not match the value",
        NearMiss::LaterWildcard => "it matches too, but an earlier wildcard goes first",
        NearMiss::LessExact => "it matches too, but a value goes before a wildcard, and a wildcard before a bare key",
        NearMiss::OtherKey => "its key is another",
    };
    ExplainedStep {
        entry: entry_text(entry),
        met: step.matched.as_ref().map(|(met, place)| [how(*met).to_owned(), node(place), place.location.to_string()]),
        misses: step
            .near_misses
            .iter()
            .map(|(place, miss)| [node(place), place.location.to_string(), why(*miss).to_owned()])
            .collect(),
        more_misses: step.more_near_misses,
    }
}

fn explained_limit(selected: &SelectedLimit<'_>, any_is_strict: bool, result: Option<&ChargeResult>) -> ExplainedLimit {
    ExplainedLimit {
        name: selected.name.to_owned(),
        limit: limit_text(&selected.limit),
        guarantee: guarantee(&selected.limit, any_is_strict),
        shadow_mode: selected.shadow,
        quota_mode: selected.quota,
        counter: result.map(ExplainedCounter::of),
    }
}

impl ExplainedCounter {
    /// What a look found.
    pub(super) const fn of(result: &ChargeResult) -> Self {
        Self {
            passes: result.admitted,
            used: result.after,
            remaining: result.remaining,
            reset_us: result.reset_us,
            retry_after_us: result.retry_after_us,
        }
    }
}

fn guarantee(limit: &Limit, any_is_strict: bool) -> Cow<'static, str> {
    let most = match limit.consistency() {
        Consistency::Strict => return "strict: every admitted hit is counted first".into(),
        Consistency::Eventual(_) if any_is_strict => {
            return "eventual, but strict as a limit beside it is: every admitted hit is counted first".into();
        }
        Consistency::Eventual(Overshoot::Hits(hits)) => format!("{hits} hits"),
        Consistency::Eventual(Overshoot::MilliPercent(part)) => {
            let percent = format!("{}.{:03}", part / 1000, part % 1000);
            format!("{} %", percent.trim_end_matches('0').trim_end_matches('.'))
        }
    };
    format!("eventual: all replicas together admit at most {most} beyond the limit in any span of a period").into()
}

/// `10 per 5 minutes by token_bucket, bucket_size 20`.
pub fn limit_text(limit: &Limit) -> String {
    let (count, unit) = (limit.period().multiplier(), limit.period().unit().name());
    let period = if count == 1 { unit.to_owned() } else { format!("{count} {unit}s") };
    let capacity = match limit.algorithm().properties().capacity.key() {
        Some(key) => format!(", {key} {}", limit.capacity()),
        None => String::new(),
    };
    let rejected = if limit.count_rejected() { ", refused hits count" } else { "" };
    format!("{} per {period} by {}{capacity}{rejected}", limit.requests_per_unit(), limit.algorithm())
}

/// `key=value,key=value`, as it was sent.
pub fn descriptor_text(descriptor: &Descriptor<'_>) -> String {
    descriptor.entries.iter().map(entry_text).collect::<Vec<_>>().join(",")
}

fn entry_text(entry: &Entry<'_>) -> String {
    format!("{}={}", String::from_utf8_lossy(entry.key), String::from_utf8_lossy(entry.value))
}
