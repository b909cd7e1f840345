//! Writer of one sink: a thread that takes records from their queue and writes them.
//!
//! It alone waits for the sink. Records that the queue dropped, and those that the sink did not take, are counted, and
//! told in the log itself once it can be written again. A sink that never returns keeps its thread, and nothing else:
//! a shutdown waits for it for a bounded time.
//!
//! Decides: failed writes of a sink, their log line, and the record of what was dropped (`"type":"dropped"`).

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;

use super::queue::{Batch, LostRecords, RecordQueue};
use super::record::{DropReason, DroppedCountRecord};
use super::sink::{self, Sink};
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::text::escape_unprintable_json_lines;
use crate::base::threads;
use crate::settings::decision_log::{DecisionLogSettings, SinkSettings};
use crate::telemetry::log_throttle::LogThrottle;

/// Handle to the writer of a sink.
#[derive(Debug)]
pub(super) struct SinkWriterHandle {
    pub(super) name: &'static str,
    pub(super) queue: Arc<RecordQueue>,
    /// Receives an error when the thread has ended.
    ended: Mutex<mpsc::Receiver<()>>,
}

impl SinkWriterHandle {
    /// Starts the writer of a sink.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(of: &SinkSettings, settings: &DecisionLogSettings, process: &str) -> io::Result<Self> {
        let queue = Arc::new(RecordQueue::new(settings.queue_bytes));
        let (alive, ended) = mpsc::channel();
        let mut writer = SinkWriter {
            sink: Sink::new(of, settings)?,
            name: sink::sink_name(of),
            process: process.to_owned(),
            untold_failures: 0,
            untold_drops: 0,
            throttle: LogThrottle::every(Duration::from_secs(60)),
        };
        let own_queue = Arc::clone(&queue);
        thread::Builder::new().name("decision-log".to_owned()).spawn(move || {
            threads::lower_thread_priority();
            writer.write_until_closed(&own_queue);
            drop(alive);
        })?;
        Ok(Self { name: sink::sink_name(of), queue, ended: Mutex::new(ended) })
    }

    /// Waits until the writer of a closed queue has written everything; false if it has not by `deadline`.
    pub(super) fn wait_until_written(&self, deadline: Instant) -> bool {
        let ended = lock_ignoring_poison(&self.ended);
        let left = deadline.saturating_duration_since(Instant::now());
        ended.recv_timeout(left) == Err(mpsc::RecvTimeoutError::Disconnected)
    }
}

struct SinkWriter {
    sink: Sink,
    name: &'static str,
    process: String,
    /// Records that the sink did not take, and that the log does not tell yet.
    untold_failures: u64,
    /// Records that the queue dropped, and that the log does not tell yet.
    untold_drops: u64,
    throttle: LogThrottle,
}

impl SinkWriter {
    /// Writes until the queue is closed and empty.
    fn write_until_closed(&mut self, queue: &RecordQueue) {
        while let Some(Batch { headers, chunks, dropped }) = queue.take_batch(self.sink.gather_time()) {
            for header in &headers {
                let written = self.sink.write_header(header);
                self.log_if_write_failed(written);
            }
            for chunk in &chunks {
                let lines = memchr::memchr_iter(b'\n', chunk).count() as u64;
                let written = self.sink.write_lines(&escape_unprintable_json_lines(chunk));
                let failed = written.as_ref().err().map_or(0, |lost| lost.count);
                queue.counters().written.fetch_add(lines - failed, Ordering::Relaxed);
                queue.counters().failed.fetch_add(failed, Ordering::Relaxed);
                self.untold_failures += failed;
                self.log_if_write_failed(written);
            }
            queue.reuse_chunks(chunks.into_iter());
            self.untold_drops += dropped;
            self.untold_drops -= self.write_dropped_count_record(self.untold_drops, DropReason::QueueFull);
            self.untold_failures -= self.write_dropped_count_record(self.untold_failures, DropReason::WriteFailed);
        }
    }

    /// Writes that records are missing. Returns their number, or 0 if that could not be written.
    fn write_dropped_count_record(&mut self, count: u64, reason: DropReason) -> u64 {
        if count == 0 {
            return 0;
        }
        let time_us = Clock::System.now().as_micros();
        let record = DroppedCountRecord { process: self.process.clone(), time_us, count, reason };
        if self.sink.write_lines(&record.to_line()).is_ok() { count } else { 0 }
    }

    fn log_if_write_failed(&self, written: Result<(), LostRecords>) {
        let Err(LostRecords { error, .. }) = written else { return };
        if let Some(suppressed) = self.throttle.allow(Clock::System.now()) {
            let sink = self.name;
            tracing::error!(
                sink,
                suppressed,
                "records of the decision log are lost: {error} (check TOLLKEEPER_DECISION_LOG)"
            );
        }
    }
}
