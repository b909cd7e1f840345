//! `quota`: shows the quota streams of a running server, and how limits are divided among proxies.

use std::thread;
use std::time::Duration;

use super::client::fetch_page;
use super::print::{CommandOutcome, fail_if_unwritten, print_error, print_to_stdout};
use super::top::percent_encode;
use crate::serve::quota::page::QuotaReport;
use crate::settings::address::ServerAddress;

/// Arguments of `quota`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Address of the debug listener of a running server
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:6070")]
    addr: ServerAddress,
    /// Show only keys of this rule, by name: domain.key_value.key
    #[arg(long, value_name = "NAME")]
    rule: Option<String>,
    /// Maximum number of streams, and of keys
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    most: Option<u32>,
    /// Write the report as one JSON object
    #[arg(long)]
    json: bool,
    /// Repeat with this many seconds in between
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: Option<u64>,
}

pub(super) const HELP: &str = "\
The server must run with TOLLKEEPER_RLQS=true. It shows what it holds of each limit, what each proxy was assigned of \
that, and until when. Other replicas have streams and shares of their own.

Examples:
  tollkeeper quota
  tollkeeper quota --addr localhost:6070 --rule shop.user --every 2

Exit codes: 0 shown, 1 the server did not answer, 2 invalid usage.";

/// Prints the report, once or until the process is stopped.
pub(super) fn run(args: &Args) -> CommandOutcome {
    loop {
        let page = match fetch_report(args) {
            Ok(page) => page,
            Err(problem) => {
                print_error(problem);
                return CommandOutcome::Failure;
            }
        };
        let written = print_to_stdout(page);
        match args.every {
            Some(seconds) if written.is_ok() => thread::sleep(Duration::from_secs(seconds)),
            _ => return fail_if_unwritten(written, CommandOutcome::Success),
        }
        if !args.json && print_to_stdout("\n").is_err() {
            return CommandOutcome::Success;
        }
    }
}

fn fetch_report(args: &Args) -> Result<String, String> {
    let mut path = "/quota?".to_owned();
    if let Some(rule) = &args.rule {
        path += &format!("rule={}&", percent_encode(rule));
    }
    if let Some(most) = args.most {
        path += &format!("most={most}");
    }
    let page = fetch_page(&args.addr, path.trim_end_matches(['&', '?']), None)?;
    if args.json {
        // Strings in JSON are escaped already.
        return Ok(String::from_utf8_lossy(&page).into_owned() + "\n");
    }
    let report: Result<QuotaReport, _> = serde_json::from_slice(&page);
    report.map(|report| report.format_text()).map_err(|_| {
        format!("{} answered, but not with a report; is it the debug listener of this version?", args.addr)
    })
}
