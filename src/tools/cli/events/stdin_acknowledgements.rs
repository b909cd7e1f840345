//! Acknowledgements of records, by the ids that standard input has.
//!
//! Records that were printed and are not acknowledged are *outstanding*. While this process lives it keeps them: no
//! other consumer claims them, even if a worker waits for hours before it acknowledges.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Read as _};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::stderr_messages::{EventsError, StderrPrinter};
use crate::base::sharded::lock_ignoring_poison;
use crate::decide::log::redis_stream::EntryId;
use crate::decide::log::redis_stream::consumer_group::{GroupConsumer, MAX_ENTRIES_PER_COMMAND};
use crate::store::client::redis::key_connection::KeyCommandError;
use crate::tools::cli::print::escape_and_shorten;

/// Maximum length of a line of standard input, in bytes.
const MAX_LINE_BYTES: u64 = 64;
/// Pause before an acknowledgement is sent again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Records that were printed and are not acknowledged.
#[derive(Debug, Default)]
pub(super) struct OutstandingRecords {
    ids: Mutex<BTreeSet<EntryId>>,
    /// Notified after records were acknowledged.
    pub(super) acknowledged: Notify,
}

impl OutstandingRecords {
    pub(super) fn lock_ids(&self) -> MutexGuard<'_, BTreeSet<EntryId>> {
        lock_ignoring_poison(&self.ids)
    }
}

/// Reader of ids, and sender of acknowledgements.
#[derive(Debug)]
pub(super) struct Acknowledger {
    consumer: GroupConsumer,
    outstanding: Arc<OutstandingRecords>,
    messages: Arc<StderrPrinter>,
    keep_interval: Duration,
    ids: mpsc::Receiver<Result<EntryId, EventsError>>,
}

impl Acknowledger {
    /// Starts to read standard input on a thread of its own, which ends with the process.
    pub(super) fn start(
        consumer: GroupConsumer,
        outstanding: Arc<OutstandingRecords>,
        messages: Arc<StderrPrinter>,
        keep_interval: Duration,
    ) -> Self {
        let (sender, ids) = mpsc::channel(MAX_ENTRIES_PER_COMMAND);
        thread::spawn(move || read_ids_from_stdin(&sender));
        Self { consumer, outstanding, messages, keep_interval, ids }
    }

    /// Acknowledges until the end of standard input: the worker is gone.
    ///
    /// # Errors
    /// Redis rejects a command, or a line is not an id.
    pub(super) async fn acknowledge_until_end_of_input(&mut self) -> Result<(), EventsError> {
        let mut keep = interval(self.keep_interval);
        keep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let mut received = Vec::new();
            tokio::select! {
                biased;
                count = self.ids.recv_many(&mut received, MAX_ENTRIES_PER_COMMAND) => if count == 0 {
                    return Ok(());
                },
                _ = keep.tick() => self.renew_claims().await?,
            }
            let ids: Vec<EntryId> = received.into_iter().collect::<Result<_, _>>()?;
            self.acknowledge(&ids).await?;
        }
    }

    /// Acknowledges records until Redis answers.
    async fn acknowledge(&mut self, ids: &[EntryId]) -> Result<(), EventsError> {
        let is_outstanding = |id: &EntryId| self.outstanding.lock_ids().contains(id);
        let ids: Vec<EntryId> = ids.iter().copied().filter(is_outstanding).collect();
        if ids.is_empty() {
            return Ok(());
        }
        while let Err(error) = self.consumer.acknowledge(&ids).await {
            self.fail_unless_transient(&error)?;
            sleep(RETRY_INTERVAL).await;
        }
        self.outstanding.lock_ids().retain(|id| !ids.contains(id));
        self.outstanding.acknowledged.notify_one();
        Ok(())
    }

    /// Resets the idle times of outstanding records, so that no other consumer claims them; the next call retries.
    async fn renew_claims(&mut self) -> Result<(), EventsError> {
        let ids: Vec<EntryId> = self.outstanding.lock_ids().iter().copied().collect();
        match self.consumer.reset_idle_times(&ids).await {
            Err(error) => self.fail_unless_transient(&error),
            Ok(()) => Ok(()),
        }
    }

    fn fail_unless_transient(&self, error: &KeyCommandError) -> Result<(), EventsError> {
        // The reader creates a missing group.
        if error.is_transient() || error.text.starts_with("NOGROUP") {
            return Ok(());
        }
        Err(self.messages.describe_redis_error(error))
    }
}

/// Sends the ids of standard input until its end, or until the first line that is not an id.
fn read_ids_from_stdin(sender: &mpsc::Sender<Result<EntryId, EventsError>>) {
    let mut input = io::stdin().lock();
    loop {
        let mut line = Vec::new();
        let read = (&mut input).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
        let text = String::from_utf8_lossy(&line);
        let id = match read {
            Ok(0) | Err(_) => return,
            Ok(_) if text.trim().is_empty() => continue,
            Ok(_) => text.trim().parse().map_err(|_| EventsError::Input(escape_and_shorten(text.trim()))),
        };
        let is_last = id.is_err();
        if sender.blocking_send(id).is_err() || is_last {
            return;
        }
    }
}
