//! All files of traffic as one stream, ordered by time.
//!
//! Each file is decoded on a thread of its own, which sorts its requests, in batches over a bounded channel. The heads of
//! all files are compared by time, process and number.
//!
//! Decides: in which order the requests of several logs are replayed, and how many logs there may be.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use super::log_completeness::SequenceCheck;
use super::source::{SourceError, SourceOptions, SourceSummary, TrafficEvent, TrafficLocation, TrafficSource};
use crate::base::clock::Time;
use crate::base::threads::thread_cpu_time;

/// Events of a batch.
const EVENTS_PER_BATCH: usize = 1024;
/// Batches of a file that wait to be merged.
const MAX_WAITING_BATCHES: usize = 4;
/// Maximum number of files.
pub const MAX_TRAFFIC_FILES: usize = 1000;

/// Message of a decoding thread.
enum DecoderMessage {
    Batch(Vec<TrafficEvent>),
    End { summary: SourceSummary, cpu_time: Duration },
    Failed(SourceError),
}

/// All traffic, in order.
pub struct MergedTraffic {
    files: Vec<FileBeingDecoded>,
    /// Next event of each file but the current one; unused for a single file.
    heads: BinaryHeap<Reverse<NextEventOfFile>>,
    /// File of the last event.
    current: Option<usize>,
    sequences: SequenceCheck,
    /// Properties of all files that ended, summed up.
    summary: SourceSummary,
    /// CPU time of decoding the files that ended.
    pub decode_time: Duration,
}

/// A file that is decoded.
struct FileBeingDecoded {
    batches: Receiver<DecoderMessage>,
    batch: Vec<TrafficEvent>,
    /// Index of the next event in the batch.
    next: usize,
    /// Order of the last event.
    last: EventOrder,
}

/// Order of an event among all files.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct EventOrder {
    at: Time,
    process: Arc<str>,
    seq: u64,
}

/// Position of an event in the batch of a file.
struct EventPosition {
    file: usize,
    index: usize,
}

/// Order of the next event of a file, in the heap of all files.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NextEventOfFile {
    order: EventOrder,
    file: usize,
}

impl MergedTraffic {
    /// Opens all files and begins to decode them. Adds the bytes that are read to `bytes`.
    ///
    /// # Errors
    /// A file cannot be opened or read.
    pub fn open(
        locations: &[TrafficLocation],
        options: &SourceOptions,
        bytes: &Arc<AtomicU64>,
    ) -> Result<Self, SourceError> {
        let open = |location: &TrafficLocation| TrafficSource::open(location, options, Arc::clone(bytes));
        let sources: Vec<TrafficSource> = locations.iter().map(open).collect::<Result<_, _>>()?;
        let files = sources.into_iter().map(|source| {
            let (sender, batches) = sync_channel(MAX_WAITING_BATCHES);
            // The thread ends when its file does, or when the receiver is dropped.
            thread::spawn(move || decode_file(source, &sender));
            FileBeingDecoded { batches, batch: Vec::new(), next: 0, last: EventOrder::default() }
        });
        Ok(Self {
            files: files.collect(),
            heads: BinaryHeap::new(),
            current: None,
            sequences: SequenceCheck::default(),
            summary: SourceSummary::default(),
            decode_time: Duration::ZERO,
        })
    }

    /// Properties of the files, complete at their end.
    pub fn summary(&self) -> SourceSummary {
        SourceSummary { sequences: self.sequences.findings(), ..self.summary.clone() }
    }

    /// Returns the next event of all files, without records that occurred before; `None` at the end.
    ///
    /// # Errors
    /// A file cannot be read further.
    pub fn next_event(&mut self) -> Result<Option<&TrafficEvent>, SourceError> {
        loop {
            let Some(EventPosition { file, index }) = self.advance_to_next_event()? else { return Ok(None) };
            let is_new = match &self.files[file].batch[index] {
                TrafficEvent::Request(request) => self.sequences.add_record(request),
                TrafficEvent::Header(header) => {
                    if header.is_start {
                        self.sequences.note_process_start(&header.process);
                    }
                    true
                }
                TrafficEvent::Dropped(_) => true,
            };
            if is_new {
                return Ok(Some(&self.files[file].batch[index]));
            }
        }
    }

    /// Moves past the last event, and returns the position of the next one of all files.
    fn advance_to_next_event(&mut self) -> Result<Option<EventPosition>, SourceError> {
        match self.current {
            Some(file) => {
                self.files[file].next += 1;
                self.push_next_event(file)?;
            }
            None => (0..self.files.len()).try_for_each(|file| self.push_next_event(file))?,
        }
        let file = if self.files.len() == 1 { 0 } else { self.heads.pop().map_or(0, |Reverse(head)| head.file) };
        self.current = Some(file);
        let FileBeingDecoded { batch, next, .. } = &self.files[file];
        Ok((*next < batch.len()).then_some(EventPosition { file, index: *next }))
    }

    /// Puts the next event of a file into the heap of heads; a single file needs no heap.
    fn push_next_event(&mut self, file: usize) -> Result<(), SourceError> {
        if !self.wait_for_event(file)? || self.files.len() == 1 {
            return Ok(());
        }
        let open = &mut self.files[file];
        let order = match &open.batch[open.next] {
            TrafficEvent::Request(request) => {
                EventOrder { at: request.order_time(), process: Arc::clone(&request.process), seq: request.seq }
            }
            // Has no place of its own among other files: it goes right after the event before it in its file.
            TrafficEvent::Header(_) | TrafficEvent::Dropped(_) => open.last.clone(),
        };
        open.last = order.clone();
        self.heads.push(Reverse(NextEventOfFile { order, file }));
        Ok(())
    }

    /// Waits for the next event of a file; false at its end.
    fn wait_for_event(&mut self, file: usize) -> Result<bool, SourceError> {
        let open = &mut self.files[file];
        while open.next >= open.batch.len() {
            match open.batches.recv() {
                Ok(DecoderMessage::Batch(batch)) => (open.batch, open.next) = (batch, 0),
                Ok(DecoderMessage::End { summary, cpu_time }) => {
                    self.summary.add_summary(summary);
                    self.decode_time += cpu_time;
                }
                Ok(DecoderMessage::Failed(error)) => return Err(error),
                // Every thread sends an end or an error last.
                Err(_) => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// Decodes a file to its end, or until nothing receives its batches.
fn decode_file(mut source: TrafficSource, sender: &SyncSender<DecoderMessage>) {
    let mut batch = Vec::with_capacity(EVENTS_PER_BATCH);
    loop {
        match source.next_event() {
            Ok(Some(event)) => {
                batch.push(event);
                if batch.len() == EVENTS_PER_BATCH {
                    source.renew_shared_arcs();
                    let full = std::mem::replace(&mut batch, Vec::with_capacity(EVENTS_PER_BATCH));
                    if sender.send(DecoderMessage::Batch(full)).is_err() {
                        return;
                    }
                }
            }
            Ok(None) => {
                let _ = sender.send(DecoderMessage::Batch(batch));
                let _ = sender.send(DecoderMessage::End { summary: source.summary(), cpu_time: thread_cpu_time() });
                return;
            }
            Err(error) => {
                let _ = sender.send(DecoderMessage::Batch(batch));
                let _ = sender.send(DecoderMessage::Failed(error));
                return;
            }
        }
    }
}
