//! `why`: shows why requests with a descriptor were rejected, from decision logs.
//!
//! Decides: options of `why`: `--window`, `--max`; which logs `why --log` opens: no rotated files.

use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::print::{
    CommandOutcome, escape_and_shorten, fail_if_unwritten, format_micros, format_with_noun, print_error,
    print_to_stdout, usage_error,
};
use super::request_flags::{parse_descriptor, parse_duration};
use super::traffic_input::{CommandFailure, ReadProgress, parse_log_location};
use crate::base::clock::to_micros;
use crate::base::pb::RateLimitDescriptor;
use crate::base::text::{escape_unprintable, to_pretty_json};
use crate::decide::log::reader::{ReadError, RecordReader};
use crate::decide::log::record::{DescriptorRecord, LimitRecord, RecordedVerdict};
use crate::decide::log::redis_stream::EntryRange;
use crate::decide::log::value_form::ValueForm;
use crate::limit::request::Entry;
use crate::settings::Settings;
use crate::settings::decision_log::HASH_KEY_VARIABLES;
use crate::tools::replay::source::{CountedInput, TrafficLocation};
use crate::tools::why::asked_descriptor::{AskedDescriptor, format_entries};
use crate::tools::why::descriptor_history::{DecisionFilter, DescriptorHistory, RuleChange};
use crate::tools::why::rejection::{
    BanFacts, NeverPassesReason, Remedy, format_decider, format_limit, format_limit_origin,
};
use crate::tools::why::results::{DecisionWithRemedies, LimitRemedies, WhyResults};
use crate::tools::why::time_range::{AskedTime, TimeRange};

/// Arguments of `why`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Domain of the rules
    #[arg(long, value_name = "DOMAIN")]
    domain: String,
    /// All entries of a descriptor, in any order. A backslash escapes `,` `=` and `\`
    #[arg(long, value_name = "K=V,K=V", value_parser = parse_descriptor)]
    descriptor: RateLimitDescriptor,
    /// Decision logs: files, plain or compressed (gzip), redis:STREAM, or - for standard input
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    log: Vec<PathBuf>,
    /// Time: 10:05 or 2026-07-08T10:05 in UTC, or RFC 3339 with an offset; without it the whole log
    #[arg(long, value_name = "TIME")]
    at: Option<AskedTime>,
    /// Time to show before and after --at
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = parse_window_duration, requires = "at")]
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

fn parse_window_duration(text: &str) -> Result<Duration, String> {
    const WINDOW_RANGE: &str = "1ms to 8784h";
    parse_duration(text, WINDOW_RANGE)
}

/// Shows the decisions on the descriptor.
pub(super) fn run(args: &Args) -> CommandOutcome {
    if args.log.iter().filter(|path| *path == Path::new("-")).count() > 1 {
        return usage_error("standard input (-) can be read only once");
    }
    let hash = match read_hashed_value_form() {
        Ok(hash) => hash,
        Err(problem) => {
            return usage_error(escape_unprintable(&problem));
        }
    };
    let entries: Vec<Entry<'_>> =
        args.descriptor.entries.iter().map(|entry| Entry { key: &entry.key, value: &entry.value }).collect();
    let asked = AskedDescriptor::new(&args.domain, &entries, hash.as_ref());
    let range = TimeRange::new(args.at, to_micros(args.window));
    let mut history = DescriptorHistory::new(asked, range, DecisionFilter { admitted: args.all, max: args.max.into() });
    let mut outcome = CommandOutcome::Success;
    for path in &args.log {
        let added = open_log(path, range).and_then(|log| add_records_of_log(log, &mut history));
        if let Err(CommandFailure { problem, .. }) = added {
            print_error(problem);
            outcome = CommandOutcome::Failure;
        }
    }
    let results = WhyResults::new(&history);
    if results.requests == 0 {
        outcome = CommandOutcome::Failure;
    }
    let page = if args.json {
        to_pretty_json(&results).expect("it holds only texts, numbers and flags") + "\n"
    } else {
        format_results(&results)
    };
    fail_if_unwritten(print_to_stdout(page), outcome)
}

/// Form of hashed values, if the environment has their key.
fn read_hashed_value_form() -> Result<Option<ValueForm>, String> {
    let key = Settings::secret_from_env(env::vars_os(), &HASH_KEY_VARIABLES).map_err(|error| error.to_string())?;
    let secret = key.map(|key| key.load_secret()).transpose().map_err(|error| error.to_string())?;
    Ok(secret.map(|secret| ValueForm::hashed_with(secret.reveal())))
}

/// Opens a log. Of a stream, only the part around an instant is read.
fn open_log(path: &Path, range: TimeRange) -> Result<OpenLog, CommandFailure> {
    let location = parse_log_location("--log", path)?;
    let progress = ReadProgress::start(&[path.to_owned()]);
    let bounds = range.bounds().filter(|_| matches!(location, TrafficLocation::Stream(_)));
    let entries =
        bounds.map_or(EntryRange::ALL, |bounds| EntryRange::around_decision_times(bounds.from_us, bounds.to_us));
    let input = CountedInput { input: location.open_input(entries)?, bytes: Arc::clone(&progress.bytes) };
    let reader = RecordReader::new(&location.name(), input)?;
    Ok(OpenLog { reader, progress, is_partial: bounds.is_some() })
}

/// A log that is read, with its progress.
struct OpenLog {
    reader: RecordReader,
    progress: ReadProgress,
    /// Only the part around the asked time is read.
    is_partial: bool,
}

/// Adds all records of a log. Invalid lines are left out and told.
fn add_records_of_log(log: OpenLog, history: &mut DescriptorHistory<'_>) -> Result<(), CommandFailure> {
    let OpenLog { mut reader, mut progress, is_partial } = log;
    if is_partial {
        history.mark_partially_read();
    }
    let (mut records, mut invalid, mut first_problem) = (0_u64, 0_u64, None);
    loop {
        match reader.next_record() {
            Ok(Some(record)) => {
                records += 1;
                history.add_record(record);
                if records.is_multiple_of(1 << 12) {
                    progress.show();
                }
            }
            Ok(None) => break,
            Err(error @ (ReadError::NotARecord { .. } | ReadError::UnknownVersion { .. })) => {
                invalid += 1;
                first_problem.get_or_insert(error);
            }
            Err(error) => return Err(error.into()),
        }
    }
    match first_problem {
        Some(error) if records == 0 => return Err(error.into()),
        Some(error) => history.add_problem(format!("{invalid} lines are left out; the first: {error}")),
        None => {}
    }
    if reader.is_truncated() {
        history.add_problem("a log ends within a record, which is left out".to_owned());
    }
    Ok(())
}

/// Number of causes in the summary.
const MAX_SHOWN_CAUSES: usize = 10;
/// Length of a date at the start of a time.
const DATE_CHARS: usize = 10;

/// Formats the results.
fn format_results(results: &WhyResults<'_>) -> String {
    let mut page = format_summary(results);
    let mut changes = results.rule_changes.iter().peekable();
    let mut date = "";
    for decision in &results.decisions {
        while let Some(change) = changes.next_if(|change| change.time_us <= decision.time_us) {
            page += &format_rule_change(change);
        }
        let new_date = decision.time.get(..DATE_CHARS).unwrap_or_default();
        if date != new_date {
            let _ = writeln!(page, "\n{new_date} (UTC)");
            date = new_date;
        }
        page += &format_decision(decision);
    }
    changes.for_each(|change| page += &format_rule_change(change));
    page
}

/// Formats the figures, the causes and the remarks. Writing to a String does not fail.
fn format_summary(results: &WhyResults<'_>) -> String {
    let mut page = format!(
        "domain {}, descriptor {}\n",
        escape_and_shorten(results.domain),
        escape_and_shorten(&results.descriptor)
    );
    if let Some(range) = &results.range {
        let _ = writeln!(page, "{} to {} UTC", format_moment(&range.from), format_moment(&range.to));
    }
    if results.requests > 0 {
        let requests = format_with_noun(results.requests, "request");
        let _ = write!(page, "rejected {} of {requests}", results.rejected);
        if let (Some(first), Some(last)) = (&results.first_rejected, &results.last_rejected) {
            let _ = write!(page, ", from {} to {} UTC", format_moment(first), format_moment(last));
        }
        page.push('\n');
    } else {
        page += "no requests with this descriptor were found\n";
    }
    for cause in results.causes.iter().take(MAX_SHOWN_CAUSES) {
        let _ = writeln!(page, "  {} by {}", cause.requests, escape_unprintable(&cause.cause));
    }
    if results.causes.len() > MAX_SHOWN_CAUSES {
        let _ = writeln!(page, "  and {} more causes", results.causes.len() - MAX_SHOWN_CAUSES);
    }
    if results.rejected > 0 {
        page += "  (with shadow_mode: true a limit rejects nothing)\n";
    }
    let other = results.rejected_by_other_descriptors;
    for (count, text) in [
        (other, "rejected by another descriptor of the request: this one had room"),
        (results.shadow, "admitted in shadow mode: only a limit that does not reject was exceeded"),
        (results.errors, "without an answer"),
        (results.left_out, "not shown (--max)"),
    ] {
        if count > 0 {
            let _ = writeln!(page, "  {count} {text}");
        }
    }
    let hidden = results.requests - results.left_out - results.decisions.len() as u64;
    if hidden > 0 {
        let _ = writeln!(page, "  {hidden} admitted, not shown (--all)");
    }
    for note in &results.notes {
        let _ = writeln!(page, "note: {}", escape_unprintable(note));
    }
    if !results.nearest.is_empty() {
        page += "nearest descriptors in the logs:\n";
        results.nearest.iter().for_each(|text| page += &format!("  {}\n", escape_and_shorten(text)));
    }
    page
}

fn format_rule_change(change: &RuleChange) -> String {
    let event = match change.event {
        crate::decide::log::header::HeaderReason::Start => "process started",
        _ => "rules changed",
    };
    let rules = change.rules.as_deref().unwrap_or("none");
    let version = change
        .version
        .as_ref()
        .map_or_else(String::new, |version| format!(", version {}", escape_and_shorten(version)));
    let changes = change.changes.as_ref().map_or_else(String::new, |changes| format!("    {changes}\n"));
    format!(
        "\n{}  {event}: rules {}{version} (process {})\n{changes}",
        format_moment(&change.time),
        escape_and_shorten(rules),
        escape_and_shorten(&change.process)
    )
}

/// Formats a decision: its verdict, then each descriptor that was asked for or rejected.
fn format_decision(shown: &DecisionWithRemedies<'_>) -> String {
    let record = &shown.record;
    let time = shown.time.get(DATE_CHARS + 1..).unwrap_or_default().trim_end_matches('Z');
    let mut page = format!("\n{time}  {}", record.verdict.name());
    if record.delay_us > 0 {
        let _ = write!(page, ", delayed {}", format_micros(record.delay_us));
    }
    if let Some(error) = &record.error {
        let _ = write!(page, ": {}", escape_and_shorten(error));
    }
    if let Some(trace_id) = &record.trace_id {
        let _ = write!(page, "  trace {}", escape_and_shorten(trace_id));
    }
    page.push('\n');
    for (index, descriptor) in record.descriptors.iter().enumerate() {
        let is_asked = shown.asked.contains(&index);
        let rejects = record.verdict == RecordedVerdict::OverLimit && descriptor.verdict == RecordedVerdict::OverLimit;
        if is_asked || rejects {
            let name = if is_asked {
                String::new()
            } else {
                format!(
                    "rejected by descriptor {}: {}, ",
                    index + 1,
                    escape_and_shorten(&format_entries(&descriptor.entries))
                )
            };
            let _ = writeln!(page, "  {name}{}", format_recorded_descriptor(descriptor));
            let of = |it: &&LimitRemedies| it.descriptor == index;
            append_limits_text(&mut page, descriptor, &shown.rejected_by.iter().filter(of).collect::<Vec<_>>());
        }
    }
    page
}

/// Formats the hits, the verdict, the rule and the decider of a descriptor.
fn format_recorded_descriptor(descriptor: &DescriptorRecord<'_>) -> String {
    let hits = match descriptor.hits {
        0 => "peek".to_owned(),
        hits if hits < 0 => format!("refund of {}", format_with_noun(hits.unsigned_abs(), "hit")),
        hits => format_with_noun(hits.unsigned_abs(), "hit"),
    };
    let mut text =
        format!("{hits}: {}, {}", descriptor.verdict.name(), escape_unprintable(&format_limit_origin(descriptor)));
    if descriptor.unlimited {
        text += ", unlimited";
    }
    if let Some(decider) = format_decider(descriptor) {
        let _ = write!(text, ", decided by {}", escape_unprintable(&decider));
    }
    text
}

fn append_limits_text(page: &mut String, descriptor: &DescriptorRecord<'_>, rejected_by: &[&LimitRemedies]) {
    for (at, limit) in descriptor.limits.iter().enumerate() {
        let _ = writeln!(page, "    {}", format_limit_line(limit));
        let found = rejected_by.iter().find(|remedies| remedies.limit == Some(at));
        found.iter().for_each(|found| append_remedies_text(page, found));
    }
    let without_limit = rejected_by.iter().find(|remedies| remedies.limit.is_none());
    without_limit.iter().for_each(|found| append_remedies_text(page, found));
}

/// Formats a limit with its level before and after.
fn format_limit_line(limit: &LimitRecord<'_>) -> String {
    let mut text = escape_unprintable(&format_limit(limit));
    for (is_so, mode) in [
        (limit.candidate, "candidate, rejects nothing"),
        (limit.shadow && !limit.candidate, "in shadow mode, rejects nothing"),
        (limit.quota, "quota_mode, rejects only together with all other quotas"),
    ] {
        if is_so {
            let _ = write!(text, " [{mode}]");
        }
    }
    match &limit.result {
        Some(result) => {
            let verdict = if result.admitted { "has room" } else { "exceeded" };
            let (before, after, remaining) = (result.before, result.after, result.remaining);
            let _ = write!(text, ": {before} -> {after} counted, {remaining} remaining, {verdict}");
            if result.delay_us > 0 {
                let _ = write!(text, ", delay {}", format_micros(result.delay_us));
            }
            if result.banned_us > 0 {
                let _ = write!(text, ", banned for {}", format_micros(result.banned_us));
            }
        }
        None => text += ": no counter was read",
    }
    text
}

/// Formats changes; the summary has `shadow_mode`.
fn append_remedies_text(page: &mut String, rejected_by: &LimitRemedies) {
    if let Some(BanFacts { since, until, .. }) = &rejected_by.ban {
        let _ = writeln!(page, "      banned from {} until {} UTC", format_moment(since), format_moment(until));
    }
    for remedy in &rejected_by.remedies {
        let text = match remedy {
            Remedy::Wait { until, wait_us } => {
                format!("at {} UTC ({} later)", format_moment(until), format_micros(*wait_us))
            }
            Remedy::NeverByWaiting { reason } => {
                let reason = match reason {
                    NeverPassesReason::LimitIsZero => "the limit is 0",
                    NeverPassesReason::MoreHitsThanLimit => "more hits than the limit",
                };
                let _ = writeln!(page, "      never passes later: {reason}");
                continue;
            }
            Remedy::Limit { key, value, counted, delay_us, max_wait_us } => {
                let delay = delay_us.map(|delay_us| format!(" and {}", format_delay_advice(delay_us, *max_wait_us)));
                format!("with {key} {value}{}: {counted} were counted before", delay.unwrap_or_default())
            }
            Remedy::LongerDelay { delay_us, max_wait_us } => {
                format!("with {}", format_delay_advice(*delay_us, *max_wait_us))
            }
            Remedy::FewerHits { hits } => format!("with {}", format_with_noun(*hits, "hit")),
            Remedy::ShadowMode => continue,
            Remedy::Unblock => "after `tollkeeper unblock`".to_owned(),
            Remedy::WorkingStore => "with a store that answers, or with on_store_error: allow".to_owned(),
        };
        let _ = writeln!(page, "      would have passed {text}");
    }
}

/// Formats a delay, with the bounds on it that must be raised. `max_wait_us` is that of the rule, if it must.
fn format_delay_advice(delay_us: u64, max_wait_us: Option<u64>) -> String {
    let bounds = if max_wait_us.is_some() { "raise max_wait to it, and" } else { "raise" };
    format!("a delay of {} ({bounds} the caller's deadline)", format_micros(delay_us))
}

/// Formats a time for reading: `2026-07-08 10:05:30.000000`.
fn format_moment(time: &str) -> String {
    time.trim_end_matches('Z').replacen('T', " ", 1)
}
