//! Records of a decision log as recorded requests, and its headers as settings and rules.
//!
//! Replicas share rules, and each file repeats them, so equal rule sets are compiled once for all files.
//!
//! Decides: what of a recorded decision is replayed: hits, peeks, overrides, slots; values that a log leaves out.
//! Decides: decisions of a policy, share or block.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;

use super::recorded_request::{RecordedAnswer, RecordedDescriptor, RecordedPlan, RecordedRequest};
use super::redis_clock::RedisClock;
use super::replayer::RecordedHeader;
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::decide::log::header::{self, HeaderReason, HeaderRecord, RuleSetRecord, SettingsRecord};
use crate::decide::log::record::{
    DecisionRecord, DecisionSource, DescriptorRecord, EntryRecord, RecordedVerdict, SlotRecord, hits_from_number,
};
use crate::decide::log::record_field::RecordText;
use crate::limit::period::Period;
use crate::limit::request::Hits;
use crate::rules::compile::options::CompileOptions;
use crate::rules::plan_table::OwnLimit;
use crate::rules::rule::OWN_LIMIT_NAME;
use crate::rules::rule::set::RuleSet;
use crate::settings::decisions::DecisionSettings;

/// Rule sets of headers by id and settings, shared by the readers of all files.
#[derive(Debug, Default)]
pub(super) struct RuleSetCache(Mutex<HashMap<String, Arc<RuleSet>>>);

/// Maximum number of rule sets.
const MAX_RULE_SETS: usize = 1000;

/// Converts the records of one decision log to recorded requests and headers.
#[derive(Debug)]
pub(super) struct RecordConverter {
    cache: Arc<RuleSetCache>,
    defaults: DecisionSettings,
    /// Id of the current rule set, by process.
    rule_ids: HashMap<Arc<str>, String>,
    /// Rule sets of all headers so far, by id.
    by_id: HashMap<String, Arc<RuleSet>>,
    redis_clock: RedisClock,
    /// Process, domain and id of the rules of the last record, because they rarely change.
    process: Arc<str>,
    domain: Arc<str>,
    rules_id: Arc<str>,
    /// Descriptors without values.
    pub(super) hidden: u64,
}

impl RecordConverter {
    /// Creates a converter; `defaults` are settings that headers do not have.
    pub(super) fn new(cache: Arc<RuleSetCache>, defaults: DecisionSettings) -> Self {
        let [process, domain, rules_id] = [Arc::from(""), Arc::from(""), Arc::from("")];
        Self {
            cache,
            defaults,
            rule_ids: HashMap::new(),
            by_id: HashMap::new(),
            redis_clock: RedisClock::default(),
            process,
            domain,
            rules_id,
            hidden: 0,
        }
    }

    /// Copies the texts that requests share, so that later requests share a new reference counter.
    pub(super) fn renew_shared_arcs(&mut self) {
        self.process = Arc::from(&*self.process);
        self.domain = Arc::from(&*self.domain);
        self.rules_id = Arc::from(&*self.rules_id);
    }

    /// Converts a header.
    pub(super) fn convert_header(&mut self, record: HeaderRecord) -> Result<RecordedHeader, String> {
        let HeaderRecord { event, process, seq, time_us, store, settings, rules, .. } = record;
        if settings.values == "none" {
            return Err(VALUES_LEFT_OUT_ERROR.to_owned());
        }
        let process: Arc<str> = process.into();
        let id = rules.as_ref().map_or_else(String::new, |rules| rules.id.clone());
        let rules = rules.map(|rules| self.cache.find_or_compile(&rules, &settings)).transpose()?;
        if let Some(rules) = &rules {
            self.by_id.insert(id.clone(), Arc::clone(rules));
        }
        self.rule_ids.insert(Arc::clone(&process), id.clone());
        let behaviour = DecisionSettings {
            shadow_mode: settings.shadow_mode,
            quota_mode: settings.quota_mode,
            stop_cache_key_increment_when_overlimit: settings.stop_cache_key_increment_when_overlimit,
            calendar_months: settings.calendar_months,
            log_max: settings.log_max,
            ..self.defaults.clone()
        };
        Ok(RecordedHeader {
            process,
            seq,
            at: Time::from_micros(time_us),
            is_start: event == HeaderReason::Start,
            in_memory: store == "memory",
            behaviour: Arc::new(behaviour),
            rules,
            rules_id: id.into(),
            options: header::build_compile_options(&settings),
            sample: settings.sample,
            is_complete: settings.when.iter().any(|when| when == "all"),
            hashed_values: settings.values == "hashed",
        })
    }

    /// Rules of a decision that was logged after a header with newer ones; `None` if they are those of the last header of
    /// its process, or of no header of the file so far.
    fn find_rules_of_other_header(&self, record: &DecisionRecord<'_>) -> Option<Arc<RuleSet>> {
        let current = self.rule_ids.get(&*record.process).filter(|current| **current != *record.rules);
        current.and_then(|_| self.by_id.get(&*record.rules).cloned())
    }

    /// Converts a decision. Its charges have the time of Redis, if its process charges there.
    pub(super) fn convert_decision(&mut self, record: &DecisionRecord<'_>) -> Result<RecordedRequest, String> {
        self.redis_clock.compare_clocks(record);
        if *record.process != *self.process {
            self.process = Arc::from(&*record.process);
        }
        if *record.domain != *self.domain {
            self.domain = Arc::from(&*record.domain);
        }
        if *record.rules != *self.rules_id {
            self.rules_id = Arc::from(&*record.rules);
        }
        let mut request = RecordedRequest::default();
        request.arrival = Time::from_micros(record.time_us);
        request.process = Arc::clone(&self.process);
        request.seq = record.seq;
        request.domain = Arc::clone(&self.domain);
        request.max_delay_us = record.max_delay_us;
        request.answer = convert_answer(record);
        request.is_blocked = record.descriptors.iter().any(|descriptor| descriptor.block.is_some());
        request.rules_id = Arc::clone(&self.rules_id);
        request.rules = self.find_rules_of_other_header(record);
        for descriptor in &record.descriptors {
            let charged_at = self.redis_clock.charge_time_us(record, descriptor).map(Time::from_micros);
            if add_descriptor(&mut request, descriptor, charged_at)? {
                self.hidden += 1;
                request.answer = None;
            }
        }
        Ok(request)
    }
}

const VALUES_LEFT_OUT_ERROR: &str = "the log has no values, so keys cannot be told apart (record with \
    TOLLKEEPER_DECISION_LOG_VALUES=plain, or hashed)";

/// Adds a descriptor; returns true if its values were left out, so that it can match no rule.
fn add_descriptor(
    request: &mut RecordedRequest,
    record: &DescriptorRecord<'_>,
    charged_at: Option<Time>,
) -> Result<bool, String> {
    let limit_override = record.limit_override.as_ref();
    let limit_override =
        limit_override.map(|sent| sent.to_limit_override().ok_or("the unit of an override is invalid"));
    let charged = hits_from_number(record.hits);
    let hits = if request.is_blocked && matches!(charged, Hits::Charge(_)) { Hits::Peek } else { charged };
    let mut descriptor = RecordedDescriptor::new(hits);
    descriptor.limit_override = limit_override.transpose()?;
    descriptor.charged_at = charged_at;
    descriptor.is_sampled = record.sampled && record.entries.iter().all(has_logged_value);
    // A candidate's result may come after the answer, and be absent.
    let deciding = record.limits.iter().filter(|limit| !limit.candidate);
    descriptor.admitted = deciding.filter_map(|limit| Some(limit.result?.admitted)).collect();
    descriptor.plan = convert_plan(record);
    descriptor.slot = record.slot.as_ref().and_then(SlotRecord::to_slot_use);
    request.push_descriptor(descriptor);
    let entries = record.entries.iter().map(decode_entry).collect::<Result<Option<SmallVec<[_; 4]>>, String>>()?;
    // Without entries it matches no rule.
    for (key, value) in entries.iter().flatten() {
        request.push_entry(key, value);
    }
    Ok(entries.is_none())
}

/// The plan that a table chose for a descriptor.
fn convert_plan(record: &DescriptorRecord<'_>) -> Option<RecordedPlan> {
    let name: Box<str> = (&**record.rule.as_ref()?.plan.as_ref()?).into();
    let limit = record.limits.first().filter(|_| *name == *OWN_LIMIT_NAME);
    let own = limit.and_then(|limit| {
        let period = Period::new(limit.unit, limit.unit_multiplier.unwrap_or(1))?;
        Some(OwnLimit { requests_per_unit: u32::try_from(limit.requests_per_unit).ok()?, period })
    });
    Some(RecordedPlan { name, own })
}

fn has_logged_value(entry: &EntryRecord<'_>) -> bool {
    entry.value.is_some() || entry.value_base64.is_some() || entry.value_hash.is_some()
}

/// Bytes of a key and of its value, or of the value's hash.
type EntryBytes<'a> = (Cow<'a, [u8]>, Cow<'a, [u8]>);

/// Returns the bytes of an entry; `None` if its value was left out.
fn decode_entry<'a>(entry: &'a EntryRecord<'_>) -> Result<Option<EntryBytes<'a>>, String> {
    let key = entry.key_bytes().ok_or("an entry has no key")?;
    let hash = || entry.value_hash.as_ref().map(|RecordText(hash)| Cow::Borrowed(hash.as_bytes()));
    Ok(entry.value_bytes().or_else(hash).map(|value| (key, value)))
}

/// The answer of a decision; `None` if there was none.
fn convert_answer(record: &DecisionRecord<'_>) -> Option<RecordedAnswer> {
    let by_counters = |descriptor: &DescriptorRecord<'_>| {
        descriptor.sampled && descriptor.decided_by.is_none_or(|decided_by| decided_by == DecisionSource::Counter)
    };
    (record.verdict != RecordedVerdict::Error).then(|| RecordedAnswer {
        rejected: record.verdict == RecordedVerdict::OverLimit,
        repeatable: record.descriptors.iter().all(by_counters),
    })
}

impl RuleSetCache {
    fn find_or_compile(&self, rules: &RuleSetRecord, settings: &SettingsRecord) -> Result<Arc<RuleSet>, String> {
        let options = header::build_compile_options(settings);
        let key = format!("{} {options:?}", rules.id);
        let mut known = lock_ignoring_poison(&self.0);
        if let Some(compiled) = known.get(&key) {
            return Ok(Arc::clone(compiled));
        }
        if known.len() == MAX_RULE_SETS {
            return Err(format!("the traffic has more than {MAX_RULE_SETS} rule sets (replay fewer files)"));
        }
        let with_errors = |problems: String| format!("the recorded rules have errors: {problems}");
        let source =
            header::decode_recorded_rules(rules.clone()).map_err(|problems| with_errors(problems.join("; ")))?;
        let options = CompileOptions { rule_defaults: Arc::new(source.defaults), ..options };
        let compiled = source.rules.compile(&options).map_err(|problems| with_errors(problems.to_string()))?;
        let mut compiled = RuleSet::new(compiled.domains);
        compiled.switch_to_recorded_plans();
        let compiled = Arc::new(compiled);
        known.insert(key, Arc::clone(&compiled));
        Ok(compiled)
    }
}
