//! What an operator may do with counters: list those of a rule, and let go of those of a request.
//!
//! Redis tells its keys; memory knows hashes only, so there the keys whose counters began last are looked up. Either
//! way a counter that is listed was looked at as `explain` does, charging nothing.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde::Serialize;
use smallvec::SmallVec;

use super::explain::ExplainedCounter;
use super::selection::{Selection, select};
use super::{Decider, DecisionContext, charge};
use crate::algorithm::ChargeResult;
use crate::counter::Charge;
use crate::redis::error::RedisError;
use crate::request::{Descriptor, Entry, Hits, Request};
use crate::rule::set::{CompiledRule, DomainRules, RuleSet};
use crate::store::Store;
use crate::store::redis::ChargeMode;
use crate::store::redis::key::ParsedKey;

/// How long Redis may take to list or to forget.
const PATIENCE: Duration = Duration::from_secs(5);
/// Counters that are looked at together.
const AT_ONCE: usize = 100;

/// The counters of a rule.
#[derive(Debug, Serialize)]
pub struct Listing {
    /// Those that count something.
    pub counters: Vec<Listed>,
    /// Whether there are no others.
    pub complete: bool,
    /// What it rests on.
    pub note: &'static str,
}

/// The counters of one descriptor.
#[derive(Debug, Serialize)]
pub struct Listed {
    /// Key and value of each entry; the pattern, where values share a counter.
    pub entries: Vec<[String; 2]>,
    /// A counter for each limit of the rule.
    pub limits: Vec<ExplainedCounter>,
}

/// Why counters could not be listed or forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("redis: {0}; the user needs +scan and +unlink for this")]
pub struct AdminError(RedisError);

const BY_SCAN: &str = "found by their keys in redis";
const BY_MEMORY: &str = "of the keys whose counters began last in this process";

impl Decider {
    /// The counters of a rule that count something, `most` of them at most.
    ///
    /// # Errors
    /// Redis could not be asked.
    pub async fn list(
        &self,
        context: DecisionContext<'_>,
        (rules, domain, rule): (&RuleSet, &DomainRules, &CompiledRule),
        most: usize,
    ) -> Result<Listing, AdminError> {
        let (candidates, complete, note) = match &self.store {
            Store::Memory(_) => (self.recent_keys(rules, domain, rule), false, BY_MEMORY),
            Store::Redis(redis) => {
                let until = Instant::now() + PATIENCE;
                let wanted = |path: &ParsedKey| {
                    rules.find(domain, &borrowed(&path.entries)).is_some_and(|found| std::ptr::eq(found.rule, rule))
                };
                let scan = redis.scan(&domain.name, most, until, wanted).await.map_err(AdminError)?;
                (scan.paths, scan.complete && scan.untold == 0, BY_SCAN)
            }
        };
        let mut counters = Vec::new();
        let mut rest = &*candidates;
        while !rest.is_empty() && counters.len() < most {
            let (some, others) = rest.split_at(rest.len().min(AT_ONCE));
            counters.extend(self.look_at(context, (&domain.name, rule), some).await);
            rest = others;
        }
        let complete = complete && counters.len() <= most;
        counters.truncate(most);
        Ok(Listing { counters, complete, note })
    }

    /// Lets go of all counters that `request` would charge from; how many there were, by descriptor.
    ///
    /// # Errors
    /// Redis could not be asked; the counters of some descriptors may be gone.
    pub async fn forget(&self, context: DecisionContext<'_>, request: &Request<'_>) -> Result<Vec<u64>, AdminError> {
        let Some(rules) = context.rules else { return Ok(Vec::new()) };
        let selections = select(&self.behaviour, rules, request);
        let mut gone = Vec::with_capacity(selections.len());
        for (place, selection) in selections.iter().enumerate() {
            gone.push(match (selection.charge((request, place), 0), &self.store) {
                (None, _) => 0,
                (Some(charge), Store::Memory(memory)) => memory.forget(&charge) as u64,
                (Some(charge), Store::Redis(redis)) => {
                    redis.forget(&charge, (context.now, Instant::now() + PATIENCE)).await.map_err(AdminError)?
                }
            });
        }
        Ok(gone)
    }

    /// Those of the keys begun last that meet a rule, as Redis would tell them.
    fn recent_keys(&self, rules: &RuleSet, domain: &DomainRules, rule: &CompiledRule) -> Vec<ParsedKey> {
        let Some(limit) = rule.limits.first() else { return Vec::new() };
        let mut known = HashSet::new();
        let keys = self.metrics.recent_keys.of(&limit.stats).into_iter().filter_map(|parts| {
            let mut parts = parts.into_iter();
            let mut entries: Vec<[Vec<u8>; 2]> = std::iter::from_fn(|| Some([parts.next()?, parts.next()?])).collect();
            let found = rules.find(domain, &borrowed(&entries)).filter(|found| std::ptr::eq(found.rule, rule))?;
            let patterns: Vec<(usize, Vec<u8>)> =
                found.shared.iter().map(|(place, pattern)| (*place, pattern.to_vec())).collect();
            let shared = patterns.iter().map(|(place, _)| *place).collect();
            patterns.into_iter().for_each(|(place, pattern)| entries[place][1] = pattern);
            let path = ParsedKey { domain: domain.name.clone().into_bytes(), entries, shared };
            known.insert(path.clone()).then_some(path)
        });
        keys.collect()
    }

    /// Those of the candidates that count something.
    async fn look_at(
        &self,
        context: DecisionContext<'_>,
        (domain, rule): (&str, &CompiledRule),
        candidates: &[ParsedKey],
    ) -> Vec<Listed> {
        let descriptors = candidates.iter().map(|path| Descriptor {
            entries: borrowed(&path.entries),
            hits: Hits::Peek,
            hits_addend: None,
            limit_override: None,
        });
        let request = Request { domain, descriptors: descriptors.collect(), hits_addend: 0 };
        let selections = candidates.iter().enumerate();
        let selections: Vec<Selection<'_>> =
            selections.map(|(place, path)| Selection::of_rule(rule, shared(path), (&request, place))).collect();
        let charges: Vec<Charge<'_>> = selections
            .iter()
            .enumerate()
            .filter_map(|(place, selection)| selection.charge((&request, place), context.max_delay_us))
            .collect();
        let levels: Vec<Option<SmallVec<[ChargeResult; 1]>>> = match &self.store {
            Store::Memory(memory) => charges.iter().map(|charge| memory.charge(charge, context.now).ok()).collect(),
            Store::Redis(redis) => {
                let context = DecisionContext { until: Some(Instant::now() + PATIENCE), ..context };
                let found = charge::ask(redis, &charges, ChargeMode::DryRun, context).await;
                found.into_iter().map(|found| Some(found.ok()?.levels)).collect()
            }
        };
        let counting = candidates.iter().zip(levels).filter_map(|(candidate, levels)| {
            let levels = levels.filter(|levels| levels.iter().any(|level| level.after > 0))?;
            let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
            let entries = candidate.entries.iter().map(|[key, value]| [text(key), text(value)]).collect();
            Some(Listed { entries, limits: levels.iter().map(ExplainedCounter::of).collect() })
        });
        counting.collect()
    }
}

fn shared(path: &ParsedKey) -> SmallVec<[(usize, &[u8]); 1]> {
    path.shared.iter().map(|place| (*place, &*path.entries[*place][1])).collect()
}

fn borrowed(entries: &[[Vec<u8>; 2]]) -> SmallVec<[Entry<'_>; 4]> {
    entries.iter().map(|[key, value]| Entry { key, value }).collect()
}
