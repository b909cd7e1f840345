//! `why`: shows why requests with a descriptor were rejected, from decision logs.

mod report;

use std::env;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::ProgressBar;

use super::duration;
use super::outcome::CommandOutcome;
use super::print::{finish, print, print_error};
use super::request_args::descriptor;
use super::stream_settings::stream_settings;
use super::traffic_args::progress_bar;
use crate::base::clock::micros;
use crate::base::pb::RateLimitDescriptor;
use crate::base::text::printable;
use crate::base::text::to_pretty_json;
use crate::decide::log::reader::{ReadError, RecordReader};
use crate::decide::log::stream::input::{EntryRange, StreamInput};
use crate::decide::log::values::ValueForm;
use crate::limit::request::Entry;
use crate::settings::Settings;
use crate::settings::value::number::DurationRange;
use crate::tools::why::question::Question;
use crate::tools::why::results::WhyResults;
use crate::tools::why::time_line::{ShownDecisions, TimeLine};
use crate::tools::why::time_range::{AskedTime, TimeRange};

/// Arguments of `why`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Domain of the rules
    #[arg(long, value_name = "DOMAIN")]
    domain: String,
    /// All entries of a descriptor, outermost first. A backslash escapes `,` `=` and `\`
    #[arg(long, value_name = "K=V,K=V", value_parser = descriptor)]
    descriptor: RateLimitDescriptor,
    /// Decision logs: files, plain or compressed (zstd, gzip), redis:STREAM, or - for standard input
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    log: Vec<PathBuf>,
    /// Time: 10:05 or 2026-07-08T10:05 in UTC, or RFC 3339 with an offset; without it the whole log
    #[arg(long, value_name = "TIME")]
    at: Option<AskedTime>,
    /// Time to show before and after --at
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = window, requires = "at")]
    window: Duration,
    /// Show admitted requests too
    #[arg(long)]
    all: bool,
    /// Number of requests to show: those nearest to --at, or else the last
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    max: u16,
    /// Write the results as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) const HELP: &str = "\
Reads what the server recorded (TOLLKEEPER_DECISION_LOG) and sends nothing. A time of day is that of the last day that \
the logs reach. Several logs, such as those of all replicas, are merged by time.

\"Would have passed\" is computed from the record: a changed limit with the counter as it was at that moment. The effect \
of a limit on all traffic is what `tollkeeper simulate` shows.

Hashed logs need their key in TOLLKEEPER_DECISION_LOG_HASH_KEY or TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE.

Examples:
  tollkeeper why --domain shop --descriptor login=ann --log decisions.jsonl
  tollkeeper why --domain shop --descriptor login=ann --at 22:13 \\
    --window 5m --all --log decisions.jsonl
  tollkeeper why --domain shop --descriptor login=ann --json \\
    --log decisions.jsonl | jq '.causes'

Exit codes: 0 requests were found, 1 none were found or a log cannot be read, 2 invalid usage.";

fn window(text: &str) -> Result<Duration, String> {
    const WINDOWS: DurationRange = DurationRange::new(Duration::from_millis(1), Duration::from_secs(366 * 86_400));
    duration::parse(text, &WINDOWS)
}

/// Shows the time line.
pub(super) fn run(args: &Args) -> CommandOutcome {
    if args.log.iter().filter(|path| *path == Path::new("-")).count() > 1 {
        print_error("standard input (-) can be read only once");
        return CommandOutcome::UsageError;
    }
    let hash = match hash_form() {
        Ok(hash) => hash,
        Err(problem) => {
            print_error(printable(&problem));
            return CommandOutcome::UsageError;
        }
    };
    let entries: Vec<Entry<'_>> =
        args.descriptor.entries.iter().map(|entry| Entry { key: &entry.key, value: &entry.value }).collect();
    let question = Question::new(&args.domain, &entries, hash.as_ref());
    let range = TimeRange::new(args.at, micros(args.window));
    let mut line = TimeLine::new(question, range, ShownDecisions { admitted: args.all, max: args.max.into() });
    let mut outcome = CommandOutcome::Success;
    for path in &args.log {
        let added = open(path, range).and_then(|log| add_records(log, &mut line));
        if let Err(problem) = added {
            print_error(printable(&problem));
            outcome = CommandOutcome::Failure;
        }
    }
    let results = WhyResults::new(&line);
    if results.requests == 0 {
        outcome = CommandOutcome::Failure;
    }
    let page = if args.json {
        to_pretty_json(&results).expect("it holds only texts, numbers and flags") + "\n"
    } else {
        report::text(&results)
    };
    finish(print(page), outcome)
}

/// Form of hashed values, if the environment has their key.
fn hash_form() -> Result<Option<ValueForm>, String> {
    let key = Settings::hash_key_from_env(env::vars_os()).map_err(|error| error.to_string())?;
    let secret = key.map(|key| key.secret()).transpose().map_err(|error| error.to_string())?;
    Ok(secret.map(|secret| ValueForm::hashed(secret.reveal())))
}

/// Opens a log. Of a stream, only the part around an instant is read.
fn open(path: &Path, range: TimeRange) -> Result<OpenLog, String> {
    let bar = progress_bar(&[path.to_owned()]);
    bar.set_message(printable(&path.display().to_string()));
    let mut is_partial = false;
    let reader = match path.to_str() {
        Some("-") => RecordReader::new("standard input", bar.wrap_read(io::stdin())),
        Some(text) if text.starts_with("redis:") => {
            let in_stream = |problem: String| format!("{text}: {problem}");
            let settings = stream_settings(&text["redis:".len()..], None).map_err(in_stream)?;
            is_partial = range.bounds().is_some();
            let entries =
                range.bounds().map_or(EntryRange::ALL, |range| EntryRange::of_decisions(range.from_us, range.to_us));
            let input = StreamInput::open(&settings, entries).map_err(|error| in_stream(error.to_string()))?;
            RecordReader::new(text, bar.wrap_read(input))
        }
        _ => {
            let file = File::open(path).map_err(|error| format!("{}: cannot be opened: {error}", path.display()))?;
            RecordReader::new(&path.display().to_string(), bar.wrap_read(file))
        }
    };
    Ok(OpenLog { reader: reader.map_err(|error| error.to_string())?, bar, is_partial })
}

/// A log that is read, with its progress.
struct OpenLog {
    reader: RecordReader,
    bar: ProgressBar,
    /// Only the part around the asked time is read.
    is_partial: bool,
}

/// Adds all records of a log. Invalid lines are left out and told.
fn add_records(log: OpenLog, line: &mut TimeLine<'_>) -> Result<(), String> {
    let OpenLog { mut reader, bar, is_partial } = log;
    if is_partial {
        line.set_partial();
    }
    let (mut records, mut invalid, mut first_problem) = (0_u64, 0_u64, None);
    loop {
        match reader.next_record() {
            Ok(Some(record)) => {
                records += 1;
                line.add(record);
            }
            Ok(None) => break,
            Err(error @ (ReadError::NotARecord { .. } | ReadError::UnknownVersion { .. })) => {
                invalid += 1;
                first_problem.get_or_insert(error);
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    bar.finish_and_clear();
    match first_problem {
        Some(error) if records == 0 => return Err(error.to_string()),
        Some(error) => line.add_problem(format!("{invalid} lines are left out; the first: {error}")),
        None => {}
    }
    if reader.is_truncated() {
        line.add_problem("a log ends within a record, which is left out".to_owned());
    }
    Ok(())
}
