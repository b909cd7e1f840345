//! Demand on one limit: its recorded charges by counter, whether or not they were rejected, and their collection.
//!
//! The decider matches each recorded request, as the server does, so that wildcards, shared values, overrides and
//! `replaces` have their effect. The use of a key (p50, p90, ...) is computed in `recommendation`.
//!
//! Decides: whose charges `recommend` counts, and memory for them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::Serialize;

use crate::base::clock::Time;
use crate::base::sharded::PrehashedMap;
use crate::decide::results::{DescriptorResults, LimitWithResult};
use crate::limit::Limit;
use crate::limit::active::ActiveTimes;
use crate::limit::request::Hits;
use crate::tools::replay::recorded_request::{RecordedDescriptor, RecordedRequest};
use crate::tools::replay::replayer::{
    CounterLosses, RecordedHeader, ReplayError, ReplayOptions, ReplayRules, Replayer,
};
use crate::tools::simulate::simulation::{LogProperties, TrafficSpan};

/// A recorded charge or refund.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedCharge {
    /// Time that the counter worked at.
    pub at: Time,
    /// Hits; never a peek, which changes no counter.
    pub hits: Hits,
    /// Longest delay that the caller could wait for, in microseconds.
    pub max_delay_us: u64,
}

/// Charges of one counter, in the order of the log.
#[derive(Clone, Debug, Default)]
pub struct ChargeSequence {
    /// Index of the key. A key has several counters if processes count in their own memory.
    pub key: usize,
    /// The charges.
    pub charges: Vec<RecordedCharge>,
}

/// Demand on one limit.
#[derive(Debug, Default)]
pub struct LimitDemand {
    /// Number of keys with a charge.
    pub keys: usize,
    /// Charges by counter.
    pub sequences: Vec<ChargeSequence>,
    /// The limit as the rules have it; `None` before the first charge.
    pub asked: Option<ExistingLimit>,
    /// Totals.
    pub totals: DemandTotals,
    /// First and last time of the limit's charges.
    pub span: Option<TrafficSpan>,
}

/// The limit that the recommendation is for, as the rules have it.
#[derive(Clone, Debug)]
pub struct ExistingLimit {
    /// Path of its rule.
    pub rule: String,
    /// File, line and column of the rule.
    pub location: String,
    /// Plan that the limit is of; `None`: the rule has no plans.
    pub plan: Option<Arc<str>>,
    /// Name; empty if it has none.
    pub name: String,
    /// The limit.
    pub limit: Limit,
    /// Times at which it is active; `None`: always. The demand is that of these times.
    pub active: Option<ActiveTimes>,
    /// Maximum `requests_per_unit` of a sliding_window_log.
    pub log_max: u32,
}

/// Charges whose requests were rejected when they were recorded.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RecordedRejections {
    /// Charges.
    pub requests: u64,
    /// Share of the charges with a known answer, 0 to 1.
    pub share: f64,
    /// Keys with such a charge.
    pub keys: u64,
    /// Number for each limit of the rule, by path.
    pub by_limit: BTreeMap<String, u64>,
    /// Number of those that other rules or policies rejected.
    pub elsewhere: u64,
}

/// Totals of the demand on one limit.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DemandTotals {
    /// Charges on the limit.
    pub requests: u64,
    /// Hits of the charges.
    pub hits: u64,
    /// Peeks, which count nothing.
    pub peeks: u64,
    /// Refunds.
    pub refunds: u64,
    /// Descriptors of the rule's domain that brought a limit of their own, so that the rule did not decide; excluded.
    pub overrides: u64,
    /// Charges of keys beyond the bound of keys; excluded.
    pub untracked: u64,
    /// Longest delay that a caller could wait for, in microseconds: a leaky_bucket rejects what would wait longer.
    pub max_delay_us: u64,
    /// Processes with counters of their own.
    #[serde(skip)]
    pub own_counters: u64,
    /// Charges whose request has a known answer.
    #[serde(skip)]
    pub answered: u64,
    /// Charges of requests that were rejected, without their share.
    #[serde(skip)]
    pub rejections: RecordedRejections,
}

/// Bounds of a collection.
#[derive(Clone, Debug)]
pub struct CollectorOptions {
    /// Bounds and defaults of the replay. Its memory bounds the recorded charges too.
    pub replay: ReplayOptions,
    /// Maximum number of keys.
    pub max_keys: usize,
}

/// Collects the demand on one limit.
#[derive(Debug)]
pub struct DemandCollector {
    replayer: Replayer,
    /// Properties of the log.
    pub log: LogProperties,
    /// Requests of all rules.
    pub requests: u64,
    /// Names of processes.
    pub processes: BTreeSet<Arc<str>>,
    index: IndexedDemand,
}

/// The demand while it is collected, with indices of its keys and counters.
#[derive(Debug)]
struct IndexedDemand {
    path: String,
    demand: LimitDemand,
    /// For each limit id, whether the limit has the path.
    is_asked: HashMap<u64, bool>,
    keys: PrehashedMap<KeyState>,
    /// Index of a counter's sequence, by key and set of counters.
    counters: HashMap<(usize, u32), usize>,
    /// Current set of counters of each process that counts in its own memory; 0 is shared.
    own_sets: HashMap<Arc<str>, u32>,
    set_count: u32,
    log_max: u32,
    max_keys: usize,
    /// Charges for which there is still memory.
    free_charges: u64,
}

#[derive(Debug)]
struct KeyState {
    index: usize,
    was_rejected: bool,
}

impl DemandCollector {
    /// Creates a collector of the demand on the limit with this path.
    pub fn new(path: &str, rules: ReplayRules, options: &CollectorOptions) -> Self {
        let index = IndexedDemand {
            path: path.to_owned(),
            demand: LimitDemand::default(),
            is_asked: HashMap::new(),
            keys: PrehashedMap::default(),
            counters: HashMap::new(),
            own_sets: HashMap::new(),
            set_count: 0,
            log_max: options.replay.behaviour.log_max,
            max_keys: options.max_keys,
            free_charges: options.replay.memory_bytes / size_of::<RecordedCharge>() as u64,
        };
        let replayer = Replayer::new(rules, options.replay.clone());
        Self { replayer, log: LogProperties::default(), requests: 0, processes: BTreeSet::new(), index }
    }

    /// Takes over settings and rules of a process, and its empty counters at a start.
    ///
    /// # Errors
    /// There are too many processes.
    pub fn apply_header(&mut self, header: &RecordedHeader) -> Result<(), ReplayError> {
        self.log.add_header(header);
        self.replayer.apply_header(header)?;
        self.index.log_max = header.behaviour.log_max;
        let own_sets = &mut self.index.own_sets;
        // As the replayer does: each start begins with empty counters.
        if header.in_memory && (header.is_start || !own_sets.contains_key(&header.process)) {
            self.index.set_count += 1;
            own_sets.insert(Arc::clone(&header.process), self.index.set_count);
        }
        Ok(())
    }

    /// Adds a request. Returns false, and adds nothing, once memory is full.
    ///
    /// # Errors
    /// There are too many processes, or their counters need too much memory.
    pub fn add_request(&mut self, recorded: &RecordedRequest) -> Result<bool, ReplayError> {
        let Self { replayer, index, .. } = self;
        if index.free_charges < recorded.descriptors().len() as u64 {
            return Ok(false);
        }
        let request = recorded.to_request();
        replayer.decide(recorded, &request, |descriptor| index.add_descriptor(recorded, &descriptor))?;
        self.requests += 1;
        if !self.processes.contains(&recorded.process) {
            // The replayer bounds their number.
            self.processes.insert(Arc::clone(&recorded.process));
        }
        Ok(true)
    }

    /// Counters that the replay lost.
    pub fn counter_losses(&self) -> CounterLosses {
        self.replayer.counter_losses()
    }

    /// Ends the collection.
    pub fn finish(self) -> LimitDemand {
        let IndexedDemand { mut demand, keys, own_sets, .. } = self.index;
        demand.totals.own_counters = own_sets.len() as u64;
        demand.totals.rejections.keys = keys.values().filter(|key| key.was_rejected).count() as u64;
        demand
    }
}

impl IndexedDemand {
    fn add_descriptor(&mut self, recorded: &RecordedRequest, descriptor: &DescriptorResults<'_, '_>) {
        let Some(of) = recorded.descriptors().get(descriptor.index).filter(|of| of.is_sampled) else { return };
        if descriptor.rule().is_none() {
            let domain = self.path.strip_prefix(&*recorded.domain).is_some_and(|rest| rest.starts_with('.'));
            self.demand.totals.overrides += u64::from(domain && of.limit_override.is_some());
            return;
        }
        let Some(limit) = descriptor.limits().find(|limit| self.has_asked_path(descriptor, limit)) else { return };
        match of.hits {
            Hits::Peek => self.demand.totals.peeks += 1,
            // The key is unknown if other rules replace all limits that decide.
            _ if descriptor.path_hash() == 0 => {}
            // A refund before any charge finds an empty counter.
            Hits::Refund(_) if !self.keys.contains_key(&descriptor.path_hash()) => self.demand.totals.refunds += 1,
            Hits::Charge(_) | Hits::Refund(_) => {
                self.update_existing_limit(descriptor, &limit);
                self.add_hits(recorded, of, descriptor);
            }
        }
    }

    fn has_asked_path(&mut self, descriptor: &DescriptorResults<'_, '_>, limit: &LimitWithResult<'_, '_>) -> bool {
        let path = &self.path;
        let has_path = || descriptor.rule().is_some_and(|rule| rule.rule.limit_path(limit.index) == *path);
        *self.is_asked.entry(limit.id).or_insert_with(has_path)
    }

    /// Keeps the limit as the rules have it now; the last version counts.
    fn update_existing_limit(&mut self, descriptor: &DescriptorResults<'_, '_>, limit: &LimitWithResult<'_, '_>) {
        let Some(compiled) = descriptor.rule() else { return };
        let active = compiled.limits.get(limit.index).and_then(|limit| limit.active);
        let spec = |active: Option<ActiveTimes>| active.map(ActiveTimes::spec);
        let is_known = |asked: &ExistingLimit| asked.limit == *limit.limit && spec(asked.active) == spec(active);
        if self.demand.asked.as_ref().is_some_and(is_known) {
            return;
        }
        self.demand.asked = Some(ExistingLimit {
            rule: compiled.rule.path.clone(),
            location: compiled.rule.location.to_string(),
            plan: compiled.rule.plan.as_ref().map(|plan| Arc::clone(&plan.name)),
            name: limit.name.to_owned(),
            limit: *limit.limit,
            active,
            log_max: self.log_max,
        });
    }

    fn add_hits(
        &mut self,
        recorded: &RecordedRequest,
        of: &RecordedDescriptor,
        descriptor: &DescriptorResults<'_, '_>,
    ) {
        let (is_full, next) = (self.keys.len() >= self.max_keys, self.keys.len());
        let new_key = || KeyState { index: next, was_rejected: false };
        let key = if is_full {
            self.keys.get_mut(&descriptor.path_hash())
        } else {
            Some(self.keys.entry(descriptor.path_hash()).or_insert_with(new_key))
        };
        let LimitDemand { keys, sequences, totals, span, .. } = &mut self.demand;
        let Some(key) = key else {
            totals.untracked += 1;
            return;
        };
        *keys = next.max(key.index + 1);
        let at = of.charged_at.unwrap_or(recorded.arrival);
        let span = span.get_or_insert(TrafficSpan { first: at, last: at });
        (span.first, span.last) = (span.first.min(at), span.last.max(at));
        totals.max_delay_us = totals.max_delay_us.max(recorded.max_delay_us);
        match of.hits {
            Hits::Charge(hits) => {
                totals.requests += 1;
                totals.hits = totals.hits.saturating_add(hits);
                totals.answered += u64::from(recorded.answer.is_some());
                if recorded.answer.is_some_and(|answer| answer.rejected) {
                    key.was_rejected = true;
                    totals.rejections.requests += 1;
                    totals.rejections.elsewhere +=
                        u64::from(!count_rejecting_limits(&mut totals.rejections.by_limit, of, descriptor));
                }
            }
            Hits::Refund(_) | Hits::Peek => totals.refunds += 1,
        }
        let set = self.own_sets.get(&recorded.process).copied().unwrap_or(0);
        let sequence = *self.counters.entry((key.index, set)).or_insert_with(|| {
            sequences.push(ChargeSequence { key: key.index, charges: Vec::new() });
            sequences.len() - 1
        });
        sequences[sequence].charges.push(RecordedCharge { at, hits: of.hits, max_delay_us: recorded.max_delay_us });
        self.free_charges = self.free_charges.saturating_sub(1);
    }
}

/// Counts the limits that rejected the hits; returns true if there is one.
fn count_rejecting_limits(
    rejected_by: &mut BTreeMap<String, u64>,
    of: &RecordedDescriptor,
    descriptor: &DescriptorResults<'_, '_>,
) -> bool {
    let Some(compiled) = descriptor.rule() else { return false };
    let rejecting = of.admitted.iter().zip(compiled.deciding_limits()).enumerate();
    let mut any = false;
    for (index, _) in rejecting.filter(|(_, (admitted, limit))| !**admitted && !limit.shadow) {
        any = true;
        *rejected_by.entry(compiled.rule.limit_path(index)).or_default() += 1;
    }
    any
}
