//! Check of a decision log's completeness: records of each process by their numbers.
//!
//! A process numbers its records from 1. A missing number is a lost record, or a file that was left out. A
//! repeated number is a file that was given twice; the record is left out. The numbers that occurred are kept as ranges, so
//! a complete log takes one range.
//!
//! Decides: missing and repeated records of a log.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::recorded_request::RecordedRequest;

/// Maximum number of ranges, of all processes; they take about 64 MiB. Further numbers are not checked.
const MAX_RANGES: usize = 1 << 20;
/// Maximum number of processes that are checked.
const MAX_CHECKED_PROCESSES: usize = 10_000;

/// Records of all processes by their numbers.
#[derive(Debug, Default)]
pub(super) struct SequenceCheck {
    processes: HashMap<Arc<str>, ProcessSequence>,
    ranges: usize,
}

/// Irregularities in the records of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceFindings {
    /// Id of the process.
    pub process: Arc<str>,
    /// Numbers that are absent before the last.
    pub missing: u64,
    /// First gap.
    pub first_gap: Option<RangeInclusive<u64>>,
    /// Records that occurred before, and were left out.
    pub repeated: u64,
}

#[derive(Debug, Default)]
struct ProcessSequence {
    /// Last number of each range, by its first.
    ranges: BTreeMap<u64, u64>,
    /// Lowest number that is expected; `None` if the log does not have the start of the process.
    first: Option<u64>,
    repeated: u64,
    /// There was no room for a number, so that gaps are not known.
    is_unknown: bool,
}

impl SequenceCheck {
    /// Notes the start of a process.
    pub(super) fn note_process_start(&mut self, process: &Arc<str>) {
        if let Some(process) = self.find_or_add_process(process) {
            process.first = Some(1);
        }
    }

    /// Notes a record. Returns false if it occurred before.
    pub(super) fn add_record(&mut self, record: &RecordedRequest) -> bool {
        let has_room = self.ranges < MAX_RANGES;
        // Rows of other formats have no numbers.
        let Some(process) = self.find_or_add_process(&record.process).filter(|_| record.seq > 0) else { return true };
        let before = process.ranges.len();
        let is_new = process.add_number(record.seq, has_room);
        let after = process.ranges.len();
        self.ranges = self.ranges + after - before;
        is_new
    }

    /// Irregularities of all processes that have any, in the order of their ids.
    pub(super) fn findings(&self) -> Vec<SequenceFindings> {
        let mut found: Vec<_> = self.processes.iter().map(|(id, process)| process.findings(id)).collect();
        found.retain(|found| found.missing > 0 || found.repeated > 0);
        found.sort_unstable_by(|one, other| one.process.cmp(&other.process));
        found
    }

    fn find_or_add_process(&mut self, id: &Arc<str>) -> Option<&mut ProcessSequence> {
        if self.processes.len() == MAX_CHECKED_PROCESSES || self.processes.contains_key(id) {
            return self.processes.get_mut(id);
        }
        Some(self.processes.entry(Arc::clone(id)).or_default())
    }
}

impl ProcessSequence {
    /// Adds a number, also one between others. Returns false if it occurred before.
    fn add_number(&mut self, number: u64, has_room: bool) -> bool {
        let below = self.ranges.range(..=number).next_back().map(|(from, to)| (*from, *to));
        if below.is_some_and(|(_, to)| number <= to) {
            self.repeated += 1;
            return false;
        }
        let from = below.filter(|(_, to)| to + 1 == number).map(|(from, _)| from);
        let to = self.ranges.remove(&number.saturating_add(1));
        if from.is_some() || to.is_some() || has_room {
            self.ranges.insert(from.unwrap_or(number), to.unwrap_or(number));
        } else {
            self.is_unknown = true;
        }
        true
    }

    fn findings(&self, id: &Arc<str>) -> SequenceFindings {
        let first = self.first.or_else(|| self.ranges.keys().next().copied()).unwrap_or(0);
        let starts = self.ranges.keys().copied();
        let ends = std::iter::once(first.saturating_sub(1)).chain(self.ranges.values().copied());
        let gaps = ends.zip(starts).filter(|(end, start)| end + 1 < *start && !self.is_unknown);
        let gaps: Vec<_> = gaps.map(|(end, start)| end + 1..=start - 1).collect();
        SequenceFindings {
            process: Arc::clone(id),
            missing: gaps.iter().map(|gap| gap.end() - gap.start() + 1).sum(),
            first_gap: gaps.into_iter().next(),
            repeated: self.repeated,
        }
    }
}
