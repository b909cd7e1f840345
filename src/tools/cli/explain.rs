//! `explain`: shows which rule each descriptor of a request matches, and why similar rules do not match.
//!
//! Uses rule files without a server, or a running server with its counters; neither charges anything. `decide` produces
//! the explanation; this module formats it. Names and values are untrusted and are escaped.

use std::fmt::Write as _;
use std::path::PathBuf;

use jiff::Timestamp;

use super::client::{default_debug_address, fetch_page, parse_page};
use super::print::{
    CommandOutcome, escape_and_shorten, fail_if_unwritten, format_micros, print_error, print_with_colored_verdicts,
    usage_error,
};
use super::request_flags::RequestArgs;
use super::rule_files::{self, CheckedRules, read_settings_or_defaults};
use crate::base::clock::{Clock, Time};
use crate::base::pb::RateLimitRequest;
use crate::base::pb::proto_json::request_to_json;
use crate::base::text::{escape_unprintable, to_pretty_json};
use crate::decide::explain::{
    ExplainedCounter, ExplainedDescriptor, ExplainedEntryMatch, ExplainedLimit, ExplainedProxyShares, ExplainedSlots,
    ExplainedTablePlan, Explanation,
};
use crate::rules::diagnostic::Diagnostics;
use crate::rules::rule::value_pattern::MatchKind;
use crate::serve::grpc::decode;
use crate::serve::quota::page::format_shares;
use crate::settings::address::ConnectAddress;

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Rule file, directory of rule files, or - for standard input; repeatable. Explains them without a server
    #[arg(long = "config", value_name = "PATH")]
    config: Vec<PathBuf>,
    /// Address of the debug listener of a running server, which explains with its counters; not with --config
    #[arg(long, value_name = "HOST:PORT", default_value = default_debug_address(), conflicts_with = "config")]
    addr: ConnectAddress,
    /// Time for which --config is explained, such as 2026-12-01T22:30:00+01:00; without it, now. For `active`
    #[arg(long, value_name = "TIME", requires = "config", value_parser = parse_time)]
    at: Option<Time>,
    #[command(flatten)]
    request: RequestArgs,
    /// Write the explanation as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) const HELP: &str = "\
Nothing is charged. With --config the rules are those of the files, compiled with the environment of this command, and \
no counters are shown. Without it, the running server at --addr explains the request and shows its counters.

Examples:
  tollkeeper explain --config config/example.yaml --domain example \\
    --descriptor user=42,action=like
  tollkeeper explain --config config/example.yaml --domain example \\
    --descriptor login=ann --at 2026-12-01T23:00:00+01:00
  tollkeeper explain --domain example --descriptor login=ann --descriptor path=/
  tollkeeper explain --addr localhost:6070 --request request.json --json

Exit codes: 0 explained, 1 the rules have errors or the server did not answer, 2 invalid usage.";

const FILES_ONLY_NOTE: &str = "\nThis is based on the files only; a running server (--addr) shows its counters too.\n";

/// Explains the request.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let request = match args.request.read_request() {
        Ok(request) => request,
        Err(problem) => {
            return usage_error(escape_unprintable(&problem));
        }
    };
    let explained = if args.config.is_empty() {
        explain_with_server(&args.addr, &request)
    } else {
        explain_with_files(&args.config, &request, args.at)
    };
    let explanation = match explained {
        Ok(explanation) => explanation,
        Err(problem) => {
            print_error(problem);
            return CommandOutcome::Failure;
        }
    };
    let page = if args.json {
        to_pretty_json(&explanation).expect("it holds only texts, numbers and flags") + "\n"
    } else {
        format_explanation(&explanation, args.config.is_empty())
    };
    fail_if_unwritten(print_with_colored_verdicts(page), CommandOutcome::Success)
}

/// Explains with rule files, without counters.
fn explain_with_files(paths: &[PathBuf], request: &RateLimitRequest, at: Option<Time>) -> Result<Explanation, String> {
    let settings = read_settings_or_defaults();
    let mut found = Diagnostics::default();
    let options = rule_files::build_compile_options(&settings, None, &mut found);
    let rules = CheckedRules::read_and_compile(paths, &options, found);
    let Some(set) = &rules.set else {
        return Err(format!("the rules have errors\n{}", rules.format_problems().trim_end()));
    };
    // Without a store there are no counters to show.
    Ok(Explanation::explain_request(
        &settings.decisions,
        set,
        &decode::convert_request(request),
        &[],
        at.unwrap_or_else(|| Clock::System.now()),
    ))
}

/// Parses a time with its zone, such as `2026-12-01T22:30:00+01:00`, from 1970 on.
fn parse_time(text: &str) -> Result<Time, String> {
    let time: Timestamp =
        text.parse().map_err(|_| "write a time with its zone, such as 2026-12-01T22:30:00+01:00".to_owned())?;
    u64::try_from(time.as_microsecond()).map(Time::from_micros).map_err(|_| "it is before 1970".to_owned())
}

/// Fetches the explanation of a running server.
fn explain_with_server(target: &ConnectAddress, request: &RateLimitRequest) -> Result<Explanation, String> {
    let body = request_to_json(request).map_err(|error| error.to_string())?;
    let page = fetch_page(target, "/explain", Some(&body))?;
    parse_page(target, &page, "an explanation")
}

/// Formats an explanation; `has_counters` is true for that of a server.
fn format_explanation(explanation: &Explanation, has_counters: bool) -> String {
    let mut page = format!("domain {}\n", escape_and_shorten(&explanation.domain));
    if let Some(version) = &explanation.source_version {
        let _ = writeln!(page, "version {} of the rules", escape_and_shorten(version));
    }
    for block in &explanation.blocked {
        let (entry, until, reason) =
            (escape_and_shorten(&block.entry), escape_and_shorten(&block.until), escape_and_shorten(&block.reason));
        let _ = writeln!(page, "blocked: {entry} until {until}, whatever the rules say: {reason}");
    }
    if let Some(region) = &explanation.region {
        let state = if region.cut_off { ", cut off from the global Redis" } else { "" };
        let _ = writeln!(page, "region {}{state}", escape_and_shorten(&region.name));
    }
    for (index, descriptor) in explanation.descriptors.iter().enumerate() {
        let _ = writeln!(page, "\ndescriptor {}: {}", index + 1, escape_and_shorten(&descriptor.descriptor));
        append_descriptor_text(&mut page, descriptor, has_counters);
    }
    if !has_counters {
        page += FILES_ONLY_NOTE;
    }
    page
}

/// Formats a descriptor. Writing to a String does not fail.
fn append_descriptor_text(page: &mut String, descriptor: &ExplainedDescriptor, has_counters: bool) {
    descriptor.steps.iter().for_each(|step| append_step_text(page, step));
    let _ = writeln!(page, "  => {}", escape_unprintable(&descriptor.outcome));
    if let Some(near) = &descriptor.near_miss {
        let _ = writeln!(page, "     {}", escape_unprintable(&near.why));
        if let Some(origin) = &near.origin {
            let _ = writeln!(page, "     at {}", escape_unprintable(origin));
        }
    }
    if let Some(rule) = &descriptor.rule {
        let _ = writeln!(page, "     {} at {}", escape_unprintable(&rule.path), escape_unprintable(&rule.origin));
        if let Some(ExplainedTablePlan { name, table, reason, .. }) = &rule.plan {
            let [name, table, reason] = [name, table, reason].map(|text| escape_unprintable(text));
            let _ = writeln!(page, "     plan {name} of the table {table}: {reason}");
        }
    }
    descriptor.limits.iter().for_each(|limit| append_limit_text(page, limit, has_counters));
    descriptor.slots.iter().for_each(|slots| append_slots_text(page, slots));
    if let Some(ExplainedProxyShares { limits, proxies, proxy_count, store_failed }) = &descriptor.quota {
        *page += "     divided among proxies over RLQS";
        *page += if *store_failed { " (the store does not answer)\n" } else { "\n" };
        for line in format_shares(limits, proxies, *proxy_count).lines() {
            let _ = writeln!(page, "     {line}");
        }
    }
}

fn append_slots_text(page: &mut String, explained: &ExplainedSlots) {
    let ExplainedSlots { slots, seats, first_end_s, oldest_s, tombstones, holders, partial, reservations } = explained;
    let [one, use_of, amount] =
        if *reservations { ["reservations", "open", "hits"] } else { ["slots", "in use", "seats"] };
    let more = if *partial { " or more" } else { "" };
    let _ = write!(page, "     {slots}{more} {one} {use_of}, {seats} {amount}");
    if let (Some(first_end_s), Some(oldest_s)) = (first_end_s, oldest_s) {
        let _ = write!(page, "; the oldest is {oldest_s} s old and ends in {first_end_s} s without a release");
    }
    if *tombstones > 0 {
        let _ = write!(page, "; releases that came before their requests: {tombstones}");
    }
    page.push('\n');
    for holder in holders {
        let name = match &*holder.holder {
            "" => "an Envoy without a name (no x-tollkeeper-holder, and no address)".to_owned(),
            name => escape_and_shorten(name),
        };
        let _ = writeln!(page, "       {} {one} of {name}", holder.slots);
    }
}

fn append_step_text(page: &mut String, step: &ExplainedEntryMatch) {
    let entry = escape_and_shorten(&step.entry);
    let _ = match &step.matched {
        Some([how, node, origin]) => {
            let how = match MatchKind::from_name(how) {
                Some(MatchKind::Exact) => "exactly",
                Some(MatchKind::Wildcard) => "by its wildcard",
                Some(MatchKind::Match) => "by its match",
                Some(MatchKind::Any) | None => "by its key alone",
            };
            writeln!(page, "  {entry} matches {} {how}, at {}", escape_and_shorten(node), escape_unprintable(origin))
        }
        None => writeln!(page, "  {entry} matches nothing"),
    };
    for [node, origin, why] in &step.other_matches {
        let _ = writeln!(
            page,
            "    not {} at {}: {}",
            escape_and_shorten(node),
            escape_unprintable(origin),
            escape_unprintable(why)
        );
    }
    if step.more_other_matches > 0 {
        let _ = writeln!(page, "    and {} more that match", step.more_other_matches);
    }
}

fn append_limit_text(page: &mut String, limit: &ExplainedLimit, has_counters: bool) {
    let name = if limit.name.is_empty() { String::new() } else { format!(" ({})", escape_and_shorten(&limit.name)) };
    let _ = writeln!(page, "     limit {}{name}", escape_unprintable(&limit.limit));
    let _ = writeln!(page, "       {}", escape_unprintable(&limit.guarantee));
    for (is_so, what) in [
        (limit.candidate, "candidate: charged on its own, and it rejects nothing"),
        (limit.shadow_mode && !limit.candidate && limit.enforced_share.is_none(), "shadow_mode: it rejects nothing"),
        (limit.quota_mode, "quota_mode: it rejects only together with all other quotas"),
    ] {
        if is_so {
            let _ = writeln!(page, "       {what}");
        }
    }
    if let Some(share) = &limit.enforced_share {
        let of_this_key = if limit.shadow_mode { "not for this key: it rejects nothing" } else { "for this key too" };
        let _ = writeln!(page, "       enforced_share: enforced for {share} of the keys, {of_this_key}");
    }
    match &limit.counter {
        Some(counter) => *page += &format!("       {}\n", format_counter(counter)),
        None if has_counters => *page += "       the counter could not be read\n",
        None => {}
    }
}

fn format_counter(counter: &ExplainedCounter) -> String {
    let ExplainedCounter { passes, used, remaining, reset_us, retry_after_us, banned_us, local } = counter;
    let next = match (passes, retry_after_us) {
        (true, _) => "one more hit is admitted".to_owned(),
        _ if *banned_us > 0 => format!("banned for {}", format_micros(*banned_us)),
        (false, Some(retry)) => format!("one more hit is rejected for {}", format_micros(*retry)),
        (false, None) => "one more hit is rejected".to_owned(),
    };
    let of = if *local { "the store failed, so the counter of this process decides (`local`): " } else { "" };
    format!("{of}{used} used, {remaining} remaining, reset in {}; {next}", format_micros(*reset_us))
}
