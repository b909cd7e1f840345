//! `top`: which keys a running server refuses most, and whether its limits are the right ones.
//!
//! The report is the server's; its text is made here from the data, by the same code, so that nothing that a stranger
//! sent reaches a terminal as it came.

use std::thread;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::print::{complain, ended, print};
use super::{Outcome, debug_listener};
use crate::report::{rules, top};
use crate::settings::target::Target;

/// What `top` takes.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The debug listener of a running server
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:6070")]
    addr: Target,
    /// Tell of each limit what it did and whether it seems wrong, rather than of keys
    #[arg(long)]
    rules: bool,
    /// Over how many minutes, the one that is running included
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=10),
        conflicts_with = "rules")]
    minutes: u64,
    /// Only this limit and those below it, by name: domain.key_value.key
    #[arg(long, value_name = "NAME")]
    rule: Option<String>,
    /// Only limits of which this stands out
    #[arg(long, value_name = "KIND", requires = "rules")]
    finding: Option<Kind>,
    /// How many to tell of
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    most: Option<u32>,
    /// Write the report as one JSON object
    #[arg(long)]
    json: bool,
    /// Ask again and again, with so many seconds between
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: Option<u64>,
}

/// What can stand out, as `/rules` calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kind {
    /// No request has met it
    NeverMatched,
    /// It has refused nothing
    NeverRefused,
    /// Nearly every request brings a key of its own
    KeysSeenOnce,
    /// What it refuses are mostly short bursts
    TokenBucket,
}

pub(super) const HELP: &str = "\
Counts are kept while the server runs, in a bounded sketch: a key was refused at least and at most as often as is told, \
and the first line says how often a key that is missing can have been refused. Trials (shadow_mode) are told of as if \
they refused. With --rules, counts are since the rule was loaded, and counts of keys are estimates with a standard error \
of 4.6 %.

Examples:
  tollkeeper top
  tollkeeper top --addr 10.0.0.7:6070 --minutes 1 --rule shop.login --every 2
  tollkeeper top --rules --finding never_matched

Exit codes: 0 told, 1 the server did not answer, 2 bad usage.";

/// Tells, once or until it is ended.
pub(super) fn run(args: &Args) -> Outcome {
    loop {
        let page = match page(args) {
            Ok(page) => page,
            Err(problem) => {
                complain(problem);
                return Outcome::Failed;
            }
        };
        let written = print(page);
        match args.every {
            Some(seconds) if written.is_ok() => thread::sleep(Duration::from_secs(seconds)),
            _ => return ended(written, Outcome::Done),
        }
        if !args.json && print("\n").is_err() {
            return Outcome::Done;
        }
    }
}

fn page(args: &Args) -> Result<String, String> {
    let path = path(args);
    let page = debug_listener::ask(&args.addr, &path, None)?;
    if args.json {
        // As it is: what JSON has in a string steers no terminal.
        return Ok(String::from_utf8_lossy(&page).into_owned() + "\n");
    }
    match args.rules {
        true => read::<rules::RuleUsageReport>(args, &page).map(|report| report.text()),
        false => read::<top::TopReport>(args, &page).map(|report| report.text()),
    }
}

fn read<T: DeserializeOwned>(args: &Args, page: &[u8]) -> Result<T, String> {
    serde_json::from_slice(page).map_err(|_| {
        format!("{} answered, but not with a report; is it the debug listener of this version?", args.addr)
    })
}

fn path(args: &Args) -> String {
    let mut path = if args.rules { "/rules?".to_owned() } else { format!("/top?minutes={}&", args.minutes) };
    let mut add = |name: &str, value: &str| path += &format!("{name}={}&", encoded(value));
    if let Some(rule) = &args.rule {
        add("rule", rule);
    }
    if let Some(kind) = args.finding.and_then(|kind| clap::ValueEnum::to_possible_value(&kind)) {
        add("finding", kind.get_name());
    }
    if let Some(most) = args.most {
        add("most", &most.to_string());
    }
    path.pop();
    path
}

/// `text` as a query has it.
fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            _ => encoded += &format!("%{byte:02X}"),
        }
    }
    encoded
}
