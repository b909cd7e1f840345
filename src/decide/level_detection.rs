//! Finds the levels of `notify` that charges reach, in the thread of the decision.
//!
//! Each charge finds the levels that its counter has reached, so a charge whose answer was lost hides none. Those that
//! this process has passed on in the period are left out. A rejection reaches the whole limit, also if its hits do not fit
//! into what is left. Peeks, refunds, settlements, and charges that the store failed to make reach nothing.
//!
//! Decides: when a charge reaches a level of `notify`; the period in which a level is told once.

use super::charged_request::ChargedRequest;
use super::decision_records::{to_limit_record, to_rule_record};
use super::key_text::key_text;
use super::log::record::{EntryRecord, ThresholdRecord};
use super::outcome::DescriptorOutcome;
use super::reached_levels::{CounterLevel, ReachedLevel, ReachedLevelSender};
use super::selection::SelectedLimit;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::{Algorithm, fixed_window};
use crate::limit::charge::ChargeResult;
use crate::limit::counter_path::CounterPath;
use crate::limit::request::Hits;
use crate::rules::rule::RuleLogging;
use crate::rules::rule::notify_levels::NotifyLevel;
use crate::rules::rule::set::CompiledRule;
use crate::store::charge::DecidedBy;

impl ChargedRequest<'_, '_, '_> {
    /// Passes on the levels of limits that the charges reached.
    pub(super) fn send_reached_levels(&self) {
        let Some(reached) = &self.selected.decider.reached_levels else { return };
        for (index, selection) in self.selected.selections.iter().enumerate() {
            if let Some(compiled) = selection.rule.filter(|compiled| compiled.notifies) {
                self.send_levels_of_descriptor(reached, index, compiled);
            }
        }
    }

    #[cold]
    fn send_levels_of_descriptor(&self, reached: &ReachedLevelSender, index: usize, compiled: &CompiledRule) {
        let (selection, descriptor) = (&self.selected.selections[index], &self.selected.request.descriptors[index]);
        let Some(DescriptorOutcome::Charged(outcome)) = self.outcomes.get(index) else { return };
        let is_counted = !matches!(outcome.decided_by, DecidedBy::OverLimitCache | DecidedBy::Rlqs);
        if !is_counted || !matches!(descriptor.hits, Hits::Charge(1..)) {
            return;
        }
        let path = selection.path_of_entries(self.selected.request.domain, &descriptor.entries);
        for (selected, result) in selection.limits.iter().zip(&outcome.results) {
            let capacity = selected.limit.capacity();
            let of_rule = compiled.limits.get(selected.index).and_then(|limit| limit.notify.as_ref());
            let Some(levels) = of_rule.filter(|_| capacity > 0) else { continue };
            // Hits that do not fit use the limit up, though they are not counted.
            let count = if result.admitted { result.after } else { result.after.max(capacity) };
            let until = end_of_period(&selected.limit, outcome.now);
            for level in levels.reached(capacity, count) {
                let known = CounterLevel { counter: selection.key ^ selected.counter().tag, level };
                if !reached.has_sent(&known, outcome.now) {
                    let id = identify(&path, &compiled.rule.limit_path(selected.index), level, until);
                    let found = LevelOfCharge { index, compiled, selected, result, level, until };
                    reached.send(known, outcome.now, || self.build_reached_level(id, &found));
                }
            }
        }
    }

    fn build_reached_level(&self, id: String, found: &LevelOfCharge<'_, '_>) -> ReachedLevel {
        let LevelOfCharge { index, compiled, selected, result, level, until } = *found;
        let decider = self.selected.decider;
        let (selection, descriptor) = (&self.selected.selections[index], &self.selected.request.descriptors[index]);
        let values = decider.log.as_ref().map_or(&decider.key_values, |log| &log.values);
        let is_hidden = compiled.rule.logging == Some(RuleLogging::None);
        let entry =
            |entry| if is_hidden { EntryRecord::without_value(entry) } else { values.build_entry_record(entry) };
        let (process, zone) = decider.log.as_ref().map_or(("", ""), |log| log.process_and_zone());
        let (level, mut line) = (level.to_string(), Vec::new());
        ThresholdRecord {
            process: process.into(),
            zone: zone.into(),
            time_us: self.selected.context.store.now.as_micros(),
            domain: self.selected.request.domain.into(),
            entries: descriptor.entries.iter().map(entry).collect(),
            rule: to_rule_record(&compiled.rule),
            limit: to_limit_record(selection, selected, Some(result)),
            level: (&*level).into(),
            period_end_us: until.as_micros(),
        }
        .append_line(&mut line);
        let path = selection.path_of_entries(self.selected.request.domain, &descriptor.entries);
        let key = if is_hidden { String::new() } else { format!(" for {}", key_text(&path, values)) };
        let (limit, shadow) = (&*selected.limit, if selected.shadow { ", in shadow mode" } else { "" });
        let rule = compiled.rule.limit_path(selected.index);
        let text = format!("{level} of {rule} reached{key}: {} of {}{shadow}", result.after, limit.capacity());
        ReachedLevel { id, until, line, text }
    }
}

/// A level that a charge on a limit reached.
struct LevelOfCharge<'a, 'r> {
    /// Index of the descriptor.
    index: usize,
    compiled: &'a CompiledRule,
    selected: &'a SelectedLimit<'r>,
    result: &'a ChargeResult,
    level: NotifyLevel,
    until: Time,
}

/// End of the period in which a level of a limit is told once: of the window, or of a period counted from 1970.
fn end_of_period(limit: &Limit, now: Time) -> Time {
    match limit.algorithm() {
        Algorithm::FixedWindow => fixed_window::window_bounds(limit, now).1,
        _ => Time::from_micros((now.as_micros() / limit.period_us() + 1) * limit.period_us()),
    }
}

/// Identity of a level of a key in a period, 128 bits: clients choose the values, and must not find equal ones.
fn identify(path: &CounterPath<'_>, limit_path: &str, level: NotifyLevel, until: Time) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    part(path.domain.as_bytes());
    for (index, entry) in path.entries.iter().enumerate() {
        let shared = path.shared.iter().find(|(at, _)| *at == index).map(|(_, pattern)| *pattern);
        part(entry.key);
        part(if shared.is_some() { b"shared" } else { b"value" });
        part(shared.unwrap_or(entry.value));
    }
    part(limit_path.as_bytes());
    part(&level.milli_percent.to_le_bytes());
    part(&until.as_micros().to_le_bytes());
    hasher.finalize().to_hex()[..32].to_owned()
}
