//! `events`: prints the records of a decision log's stream, and follows it.
//!
//! The reader remembers its place: the id of the last entry. Programs that share the work of a stream read it as
//! consumers of a group of Redis, without this command.
//!
//! Decides: what `events` does with entries that are no record, and while Redis is away.

pub(super) mod args;

use std::io;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use self::args::Args;
use super::print::{CommandOutcome, print_error, print_to_stdout, usage_error};
use super::traffic_input::read_stream_settings;
use crate::base::text::escape_unprintable;
use crate::decide::log::redis_stream::{EntryId, StreamEntry, format_json_line, parse_read_entries};
use crate::settings::decision_log::RedisStreamSettings;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::key_connection::{KeyCommandError, KeyOwnerConnection};
use crate::store::client::redis::resp::Reply;

/// Maximum number of entries of a read.
const MAX_ENTRIES_PER_READ: u64 = 500;
/// Time that a read waits in Redis for entries.
const BLOCK_TIME: Duration = Duration::from_secs(5);
/// Upper bound on a read, in addition to the time that it waits.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts while Redis does not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Reason why the command ends early.
#[derive(Debug, thiserror::Error)]
enum EventsError {
    /// Redis failed.
    #[error("redis: {0}")]
    Redis(String),
    /// Standard output or a signal handler failed.
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
}

/// Prints records until there are no more, or until a signal.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let removed = [&args.group, &args.consumer, &args.claim_after, &args.ack];
    if removed.into_iter().any(Option::is_some) {
        return usage_error(
            "--group, --consumer, --claim-after and --ack were removed: follow the stream with --ids and --after, or \
             share it among consumers by XREADGROUP of Redis",
        );
    }
    let settings = match read_stream_settings(&args.stream, args.url.as_deref()) {
        Ok(settings) => settings,
        Err(problem) => {
            return usage_error(escape_unprintable(&problem));
        }
    };
    let runtime = match Builder::new_multi_thread().worker_threads(1).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            print_error(error);
            return CommandOutcome::Failure;
        }
    };
    let outcome = runtime.block_on(print_until_signal(args, &settings));
    // A write to a pipe that is not read would block the end.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => CommandOutcome::Success,
        Err(EventsError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => CommandOutcome::Success,
        Err(error) => {
            print_error(escape_unprintable(&error.to_string()));
            CommandOutcome::Failure
        }
    }
}

async fn print_until_signal(args: &Args, settings: &RedisStreamSettings) -> Result<(), EventsError> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        biased;
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
        outcome = print_records(args, settings) => outcome,
    }
}

/// Prints the records of a stream.
///
/// # Errors
/// Redis rejects a command or, without `--follow`, does not answer; or the output is closed.
async fn print_records(args: &Args, settings: &RedisStreamSettings) -> Result<(), EventsError> {
    let mut connection = KeyOwnerConnection::start(&settings.deployment, settings.key.as_bytes());
    let (mut last, mut remaining, mut is_away) = (args.after, args.count.unwrap_or(u64::MAX), false);
    let mut most = MAX_ENTRIES_PER_READ;
    while remaining > 0 {
        let reply = match read_entries(&mut connection, args, last, most.min(remaining)).await {
            Ok(reply) => reply,
            // Large entries: fewer at a time.
            Err(error) if error.is_too_large && most > 1 => {
                most = most.div_ceil(8);
                continue;
            }
            Err(error) if args.follow && error.is_transient() && !error.is_too_large => {
                if !std::mem::replace(&mut is_away, true) {
                    print_error(escape_unprintable(&format!("{}; trying again", describe_redis_error(args, &error))));
                }
                sleep(RETRY_INTERVAL).await;
                continue;
            }
            Err(error) if error.is_too_large => {
                let text = format!("the entry after {last} is larger than a reply may be (give --after a later id)");
                return Err(EventsError::Redis(text));
            }
            Err(error) => return Err(describe_redis_error(args, &error)),
        };
        if std::mem::take(&mut is_away) {
            print_error("redis answers again");
        }
        let entries = parse_read_entries(&reply);
        let entries =
            entries.ok_or_else(|| EventsError::Redis("an invalid reply (is it Redis 5.0 or newer?)".into()))?;
        match entries.last() {
            Some(newest) => last = newest.id,
            None if args.follow => continue,
            None if last == EntryId::default() => {
                let text = format!("there is no stream '{}' (check --stream; --follow waits for it)", args.stream);
                return Err(EventsError::Redis(text));
            }
            None => return Ok(()),
        }
        let lines: Vec<String> = entries.iter().filter_map(|entry| format_entry(args, entry)).collect();
        remaining -= lines.len() as u64;
        // On a thread of its own: a pipe that is not read blocks.
        let printed = spawn_blocking(move || print_to_stdout(lines.concat())).await;
        printed.unwrap_or_else(|error| Err(io::Error::other(error)))?;
    }
    Ok(())
}

/// Reads up to `most` entries after `last`; waits for the first with `--follow`.
async fn read_entries(
    connection: &mut KeyOwnerConnection,
    args: &Args,
    last: impl ToString,
    most: u64,
) -> Result<Reply, KeyCommandError> {
    let block = if args.follow { BLOCK_TIME } else { Duration::ZERO };
    let [most, block_ms, last] = [most.to_string(), block.as_millis().to_string(), last.to_string()];
    let mut words = vec!["XREAD", "COUNT", &most];
    // 0 would wait without a bound.
    words.extend(["BLOCK", &block_ms].into_iter().filter(|_| args.follow));
    words.extend(["STREAMS", &args.stream, &last]);
    let words: Vec<&[u8]> = words.into_iter().map(str::as_bytes).collect();
    connection.call(&words, READ_TIMEOUT + block).await
}

/// Line of an entry; `None` if it has no record.
fn format_entry(args: &Args, entry: &StreamEntry<'_>) -> Option<String> {
    match format_json_line(entry.record) {
        Ok(line) if args.ids => Some(format!("{{\"id\":\"{}\",\"record\":{line}}}\n", entry.id)),
        Ok(line) => Some(line + "\n"),
        Err(reason) => {
            print_error(format_args!("entry {} is skipped: {reason}", entry.id));
            None
        }
    }
}

/// Describes an error of Redis, with what to do.
fn describe_redis_error(args: &Args, error: &KeyCommandError) -> EventsError {
    let (text, stream) = (&error.text, &args.stream);
    let fix = match error.kind {
        _ if text.starts_with("NOPERM") || text.contains("no permissions") => {
            format!(" (the user needs +xread of the key {stream})")
        }
        RedisError::WrongType => format!(" (the key '{stream}' is not a stream)"),
        _ if text.contains("unknown command") => " (streams need Redis 5.0 or newer, or Valkey)".to_owned(),
        _ => String::new(),
    };
    EventsError::Redis(format!("{text}{fix}"))
}
