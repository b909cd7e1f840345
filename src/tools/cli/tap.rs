//! `tap`: prints decisions of a running server as it makes them.
//!
//! The server sends records of the decision log, at most 100 a second, and how many it left out. Untrusted text is
//! escaped here.
//!
//! Decides: options of `tap`, and how it prints a decision.

use std::io::{BufRead as _, BufReader, Read as _};

use jiff::Timestamp;

use super::admin_client::{AdminServerArgs, read_admin_token};
use super::client::{AnswerTime, PageRequest, describe_refusal, open_page};
use super::print::{CommandOutcome, escape_and_shorten, fail_if_unwritten, print_error, print_to_stdout};
use crate::base::text::{escape_unprintable, escape_unprintable_json, percent_encode};
use crate::decide::log::record::{DecisionRecord, DescriptorRecord, LimitRecord};
use crate::tools::why::asked_descriptor::format_entries;
use crate::tools::why::rejection::{format_limit, format_limit_origin, limit_rejected_hits};

/// Arguments of `tap`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Only requests of this domain
    #[arg(long, value_name = "DOMAIN")]
    domain: Option<String>,
    /// Only requests with this entry in a descriptor, or with this key
    #[arg(long, value_name = "KEY[=VALUE]")]
    entry: Option<String>,
    /// Only requests with this verdict
    #[arg(long, value_name = "VERDICT", value_parser = ["ok", "over_limit", "shadow", "error"])]
    verdict: Option<String>,
    /// End after this many decisions
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    #[command(flatten)]
    server: AdminServerArgs,
}

pub(super) const HELP: &str = "\
The server sends at most 100 decisions a second, and says how many it left out: a filter makes the sample complete. With \
--json each line is a record as in the decision log. Values have the form of TOLLKEEPER_TOP_VALUES.

The token is that of the server: TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE in the environment.

Examples:
  tollkeeper tap --verdict over_limit
  tollkeeper tap --domain example --entry login=ann --count 10 --json

Exit codes: 0 ended, 1 the server refused or did not answer, 2 invalid usage.";

/// Length of a line above which it is not read; the server sends shorter ones.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Prints decisions until there are as many as asked for, or the server ends.
pub(super) fn run(args: &Args) -> CommandOutcome {
    match print_decisions(args) {
        Ok(outcome) => outcome,
        Err(problem) => {
            print_error(problem);
            CommandOutcome::Failure
        }
    }
}

fn print_decisions(args: &Args) -> Result<CommandOutcome, String> {
    let (addr, path) = (&args.server.addr, build_path(args));
    let token = read_admin_token()?;
    let (status, mut body) = open_page(addr, &path, PageRequest::Get, AnswerTime::Unbounded, Some(&token))?;
    if status != 200 {
        let page = body.read_to_vec().unwrap_or_default();
        return Err(describe_refusal(addr, &path, status, &page));
    }
    let mut reader = BufReader::new(body.as_reader());
    let mut left = args.count.unwrap_or(u64::MAX);
    let mut line = String::new();
    while left > 0 {
        line.clear();
        let read = reader.by_ref().take(MAX_LINE_BYTES).read_line(&mut line);
        if read.map_err(|error| format!("{addr} ended the tap: {error}"))? == 0 {
            break;
        }
        let is_decision = line.starts_with("{\"v\":1,\"type\":\"decision\"");
        left -= u64::from(is_decision);
        let text = if args.server.json { escape_unprintable_json(&line).into_owned() } else { format_line(&line) };
        let written = print_to_stdout(text);
        if written.is_err() {
            return Ok(fail_if_unwritten(written, CommandOutcome::Success));
        }
    }
    Ok(CommandOutcome::Success)
}

fn build_path(args: &Args) -> String {
    let filters = [("domain", &args.domain), ("entry", &args.entry), ("verdict", &args.verdict)];
    let filters = filters.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
    let query: Vec<_> = filters.map(|(name, value)| format!("{name}={}", percent_encode(value))).collect();
    format!("/tap?{}", query.join("&"))
}

/// Formats a line of the server: a decision with a line for each descriptor, or the number of those left out.
fn format_line(line: &str) -> String {
    let Ok(record) = serde_json::from_str::<DecisionRecord<'_>>(line) else {
        let left_out = serde_json::from_str::<serde_json::Value>(line).ok().and_then(|it| it["decisions"].as_u64());
        return left_out.map_or_else(String::new, |count| format!("... {count} more (filter to see all)\n"));
    };
    let at = i64::try_from(record.time_us).ok().and_then(|us| Timestamp::from_microsecond(us).ok());
    let at = at.map_or_else(String::new, |at| format!("{at:.3}"));
    let time = at.get(11..23).unwrap_or_default();
    let descriptor = |(index, descriptor): (usize, &DescriptorRecord<'_>)| {
        let (time, verdict) = if index == 0 { (time, record.verdict.name()) } else { ("", "") };
        format!("{time:12}  {verdict:10}  {} {}\n", escape_and_shorten(&record.domain), format_descriptor(descriptor))
    };
    record.descriptors.iter().enumerate().map(descriptor).collect()
}

fn format_descriptor(descriptor: &DescriptorRecord<'_>) -> String {
    let entries = escape_and_shorten(&format_entries(&descriptor.entries));
    let origin = escape_and_shorten(&format_limit_origin(descriptor));
    let limit = |limit: &LimitRecord<'_>| {
        let result = limit.result.map(|result| format!(", {} of it used", result.after)).unwrap_or_default();
        let rejects = if limit_rejected_hits(limit) { ", exceeded" } else { "" };
        format!("; {}{result}{rejects}", escape_unprintable(&format_limit(limit)))
    };
    let limits: String = descriptor.limits.iter().map(limit).collect();
    format!("{entries} ({} hits) -> {origin}{limits}", descriptor.hits)
}
