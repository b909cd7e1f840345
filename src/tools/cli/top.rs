//! `top`: shows the most rejected keys of a running server, rejections of the last hour, or findings about its limits.
//!
//! The server sends the data as JSON; this module formats it with the server's own code, so that untrusted text is
//! escaped here too.

use super::client::{default_debug_address, fetch_page, format_json_as_line, parse_page, print_report_once_or_every};
use super::print::{CommandOutcome, usage_error};
use crate::base::text::percent_encode;
use crate::serve::fleet::report::FleetReport;
use crate::serve::report::rejections::RejectionsReport;
use crate::serve::report::rules::{LimitFindingKind, RuleUsageReport};
use crate::serve::report::top::{TopReport, TopTextContent};
use crate::serve::report::unmatched::UnmatchedReport;
use crate::settings::address::ConnectAddress;

/// Arguments of `top`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Address of the debug listener of a running server
    #[arg(long, value_name = "HOST:PORT", default_value = default_debug_address())]
    addr: ConnectAddress,
    /// Show statistics of each limit and findings about it, instead of keys
    #[arg(long)]
    rules: bool,
    /// Show the keys with most hits, rejected or not
    #[arg(long, conflicts_with = "rules")]
    busiest: bool,
    /// Show descriptors that matched no rule, and the rules that they nearly match
    #[arg(long, conflicts_with_all = ["rules", "fleet", "busiest", "minutes", "rule"])]
    unmatched: bool,
    /// Show all replicas that share the server's Redis
    #[arg(long, conflicts_with = "finding")]
    fleet: bool,
    /// Show rejections of the last hour by minute, to find out who was rejected when
    #[arg(long, conflicts_with_all = ["rules", "fleet", "busiest", "unmatched", "minutes"])]
    hour: bool,
    /// Show only keys that contain this text, such as user=ann
    #[arg(long, value_name = "TEXT", requires = "hour")]
    key: Option<String>,
    /// Show only this minute in UTC, such as 14:05, and two before and after it
    #[arg(long, value_name = "TIME", requires = "hour")]
    at: Option<String>,
    /// Number of minutes to cover, the current one included, 1 to 10; --hour goes further back
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=10),
        conflicts_with = "rules")]
    minutes: u64,
    /// Show only this limit and those below it, by name: domain.key_value.key
    #[arg(long, value_name = "NAME")]
    rule: Option<String>,
    /// Show only limits with this finding
    #[arg(long, value_name = "KIND", requires = "rules", value_parser = parse_finding)]
    finding: Option<LimitFindingKind>,
    /// Maximum number of rows
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
The server counts rejections in a bounded sketch: the report gives a lower and an upper bound for each key, and its first \
line the maximum for a missing key. Rules in shadow_mode appear as if they had rejected. A \
peek that is rejected is one hit. What a block rejects is not counted: `tollkeeper tap` shows it. With --hour, all rejections of the last hour by minute: 32 to 256 keys each of eight groups. With --rules, counts are of the \
last ten minutes and since the rule was loaded, and numbers of keys are estimates with a standard error of 4.6 %. With --fleet, counts are of all replicas, from the summaries that they publish every 5 s. \
--busiest and --unmatched count a sample of the decisions, so their numbers are estimates; --unmatched covers five to ten minutes.

Examples:
  tollkeeper top
  tollkeeper top --addr localhost:6070 --minutes 1 --rule shop.login --every 2
  tollkeeper top --hour --at 14:05 --key login=ann
  tollkeeper top --rules --finding never_matched
  tollkeeper top --unmatched
  tollkeeper top --busiest --minutes 10
  tollkeeper top --fleet

Exit codes: 0 shown, 1 the server did not answer, 2 invalid usage.";

/// Instead of the limits over replicas that earlier versions had.
const LIMITS_OVER_REPLICAS: &str = "--rules with --fleet was removed: decisions of a limit over all replicas are PromQL, \
     sum by (domain, rule, verdict) (rate(tollkeeper_decisions_total[5m])); --rules without --fleet shows one replica";

/// Prints the report, once or until the process is stopped.
pub(super) fn run(args: &Args) -> CommandOutcome {
    if args.fleet && args.rules {
        return usage_error(LIMITS_OVER_REPLICAS);
    }
    print_report_once_or_every(args.every, args.json, || fetch_report(args))
}

fn fetch_report(args: &Args) -> Result<String, String> {
    let path = build_report_path(args);
    let page = fetch_page(&args.addr, &path, None)?;
    if args.json {
        return Ok(format_json_as_line(&page));
    }
    let show = if args.busiest { TopTextContent::Busiest } else { TopTextContent::Rejected };
    match args.rules {
        _ if args.hour => {
            parse_page::<RejectionsReport>(&args.addr, &page, "a report").map(|report| report.format_text())
        }
        _ if args.unmatched => {
            parse_page::<UnmatchedReport>(&args.addr, &page, "a report").map(|report| report.format_text())
        }
        _ if args.fleet => {
            parse_page::<FleetReport>(&args.addr, &page, "a report").map(|report| report.format_text(show))
        }
        true => parse_page::<RuleUsageReport>(&args.addr, &page, "a report").map(|report| report.format_text()),
        false => parse_page::<TopReport>(&args.addr, &page, "a report").map(|report| report.format_text(show)),
    }
}

fn parse_finding(name: &str) -> Result<LimitFindingKind, String> {
    let names = || LimitFindingKind::NAMES.join(", ");
    LimitFindingKind::from_name(name).ok_or_else(|| format!("not a finding; write one of {}", names()))
}

fn build_report_path(args: &Args) -> String {
    let page = match args.rules {
        _ if args.hour => "/rejections",
        _ if args.unmatched => "/unmatched",
        _ if args.fleet => "/fleet",
        true => "/rules",
        false => "/top",
    };
    let mut path = format!("{page}?");
    let mut add = |name: &str, value: &str| path += &format!("{name}={}&", percent_encode(value));
    if !args.rules && !args.unmatched && !args.hour {
        add("minutes", &args.minutes.to_string());
    }
    for (name, text) in [("rule", &args.rule), ("key", &args.key), ("at", &args.at)] {
        if let Some(text) = text {
            add(name, text);
        }
    }
    if let Some(kind) = args.finding {
        add("finding", kind.name());
    }
    if let Some(most) = args.most {
        add("most", &most.to_string());
    }
    path.truncate(path.trim_end_matches(['&', '?']).len());
    path
}
