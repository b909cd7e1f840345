//! Collection of the decisions on one descriptor, in bounded memory, from logs in any order.
//!
//! Decides: how many decisions `why` keeps (`keep_decision`).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use serde::Serialize;
use smallvec::SmallVec;

use super::asked_descriptor::{AskedDescriptor, Likeness, NearestDescriptors, format_entries};
use super::rejection;
use super::time_range::{TimeRange, format_time};
use crate::decide::log::header::{HeaderReason, HeaderRecord, SettingsRecord};
use crate::decide::log::header::{build_compile_options, decode_recorded_rules};
use crate::decide::log::record::{DecisionRecord, Record, RecordedVerdict};
use crate::rules::compile::options::CompileOptions;
use crate::rules::rule::changes::{LimitList, RuleChanges};
use crate::tools::replay::redis_clock::RedisClock;

/// Maximum number of different causes that are counted by name.
const MAX_CAUSES: usize = 100;
/// Number of processes whose last record is noted, and whose rules are compared.
const MAX_PROCESSES: usize = 10_000;
/// Name of all further causes.
const OTHER_CAUSES: &str = "other limits";

/// Decisions that are kept.
#[derive(Clone, Copy, Debug)]
pub struct DecisionFilter {
    /// Keep admitted requests too.
    pub admitted: bool,
    /// Maximum number of decisions; those nearest to the asked time are kept, or else the last.
    pub max: usize,
}

/// Collected decisions on one descriptor.
#[derive(Debug)]
pub struct DescriptorHistory<'q> {
    pub(super) asked: AskedDescriptor<'q>,
    pub(super) range: TimeRange,
    shown: DecisionFilter,
    kept: BTreeMap<KeptOrder, KeptDecision>,
    records: u64,
    /// Time of the last record of each process.
    last_us: HashMap<String, u64>,
    redis_clock: RedisClock,
    /// Only the part of the logs around the range was read.
    pub(super) is_partial: bool,
    pub(super) counts: RangeCounts,
    pub(super) log: LogCounts,
    pub(super) headers: LogHeaderFacts,
    pub(super) nearest: NearestDescriptors,
    /// Limits of the last rule sets.
    rule_sets: RecordedRuleSets,
    /// Problems of the logs.
    pub(super) problems: Vec<String>,
}

/// Order in which decisions are kept: those nearest the middle of the asked time first, or the latest if no time is
/// asked.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct KeptOrder {
    distance_us: u64,
    record: u64,
}

/// A decision that is kept: the line of its record, which is parsed again to be printed.
#[derive(Debug)]
struct KeptDecision {
    time_us: u64,
    line: Vec<u8>,
    asked_positions: SmallVec<[usize; 1]>,
}

/// A decision with the positions of the asked descriptor.
#[derive(Debug)]
pub(super) struct AskedDecision<'l> {
    /// Time by the clock of Redis, if its process charges there.
    pub(super) time_us: u64,
    pub(super) record: DecisionRecord<'l>,
    pub(super) asked_positions: &'l [usize],
}

/// Counts of requests with the descriptor within the range.
#[derive(Debug, Default)]
pub(super) struct RangeCounts {
    pub(super) requests: u64,
    /// Requests that were rejected, whatever descriptor did so.
    pub(super) rejected: u64,
    /// Rejected requests in which the asked descriptor had room.
    pub(super) rejected_by_others: u64,
    pub(super) shadow: u64,
    pub(super) errors: u64,
    pub(super) first_rejected_us: Option<u64>,
    pub(super) last_rejected_us: Option<u64>,
    /// Requests by the cause of their rejection.
    pub(super) causes: HashMap<String, u64>,
    /// Decisions of the key that the sample leaves out.
    pub(super) unsampled: u64,
    /// Records that are missing.
    pub(super) dropped: u64,
    /// Decisions that would be shown, kept or not.
    pub(super) showable: u64,
}

/// Counts over the whole logs.
#[derive(Debug, Default)]
pub(super) struct LogCounts {
    pub(super) decisions: u64,
    /// Times of the first and the last record.
    pub(super) first_us: Option<u64>,
    pub(super) last_us: Option<u64>,
    /// Decisions with the descriptor.
    pub(super) found: u64,
    pub(super) first_found_us: Option<u64>,
    pub(super) last_found_us: Option<u64>,
    /// Descriptors with the same keys whose values were left out.
    pub(super) hidden: u64,
    /// Descriptors with the same keys and other hashes.
    pub(super) other_hashes: u64,
}

impl<'q> DescriptorHistory<'q> {
    /// Creates an empty history.
    pub fn new(asked: AskedDescriptor<'q>, range: TimeRange, shown: DecisionFilter) -> Self {
        let nearest = NearestDescriptors::new(&asked.descriptor_text());
        Self {
            asked,
            range,
            shown,
            kept: BTreeMap::new(),
            records: 0,
            last_us: HashMap::new(),
            redis_clock: RedisClock::default(),
            is_partial: false,
            counts: RangeCounts::default(),
            log: LogCounts::default(),
            headers: LogHeaderFacts::default(),
            nearest,
            rule_sets: RecordedRuleSets::default(),
            problems: Vec::new(),
        }
    }

    /// Notes that a part of the logs is not known.
    pub fn add_problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Notes that a log is read around the range only.
    pub const fn mark_partially_read(&mut self) {
        self.is_partial = true;
    }

    /// Adds a record. Its time is that of the clock of Redis, if its process charges there.
    pub fn add_record(&mut self, mut record: Record<'_>) {
        self.records += 1;
        let moved =
            |clock: &RedisClock, process: &str, time_us| clock.to_redis_time_us(process, time_us).unwrap_or(time_us);
        let time_us = match &mut record {
            Record::Decision(decision) => {
                self.redis_clock.compare_clocks(decision);
                let own = || moved(&self.redis_clock, &decision.process, decision.time_us);
                decision.last_charge_us().unwrap_or_else(own)
            }
            Record::Header(header) => {
                header.time_us = moved(&self.redis_clock, &header.process, header.time_us);
                header.time_us
            }
            Record::Dropped(dropped) => moved(&self.redis_clock, &dropped.process, dropped.time_us),
        };
        if self.range.move_to_day_of(time_us) {
            self.kept.clear();
            self.counts = RangeCounts::default();
            self.headers.clear_rule_changes();
        }
        extend_span(&mut self.log.first_us, &mut self.log.last_us, time_us);
        let is_in_range = self.range.contains(time_us);
        match record {
            Record::Decision(decision) => {
                self.note_process_time(&decision.process, time_us);
                self.add_decision(&decision, time_us, is_in_range);
            }
            Record::Header(header) => {
                self.note_process_time(&header.process, time_us);
                self.rule_sets.add_header(&header);
                self.headers.add_header(&header, is_in_range, &self.rule_sets);
            }
            Record::Dropped(dropped) => {
                // The records are missing since the last one of the process.
                let since_us = self.last_us.get(&dropped.process).map_or(time_us, |last_us| time_us.min(*last_us));
                if self.range.overlaps(since_us, time_us) {
                    self.counts.add_dropped(dropped.count);
                }
                self.note_process_time(&dropped.process, time_us);
            }
        }
    }

    /// Notes the time of the last record of a process.
    fn note_process_time(&mut self, process: &str, time_us: u64) {
        if let Some(last_us) = self.last_us.get_mut(process) {
            *last_us = time_us;
        } else if self.last_us.len() < MAX_PROCESSES {
            self.last_us.insert(process.to_owned(), time_us);
        }
    }

    fn add_decision(&mut self, decision: &DecisionRecord<'_>, time_us: u64, is_in_range: bool) {
        self.log.decisions += 1;
        let positions = self.find_asked_and_note_similar(decision);
        if positions.is_empty() {
            return;
        }
        self.log.found += 1;
        extend_span(&mut self.log.first_found_us, &mut self.log.last_found_us, time_us);
        if is_in_range {
            self.counts.add_decision(decision, time_us, &positions);
            self.keep_decision(decision, time_us, positions);
        }
    }

    /// Positions of the asked descriptor; takes note of descriptors like it.
    fn find_asked_and_note_similar(&mut self, decision: &DecisionRecord<'_>) -> SmallVec<[usize; 1]> {
        let is_domain = *decision.domain == *self.asked.domain;
        let mut positions = SmallVec::new();
        for (index, descriptor) in decision.descriptors.iter().enumerate() {
            match (is_domain, self.asked.compare_descriptor(descriptor)) {
                (true, Likeness::Same) => positions.push(index),
                (true, Likeness::HiddenValues) => self.log.hidden += 1,
                (true, Likeness::OtherHashes) => self.log.other_hashes += 1,
                // Only of use if the descriptor is nowhere.
                _ if self.log.found > 0 || self.nearest.is_full() => {}
                (true, Likeness::Different) => self.nearest.keep_if_among_nearest(&format_entries(&descriptor.entries)),
                (false, Likeness::Same) => {
                    let text = format_entries(&descriptor.entries);
                    self.nearest.keep_if_among_nearest(&format!("{text} in domain {}", &*decision.domain));
                }
                (false, _) => {}
            }
        }
        positions
    }

    fn keep_decision(&mut self, decision: &DecisionRecord<'_>, time_us: u64, positions: SmallVec<[usize; 1]>) {
        if !self.shown.admitted && decision.verdict == RecordedVerdict::Ok {
            return;
        }
        self.counts.showable += 1;
        let order = KeptOrder { distance_us: self.range.distance_from_middle_us(time_us), record: self.records };
        let is_kept = self.kept.len() < self.shown.max
            || self.kept.last_key_value().is_some_and(|(furthest, _)| order < *furthest);
        if !is_kept {
            return;
        }
        let mut line = Vec::new();
        decision.append_line(&mut line);
        self.kept.insert(order, KeptDecision { time_us, line, asked_positions: positions });
        if self.kept.len() > self.shown.max {
            self.kept.pop_last();
        }
    }

    /// The kept decisions by time.
    pub(super) fn decisions_by_time(&self) -> Vec<AskedDecision<'_>> {
        let mut kept: Vec<_> = self.kept.values().map(KeptDecision::parse_line).collect();
        let order = |decision: &AskedDecision<'_>| (decision.time_us, decision.record.seq);
        kept.sort_by(|one, other| {
            order(one).cmp(&order(other)).then_with(|| one.record.process.cmp(&other.record.process))
        });
        kept
    }
}

impl KeptDecision {
    fn parse_line(&self) -> AskedDecision<'_> {
        let record = serde_json::from_slice(&self.line).expect("a record that was parsed from such a line");
        AskedDecision { time_us: self.time_us, record, asked_positions: &self.asked_positions }
    }
}

impl RangeCounts {
    /// Adds missing records; a log may claim any number.
    const fn add_dropped(&mut self, count: u64) {
        self.dropped = self.dropped.saturating_add(count);
    }

    fn add_decision(&mut self, decision: &DecisionRecord<'_>, time_us: u64, positions: &[usize]) {
        self.requests += 1;
        let mut descriptors = positions.iter().filter_map(|index| decision.descriptors.get(*index));
        self.unsampled += u64::from(descriptors.clone().all(|descriptor| !descriptor.sampled));
        match decision.verdict {
            RecordedVerdict::Ok => return,
            RecordedVerdict::Shadow => {
                self.shadow += 1;
                return;
            }
            RecordedVerdict::Error => {
                self.errors += 1;
                return;
            }
            RecordedVerdict::OverLimit => {}
        }
        self.rejected += 1;
        extend_span(&mut self.first_rejected_us, &mut self.last_rejected_us, time_us);
        if descriptors.all(|descriptor| descriptor.verdict != RecordedVerdict::OverLimit) {
            self.rejected_by_others += 1;
        }
        let mut causes: Vec<String> = decision.descriptors.iter().flat_map(rejection::list_causes).collect();
        causes.sort_unstable();
        causes.dedup();
        for cause in causes {
            let has_room = self.causes.len() < MAX_CAUSES || self.causes.contains_key(&cause);
            let cause = if has_room { cause } else { OTHER_CAUSES.to_owned() };
            *self.causes.entry(cause).or_default() += 1;
        }
    }
}

/// Extends a span of time by a time.
fn extend_span(first_us: &mut Option<u64>, last_us: &mut Option<u64>, time_us: u64) {
    *first_us = Some(first_us.map_or(time_us, |first| first.min(time_us)));
    *last_us = Some(last_us.map_or(time_us, |last| last.max(time_us)));
}

/// Maximum number of rule changes that are kept.
const MAX_KEPT_RULE_CHANGES: usize = 20;

/// Start of a process, or another rule set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleChange {
    /// Time in microseconds since the Unix epoch.
    pub time_us: u64,
    /// The same as RFC 3339.
    pub time: String,
    /// Reason for the header.
    pub event: HeaderReason,
    /// Id of the process.
    pub process: String,
    /// Id of the rule set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rules: Option<String>,
    /// Version that the control plane gives the rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Limits that differ from those of the process before; absent at its start, and if they are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<RuleChanges>,
}

/// Facts from headers.
#[derive(Debug, Default)]
pub(super) struct LogHeaderFacts {
    /// Rule set of each process.
    rules: HashMap<String, String>,
    /// Changes within the range.
    pub(super) changes: Vec<RuleChange>,
    /// Number of changes that were left out.
    pub(super) more_changes: u64,
    /// Settings of the last header.
    pub(super) settings: Option<SettingsRecord>,
}

impl LogHeaderFacts {
    /// Takes note of a header.
    pub(super) fn add_header(&mut self, header: &HeaderRecord, is_in_range: bool, known: &RecordedRuleSets) {
        self.settings = Some(header.settings.clone());
        let id = header.rules.as_ref().map(|rules| rules.id.clone());
        let before = id.clone().and_then(|id| {
            let has_room = self.rules.len() < MAX_PROCESSES || self.rules.contains_key(&header.process);
            has_room.then(|| self.rules.insert(header.process.clone(), id)).flatten()
        });
        let is_change = header.event == HeaderReason::Start || header.event == HeaderReason::Reload && before != id;
        if !is_change || !is_in_range {
            return;
        }
        if self.changes.len() == MAX_KEPT_RULE_CHANGES {
            self.more_changes += 1;
            return;
        }
        self.changes.push(RuleChange {
            time_us: header.time_us,
            time: format_time(header.time_us),
            event: header.event,
            process: header.process.clone(),
            changes: known.changes_between(before.as_deref(), id.as_deref()),
            rules: id,
            version: header.rules.as_ref().and_then(|rules| rules.version.clone()),
        });
    }

    /// Removes the rule changes, because the range moved to a later day.
    pub(super) fn clear_rule_changes(&mut self) {
        self.changes.clear();
        self.more_changes = 0;
    }
}

/// Number of rule sets whose limits are kept, to compare the next with them.
const MAX_KEPT_LIMIT_LISTS: usize = 4;

/// Limits of the last recorded rule sets, by their ids.
#[derive(Debug, Default)]
pub(super) struct RecordedRuleSets(VecDeque<(String, LimitList)>);

impl RecordedRuleSets {
    /// Takes note of the rules of a header, unless they cannot be compiled here.
    fn add_header(&mut self, header: &HeaderRecord) {
        let Some(rules) = header.rules.as_ref().filter(|rules| self.find(Some(&rules.id)).is_none()) else { return };
        let Ok(recorded) = decode_recorded_rules(rules.clone()) else { return };
        let rule_defaults = Arc::new(recorded.defaults);
        let options = CompileOptions { rule_defaults, ..build_compile_options(&header.settings) };
        let Ok(compiled) = recorded.rules.compile(&options) else { return };
        self.0.truncate(MAX_KEPT_LIMIT_LISTS - 1);
        self.0.push_front((rules.id.clone(), LimitList::of_domains(&compiled.domains)));
    }

    fn find(&self, id: Option<&str>) -> Option<&LimitList> {
        self.0.iter().find(|(known, _)| Some(known.as_str()) == id).map(|(_, limits)| limits)
    }

    /// Limits that differ between two rule sets, if those of both are kept.
    fn changes_between(&self, before: Option<&str>, after: Option<&str>) -> Option<RuleChanges> {
        Some(RuleChanges::between(self.find(before)?, self.find(after)?))
    }
}
