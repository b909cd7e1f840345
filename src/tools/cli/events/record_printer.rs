//! Reads records of the stream as a consumer of a group, prints them, and acknowledges them.
//!
//! Pending entries come first: those of this consumer's own name, left by an earlier run or a lost reply, and those
//! that another consumer has not acknowledged for `--claim-after`. They are read in parts, so that new entries are not
//! held up by many that others work on.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::args::{AckTrigger, Args};
use super::stderr_messages::{EventsError, StderrPrinter};
use super::stdin_acknowledgements::OutstandingRecords;
use crate::decide::log::redis_stream::EntryId;
use crate::decide::log::redis_stream::consumer_group::{
    DeliveredEntry, GroupConsumer, MAX_ENTRIES_PER_COMMAND, PendingEntry,
};
use crate::store::client::redis::key_connection::KeyCommandError;
use crate::tools::cli::print::print_to_stdout;

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
pub(super) struct RecordPrinter<'a> {
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

impl<'a> RecordPrinter<'a> {
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
