//! All files of traffic as one stream, ordered by time.
//!
//! Each file is decoded on a thread of its own, in batches over a bounded channel. A file keeps its own order, because
//! a log has the order in which a process decided; the heads of all files are compared by time, process and number.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use super::source::{SourceError, SourceOptions, SourceSummary, TrafficEvent, TrafficSource};
use crate::clock::Time;
use crate::thread_time::thread_cpu_time;

/// Events of a batch.
const BATCH_EVENTS: usize = 1024;
/// Batches of a file that wait to be merged.
const WAITING_BATCHES: usize = 4;
/// Maximum number of files.
pub const MAX_FILES: usize = 1000;

/// Message of a decoding thread.
enum Decoded {
    Batch(Vec<TrafficEvent>),
    End { summary: SourceSummary, cpu_time: Duration },
    Failed(SourceError),
}

/// All traffic, in order.
pub struct MergedTraffic {
    files: Vec<OpenFile>,
    heads: BinaryHeap<Reverse<FileHead>>,
    /// Properties of all files that ended, summed up.
    pub summary: SourceSummary,
    /// CPU time of decoding the files that ended.
    pub decode_time: Duration,
    started: bool,
}

/// A file that is decoded.
struct OpenFile {
    batches: Receiver<Decoded>,
    batch: std::vec::IntoIter<TrafficEvent>,
    /// Event to be merged next.
    next: Option<TrafficEvent>,
    /// Time, process and number of the last event.
    last: EventOrder,
}

/// Order of an event among all files.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct EventOrder {
    at: Time,
    process: Arc<str>,
    seq: u64,
}

/// Next event of a file.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FileHead {
    order: EventOrder,
    file: usize,
}

impl MergedTraffic {
    /// Opens all files and begins to decode them. Adds the bytes that are read to `bytes`.
    ///
    /// # Errors
    /// A file cannot be opened or read.
    pub fn open(paths: &[PathBuf], options: &SourceOptions, bytes: &Arc<AtomicU64>) -> Result<Self, SourceError> {
        let open = |path: &PathBuf| TrafficSource::open(path, options, Arc::clone(bytes));
        let sources: Vec<TrafficSource> = paths.iter().map(open).collect::<Result<_, _>>()?;
        let files = sources.into_iter().map(|source| {
            let (sender, batches) = sync_channel(WAITING_BATCHES);
            // The thread ends when its file does, or when the receiver is dropped.
            thread::spawn(move || decode(source, &sender));
            OpenFile { batches, batch: Vec::new().into_iter(), next: None, last: EventOrder::default() }
        });
        Ok(Self {
            files: files.collect(),
            heads: BinaryHeap::new(),
            summary: SourceSummary::default(),
            decode_time: Duration::ZERO,
            started: false,
        })
    }

    /// Returns the next event of all files; `None` at the end.
    ///
    /// # Errors
    /// A file cannot be read further.
    pub fn next_event(&mut self) -> Result<Option<TrafficEvent>, SourceError> {
        if !self.started {
            self.started = true;
            for file in 0..self.files.len() {
                self.advance(file)?;
            }
        }
        if let [only] = &mut *self.files {
            // One file needs no order.
            if let Some(event) = only.next.take().or_else(|| only.batch.next()) {
                return Ok(Some(event));
            }
            self.heads.clear();
            self.advance(0)?;
            return Ok(self.files[0].next.take());
        }
        let Some(Reverse(FileHead { file, .. })) = self.heads.pop() else { return Ok(None) };
        let event = self.files[file].next.take();
        self.advance(file)?;
        Ok(event)
    }

    /// Takes the next event of a file.
    fn advance(&mut self, file: usize) -> Result<(), SourceError> {
        let open = &mut self.files[file];
        let event = loop {
            if let Some(event) = open.batch.next() {
                break event;
            }
            match open.batches.recv() {
                Ok(Decoded::Batch(batch)) => open.batch = batch.into_iter(),
                Ok(Decoded::End { summary, cpu_time }) => {
                    self.summary.skipped += summary.skipped;
                    self.summary.hidden += summary.hidden;
                    self.summary.late += summary.late;
                    self.summary.truncated |= summary.truncated;
                    self.decode_time += cpu_time;
                    return Ok(());
                }
                Ok(Decoded::Failed(error)) => return Err(error),
                // Every thread sends an end or an error last.
                Err(_) => return Ok(()),
            }
        };
        let order = match &event {
            TrafficEvent::Request(request) => {
                EventOrder { at: request.order_time(), process: Arc::clone(&request.process), seq: request.seq }
            }
            TrafficEvent::Header(header) => {
                EventOrder { at: header.at, process: Arc::clone(&header.process), seq: header.seq }
            }
            TrafficEvent::Dropped(_) => open.last.clone(),
        };
        open.last = order.clone();
        open.next = Some(event);
        self.heads.push(Reverse(FileHead { order, file }));
        Ok(())
    }
}

/// Decodes a file to its end, or until nothing receives its batches.
fn decode(mut source: TrafficSource, sender: &SyncSender<Decoded>) {
    let mut batch = Vec::with_capacity(BATCH_EVENTS);
    loop {
        match source.next_event() {
            Ok(Some(event)) => {
                batch.push(event);
                if batch.len() == BATCH_EVENTS {
                    source.renew_shared_text();
                    let full = std::mem::replace(&mut batch, Vec::with_capacity(BATCH_EVENTS));
                    if sender.send(Decoded::Batch(full)).is_err() {
                        return;
                    }
                }
            }
            Ok(None) => {
                let _ = sender.send(Decoded::Batch(batch));
                let _ = sender.send(Decoded::End { summary: source.summary(), cpu_time: thread_cpu_time() });
                return;
            }
            Err(error) => {
                let _ = sender.send(Decoded::Batch(batch));
                let _ = sender.send(Decoded::Failed(error));
                return;
            }
        }
    }
}
