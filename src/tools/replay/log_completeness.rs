//! Check of a decision log's completeness: records of each process by their numbers.
//!
//! A process numbers its records from 1. A number that is absent is a lost record, or in a file that was left out. One
//! that occurs again is in a file given twice; the record is left out. A low one after high ones, at an earlier time,
//! is in a log whose parts are in the wrong order. Numbers are bits in chunks, so a complete log takes a bit per
//! record.
//!
//! Decides: missing, repeated and late records of a log.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::recorded_request::RecordedRequest;
use crate::base::clock::Time;

/// Record numbers in a chunk, one bit each.
const NUMBERS_PER_CHUNK: u64 = 4096;
/// 64-bit words in a chunk.
const WORDS_PER_CHUNK: usize = (NUMBERS_PER_CHUNK / 64) as usize;
/// Maximum number of chunks, of all processes; they take 128 MiB.
const MAX_CHUNKS: usize = 1 << 18;
/// Maximum number of processes that are checked.
const MAX_CHECKED_PROCESSES: usize = 10_000;
/// Time by which records that were written at once may be in another order, in microseconds.
const ORDER_TOLERANCE_US: u64 = 50_000;

/// Records of all processes by their numbers.
#[derive(Debug, Default)]
pub(super) struct SequenceCheck {
    processes: Vec<ProcessSequence>,
    by_id: HashMap<Arc<str>, usize>,
    /// Process of the last record.
    current: Option<usize>,
    chunks: usize,
}

/// Irregularities in the records of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceFindings {
    /// Id of the process.
    pub process: Arc<str>,
    /// Numbers that are absent between the first and the last.
    pub missing: u64,
    /// First and last number of the first gap.
    pub first_gap: Option<RecordNumberSpan>,
    /// Records that occurred before, and were left out.
    pub repeated: u64,
    /// Records that come after later ones.
    pub late: u64,
    /// The first of these, and the highest number before it.
    pub first_late: Option<RecordNumberSpan>,
}

/// Range of record numbers, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordNumberSpan {
    /// The first.
    pub from: u64,
    /// The last.
    pub to: u64,
}

#[derive(Debug, Default)]
struct ProcessSequence {
    id: Arc<str>,
    chunks: BTreeMap<u64, Box<[u64; WORDS_PER_CHUNK]>>,
    /// Lowest and highest number; `None` before the first record.
    bounds: Option<RecordNumberSpan>,
    /// Time of the highest number.
    highest_at: Time,
    distinct: u64,
    /// The log has the start of the process, so that its numbers begin with 1.
    has_start: bool,
    /// There was no memory for a number.
    is_unknown: bool,
    repeated: u64,
    late: u64,
    first_late: Option<RecordNumberSpan>,
}

impl SequenceCheck {
    /// Notes the start of a process.
    pub(super) fn note_process_start(&mut self, process: &Arc<str>) {
        if let Some(index) = self.find_or_add_process(process) {
            self.processes[index].has_start = true;
        }
    }

    /// Notes a record. Returns false if it occurred before.
    pub(super) fn add_record(&mut self, record: &RecordedRequest) -> bool {
        // Rows of other formats have no numbers.
        if record.seq == 0 {
            return true;
        }
        let index = match self.current {
            Some(current) if self.processes[current].id == record.process => current,
            _ => match self.find_or_add_process(&record.process) {
                Some(index) => index,
                None => return true,
            },
        };
        self.current = Some(index);
        let process = &mut self.processes[index];
        let has_room = self.chunks < MAX_CHUNKS;
        let added = process.add_number(record.seq, has_room);
        self.chunks += usize::from(added.is_new_chunk);
        if added.is_new {
            process.track_record_order(record.seq, record.order_time());
        } else {
            process.repeated += 1;
        }
        added.is_new
    }

    /// Irregularities of all processes that have any, in the order of their first records.
    pub(super) fn findings(&self) -> Vec<SequenceFindings> {
        self.processes.iter().map(ProcessSequence::findings).filter(|found| !found.is_regular()).collect()
    }

    fn find_or_add_process(&mut self, id: &Arc<str>) -> Option<usize> {
        if let Some(index) = self.by_id.get(id) {
            return Some(*index);
        }
        if self.processes.len() == MAX_CHECKED_PROCESSES {
            return None;
        }
        self.processes.push(ProcessSequence { id: Arc::clone(id), ..ProcessSequence::default() });
        self.by_id.insert(Arc::clone(id), self.processes.len() - 1);
        Some(self.processes.len() - 1)
    }
}

impl SequenceFindings {
    const fn is_regular(&self) -> bool {
        self.missing == 0 && self.repeated == 0 && self.late == 0
    }
}

/// What adding a record number changed.
struct AddNumberOutcome {
    /// The number did not occur before.
    is_new: bool,
    is_new_chunk: bool,
}

impl ProcessSequence {
    fn add_number(&mut self, number: u64, has_room: bool) -> AddNumberOutcome {
        let (chunk, bit) = (number / NUMBERS_PER_CHUNK, number % NUMBERS_PER_CHUNK);
        let is_new_chunk = !self.chunks.contains_key(&chunk);
        if is_new_chunk && !has_room {
            self.is_unknown = true;
            return AddNumberOutcome { is_new: true, is_new_chunk: false };
        }
        let words = self.chunks.entry(chunk).or_insert_with(|| Box::new([0; WORDS_PER_CHUNK]));
        let word = &mut words[(bit / 64) as usize];
        let is_new = *word & (1 << (bit % 64)) == 0;
        *word |= 1 << (bit % 64);
        self.distinct += u64::from(is_new);
        AddNumberOutcome { is_new, is_new_chunk }
    }

    /// Counts a record as late if it comes after later ones; extends the bounds.
    fn track_record_order(&mut self, number: u64, at: Time) {
        let Some(bounds) = &mut self.bounds else {
            self.bounds = Some(RecordNumberSpan { from: number, to: number });
            self.highest_at = at;
            return;
        };
        if number > bounds.to {
            bounds.to = number;
            self.highest_at = at;
        } else if self.highest_at.since_us(at) > ORDER_TOLERANCE_US {
            self.late += 1;
            self.first_late.get_or_insert(RecordNumberSpan { from: number, to: bounds.to });
        }
        bounds.from = bounds.from.min(number);
    }

    fn findings(&self) -> SequenceFindings {
        let missing = match self.bounds {
            Some(RecordNumberSpan { from, to }) if !self.is_unknown => {
                let first = if self.has_start { 1 } else { from };
                (to - first + 1).saturating_sub(self.distinct)
            }
            _ => 0,
        };
        SequenceFindings {
            process: Arc::clone(&self.id),
            missing,
            first_gap: (missing > 0).then(|| self.find_first_gap()),
            repeated: self.repeated,
            late: self.late,
            first_late: self.first_late,
        }
    }

    /// Finds the first gap; there must be one.
    fn find_first_gap(&self) -> RecordNumberSpan {
        let Some(RecordNumberSpan { from, to }) = self.bounds else { return RecordNumberSpan { from: 0, to: 0 } };
        let first = if self.has_start { 1 } else { from };
        let start = self.find_first_occurring_or_missing(first, to, false);
        RecordNumberSpan { from: start, to: self.find_first_occurring_or_missing(start, to, true) - 1 }
    }

    /// First number of `from..=to` that occurred, or that did not; `to` if there is none.
    fn find_first_occurring_or_missing(&self, from: u64, to: u64, occurred: bool) -> u64 {
        let mut number = from;
        while number < to {
            let chunk = number / NUMBERS_PER_CHUNK;
            let Some(words) = self.chunks.get(&chunk) else {
                if !occurred {
                    return number;
                }
                let Some((next, _)) = self.chunks.range(chunk..).next() else { return to };
                number = next * NUMBERS_PER_CHUNK;
                continue;
            };
            let bit = number % NUMBERS_PER_CHUNK;
            let is_set = words[(bit / 64) as usize] & (1 << (bit % 64)) != 0;
            if is_set == occurred {
                return number;
            }
            number += 1;
        }
        to
    }
}
