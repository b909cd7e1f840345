//! `recommend`: finds the smallest limits that reject few keys of recorded traffic.
//!
//! Decides: options of `recommend` and their defaults (`--memory`, `--max-keys`).
//! Decides: which limits it refuses: concurrent, unlimited, plans, never charged; exit code 1 if no limit will do.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

use super::chart::{chart_width, format_timeline_chart};
use super::print::{
    CommandOutcome, fail_if_unwritten, format_seconds, format_with_noun, format_with_share, print_error,
    print_to_stdout,
};
use super::traffic_input::{
    CommandFailure, ReplaySetup, TrafficArgs, TrafficReadStats, list_limit_paths, print_failure,
    refuse_rules_on_hashed_values, suggest_similar_paths,
};
use crate::base::text::{escape_unprintable, to_pretty_json};
use crate::base::text_table::{NumberAlignment, format_table};
use crate::limit::Limit;
use crate::limit::overflow::ChainPosition;
use crate::rules::rule::set::RuleSet;
use crate::tools::recommend::demand::{
    CollectorOptions, DemandCollector, DemandTotals, LimitDemand, RecordedRejections,
};
use crate::tools::recommend::recommendation::{RejectedKeysGoal, recommend_limits};
use crate::tools::recommend::results::{PeakUseResults, RecommendationResults, TrafficBasisResults};
use crate::tools::recommend::results_builder::{RecommendationParts, TrafficBasis};
use crate::tools::replay::replayer::{ReplayOptions, ReplayRules};
use crate::tools::replay::source::{SourceOptions, TrafficEvent};
use crate::tools::simulate::warnings;

/// Arguments of `recommend`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Path of the limit, as in /rlconfig, such as shop.login
    #[arg(long, value_name = "PATH")]
    rule: String,
    #[command(flatten)]
    traffic: TrafficArgs,
    /// Keys that may be rejected: a share with %, or a number
    #[arg(long, value_name = "SHARE", default_value = "0.1%", value_parser = parse_rejected_keys_goal)]
    rejected_keys: RejectedKeysGoal,
}

pub(super) const HELP: &str = "\
Shows the peak use of the keys in any span of each period, and finds the smallest limit that rejects at most a share of \
the keys at least once, by replaying the recorded requests of each key through the algorithm of the rule. Nothing is sent \
anywhere.

Requests that were rejected when they were recorded are part of the use. A bucket or queue holds as many as the limit.

A chart shows when the recommended limit admits and rejects requests, as that of `tollkeeper simulate`.

The log must have all decisions (TOLLKEEPER_DECISION_LOG_WHEN=all) with their values, plain or hashed. See \
docs/simulate.md for other formats, for the fields of the JSON, and for the basis of the figures.

Examples:
  tollkeeper recommend --rule shop.login --traffic decisions.jsonl
  tollkeeper recommend --rule shop.login --traffic decisions.jsonl \\
    --rejected-keys 1%
  tollkeeper recommend --rule shop.login.free --rules rules.yaml \\
    --table customers=new.csv --traffic decisions.jsonl
  tollkeeper recommend --rule shop.login --rules new.yaml \\
    --traffic access.log --map map.yaml --json

Exit codes: 0 limits found, 1 there is no such limit, or the rules or the traffic have errors, 2 invalid usage.";

/// Parses a share with `%`, or a number of keys.
fn parse_rejected_keys_goal(text: &str) -> Result<RejectedKeysGoal, String> {
    let invalid = || "write a share, such as 0.1%, or a number of keys".to_owned();
    let Some(percent) = text.strip_suffix('%') else {
        return text.parse().map(RejectedKeysGoal::Keys).map_err(|_| invalid());
    };
    let percent: f64 = percent.trim().parse().map_err(|_| invalid())?;
    if !(0.0..100.0).contains(&percent) {
        return Err("write a share from 0% to less than 100%".to_owned());
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the range above")]
    let billionths = (percent / 100.0 * RejectedKeysGoal::BILLIONTHS_IN_WHOLE as f64).round() as u64;
    Ok(RejectedKeysGoal::Billionths(billionths))
}

/// Recommends, and prints the results.
pub(super) fn run(args: &Args) -> CommandOutcome {
    print_failure(recommend_from_traffic(args))
}

/// Traffic and rules of the command.
struct DemandReader<'a> {
    args: &'a Args,
    sources: SourceOptions,
    rules: ReplayRules,
    replay: ReplayOptions,
    /// All rule sets, each once.
    rule_sets: Vec<Arc<RuleSet>>,
}

fn recommend_from_traffic(args: &Args) -> Result<CommandOutcome, CommandFailure> {
    let ReplaySetup { rules: fixed, replay, sources, .. } = args.traffic.prepare(&[])?;
    let rule_sets: Vec<_> = fixed.iter().cloned().collect();
    if !rule_sets.is_empty() {
        check_limit_path(&args.rule, &rule_sets)?;
    }
    let rules = fixed.map_or(ReplayRules::Recorded, ReplayRules::Fixed);
    let mut input = DemandReader { args, sources, rules, replay, rule_sets };
    let (demand, basis) = input.collect_demand()?;
    check_limit_path(&args.rule, &input.rule_sets)?;
    let Some(asked) = demand.asked.clone() else {
        let problem = escape_unprintable(&format!("no request of the traffic charged {}", args.rule));
        return Err(CommandFailure { outcome: CommandOutcome::Failure, problem });
    };
    let entries = input.rule_sets.iter().rev().find_map(|rules| rules.find_rule_path(&asked.rule));
    let results = RecommendationResults::new(RecommendationParts {
        path: &args.rule,
        entries: entries.as_ref(),
        demand: &demand,
        asked: &asked,
        goal: args.rejected_keys,
        basis: &basis,
        recommendation: &recommend_limits(&demand, &asked, args.rejected_keys),
    });
    print_results(args, &results)
}

impl DemandReader<'_> {
    /// Reads the demand on the limit.
    fn collect_demand(&mut self) -> Result<(LimitDemand, TrafficBasis), CommandFailure> {
        let options = CollectorOptions { replay: self.replay.clone(), max_keys: self.args.traffic.max_keys as usize };
        let mut collector = DemandCollector::new(&self.args.rule, self.rules.clone(), &options);
        let mut is_cut = false;
        let rule_sets = &mut self.rule_sets;
        let is_fixed = matches!(self.rules, ReplayRules::Fixed(_));
        let TrafficReadStats { summary, .. } = self.args.traffic.read_traffic(&self.sources, |event| {
            match event {
                TrafficEvent::Request(request) => is_cut = !collector.add_request(request)?,
                TrafficEvent::Header(header) => {
                    add_rule_set_if_new(rule_sets, header.rules.as_ref().filter(|_| !is_fixed));
                    if header.hashed_values {
                        refuse_rules_on_hashed_values(rule_sets.iter())?;
                    }
                    collector.apply_header(header)?;
                }
                TrafficEvent::Dropped(count) => collector.log.dropped += count,
            }
            Ok(!is_cut)
        })?;
        if collector.requests == 0 {
            let problem = "the traffic has no requests".to_owned();
            return Err(CommandFailure { outcome: CommandOutcome::Failure, problem });
        }
        let basis = TrafficBasis::new(&collector, is_cut, warnings::collect_input_warnings(&collector.log, &summary));
        Ok((collector.finish(), basis))
    }
}

/// Adds a rule set that is new.
fn add_rule_set_if_new(rule_sets: &mut Vec<Arc<RuleSet>>, rules: Option<&Arc<RuleSet>>) {
    if let Some(rules) = rules.filter(|rules| !rule_sets.iter().any(|known| Arc::ptr_eq(known, rules))) {
        rule_sets.push(Arc::clone(rules));
    }
}

fn print_results(args: &Args, results: &RecommendationResults) -> Result<CommandOutcome, CommandFailure> {
    let text = if args.traffic.json { to_pretty_json(results)? + "\n" } else { format_results(results) };
    let is_found = !results.limits.is_empty();
    let outcome = fail_if_unwritten(
        print_to_stdout(text),
        if is_found { CommandOutcome::Success } else { CommandOutcome::Failure },
    );
    if !is_found {
        print_error("no limit rejects so few keys (raise --rejected-keys, or give --rules with another algorithm)");
    }
    Ok(outcome)
}

/// Maximum number of limits of plans that a message names.
const MAX_NAMED_PLANS: usize = 10;

/// Checks that one of the rule sets has the limit, and that none has it as a concurrent one.
fn check_limit_path(path: &str, rule_sets: &[Arc<RuleSet>]) -> Result<(), CommandFailure> {
    let paths = || rule_sets.iter().flat_map(|rules| list_limit_paths(rules));
    let rules = || rule_sets.iter().flat_map(|rules| rules.rules());
    let is_a_limit_that = |is_so: fn(&Limit) -> bool| {
        rules().any(|compiled| {
            let mut limits = compiled.limits.iter().enumerate();
            limits.any(|(index, one)| is_so(&one.limit) && compiled.rule.limit_path(index) == path)
        })
    };
    let is_concurrent = is_a_limit_that(Limit::is_concurrent);
    let overflows = is_a_limit_that(|limit| limit.chain_position() != ChainPosition::NotInChain);
    let is_known = paths().any(|known| known == path);
    if is_known && !is_concurrent && !overflows {
        return Ok(());
    }
    let of_rule = rules().find(|compiled| compiled.rule.path == path);
    let problem = if is_concurrent {
        format!(
            "--rule {path}: the limit is concurrent, and recommend finds numbers of requests per period (simulate \
             replays a concurrent limit with another number)"
        )
    } else if overflows {
        format!(
            "--rule {path}: the limit overflows into another, or takes the overflow of one, and recommend replays one \
             limit alone (simulate replays all of them)"
        )
    } else if of_rule.is_some_and(|compiled| compiled.rule.plan.is_some()) {
        let plans = paths().filter(|known| known.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')));
        let plans: BTreeSet<String> = plans.take(MAX_NAMED_PLANS).collect();
        let plans = plans.into_iter().collect::<Vec<_>>().join(" or ");
        format!("--rule {path}: the rule has plans (name the limit of one: {plans})")
    } else if of_rule.is_some() {
        format!("--rule {path}: the rule is unlimited (give --rules with any limit for it)")
    } else if rule_sets.is_empty() {
        "the traffic has no rules (give --rules)".to_owned()
    } else {
        format!("--rule {path}: the rules have no limit of that path{}", suggest_similar_paths(paths(), path))
    };
    Err(CommandFailure::usage_error(escape_unprintable(&problem)))
}

/// Formats the results.
fn format_results(results: &RecommendationResults) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a String does not fail.
        let _ = writeln!(page, "{name:<10}{text}");
    };
    let (rule, basis) = (&results.rule, &results.basis);
    line("rule", escape_unprintable(&format!("{}: {} ({})", rule.path, rule.limit, rule.location)));
    line("basis", format_traffic_basis(basis));
    line("", format!("{} to {}", basis.first, basis.last));
    if let Some(already) = &basis.already_rejected {
        line("rejected", format_already_rejected(already));
    }
    line("now", format!("rejects {} of the keys", format_with_share(rule.rejected_keys, basis.keys)));
    let allowed = results.goal.rejected_keys;
    line("goal", format!("at most {} of {} rejected", format_with_noun(allowed, "key"), basis.keys));
    for warning in &results.warnings {
        line("warning", escape_unprintable(warning));
    }
    if let Some(first) = results.left_out_periods.first() {
        let periods: Vec<&str> = results.left_out_periods.iter().map(|left_out| &*left_out.period).collect();
        line("left out", format!("{}: {}", periods.join(", "), first.reason));
    }
    page += &format_limits_by_period(results);
    if let Some(timeline) = &results.timeline {
        page += &format_timeline_chart("under the recommended limit", timeline, &basis.last, chart_width());
    }
    if let Some(yaml) = &results.yaml {
        // Values are escaped by the quotes of YAML.
        let _ = write!(page, "\n{yaml}");
    }
    page
}

fn format_traffic_basis(basis: &TrafficBasisResults) -> String {
    let TrafficBasisResults { keys, processes, .. } = *basis;
    let DemandTotals { requests, hits, peeks, refunds, .. } = basis.totals;
    let mut text = format!("{} of {}", format_with_noun(requests, "request"), format_with_noun(keys, "key"));
    if hits != requests {
        text += &format!(", {hits} hits");
    }
    for (number, what) in [(peeks, "peek"), (refunds, "refund")] {
        if number > 0 {
            text += &format!(", {}", format_with_noun(number, what));
        }
    }
    if processes > 1 {
        text += &format!(", {processes} processes");
    }
    text + &format!(" in {}", format_seconds(basis.span_seconds))
}

fn format_already_rejected(already: &RecordedRejections) -> String {
    let RecordedRejections { requests, keys, elsewhere, .. } = *already;
    let mut text = format!(
        "{requests} requests ({:.2} %) of {} were rejected already",
        already.share * 100.0,
        format_with_noun(keys, "key")
    );
    let by_limit = already.by_limit.iter().map(|(path, count)| format!("{count} by {path}"));
    let elsewhere = (elsewhere > 0).then(|| format!("{elsewhere} by other rules or policies"));
    let causes: Vec<String> = by_limit.chain(elsewhere).collect();
    if !causes.is_empty() {
        text += &format!(": {}", causes.join(", "));
    }
    escape_unprintable(&text)
}

/// Formats the peak use of each period, and its smallest limit.
fn format_limits_by_period(results: &RecommendationResults) -> String {
    let row = |used: &PeakUseResults| {
        let found = results.limits.iter().find(|limit| limit.period == used.period);
        let mark = if found.is_some_and(|limit| limit.recommended) { " *" } else { "" };
        let limit = found.map_or_else(|| "none".to_owned(), |limit| limit.requests_per_unit.to_string());
        let rejected = found.map(|limit| format_with_share(limit.rejected_keys, results.basis.keys));
        let numbers = [used.p50, used.p90, used.p99, used.max].map(|number| number.to_string());
        let period = format!("any {}{mark}", used.period);
        [period].into_iter().chain(numbers).chain([limit, rejected.unwrap_or_default()]).collect::<Vec<_>>()
    };
    let headings = ["HITS PER KEY IN", "P50", "P90", "P99", "MAX", "LIMIT", "REJECTED KEYS"];
    let table = format_table(&headings, results.uses.iter().map(row), NumberAlignment::Left);
    let recommended = results.limits.first();
    let note = recommended.map(|limit| format!("limits by {}; * is that of the rule to paste\n", limit.algorithm));
    format!("\n{table}{}", note.unwrap_or_default())
}
