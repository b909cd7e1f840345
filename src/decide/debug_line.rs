//! A decision as one line of the process's log, at the level debug.
//!
//! Each descriptor is shown with the rule that matched it, its limits and its verdict. The line has the values of the
//! decision log's form, so that values that are hashed there are not readable here. Text of the request is bounded
//! here; the log escapes it.

use std::fmt::Write as _;

use super::decided_request::DecidedRequest;
use super::outcome::DescriptorOutcome;
use super::selection::Selection;
use crate::decide::decision::{DecideError, Decision};
use crate::decide::log::convert::hits_to_number;
use crate::decide::log::record::EntryRecord;
use crate::decide::log::value_form::ValueForm;
use crate::limit::request::Entry;
use crate::rules::rule::RuleLogging;

/// Maximum number of descriptors in a line.
const MAX_DESCRIPTORS: usize = 16;
/// Maximum number of entries of a descriptor in a line.
const MAX_ENTRIES: usize = 16;
/// Maximum length of a domain, key or value in a line, in bytes.
const MAX_TEXT_BYTES: usize = 256;

impl DecidedRequest<'_, '_, '_> {
    /// Logs the decision as one line.
    #[inline(never)]
    pub(super) fn log_debug_line(self, values: &ValueForm, decided: Result<&Decision<'_>, DecideError>) {
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
            None if selection.limits.is_empty() => write!(text, " -> no rule"),
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
