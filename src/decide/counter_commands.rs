//! Operator commands on counters: list those of a rule, delete those of a request.
//!
//! Redis lists its keys. The memory store keeps hashes only, so there the keys of recently created counters are used.
//! Either way each counter is peeked at, as `explain` does, and nothing is charged.
//!
//! Decides: which counters `/reset` deletes (bans too; slots and holds stay), and a rule's page lists.
//! Decides: a descriptor without a rule; how long both may take (`REDIS_CALL_TIMEOUT`).

use std::collections::HashSet;
use std::time::Duration;

use serde::Serialize;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::decider::Decider;
use super::decision::DecisionContext;
use super::explain::ExplainedCounter;
use super::prepared_request::PreparedRequest;
use super::selection::{Selection, select_limits};
use crate::decide::log::value_form::ValueForm;
use crate::limit::request::{Descriptor, Entry, Hits, Request};
use crate::rules::rule::RuleLogging;
use crate::rules::rule::set::{CompiledRule, DomainRules, RuleSet};
use crate::store::StoreContext;
use crate::store::error::CounterCommandError;
use crate::store::redis::key::OwnedCounterPath;

/// Upper bound on each call of Redis.
const REDIS_CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Counters that are peeked at together.
const PEEK_BATCH_SIZE: usize = 100;

/// The counters of a rule.
#[derive(Debug, Serialize)]
pub struct CounterListing {
    /// Counters above zero.
    pub counters: Vec<ListedDescriptorCounters>,
    /// True if there are no others.
    pub complete: bool,
    /// Source of the list.
    pub note: &'static str,
}

/// The counters of one descriptor.
#[derive(Debug, Serialize)]
pub struct ListedDescriptorCounters {
    /// Key and value of each entry; the pattern in place of a shared value, and the value in the form of the settings.
    pub entries: Vec<[String; 2]>,
    /// Counter of each limit of the rule, candidates last.
    pub limits: Vec<ExplainedCounter>,
}

const LISTED_FROM_REDIS_NOTE: &str = "keys in redis";
const RECENT_COUNTERS_NOTE: &str = "keys of recently created counters in this process";

/// Rule whose counters are listed.
#[derive(Clone, Copy, Debug)]
pub struct RuleRef<'r> {
    /// All rules.
    pub rules: &'r RuleSet,
    /// Domain of the rule.
    pub domain: &'r DomainRules,
    /// The rule.
    pub rule: &'r CompiledRule,
}

impl Decider {
    /// Lists up to `max` counters of a rule that are above zero.
    ///
    /// # Errors
    /// Redis failed.
    pub async fn list_counters(
        &self,
        context: DecisionContext<'_>,
        of: RuleRef<'_>,
        max: usize,
    ) -> Result<CounterListing, CounterCommandError> {
        let RuleRef { rules, domain, rule } = of;
        let is_of_rule = |path: &OwnedCounterPath| {
            let found = rules.find_rule_of_counter(domain, &entries_as_refs(&path.entries), &path.shared);
            found.is_some_and(|found| std::ptr::eq(found, rule))
        };
        let scanned =
            self.store.list_counter_paths(&domain.name, max, Instant::now() + REDIS_CALL_TIMEOUT, is_of_rule).await?;
        let (paths, complete, note) = match scanned {
            Some(scan) => (scan.paths, scan.complete && scan.truncated == 0, LISTED_FROM_REDIS_NOTE),
            None => (self.recently_created_counter_paths(of), false, RECENT_COUNTERS_NOTE),
        };
        let mut counters = Vec::new();
        let mut rest = &*paths;
        while !rest.is_empty() && counters.len() < max {
            let (batch, others) = rest.split_at(rest.len().min(PEEK_BATCH_SIZE));
            counters.extend(self.peek_at_nonzero_counters(context, of, batch).await);
            rest = others;
        }
        let complete = complete && counters.len() <= max;
        counters.truncate(max);
        Ok(CounterListing { counters, complete, note })
    }

    /// Deletes all counters that `request` would charge; returns how many existed, by descriptor.
    ///
    /// # Errors
    /// Redis failed; the counters of some descriptors may be deleted.
    pub async fn reset_counters(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'_>,
    ) -> Result<Vec<u64>, CounterCommandError> {
        let Some(rules) = context.rules else { return Ok(Vec::new()) };
        let prepared = PreparedRequest::new_or_as_sent(rules, context.slots, request);
        let selections = select_limits(&self.behaviour, &prepared, None);
        let mut deleted = Vec::with_capacity(selections.len());
        for (index, selection) in selections.iter().enumerate() {
            let mut of_descriptor = 0;
            for charge in selection.build_all_charges(prepared.request(), index, 0) {
                of_descriptor +=
                    self.store.reset_counters(&charge, context.store.now, Instant::now() + REDIS_CALL_TIMEOUT).await?;
            }
            deleted.push(of_descriptor);
        }
        Ok(deleted)
    }

    /// Forgets what this process caches about the counters of `request`, which another process has reset.
    pub fn forget_cached_counters(&self, context: DecisionContext<'_>, request: &Request<'_>) {
        let Some(rules) = context.rules else { return };
        let prepared = PreparedRequest::new_or_as_sent(rules, context.slots, request);
        for (index, selection) in select_limits(&self.behaviour, &prepared, None).iter().enumerate() {
            selection
                .build_all_charges(prepared.request(), index, 0)
                .for_each(|charge| self.store.forget_cached(&charge, context.store.now));
        }
    }

    /// Paths of a rule's recently created counters, as a scan of Redis would return them.
    fn recently_created_counter_paths(&self, of: RuleRef<'_>) -> Vec<OwnedCounterPath> {
        let RuleRef { rules, domain, rule } = of;
        let Some(limit) = rule.limits.first() else { return Vec::new() };
        let mut known = HashSet::new();
        let keys = self.metrics.recently_created_keys.keys_of_limit(&limit.stats).into_iter().filter_map(|parts| {
            let mut parts = parts.into_iter();
            let mut entries: Vec<[Vec<u8>; 2]> = std::iter::from_fn(|| Some([parts.next()?, parts.next()?])).collect();
            let found =
                rules.find_rule(domain, &entries_as_refs(&entries)).filter(|found| std::ptr::eq(found.rule, rule))?;
            let patterns: Vec<(usize, Vec<u8>)> =
                found.shared.iter().map(|(index, pattern)| (*index, pattern.to_vec())).collect();
            let shared = patterns.iter().map(|(index, _)| *index).collect();
            patterns.into_iter().for_each(|(index, pattern)| entries[index][1] = pattern);
            let path = OwnedCounterPath { domain: domain.name.clone().into_bytes(), entries, shared };
            known.insert(path.clone()).then_some(path)
        });
        keys.collect()
    }

    /// Counters of these paths that are above zero.
    async fn peek_at_nonzero_counters(
        &self,
        context: DecisionContext<'_>,
        of: RuleRef<'_>,
        paths: &[OwnedCounterPath],
    ) -> Vec<ListedDescriptorCounters> {
        let descriptors = paths.iter().map(|path| Descriptor {
            entries: entries_as_refs(&path.entries),
            hits: Hits::Peek,
            hits_addend: None,
            limit_override: None,
        });
        let request = Request { domain: &of.domain.name, descriptors: descriptors.collect(), hits_addend: 0 };
        let selections: Vec<Selection<'_>> = paths
            .iter()
            .enumerate()
            .map(|(index, path)| Selection::for_rule(of.rule, entries_sharing_counter(path), &request, index))
            .collect();
        let context = DecisionContext {
            store: StoreContext { deadline: Some(Instant::now() + REDIS_CALL_TIMEOUT), ..context.store },
            ..context
        };
        let is_private = of.rule.rule.logging == Some(RuleLogging::None);
        let form = if is_private { &ValueForm::Omitted } else { &self.key_values };
        let found = self.peek_selected_counters(context, &request, &selections).await;
        let listed = paths.iter().zip(found).filter_map(|(path, results)| {
            results.iter().flatten().any(|counter| counter.result.after > 0).then_some(())?;
            let entries = path.entries.iter().enumerate().map(|(index, [key, value])| {
                let is_pattern = path.shared.contains(&index);
                let value = if is_pattern { value.into() } else { form.shown_value(&Entry { key, value }) };
                [&**key, &*value].map(|bytes| String::from_utf8_lossy(bytes).into_owned())
            });
            let entries = entries.collect();
            Some(ListedDescriptorCounters {
                entries,
                limits: results.iter().flatten().map(ExplainedCounter::from_peek).collect(),
            })
        });
        listed.collect()
    }
}

fn entries_sharing_counter(path: &OwnedCounterPath) -> SmallVec<[(usize, &[u8]); 1]> {
    path.shared.iter().map(|index| (*index, &*path.entries[*index][1])).collect()
}

fn entries_as_refs(entries: &[[Vec<u8>; 2]]) -> SmallVec<[Entry<'_>; 4]> {
    entries.iter().map(|[key, value]| Entry { key, value }).collect()
}
