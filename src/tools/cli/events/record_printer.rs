//! Reads records of the stream as a consumer of a group, prints them, and acknowledges them.
//!
//! Pending entries come first: those of this consumer's own name, left by an earlier run or a lost reply, and those
//! that another consumer has not acknowledged for `--claim-after`. They are read in parts, so that new entries are not
//! held up by many that others work on.
//!
//! Records are acknowledged when they are printed, or by the ids that standard input has. Records that were printed and
//! are not acknowledged are *outstanding*. While this process lives it keeps them: no other consumer claims them, even
//! if a worker waits for hours before it acknowledges.
//!
//! Decides: when a record of `events` is acknowledged, also by ids on standard input.
//! Decides: when a consumer gets those of another; how long a read waits (`MAX_READ_BLOCK_TIME`).

use std::collections::BTreeSet;
use std::io::{self, BufRead, Read as _};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::args::{AckTrigger, Args};
use super::stderr_messages::{EventsError, StderrPrinter};
use crate::base::sharded::lock_ignoring_poison;
use crate::decide::log::redis_stream::EntryId;
use crate::decide::log::redis_stream::consumer_group::{
    DeliveredEntry, GroupConsumer, MAX_ENTRIES_PER_COMMAND, PendingEntry,
};
use crate::store::client::redis::key_connection::KeyCommandError;
use crate::tools::cli::print::{escape_and_shorten, print_to_stdout};

/// Maximum number of outstanding records.
const MAX_OUTSTANDING_RECORDS: usize = 1000;
/// Maximum time that a read of new entries blocks in Redis.
const MAX_READ_BLOCK_TIME: Duration = Duration::from_secs(5);
/// Pauses between two attempts while Redis does not answer; the last one repeats.
const RETRY_PAUSES_MS: [u64; 5] = [100, 200, 500, 1000, 2000];
/// Upper bound on the acknowledgement of printed records at the end.
const FINAL_ACK_TIMEOUT: Duration = Duration::from_secs(1);

/// Error of reading or printing records: one of Redis, which may pass, or one that ends the command.
enum ReadPrintError {
    Redis(KeyCommandError),
    End(EventsError),
}

impl From<KeyCommandError> for ReadPrintError {
    fn from(error: KeyCommandError) -> Self {
        Self::Redis(error)
    }
}

/// Pass over the pending entries of the group.
#[derive(Clone, Copy)]
struct PendingPass {
    next: EntryId,
    /// True to claim entries of this consumer's own name that it does not know of.
    claims_own: bool,
}

/// Reads records as a consumer of the group, and prints them to standard output.
pub(super) struct GroupRecordPrinter<'a> {
    args: &'a Args,
    consumer: GroupConsumer,
    consumer_name: String,
    outstanding: Arc<OutstandingRecords>,
    messages: Arc<StderrPrinter>,
    /// Printed or skipped entries that are to be acknowledged.
    done: Vec<EntryId>,
    /// Records that may still be printed.
    remaining: u64,
    pass: Option<PendingPass>,
    next_pass: Instant,
}

impl<'a> GroupRecordPrinter<'a> {
    pub(super) fn new(
        args: &'a Args,
        consumer: GroupConsumer,
        consumer_name: String,
        outstanding: Arc<OutstandingRecords>,
        messages: Arc<StderrPrinter>,
    ) -> Self {
        Self {
            args,
            consumer,
            consumer_name,
            outstanding,
            messages,
            done: Vec::new(),
            remaining: args.count.unwrap_or(u64::MAX),
            pass: Some(PendingPass { next: EntryId::default(), claims_own: true }),
            next_pass: Instant::now(),
        }
    }

    /// Prints records until there are no more.
    ///
    /// # Errors
    /// Redis rejects a command or, without `--follow`, does not answer; or the output is closed.
    pub(super) async fn print_until_end(&mut self) -> Result<(), EventsError> {
        let mut failures = 0;
        loop {
            match self.read_and_print_some().await {
                Ok(true) => {
                    failures = 0;
                    self.messages.print_redis_recovered();
                }
                Ok(false) => return Ok(()),
                Err(ReadPrintError::End(error)) => return Err(error),
                Err(ReadPrintError::Redis(error)) => {
                    self.recover_from_error(&error, failures).await?;
                    failures += 1;
                    // A reply may be lost; its entries are pending now.
                    self.pass = Some(PendingPass { next: EntryId::default(), claims_own: true });
                }
            }
        }
    }

    /// Acknowledges the records that were printed before a signal.
    pub(super) async fn acknowledge_at_end(&mut self) {
        if !self.done.is_empty() {
            // Without an answer they are printed again, which is allowed.
            let _ = timeout(FINAL_ACK_TIMEOUT, self.consumer.acknowledge(&self.done)).await;
        }
    }

    /// Reads and prints some entries. Returns false if there are no more.
    async fn read_and_print_some(&mut self) -> Result<bool, ReadPrintError> {
        self.acknowledge_done().await?;
        let room = MAX_OUTSTANDING_RECORDS.saturating_sub(self.outstanding.lock_ids().len());
        let count = room.min(MAX_ENTRIES_PER_COMMAND).min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
        if self.remaining == 0 && room == MAX_OUTSTANDING_RECORDS {
            return Ok(false);
        }
        if count == 0 {
            self.outstanding.acknowledged.notified().await;
            return Ok(true);
        }
        if self.pass.is_none() && Instant::now() >= self.next_pass {
            self.pass = Some(PendingPass { next: EntryId::default(), claims_own: false });
        }
        if let Some(pass) = self.pass {
            self.claim_and_print_pending(pass, count).await?;
            return Ok(true);
        }
        let block =
            self.args.follow.then(|| MAX_READ_BLOCK_TIME.min(self.next_pass.saturating_duration_since(Instant::now())));
        let entries = self.consumer.read_new_entries(count, block).await?;
        if entries.is_empty() && !self.args.follow {
            if room == MAX_OUTSTANDING_RECORDS {
                return Ok(false);
            }
            self.outstanding.acknowledged.notified().await;
        }
        self.print_entries(entries).await?;
        Ok(true)
    }

    /// Claims and prints up to `count` entries of the next part of a pass.
    async fn claim_and_print_pending(&mut self, pass: PendingPass, count: usize) -> Result<(), ReadPrintError> {
        let pending = self.consumer.list_pending(pass.next).await?;
        let is_last = pending.len() < MAX_ENTRIES_PER_COMMAND;
        let (mut own, mut idle) = (Vec::new(), Vec::new());
        let mut last = None;
        for entry in pending {
            if own.len() + idle.len() == count {
                break;
            }
            last = Some(entry.id);
            if self.outstanding.lock_ids().contains(&entry.id) {
                continue;
            }
            if pass.claims_own && entry.consumer == self.consumer_name {
                own.push(entry);
            } else if entry.idle >= self.args.claim_after {
                idle.push(entry);
            }
        }
        let is_last = is_last && own.len() + idle.len() < count;
        for (entries, min_idle) in [(own, Duration::ZERO), (idle, self.args.claim_after)] {
            self.claim_and_print(&entries, min_idle).await?;
        }
        self.pass = last.and_then(EntryId::next).filter(|_| !is_last).map(|next| PendingPass { next, ..pass });
        if self.pass.is_none() {
            self.next_pass = Instant::now() + self.args.claim_after / 4;
        }
        Ok(())
    }

    async fn claim_and_print(&mut self, entries: &[PendingEntry], min_idle: Duration) -> Result<(), ReadPrintError> {
        let claimed = self.consumer.claim_entries(entries, min_idle).await?;
        for id in claimed.trimmed {
            self.messages.print_trimmed_entry(id);
            self.done.push(id);
        }
        self.print_entries(claimed.entries).await?;
        // Before the next part of the pass, which would find them pending.
        Ok(self.acknowledge_done().await?)
    }

    /// Prints records; entries without one are skipped.
    async fn print_entries(&mut self, entries: Vec<DeliveredEntry>) -> Result<(), ReadPrintError> {
        let (mut lines, mut ids) = (String::new(), Vec::new());
        for DeliveredEntry { id, deliveries, line } in entries {
            match line {
                Err(reason) => {
                    self.messages.print_skipped_entry(id, reason);
                    self.done.push(id);
                    continue;
                }
                Ok(line) if self.args.ack == AckTrigger::Stdin => {
                    lines += &format!("{{\"id\":\"{id}\",\"deliveries\":{deliveries},\"record\":{line}}}\n");
                }
                Ok(line) => {
                    lines += &line;
                    lines.push('\n');
                }
            }
            ids.push(id);
        }
        if ids.is_empty() {
            return Ok(());
        }
        self.remaining = self.remaining.saturating_sub(ids.len() as u64);
        if self.args.ack == AckTrigger::Stdin {
            // Before they are printed, because an acknowledgement may arrive at once.
            self.outstanding.lock_ids().extend(&ids);
        }
        // On a thread of its own: a pipe that is not read blocks.
        let printed = spawn_blocking(move || print_to_stdout(lines)).await;
        printed
            .unwrap_or_else(|error| Err(io::Error::other(error)))
            .map_err(|error| ReadPrintError::End(error.into()))?;
        if self.args.ack == AckTrigger::Printed {
            self.done.extend(ids);
        }
        Ok(())
    }

    /// Acknowledges what was printed or skipped.
    async fn acknowledge_done(&mut self) -> Result<(), KeyCommandError> {
        if !self.done.is_empty() {
            self.consumer.acknowledge(&self.done).await?;
            self.done.clear();
        }
        Ok(())
    }

    /// Creates a missing group, or waits before the next attempt.
    async fn recover_from_error(&mut self, error: &KeyCommandError, failures: usize) -> Result<(), EventsError> {
        let pause = Duration::from_millis(RETRY_PAUSES_MS[failures.min(RETRY_PAUSES_MS.len() - 1)]);
        if error.text.starts_with("NOGROUP") {
            match self.consumer.create_group(self.args.follow).await {
                Ok(()) => self.messages.print_created_group(),
                Err(error) if error.is_transient() && self.args.follow => self.messages.print_lost_connection(&error),
                Err(error) => return Err(self.messages.describe_redis_error(&error)),
            }
            // Not at once again if another program deletes it.
            if failures > 0 {
                sleep(pause).await;
            }
            return Ok(());
        }
        // A reply of many large entries: they are pending now, and are claimed in smaller parts.
        if error.is_too_large {
            return Ok(());
        }
        if !self.args.follow || !error.is_transient() {
            return Err(self.messages.describe_redis_error(error));
        }
        self.messages.print_lost_connection(error);
        sleep(pause).await;
        Ok(())
    }
}

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
    fn lock_ids(&self) -> MutexGuard<'_, BTreeSet<EntryId>> {
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
