//! `quota`: shows the quota streams of a running server, and how limits are divided among proxies.

use super::client::{default_debug_address, fetch_page, format_json_as_line, parse_page, print_report_once_or_every};
use super::print::CommandOutcome;
use crate::base::text::percent_encode;
use crate::serve::quota::page::QuotaReport;
use crate::settings::address::ConnectAddress;

/// Arguments of `quota`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Address of the debug listener of a running server
    #[arg(long, value_name = "HOST:PORT", default_value = default_debug_address())]
    addr: ConnectAddress,
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
    print_report_once_or_every(args.every, args.json, || fetch_report(args))
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
        return Ok(format_json_as_line(&page));
    }
    parse_page::<QuotaReport>(&args.addr, &page, "a report").map(|report| report.format_text())
}
