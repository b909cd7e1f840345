//! Rule sets and settings that the headers of the logs tell.

use std::collections::HashMap;

use serde::Serialize;

use super::time_range::time_text;
use crate::decide::log::header::{HeaderEvent, HeaderRecord, SettingsRecord};

/// Number of changes that are kept.
const MAX_CHANGES: usize = 20;
/// Number of processes whose rules are compared.
const MAX_PROCESSES: usize = 10_000;

/// Start of a process, or another rule set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleChange {
    /// Time in microseconds since the Unix epoch.
    pub time_us: u64,
    /// The same as RFC 3339.
    pub time: String,
    /// Reason for the header.
    pub event: HeaderEvent,
    /// Id of the process.
    pub process: String,
    /// Id of the rule set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rules: Option<String>,
    /// Version that the control plane gives the rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// Facts from headers.
#[derive(Debug, Default)]
pub(super) struct HeaderFacts {
    /// Rule set of each process.
    rules: HashMap<String, String>,
    /// Changes within the range.
    pub(super) changes: Vec<RuleChange>,
    /// Number of changes that were left out.
    pub(super) more_changes: u64,
    /// Settings of the last header.
    pub(super) settings: Option<SettingsRecord>,
}

impl HeaderFacts {
    /// Takes note of a header.
    pub(super) fn add(&mut self, header: &HeaderRecord, is_in_range: bool) {
        self.settings = Some(header.settings.clone());
        let id = header.rules.as_ref().map(|rules| rules.id.clone());
        let before = id.clone().and_then(|id| {
            let has_room = self.rules.len() < MAX_PROCESSES || self.rules.contains_key(&header.process);
            has_room.then(|| self.rules.insert(header.process.clone(), id)).flatten()
        });
        let is_change = header.event == HeaderEvent::Start || header.event == HeaderEvent::Reload && before != id;
        if !is_change || !is_in_range {
            return;
        }
        if self.changes.len() == MAX_CHANGES {
            self.more_changes += 1;
            return;
        }
        self.changes.push(RuleChange {
            time_us: header.time_us,
            time: time_text(header.time_us),
            event: header.event,
            process: header.process.clone(),
            rules: id,
            version: header.rules.as_ref().and_then(|rules| rules.version.clone()),
        });
    }

    /// Forgets the changes: the range moved.
    pub(super) fn clear_changes(&mut self) {
        self.changes.clear();
        self.more_changes = 0;
    }
}
