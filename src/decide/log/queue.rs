//! Bounded queue of encoded records, between the decisions and the writer of one sink.
//!
//! A decision appends its line under a lock that is held for a copy of the line, and never for I/O; a full queue drops
//! the line and counts it. Lines wait in chunks, so that appending never moves those that wait. The writer takes all
//! chunks at once. It is woken for the first line and for many lines; in between lines gather for a
//! moment, so that most decisions wake no thread.
//!
//! Decides: what a full queue drops (a destination that is too slow or closed); batches of a sink.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::header::HeaderRecord;
use crate::base::sharded::lock_ignoring_poison;

/// Size of a chunk in bytes; a longer line has its own.
const CHUNK_BYTES: usize = 32 * 1024;
/// Empty chunks that are kept for reuse.
const MAX_SPARE_CHUNKS: usize = 16;
/// Size of waiting lines at which the writer is woken at once, in bytes: they are still in the processor's cache.
const WRITER_WAKE_BYTES: usize = 256 * 1024;
/// Headers that wait; the oldest is dropped when there are more.
const MAX_WAITING_HEADERS: usize = 4;

/// Queue of one sink.
#[derive(Debug)]
pub struct RecordQueue {
    state: Mutex<WaitingRecords>,
    /// Wakes the writer.
    filled: Condvar,
    max_bytes: usize,
    /// Size of waiting lines at which the writer is woken at once, in bytes.
    wake_bytes: usize,
    counters: RecordCounters,
}

#[derive(Debug, Default)]
struct WaitingRecords {
    headers: VecDeque<Arc<HeaderRecord>>,
    /// Whole lines; none is empty.
    chunks: Vec<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    bytes: usize,
    /// Lines dropped since the last batch.
    dropped: u64,
    is_closed: bool,
}

impl WaitingRecords {
    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.headers.is_empty() && self.dropped == 0
    }
}

/// Number of records since the start, by outcome.
#[derive(Debug, Default)]
pub struct RecordCounters {
    /// Written to the sink.
    pub written: AtomicU64,
    /// Dropped, because the queue was full.
    pub dropped: AtomicU64,
    /// Lost, because the sink returned an error.
    pub failed: AtomicU64,
}

/// Records that a sink did not take.
#[derive(Debug)]
pub(super) struct LostRecords {
    /// Number of records, at least 1.
    pub(super) count: u64,
    /// Reason, without secrets.
    pub(super) error: io::Error,
}

impl LostRecords {
    /// Counts all of `lines` as lost.
    pub(super) fn from_lost_lines(lines: &[u8], error: io::Error) -> Self {
        Self { count: memchr::memchr_iter(b'\n', lines).count() as u64, error }
    }
}

/// Contents of a queue, for its writer.
#[derive(Debug, Default)]
pub struct Batch {
    /// Headers, oldest first. They precede the lines.
    pub headers: VecDeque<Arc<HeaderRecord>>,
    /// Lines, each chunk ending with a whole one.
    pub chunks: Vec<Vec<u8>>,
    /// Lines dropped since the last batch.
    pub dropped: u64,
}

impl RecordQueue {
    /// Creates an empty queue for `max_bytes` of lines.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            state: Mutex::default(),
            filled: Condvar::new(),
            max_bytes,
            wake_bytes: WRITER_WAKE_BYTES.min(max_bytes / 2),
            counters: RecordCounters::default(),
        }
    }

    /// Counters of the sink's records.
    pub const fn counters(&self) -> &RecordCounters {
        &self.counters
    }

    /// Appends a line, or counts it as dropped if the queue is full or closed.
    pub fn push_line(&self, line: &[u8]) {
        let mut state = self.lock();
        let was_empty = state.is_empty();
        if state.is_closed || state.bytes + line.len() > self.max_bytes {
            state.dropped += 1;
            drop(state);
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
            if was_empty {
                self.filled.notify_one();
            }
            return;
        }
        let had_enough = state.bytes >= self.wake_bytes;
        match state.chunks.last_mut() {
            Some(last) if last.len() + line.len() <= CHUNK_BYTES => last.extend_from_slice(line),
            _ => {
                let mut chunk = state.spare.pop().unwrap_or_else(|| Vec::with_capacity(CHUNK_BYTES));
                chunk.extend_from_slice(line);
                state.chunks.push(chunk);
            }
        }
        state.bytes += line.len();
        let has_enough = state.bytes >= self.wake_bytes;
        drop(state);
        if was_empty || has_enough && !had_enough {
            self.filled.notify_one();
        }
    }

    /// Adds a header, which precedes the lines that wait.
    pub fn push_header(&self, header: Arc<HeaderRecord>) {
        let mut state = self.lock();
        if state.headers.len() == MAX_WAITING_HEADERS {
            state.headers.pop_front();
        }
        state.headers.push_back(header);
        drop(state);
        self.filled.notify_one();
    }

    /// Waits for lines, and then for more of them: `gather` long, or until there are many. Returns `None` once
    /// the queue is closed and empty.
    pub fn take_batch(&self, gather: Duration) -> Option<Batch> {
        let is_empty = |state: &mut WaitingRecords| state.is_empty() && !state.is_closed;
        let mut state = self.filled.wait_while(self.lock(), is_empty).unwrap_or_else(PoisonError::into_inner);
        if state.is_empty() {
            return None;
        }
        let until = Instant::now() + gather;
        let gathers = |state: &mut WaitingRecords| state.bytes < self.wake_bytes && !state.is_closed;
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.filled.wait_timeout_while(state, left, gathers);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.bytes = 0;
        Some(Batch {
            headers: std::mem::take(&mut state.headers),
            chunks: std::mem::take(&mut state.chunks),
            dropped: std::mem::take(&mut state.dropped),
        })
    }

    /// Takes back chunks that were written, for reuse.
    pub fn reuse_chunks(&self, chunks: impl Iterator<Item = Vec<u8>>) {
        let mut state = self.lock();
        for mut chunk in chunks.filter(|chunk| chunk.capacity() == CHUNK_BYTES).take(MAX_SPARE_CHUNKS) {
            if state.spare.len() < MAX_SPARE_CHUNKS {
                chunk.clear();
                state.spare.push(chunk);
            }
        }
    }

    /// Ends the queue: its writer writes what waits, and ends.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.filled.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, WaitingRecords> {
        lock_ignoring_poison(&self.state)
    }
}
