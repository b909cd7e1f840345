//! `simulate`: shows the effect that rules would have had on recorded traffic.
//!
//! Decides: options of `simulate`, their defaults (`--memory`, `--top`).
//! Decides: exit code of `simulate`: 1 if a condition of `--fail-if` holds, 2 if it cannot be judged.
//! Decides: several `--fail-if` (one suffices), an unknown limit in one.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use super::chart::{chart_width, format_timeline_chart};
use super::print::{
    CommandOutcome, escape_and_shorten, fail_if_unwritten, format_latency, format_micros, format_seconds,
    format_with_noun, format_with_share, print_error, print_to_stdout,
};
use super::rule_files::TableFiles;
use super::traffic_input::{
    CommandFailure, ReplaySetup, TrafficArgs, TrafficReadStats, compile_rules, list_limit_paths, print_failure,
    refuse_rules_on_hashed_values, suggest_similar_paths,
};
use crate::base::text::{escape_unprintable, to_pretty_json};
use crate::base::text_table::{NumberAlignment, format_table};
use crate::base::threads::thread_cpu_time;
use crate::rules::rule::set::RuleSet;
use crate::tools::replay::replayer::ReplayRules;
use crate::tools::replay::source::{SourceOptions, TrafficEvent};
use crate::tools::simulate::fail_condition::{ConditionJudge, FailCondition, MinFidelity};
use crate::tools::simulate::results::{
    ConditionResult, LimitResults, RejectedKeyResults, ReplaySpeed, SimulationResults, VerdictChangeResults,
    compute_share, list_changed_limits_first,
};
use crate::tools::simulate::simulation::{Simulation, SimulationOptions};
use crate::tools::simulate::tally::{LimitFigures, ReplayTotals, TimelineResults};
use crate::tools::simulate::warnings;

/// Arguments of `simulate`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    traffic: TrafficArgs,
    /// Rules to compare with; without them those that the log recorded
    #[arg(long, value_name = "PATH", num_args = 1.., requires = "rules")]
    against: Vec<PathBuf>,
    /// Fail if a figure is reached, such as 'rejected(shop.login) > 1%'; repeatable
    #[arg(long, value_name = "CONDITION")]
    fail_if: Vec<FailCondition>,
    /// Judge no condition if the replay repeats fewer of the recorded decisions
    #[arg(long, value_name = "SHARE", default_value = "99%")]
    min_fidelity: MinFidelity,
    /// Number of keys in each list
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    top: u16,
}

pub(super) const HELP: &str = "\
Replays recorded decisions through the code of the server, each at its time, with counters in memory, once under the \
new rules and once under those to compare with. Nothing is sent anywhere.

A condition is METRIC(LIMIT) and >, >=, < or <= with a number, or a share with %. LIMIT is the path of a limit, as in \
/rlconfig, or * for all requests. METRIC is rejected, rejected_keys, newly_rejected, newly_admitted, delayed or \
longest_run (of rejections of one key). A condition is not judged, and the exit code is 2, if no request charged its \
limit, if the old rules are unknown, or if the replay under the recorded rules repeats too few of the recorded \
decisions (--min-fidelity).

The log must have all decisions (TOLLKEEPER_DECISION_LOG_WHEN=all) with their values. See docs/simulate.md for other \
formats, for the fields of the JSON, and for what makes a simulation differ from the server.

A chart shows when requests are admitted and rejected; before: rejected by the rules to compare with.

  admitted and rejected, requests per 32 s
        96 │                       ▂▂
  admitted │                      ███▄▄▄▄▄
         0 │▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄████████▆▆▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▂
        96 │                       ▃▃█████
  rejected │                       ███████
         0 │                       ███████▆▆
        96 │
    before │                         ▁████
         0 │                         █████▄▄
            2023-11-14T22:13:20Z              2023-11-14T22:33:18Z

Examples:
  tollkeeper simulate --rules new.yaml --traffic decisions.jsonl
  tollkeeper simulate --rules new.yaml --against old.yaml \\
    --traffic decisions.jsonl --fail-if 'newly_rejected(*) > 60%'
  tollkeeper simulate --rules rules.yaml --table customers=new.csv \\
    --traffic decisions.jsonl
  tollkeeper simulate --rules new.yaml --traffic access.log --map map.yaml
  tollkeeper simulate --traffic decisions.jsonl --json

Exit codes: 0 simulated, 1 a condition of --fail-if holds, or the rules or the traffic have errors, 2 invalid usage, \
nothing to compare with, or a condition that cannot be judged.";

/// Simulates, and prints the results.
pub(super) fn run(args: &Args) -> CommandOutcome {
    print_failure(simulate(args))
}

fn simulate(args: &Args) -> Result<CommandOutcome, CommandFailure> {
    let Args { traffic: TrafficArgs { map, max_keys, .. }, against, fail_if, .. } = args;
    let ReplaySetup { settings, rules: new, replay, sources } = args.traffic.prepare(against)?;
    if map.is_some() && against.is_empty() && fail_if.iter().any(FailCondition::needs_old_rules) {
        let problem = "newly_rejected and newly_admitted need --against".to_owned();
        return Err(CommandFailure::usage_error(problem));
    }
    let against = compile_rules("--against", against, &settings, &TableFiles::default())?;
    check_condition_limits(args, new.as_deref(), against.as_deref())?;
    let fixed: Vec<Arc<RuleSet>> = new.iter().chain(&against).cloned().collect();
    let old = match (&new, &against, map) {
        (_, Some(against), _) => Some(ReplayRules::Fixed(Arc::clone(against))),
        // Only a decision log has rules.
        (Some(_), None, None) => Some(ReplayRules::Recorded),
        _ => None,
    };
    let new = new.map_or(ReplayRules::Recorded, ReplayRules::Fixed);
    let options = SimulationOptions { replay, max_keys: *max_keys as usize };
    let mut simulation = Simulation::new(new, old, &options);
    if map.is_none() && against.is_some() && !fail_if.is_empty() {
        simulation.enable_verification(&options);
    }
    let results = replay_traffic(args, &mut simulation, &sources, &fixed)?;
    print_results(args, &results, describe_missing_rules(args, &simulation, &results).as_deref())
}

/// Tells that a decision log lacks the rules to compare with.
fn describe_missing_rules(args: &Args, simulation: &Simulation, results: &SimulationResults) -> Option<String> {
    let is_compared = args.traffic.rules.is_empty() || args.traffic.map.is_some() || results.changes.is_some();
    let missing = match simulation.log.rule_sets {
        0 => "the log has no rules (no header)",
        _ => "the log has no rules of its decisions, only others",
    };
    (!is_compared).then(|| format!("nothing was compared: {missing} (give the rules of that time as --against)"))
}

/// Replays all traffic.
fn replay_traffic(
    args: &Args,
    simulation: &mut Simulation,
    sources: &SourceOptions,
    fixed: &[Arc<RuleSet>],
) -> Result<SimulationResults, CommandFailure> {
    let started = thread_cpu_time();
    let TrafficReadStats { summary, decode_time } = args.traffic.read_traffic(sources, |event| {
        match event {
            TrafficEvent::Request(request) => simulation.replay_request(request)?,
            TrafficEvent::Header(header) => {
                if header.hashed_values {
                    refuse_rules_on_hashed_values(fixed.iter().chain(&header.rules))?;
                }
                simulation.apply_header(header)?;
            }
            TrafficEvent::Dropped(count) => simulation.log.dropped += count,
        }
        Ok(true)
    })?;
    if simulation.requests == 0 {
        return Err(CommandFailure {
            outcome: CommandOutcome::Failure,
            problem: "the traffic has no requests".to_owned(),
        });
    }
    if simulation.new.lacks_recorded_rules(simulation.requests) {
        let problem = "nothing was replayed: the log has no rules (no header) (give --rules)".to_owned();
        return Err(CommandFailure::usage_error(problem));
    }
    simulation.discard_replay_if_rules_unknown();
    let replay_seconds = (thread_cpu_time() - started).as_secs_f64();
    let decode_seconds = decode_time.as_secs_f64();
    let speed =
        ReplaySpeed::new(simulation.count_replayed_decisions(), simulation.requests, replay_seconds, decode_seconds);
    let mut results = SimulationResults::new(simulation, &summary, speed, args.top.into());
    let of_rules = fixed.iter().flat_map(|rules| warnings::collect_rule_warnings(rules));
    results.warnings = warnings::collect_warnings(simulation, &summary, &results).into_iter().chain(of_rules).collect();
    let reasons = warnings::list_infidelity_reasons(&simulation.log, &summary, &results);
    if let Some(found) = results.verification.as_mut().filter(|found| found.agreed < found.compared) {
        found.reasons = reasons;
    }
    let gate = ConditionJudge {
        results: &results,
        summary: &summary,
        min_fidelity: Some(args.min_fidelity).filter(|_| args.traffic.map.is_none()),
    };
    results.conditions = args.fail_if.iter().map(|condition| gate.judge_condition(condition)).collect();
    Ok(results)
}

/// Prints the results; `missing` tells what there was not to compare with.
fn print_results(
    args: &Args,
    results: &SimulationResults,
    missing: Option<&str>,
) -> Result<CommandOutcome, CommandFailure> {
    let page = if args.traffic.json { to_pretty_json(results)? + "\n" } else { format_results(results) };
    let outcome = if results.conditions.iter().any(|condition| condition.fails) {
        CommandOutcome::Failure
    } else if missing.is_some() || results.conditions.iter().any(|condition| condition.not_judged.is_some()) {
        CommandOutcome::UsageError
    } else {
        CommandOutcome::Success
    };
    let outcome = fail_if_unwritten(print_to_stdout(page), outcome);
    for ConditionResult { condition, figure, fails, not_judged } in &results.conditions {
        match not_judged {
            Some(reason) => {
                print_error(escape_unprintable(&format!("--fail-if '{condition}': not judged: {reason}")));
            }
            None if *fails => print_error(escape_unprintable(&format!("--fail-if '{condition}': {figure}"))),
            None => {}
        }
    }
    missing.into_iter().for_each(print_error);
    Ok(outcome)
}

/// Checks that the rules have the limits of all conditions.
fn check_condition_limits(args: &Args, new: Option<&RuleSet>, against: Option<&RuleSet>) -> Result<(), CommandFailure> {
    let Some(new) = new else { return Ok(()) };
    let paths = || [Some(new), against].into_iter().flatten().flat_map(list_limit_paths);
    for condition in &args.fail_if {
        let Some(subject) = condition.limit_path() else { continue };
        if !paths().any(|path| path == subject) {
            let hint = suggest_similar_paths(paths(), subject);
            let problem = format!("--fail-if '{condition}': the rules have no limit '{subject}'{hint}");
            return Err(CommandFailure::usage_error(escape_unprintable(&problem)));
        }
    }
    Ok(())
}

/// Rows of the time line.
const MAX_TIMELINE_ROWS: usize = 12;

/// Formats the results.
fn format_results(results: &SimulationResults) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a String does not fail.
        let _ = writeln!(page, "{name:<10}{text}");
    };
    let traffic = &results.traffic;
    let time = |at: &Option<String>| at.clone().unwrap_or_default();
    let span = format!("{} to {}", time(&traffic.first), time(&traffic.last));
    line("traffic", format!("{}, {span}", format_with_noun(traffic.requests, "request")));
    line("new", format_totals(&results.new, traffic.requests));
    if let Some(old) = &results.old {
        line("old", format_totals(old, traffic.requests));
    }
    if let Some(VerdictChangeResults { newly_rejected, newly_admitted, .. }) = &results.changes {
        line("changes", format!("{newly_rejected} newly rejected, {newly_admitted} newly admitted"));
    }
    if let Some(verification) = &results.verification {
        let (agreed, compared) = (verification.agreed, verification.compared);
        let percent = compute_share(agreed, compared) * 100.0;
        let first = verification.first_difference.as_ref();
        let first =
            first.map_or_else(String::new, |first| format!("; first difference: {}", escape_unprintable(first)));
        line("fidelity", format!("{agreed} of {compared} recorded decisions repeated ({percent:.2} %){first}"));
        verification.reasons.iter().for_each(|reason| line("reason", reason.clone()));
    }
    let speed = results.speed;
    line(
        "speed",
        format!(
            "{:.2} million decisions per second and core; decoding {:.2} million requests",
            speed.decisions_per_second / 1e6,
            speed.decoded_per_second / 1e6
        ),
    );
    for warning in &results.warnings {
        line("warning", escape_unprintable(warning));
    }
    for ConditionResult { condition, figure, fails, not_judged } in &results.conditions {
        let verdict = match not_judged {
            Some(reason) => format!("not judged: {reason} (figure: {figure})"),
            None => format!("{figure}, {}", if *fails { "failed" } else { "passed" }),
        };
        line("condition", escape_unprintable(&format!("{condition}: {verdict}")));
    }
    page += &format_limit_table(&results.limits, results.old.is_some());
    page += &format_key_lists(results);
    page += &format_timeline(&results.timeline);
    let last = results.traffic.last.as_deref().unwrap_or_default();
    page += &format_timeline_chart("admitted and rejected", &results.timeline, last, chart_width());
    page
}

fn format_totals(totals: &ReplayTotals, requests: u64) -> String {
    let ReplayTotals { rejected, unmatched_descriptors, failed, .. } = *totals;
    let mut text = format!("{} rejected", format_with_share(rejected, requests));
    if unmatched_descriptors > 0 {
        text += &format!(", {} without a rule", format_with_noun(unmatched_descriptors, "descriptor"));
    }
    if failed > 0 {
        text += &format!(", {failed} without an answer");
    }
    text
}

fn format_limit_table(limits: &[LimitResults], has_old: bool) -> String {
    let mut headings = vec!["LIMIT", "REQUESTS", "REJECTED"];
    headings.extend(has_old.then_some(["BEFORE", "NEWLY REJECTED"]).into_iter().flatten());
    headings.extend(["KEYS", "REJECTED KEYS", "LONGEST RUN", "DELAYED"]);
    let row = |limit: &LimitResults| {
        let mode = match (limit.candidate, limit.shadow_mode) {
            (true, _) => " (candidate)",
            (false, true) => " (shadow)",
            (false, false) => "",
        };
        let change = limit.change.map_or_else(String::new, |change| format!(" ({})", change.name()));
        let mut row = vec![format!("{}{mode}{change}", escape_unprintable(&limit.path))];
        let none = LimitFigures::default();
        let new = limit.new.as_ref().unwrap_or(&none);
        row.push(if limit.new.is_some() { new.requests.to_string() } else { "removed".to_owned() });
        row.push(format_with_share(new.rejected, new.requests));
        if has_old {
            let before = |old: &LimitFigures| format_with_share(old.rejected, old.requests);
            row.push(limit.old.as_ref().map_or_else(|| "-".to_owned(), before));
            row.push(new.rejected_here_only.to_string());
        }
        let about = if new.keys_are_estimates { "about " } else { "" };
        row.push(format!("{about}{}", new.keys));
        row.push(format!("{about}{}", format_with_share(new.rejected_keys, new.keys)));
        row.push(
            new.longest_run
                .as_ref()
                .map_or_else(String::new, |run| format!("{} in {}", run.requests, format_seconds(run.seconds))),
        );
        row.push(new.delays.map_or_else(String::new, |delays| {
            let (p99, max) = (format_latency(delays.p99_us), format_latency(delays.max_us));
            format!("{}: p99 {p99}, max {max}", delays.requests)
        }));
        row
    };
    let rows = list_changed_limits_first(limits).into_iter().map(row);
    format!("\n{}", format_table(&headings, rows, NumberAlignment::Left))
}

fn format_key_lists(results: &SimulationResults) -> String {
    let mut page = String::new();
    let mut list = |title: &str, keys: &[RejectedKeyResults]| {
        if !keys.is_empty() {
            let row = |key: &RejectedKeyResults| {
                let about = if key.error > 0 { "at most " } else { "" };
                vec![format!("{about}{}", key.requests), escape_unprintable(&key.limit), escape_and_shorten(&key.key)]
            };
            page +=
                &format!("\n{}", format_table(&[title, "LIMIT", "KEY"], keys.iter().map(row), NumberAlignment::Left));
        }
    };
    list("REJECTED", &results.rejected_keys);
    if let Some(changes) = &results.changes {
        list("NEWLY REJECTED", &changes.newly_rejected_keys);
        list("NEWLY ADMITTED", &changes.newly_admitted_keys);
    }
    page
}

/// Formats the time line, with neighbouring spans joined so that it stays short.
fn format_timeline(timeline: &TimelineResults) -> String {
    let joined = timeline.requests.len().div_ceil(MAX_TIMELINE_ROWS).max(1);
    let span_us = timeline.span_seconds * 1_000_000 * joined as u64;
    let sums = |counts: &[u64]| counts.chunks(joined).map(|spans| spans.iter().sum()).collect::<Vec<u64>>();
    let (requests, rejected) = (sums(&timeline.requests), sums(&timeline.rejected));
    let before = timeline.rejected_before.as_deref().map(sums);
    let mut headings = vec!["FROM START", "REQUESTS", "REJECTED"];
    headings.extend(before.is_some().then_some("BEFORE"));
    let rows = requests.iter().enumerate().map(|(index, requests)| {
        let at = |counts: &Vec<u64>| format_with_share(counts.get(index).copied().unwrap_or(0), *requests);
        let mut row = vec![format_micros(index as u64 * span_us), requests.to_string(), at(&rejected)];
        row.extend(before.as_ref().map(at));
        row
    });
    format!("\n{}", format_table(&headings, rows, NumberAlignment::Left))
}
