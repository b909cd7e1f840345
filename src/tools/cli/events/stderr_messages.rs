//! Messages of `events` on standard error, bounded, and its errors.
//!
//! Decides: what `events` says if the group or Redis is away.

use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::args::Args;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::text::escape_unprintable;
use crate::decide::log::redis_stream::{EntryId, UnusableRecord};
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::key_connection::KeyCommandError;
use crate::tools::cli::print::{format_with_noun, print_error};

/// Time between two messages about the same lost connection.
const LOST_CONNECTION_MESSAGE_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of messages about single entries; the others are counted.
const MAX_ENTRY_MESSAGES: u64 = 10;

/// Reason why the command ends early.
#[derive(Debug, thiserror::Error)]
pub(super) enum EventsError {
    /// Redis failed.
    #[error("{0}")]
    Redis(String),
    /// Standard output or a signal handler failed.
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
    /// Standard input has a line that is not an id.
    #[error("standard input: '{0}' is not the id of a printed record")]
    Input(String),
}

/// Printer of messages to standard error, which bounds their number.
#[derive(Debug)]
pub(super) struct StderrPrinter {
    stream: String,
    group: String,
    state: Mutex<MessageThrottle>,
}

#[derive(Debug, Default)]
struct MessageThrottle {
    /// Time of the last message about a lost connection; `None` while connected.
    lost_since: Option<Instant>,
    unusable: u64,
    trimmed: u64,
}

impl StderrPrinter {
    pub(super) fn new(args: &Args) -> Self {
        Self { stream: args.stream.clone(), group: args.group.clone(), state: Mutex::default() }
    }

    /// Describes an error of Redis, with what to do, as the error that ends the command.
    pub(super) fn describe_redis_error(&self, error: &KeyCommandError) -> EventsError {
        let Self { stream, group, .. } = self;
        let text = &error.text;
        let fix = match error.kind {
            _ if text.starts_with("NOPERM") || text.contains("no permissions") => format!(
                " (the user needs +xreadgroup +xpending +xclaim +xrange +xack of the key {stream}, and +xgroup to create \
                 the group {group})"
            ),
            _ if text.contains("requires the key to exist") => {
                return EventsError::Redis(format!(
                    "redis: there is no stream '{stream}' (check --stream; --follow waits for it)"
                ));
            }
            RedisError::WrongType => format!(" (the key '{stream}' is not a stream)"),
            _ if text.contains("unknown command") => " (streams need Redis 5.0 or newer, or Valkey)".to_owned(),
            _ => String::new(),
        };
        EventsError::Redis(format!("redis: {text}{fix}"))
    }

    /// Reports a lost connection, at most twice a minute.
    pub(super) fn print_lost_connection(&self, error: &KeyCommandError) {
        let mut state = lock_ignoring_poison(&self.state);
        if state.lost_since.is_none_or(|since| since.elapsed() >= LOST_CONNECTION_MESSAGE_INTERVAL) {
            state.lost_since = Some(Instant::now());
            print_error(escape_unprintable(&format!("{}; trying again", self.describe_redis_error(error))));
        }
    }

    /// Reports that Redis answers, if it did not.
    pub(super) fn print_redis_recovered(&self) {
        if lock_ignoring_poison(&self.state).lost_since.take().is_some() {
            print_error("redis answers again");
        }
    }

    /// Reports that the group was missing.
    pub(super) fn print_created_group(&self) {
        let Self { stream, group, .. } = self;
        print_error(escape_unprintable(&format!("created the group '{group}' at the start of the stream '{stream}'")));
    }

    /// Reports an entry that is acknowledged without being printed.
    pub(super) fn print_skipped_entry(&self, id: EntryId, reason: UnusableRecord) {
        let mut state = lock_ignoring_poison(&self.state);
        state.unusable += 1;
        if state.unusable <= MAX_ENTRY_MESSAGES {
            print_error(format_args!("entry {id} is skipped: {reason}"));
        }
    }

    /// Reports an entry that was removed from the stream before it was acknowledged.
    pub(super) fn print_trimmed_entry(&self, id: EntryId) {
        let mut state = lock_ignoring_poison(&self.state);
        state.trimmed += 1;
        if state.trimmed <= MAX_ENTRY_MESSAGES {
            print_error(format_args!("entry {id} was trimmed from the stream before it was acknowledged"));
        }
    }

    /// Reports the numbers of entries that were not printed.
    pub(super) fn print_unprinted_totals(&self) {
        let state = lock_ignoring_poison(&self.state);
        if state.unusable > 0 {
            print_error(format_args!("{} without a usable record: skipped", format_entry_count(state.unusable)));
        }
        if state.trimmed > 0 {
            let advice = "raise TOLLKEEPER_DECISION_LOG_STREAM_LENGTH";
            print_error(format_args!(
                "{} trimmed before an acknowledgement ({advice})",
                format_entry_count(state.trimmed)
            ));
        }
    }
}

fn format_entry_count(number: u64) -> String {
    if number == 1 { format_with_noun(1, "entry") } else { format!("{number} entries") }
}
