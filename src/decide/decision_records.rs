//! Decisions as records of the decision log, and as lines of the process's log at the level debug.
//!
//! Records are built after a decision and cannot change it. A decision that is not logged costs a hash of each key if
//! the log samples keys and, if the sample contains one of them, the verdicts on its descriptors.
//!
//! A line at the level debug shows each descriptor with the rule that matched it, its limits and its verdict. It has
//! the values of the decision log's form, so that values that are hashed there are not readable here. Text of the
//! request is bounded here; the log escapes it.
//!
//! Decides: which descriptors and verdicts of a decision are logged; times and trace id of a record.
//! Decides: the line of a decision at `LOG_LEVEL=debug`, of how many descriptors (`MAX_DESCRIPTORS`).

use std::fmt::Write as _;

use smallvec::SmallVec;

use super::blocks::Block;
use super::candidates::{CandidateCharges, CandidateRef};
use super::charged_request::ChargedRequest;
use super::decision::{DecideError, Decision};
use super::log::record::{
    BlockRecord, DecisionRecord, DecisionSource, DescriptorRecord, EntryRecord, GlobalScopeRecord, LimitRecord,
    LimitResultRecord, OverrideRecord, RecordedVerdict, RuleRecord, SlotRecord, hits_to_number,
};
use super::log::value_form::ValueForm;
use super::log::{DecisionFacts, DecisionLog, RecordStamp};
use super::outcome::{DescriptorOutcome, retry_after_us};
use super::selected_request::SelectedRequest;
use super::selection::{SelectedLimit, Selection};
use super::tap::DecisionTap;
use crate::limit::charge::ChargeResult;
use crate::limit::counter_path::CounterPath;
use crate::limit::request::Entry;
use crate::rules::rule::{Rule, RuleLogging};
use crate::store::charge::{DecidedBy, StoreOutcome};

/// Verdicts on a request and its descriptors, as the decision log records them.
struct RecordedVerdicts {
    descriptors: SmallVec<[RecordedVerdict; 2]>,
    request: RecordedVerdict,
}

/// A decision that the log selects.
struct LoggedDecision<'d, 'r> {
    decided: Result<&'d Decision<'r>, DecideError>,
    verdicts: RecordedVerdicts,
    /// True for each descriptor whose key the sample contains.
    sampled: SmallVec<[bool; 2]>,
}

impl<'a> ChargedRequest<'a, '_, '_> {
    /// Logs the decision: in the decision log, to operators that listen, and as a line at the level debug.
    pub(super) fn log(&self, decided: Result<&Decision<'_>, DecideError>) {
        let decider = self.selected.decider;
        if let Some(log) = &decider.log {
            self.log_if_selected(log, decided);
        }
        if decider.tap.has_listeners() {
            self.send_to_tap(&decider.tap, &decider.key_values, decided);
        }
        if tracing::enabled!(tracing::Level::DEBUG) {
            let values = decider.log.as_ref().map_or(&ValueForm::Plain, |log| &log.values);
            self.log_debug_line(values, decided);
        }
    }

    /// Logs the decision if it is selected.
    #[inline(never)]
    fn log_if_selected(self, log: &'a DecisionLog, decided: Result<&Decision<'_>, DecideError>) {
        let count = self.selected.request.descriptors.len();
        // Before the verdicts, because a small sample contains few keys.
        let sampled: SmallVec<[bool; 2]> =
            (0..count).map(|index| log.sample.contains(&self.counter_path(index))).collect();
        if count > 0 && !sampled.contains(&true) {
            return;
        }
        let verdicts = self.verdicts(decided);
        let facts = DecisionFacts {
            rejected: verdicts.request == RecordedVerdict::OverLimit,
            shadow: verdicts.request == RecordedVerdict::Shadow
                || self.candidates.is_some_and(CandidateCharges::would_reject),
            error: decided.is_err() || self.outcomes.iter().any(|it| matches!(it, DescriptorOutcome::Failed(_))),
        };
        let is_selected = |index: usize| facts.is_decision_selected(self.rule_logging(index), log.when);
        // Without descriptors there is neither a rule nor a key.
        let is_logged = match count {
            0 => facts.is_decision_selected(None, log.when),
            count => (0..count).any(|index| sampled[index] && is_selected(index)),
        };
        if is_logged {
            let logged = LoggedDecision { decided, verdicts, sampled };
            log.write_decision(|stamp| self.build_record(&log.values, stamp, &logged));
        }
    }

    /// Passes the decision to operators that listen.
    #[cold]
    #[inline(never)]
    fn send_to_tap(self, tap: &DecisionTap, values: &ValueForm, decided: Result<&Decision<'_>, DecideError>) {
        let sampled = SmallVec::from_elem(true, self.selected.request.descriptors.len());
        let logged = LoggedDecision { decided, verdicts: self.verdicts(decided), sampled };
        let (verdict, now_us) = (logged.verdicts.request, self.selected.context.store.now.as_micros());
        tap.send_decision(self.selected.request, verdict, now_us, |seq| {
            self.build_record(values, RecordStamp { process: "tap", zone: "", seq, now_us }, &logged)
        });
    }

    fn verdicts(self, decided: Result<&Decision<'_>, DecideError>) -> RecordedVerdicts {
        let count = self.selected.request.descriptors.len();
        let descriptors: SmallVec<[RecordedVerdict; 2]> =
            (0..count).map(|index| self.descriptor_verdict(index)).collect();
        let request = match decided {
            Err(_) => RecordedVerdict::Error,
            Ok(decision) if decision.over_limit => RecordedVerdict::OverLimit,
            Ok(decision) if decision.shadowed || descriptors.contains(&RecordedVerdict::Shadow) => {
                RecordedVerdict::Shadow
            }
            Ok(_) => RecordedVerdict::Ok,
        };
        RecordedVerdicts { descriptors, request }
    }

    /// Verdict on the descriptor at `index` alone.
    fn descriptor_verdict(self, index: usize) -> RecordedVerdict {
        if let Some(blocked) = self.selected.blocked {
            return match blocked.block_of_descriptor(index) {
                Some(_) => RecordedVerdict::OverLimit,
                None => RecordedVerdict::Ok,
            };
        }
        let limit_verdicts = self.statuses.get(index).map(|status| &status.limit_verdicts);
        let Some(limit_verdicts) = limit_verdicts.filter(|verdicts| !verdicts.fail()) else {
            return RecordedVerdict::Error;
        };
        let (limits, outcome) = (&self.selected.selections[index].limits, &self.outcomes[index]);
        let in_shadow = |(at, limit): (usize, &SelectedLimit<'_>)| limit.shadow && outcome.limit_rejects(at);
        match limit_verdicts.rejects() {
            true => RecordedVerdict::OverLimit,
            false if limits.iter().enumerate().any(in_shadow) => RecordedVerdict::Shadow,
            false => RecordedVerdict::Ok,
        }
    }

    fn rule_logging(self, index: usize) -> Option<RuleLogging> {
        self.selected.selections.get(index)?.rule?.rule.logging
    }

    /// Path of the counters of the descriptor at `index`, or the path that was sent.
    fn counter_path(self, index: usize) -> CounterPath<'a> {
        let SelectedRequest { request, selections, .. } = *self.selected;
        match selections.get(index) {
            Some(selection) => selection.counter_path(request, index),
            None => {
                let entries = &request.descriptors[index].entries;
                CounterPath { domain: request.domain, entries, shared: &[], candidate: None }
            }
        }
    }

    fn build_record(
        self,
        values: &ValueForm,
        stamp: RecordStamp<'a>,
        logged: &LoggedDecision<'_, '_>,
    ) -> DecisionRecord<'a> {
        let LoggedDecision { decided, verdicts, .. } = logged;
        let SelectedRequest { request, .. } = *self.selected;
        let is_rejected = verdicts.request == RecordedVerdict::OverLimit;
        let count = verdicts.descriptors.len();
        let time_us = self.selected.context.store.now.as_micros();
        DecisionRecord {
            process: stamp.process.into(),
            zone: stamp.zone.into(),
            seq: stamp.seq,
            time_us,
            domain: request.domain.into(),
            hits_addend: request.hits_addend,
            descriptors: (0..count).map(|index| self.build_descriptor_record(values, index, logged)).collect(),
            verdict: verdicts.request,
            error: decided.err().map(|error| error.name().into()),
            retry_after_us: match self.selected.blocked {
                Some(blocked) => Some(blocked.until.since_us(self.selected.context.store.now)),
                None if is_rejected => retry_after_us(self.limit_verdicts()),
                None => None,
            },
            delay_us: decided.map_or(0, |decision| decision.delay_us),
            max_delay_us: self.selected.context.max_delay_us,
            rules: self.selected.context.rules.map(|rules| &*rules.id).unwrap_or_default().into(),
            trace_id: self.selected.context.store.span_ref.map(|span_ref| span_ref.trace_id().to_string().into()),
            duration_us: stamp.now_us.saturating_sub(time_us),
        }
    }

    fn build_descriptor_record(
        self,
        values: &ValueForm,
        index: usize,
        logged: &LoggedDecision<'_, '_>,
    ) -> DescriptorRecord<'a> {
        let SelectedRequest { request, selections, .. } = *self.selected;
        let descriptor = &request.descriptors[index];
        let (selection, outcome) = (selections.get(index), self.outcomes.get(index));
        let is_hidden = self.rule_logging(index) == Some(RuleLogging::None);
        let entry =
            |entry| if is_hidden { EntryRecord::without_value(entry) } else { values.build_entry_record(entry) };
        let block = self.selected.blocked.and_then(|blocked| blocked.block_of_descriptor(index));
        let failed = match outcome {
            Some(DescriptorOutcome::Failed(failed)) => Some(failed),
            _ => None,
        };
        let charged_at = match outcome {
            Some(DescriptorOutcome::Charged(charged)) => Some(charged.now),
            _ => None,
        };
        DescriptorRecord {
            entries: descriptor.entries.iter().map(entry).collect(),
            hits: hits_to_number(descriptor.hits),
            limit_override: descriptor.limit_override.as_ref().map(OverrideRecord::from),
            sampled: logged.sampled[index],
            rule: selection.and_then(|selection| selection.rule).map(|compiled| to_rule_record(&compiled.rule)),
            unlimited: selection.is_some_and(|selection| selection.unlimited),
            limits: selection.map(|selection| self.build_limit_records(selection, index)).unwrap_or_default(),
            decided_by: match block {
                Some(_) => Some(DecisionSource::Block),
                None => outcome.and_then(decision_source),
            },
            policy: failed.map(|failed| failed.policies.strictest()),
            reason: failed.map(|failed| failed.error.name().into()),
            block: block.map(to_block_record),
            now_us: charged_at.filter(|at| *at != self.selected.context.store.now).map(|at| at.as_micros()),
            slot: selection.and_then(|selection| selection.slot.as_deref()).map(|slot| SlotRecord::from(*slot)),
            verdict: logged.verdicts.descriptors[index],
        }
    }

    /// Limits of the descriptor at `index`, candidates last.
    fn build_limit_records(self, selection: &'a Selection<'_>, index: usize) -> SmallVec<[LimitRecord<'a>; 1]> {
        let outcome = self.outcomes.get(index);
        let deciding = selection.limits.iter().enumerate();
        let deciding = deciding
            .map(|(at, selected)| to_limit_record(selection, selected, outcome.and_then(|it| it.limit_result(at))));
        let candidates = selection.candidates.iter().enumerate().map(|(at, selected)| {
            let charged = self.candidates.and_then(|charges| charges.result_of(CandidateRef { descriptor: index, at }));
            LimitRecord { candidate: true, ..to_limit_record(selection, selected, charged) }
        });
        deciding.chain(candidates).collect()
    }
}

fn to_block_record(block: &Block) -> BlockRecord<'_> {
    let key = match std::str::from_utf8(&block.key) {
        Ok(key) => key.into(),
        Err(_) => String::from_utf8_lossy(&block.key).into_owned().into(),
    };
    BlockRecord { key, until_us: block.until.as_micros(), reason: (&*block.reason).into() }
}

pub(super) fn to_rule_record(rule: &Rule) -> RuleRecord<'_> {
    let source = &*rule.location.file;
    // Resources of a control plane have no lines.
    let (file, line, resource) = match rule.location.line {
        0 => (None, None, Some(source.into())),
        line => (Some(source.into()), Some(line), None),
    };
    let plan = rule.plan.as_ref().map(|plan| (&*plan.name).into());
    RuleRecord { path: (&*rule.path).into(), file, line, resource, plan }
}

pub(super) fn to_limit_record<'a>(
    selection: &Selection<'_>,
    selected: &SelectedLimit<'a>,
    result: Option<&ChargeResult>,
) -> LimitRecord<'a> {
    let (limit, period) = (&selected.limit, selected.limit.period());
    let compiled = selection.rule.and_then(|rule| rule.limits.get(selected.index));
    LimitRecord {
        name: selected.name.into(),
        algorithm: limit.algorithm(),
        requests_per_unit: limit.requests_per_unit(),
        unit: period.unit(),
        unit_multiplier: Some(period.multiplier()).filter(|multiplier| *multiplier != 1),
        capacity: Some(limit.capacity()).filter(|capacity| *capacity != limit.requests_per_unit()),
        max_wait_us: limit.non_default_max_wait_us(),
        window: limit.calendar_windows().map(|window| window.spec().to_string().into()),
        ban: limit.ban().map(|ban| ban.to_string().into()),
        reservations: limit.reservations().map(|reservations| reservations.to_string().into()),
        takes_overflow: limit.chain_position().takes_overflow(),
        active: compiled.and_then(|compiled| compiled.active).map(|active| active.spec().to_string().into()),
        global: limit.global_scope().map(|scope| GlobalScopeRecord {
            reserve_milli_percent: scope.reserve_milli_percent,
            max_overshoot: scope.max_overshoot.milli_hits(limit.requests_per_unit()) / 1000,
            on_region_loss: scope.on_region_loss,
        }),
        shadow: selected.shadow,
        candidate: false,
        quota: selected.quota,
        result: result.map(to_result_record),
    }
}

const fn to_result_record(result: &ChargeResult) -> LimitResultRecord {
    let &ChargeResult {
        admitted,
        before,
        after,
        remaining,
        reset_us,
        retry_after_us,
        delay_us,
        ban_left_us: banned_us,
        ban_begun: _,
        slot,
        expired_seats,
        above_estimate,
    } = result;
    LimitResultRecord {
        admitted,
        before,
        after,
        remaining,
        reset_us,
        retry_after_us,
        delay_us,
        banned_us,
        slot,
        expired_seats,
        above_estimate,
    }
}

const fn decision_source(outcome: &DescriptorOutcome) -> Option<DecisionSource> {
    Some(match outcome {
        DescriptorOutcome::WithoutLimits => return None,
        DescriptorOutcome::Failed(_) => DecisionSource::Policy,
        DescriptorOutcome::Charged(StoreOutcome { decided_by, .. }) => match decided_by {
            DecidedBy::Store => DecisionSource::Counter,
            DecidedBy::OverLimitCache => DecisionSource::OverLimitCache,
            DecidedBy::Share => DecisionSource::Share,
            DecidedBy::Lease => DecisionSource::Lease,
            DecidedBy::Rlqs => DecisionSource::Rlqs,
        },
    })
}

/// Maximum number of descriptors in a line.
const MAX_DESCRIPTORS: usize = 16;
/// Maximum number of entries of a descriptor in a line.
const MAX_ENTRIES: usize = 16;
/// Maximum length of a domain, key or value in a line, in bytes.
const MAX_TEXT_BYTES: usize = 256;

impl ChargedRequest<'_, '_, '_> {
    /// Logs the decision as one line.
    #[inline(never)]
    fn log_debug_line(self, values: &ValueForm, decided: Result<&Decision<'_>, DecideError>) {
        let domain = lossy_text_start(self.selected.request.domain.as_bytes());
        let (verdict, delay_us) = (self.verdicts(decided).request.name(), decided.map_or(0, |it| it.delay_us));
        let error = decided.err().map(|error| error.name());
        let descriptors = self.describe_descriptors(values);
        tracing::debug!(domain, verdict, error, delay_us, descriptors, "decision");
    }

    /// Describes each descriptor: `user=alice -> shop.user (rules.yaml:3:17): 10 per minute by token_bucket: ok`.
    fn describe_descriptors(self, values: &ValueForm) -> String {
        let count = self.selected.request.descriptors.len();
        let shown = (0..count.min(MAX_DESCRIPTORS)).map(|index| self.describe_descriptor(index, values));
        let mut text = shown.collect::<Vec<_>>().join("; ");
        if count > MAX_DESCRIPTORS {
            // Writing to a String does not fail.
            let _ = write!(text, "; {} more", count - MAX_DESCRIPTORS);
        }
        text
    }

    fn describe_descriptor(self, index: usize, values: &ValueForm) -> String {
        let descriptor = &self.selected.request.descriptors[index];
        let is_hidden = self.rule_logging(index) == Some(RuleLogging::None);
        let values = if is_hidden { &ValueForm::Omitted } else { values };
        let entries = descriptor.entries.iter().take(MAX_ENTRIES).map(|entry| format_entry(entry, values));
        let mut text = entries.collect::<Vec<_>>().join(",");
        if descriptor.entries.len() > MAX_ENTRIES {
            text += ",...";
        }
        let is_release = self.selected.selections.get(index).is_some_and(Selection::is_release);
        match hits_to_number(descriptor.hits) {
            _ if is_release => text += " (release)",
            1 => {}
            hits => {
                let _ = write!(text, " ({hits} hits)");
            }
        }
        let (selection, outcome) = (self.selected.selections.get(index), self.outcomes.get(index));
        let Some(selection) = selection else { return text };
        let _ = match selection.rule {
            Some(compiled) => write!(text, " -> {} ({})", compiled.rule.path, compiled.rule.location),
            None if selection.limits.is_empty() => write!(text, " -> no limit"),
            None => write!(text, " -> limit of the request"),
        };
        for (at, limit) in selection.limits.iter().enumerate() {
            let result = outcome.and_then(|outcome| outcome.limit_result(at));
            let mode = if limit.shadow { ", in shadow mode" } else { "" };
            let _ = write!(text, ": {}{mode}", *limit.limit);
            if let Some(result) = result {
                let _ = write!(text, ", {} used, {} remaining", result.after, result.remaining);
                if result.ban_left_us > 0 {
                    let _ = write!(text, ", banned for {} ms", result.ban_left_us.div_ceil(1000));
                }
            }
        }
        if let Some(DescriptorOutcome::Failed(failed)) = outcome {
            let _ = write!(text, ": {}, policy {}", failed.error, failed.policies.strictest().name());
        }
        let _ = write!(text, ": {}", self.descriptor_verdict(index).name());
        text
    }
}

/// Returns the first [`MAX_TEXT_BYTES`] as text, with `...` if there are more; bytes that are not UTF-8 are replaced.
fn lossy_text_start(bytes: &[u8]) -> String {
    match bytes.get(..MAX_TEXT_BYTES) {
        Some(start) if bytes.len() > MAX_TEXT_BYTES => format!("{}...", String::from_utf8_lossy(start)),
        _ => String::from_utf8_lossy(bytes).into_owned(),
    }
}

fn format_entry(entry: &Entry<'_>, values: &ValueForm) -> String {
    let key = lossy_text_start(entry.key);
    match values {
        ValueForm::Plain => format!("{key}={}", lossy_text_start(entry.value)),
        ValueForm::Hashed(_) => {
            let EntryRecord { value_hash, .. } = values.build_entry_record(entry);
            format!("{key}=#{}", value_hash.as_deref().unwrap_or_default())
        }
        ValueForm::Omitted => key,
    }
}
