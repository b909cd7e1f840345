//! `recommend`: finds the smallest limits that reject few keys of recorded traffic.

mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

use super::outcome::CommandOutcome;
use super::print::{finish, print, print_error};
use super::rule_files::settings_or_defaults;
use super::traffic_args::{
    Failure, compile, limit_paths, memory, nearest_hint, open_traffic, progress_bar, read_map, refuse_hashed_values,
};
use crate::base::text::printable;
use crate::base::text::to_pretty_json;
use crate::rules::rule::set::RuleSet;
use crate::settings::value::number::ByteSize;
use crate::tools::recommend::collector::{CollectedDemand, CollectorOptions, DemandCollector};
use crate::tools::recommend::demand::DemandSubject;
use crate::tools::recommend::figures::{RecommendationParts, TrafficBasis};
use crate::tools::recommend::page;
use crate::tools::recommend::recommendation::{Recommendation, RejectedKeysGoal, SearchProgress, recommend};
use crate::tools::recommend::results::RecommendationResults;
use crate::tools::recommend::verifier::Verifier;
use crate::tools::replay::merge::MAX_FILES;
use crate::tools::replay::replayer::{ReplayOptions, ReplayRules};
use crate::tools::replay::source::{SourceOptions, SourceSummary, TrafficEvent};
use crate::tools::simulate::warnings;

/// Arguments of `recommend`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Path of the limit, as in /rlconfig, such as shop.login
    #[arg(long, value_name = "PATH")]
    rule: String,
    /// Decision logs: files, plain or compressed (zstd, gzip), redis:STREAM, or - for standard input
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    traffic: Vec<PathBuf>,
    /// Keys that may be rejected: a share with %, or a number
    #[arg(long, value_name = "SHARE", default_value = "0.1%", value_parser = goal)]
    rejected_keys: RejectedKeysGoal,
    /// Rules with the limit, in place of the recorded ones
    #[arg(long, value_name = "FILE", num_args = 1..)]
    rules: Vec<PathBuf>,
    /// Mapping of the fields of an access log (JSON lines) or of CSV to requests, in YAML
    #[arg(long, value_name = "FILE", requires = "rules")]
    map: Option<PathBuf>,
    /// Write a page with plots, in one file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write the results as one JSON object
    #[arg(long)]
    json: bool,
    /// Memory of the recorded charges, and of the counters of each replay
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = memory)]
    memory: ByteSize,
    /// Number of keys that are read; further ones are left out
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    max_keys: u32,
}

pub(super) const HELP: &str = "\
Finds, for each algorithm and period, the smallest limit that rejects at most a share of the keys at least once, by \
replaying the recorded requests of each key through the algorithm. Then it replays all traffic under the limits found, \
to verify them. Nothing is sent anywhere.

Requests that were rejected when they were recorded are part of the use. For token_bucket and leaky_bucket, the bucket \
or queue may hold a multiple of the limit in the search, and is then reduced as far as the share allows.

The log must have all decisions (TOLLKEEPER_DECISION_LOG_WHEN=all) with their values, plain or hashed. See \
docs/simulate.md for other formats, for the fields of the JSON, and for the basis of the figures.

Examples:
  tollkeeper recommend --rule shop.login --traffic decisions.jsonl
  tollkeeper recommend --rule shop.login --traffic decisions.jsonl \\
    --rejected-keys 1% --report limits.html
  tollkeeper recommend --rule shop.login --rules new.yaml \\
    --traffic access.log --map map.yaml --json

Exit codes: 0 limits found, 1 there is no such limit, or the rules or the traffic have errors, 2 invalid usage.";

/// Parses a share with `%`, or a number of keys.
fn goal(text: &str) -> Result<RejectedKeysGoal, String> {
    let invalid = || "write a share, such as 0.1%, or a number of keys".to_owned();
    let Some(percent) = text.strip_suffix('%') else {
        return text.parse().map(RejectedKeysGoal::Keys).map_err(|_| invalid());
    };
    let percent: f64 = percent.trim().parse().map_err(|_| invalid())?;
    if !(0.0..100.0).contains(&percent) {
        return Err("write a share from 0% to less than 100%".to_owned());
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the range above")]
    let billionths = (percent / 100.0 * RejectedKeysGoal::WHOLE as f64).round() as u64;
    Ok(RejectedKeysGoal::Billionths(billionths))
}

/// Recommends, and prints the results.
pub(super) fn run(args: &Args) -> CommandOutcome {
    match recommended(args) {
        Ok(outcome) => outcome,
        Err(Failure { outcome, problem }) => {
            print_error(problem);
            outcome
        }
    }
}

/// Traffic and rules of the command.
struct Input<'a> {
    args: &'a Args,
    sources: SourceOptions,
    rules: ReplayRules,
    replay: ReplayOptions,
    /// All rule sets, each once.
    rule_sets: Vec<Arc<RuleSet>>,
}

fn recommended(args: &Args) -> Result<CommandOutcome, Failure> {
    check_usage(args)?;
    let settings = settings_or_defaults();
    let map = args.map.as_deref().map(read_map).transpose()?;
    let fixed = (!args.rules.is_empty()).then(|| compile("--rules", &args.rules, &settings)).transpose()?;
    let replay = ReplayOptions { memory_bytes: args.memory.0, behaviour: Arc::new(settings.decisions.clone()) };
    let rule_sets: Vec<_> = fixed.iter().cloned().collect();
    if !rule_sets.is_empty() {
        check_path(&args.rule, &rule_sets)?;
    }
    let rules = fixed.map_or(ReplayRules::Recorded, ReplayRules::Fixed);
    let mut input = Input { args, sources: SourceOptions::new(map, settings.decisions), rules, replay, rule_sets };
    let (collected, basis) = input.collect()?;
    check_path(&args.rule, &input.rule_sets)?;
    let Some(subject) = collected.demand.subject.clone() else {
        let problem = printable(&format!("no request of the traffic charged {}", args.rule));
        return Err(Failure { outcome: CommandOutcome::Failure, problem });
    };
    let results = input.results(collected, &subject, &basis)?;
    print_results(args, &results)
}

impl Input<'_> {
    /// Reads the demand on the limit.
    fn collect(&mut self) -> Result<(CollectedDemand, TrafficBasis), Failure> {
        let options = CollectorOptions { replay: self.replay.clone(), max_keys: self.args.max_keys as usize };
        let mut collector = DemandCollector::new(&self.args.rule, self.rules.clone(), &options);
        let mut is_cut = false;
        let rule_sets = &mut self.rule_sets;
        let is_fixed = matches!(self.rules, ReplayRules::Fixed(_));
        let summary = read(&self.args.traffic, &self.sources, |event| {
            match event {
                TrafficEvent::Request(request) => is_cut = !collector.add(request)?,
                TrafficEvent::Header(header) => {
                    add_rules(rule_sets, header.rules.as_ref().filter(|_| !is_fixed));
                    if header.hashed_values {
                        refuse_hashed_values(rule_sets.iter())?;
                    }
                    collector.apply(header)?;
                }
                TrafficEvent::Dropped(count) => collector.log.dropped += count,
            }
            Ok(!is_cut)
        })?;
        if collector.requests == 0 {
            let problem = "the traffic has no requests".to_owned();
            return Err(Failure { outcome: CommandOutcome::Failure, problem });
        }
        let basis = TrafficBasis::new(&collector, is_cut, warnings::of_input(&collector.log, summary));
        Ok((collector.finish(), basis))
    }

    /// Searches, and verifies what was found.
    fn results(
        &self,
        CollectedDemand { demand, keys }: CollectedDemand,
        subject: &DemandSubject,
        basis: &TrafficBasis,
    ) -> Result<RecommendationResults, Failure> {
        let bar = search_bar();
        let progress = |SearchProgress { done, of }| {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
        };
        let recommendation = recommend(&demand, subject, self.args.rejected_keys, progress);
        bar.finish_and_clear();
        let entries = self.rule_sets.iter().rev().find_map(|rules| rules.entries_of(&subject.rule));
        let mut results = RecommendationResults::new(RecommendationParts {
            path: &self.args.rule,
            entries: entries.as_ref(),
            demand: &demand,
            subject,
            goal: self.args.rejected_keys,
            basis,
            recommendation: &recommendation,
        });
        if self.args.traffic.iter().any(|path| path == Path::new("-")) {
            results.warnings.push("standard input can be read only once: the limits are not verified".to_owned());
            return Ok(results);
        }
        let limits = |recommendation: &Recommendation| {
            recommendation.candidates.iter().filter_map(|candidate| candidate.limit).collect()
        };
        let rules = self.rules.clone();
        let verifier = Verifier::new(subject, limits(&recommendation), keys, rules, self.replay.clone());
        let verifier = self.verify(verifier, basis.requests)?;
        results.add_verification(verifier.figures(), verifier.losses());
        Ok(results)
    }

    /// Replays the first `requests` requests again.
    fn verify(&self, mut verifier: Verifier, requests: u64) -> Result<Verifier, Failure> {
        let mut left = requests;
        read(&self.args.traffic, &self.sources, |event| {
            match event {
                TrafficEvent::Request(request) => {
                    verifier.add(request)?;
                    left -= 1;
                }
                TrafficEvent::Header(header) => verifier.apply(header)?,
                TrafficEvent::Dropped(_) => {}
            }
            Ok(left > 0)
        })?;
        Ok(verifier)
    }
}

/// Adds a rule set that is new.
fn add_rules(rule_sets: &mut Vec<Arc<RuleSet>>, rules: Option<&Arc<RuleSet>>) {
    if let Some(rules) = rules.filter(|rules| !rule_sets.iter().any(|known| Arc::ptr_eq(known, rules))) {
        rule_sets.push(Arc::clone(rules));
    }
}

/// Reads traffic until `each` returns false, with a progress bar.
fn read(
    paths: &[PathBuf],
    sources: &SourceOptions,
    mut each: impl FnMut(&TrafficEvent) -> Result<bool, Failure>,
) -> Result<SourceSummary, Failure> {
    let bytes = Arc::new(AtomicU64::new(0));
    let mut traffic = open_traffic(paths, sources, &bytes)?;
    let bar = progress_bar(paths);
    let mut events: u64 = 0;
    while let Some(event) = traffic.next_event()? {
        events += 1;
        if events.is_multiple_of(1 << 14) {
            bar.set_position(bytes.load(Ordering::Relaxed));
            bar.set_message(format!("{events} records"));
        }
        if !each(event)? {
            break;
        }
    }
    bar.finish_and_clear();
    Ok(traffic.summary)
}

fn print_results(args: &Args, results: &RecommendationResults) -> Result<CommandOutcome, Failure> {
    if let Some(path) = &args.report {
        let written = fs::write(path, page::html(results)?);
        written.map_err(|error| Failure::usage(printable(&format!("--report {}: {error}", path.display()))))?;
    }
    let text = if args.json { to_pretty_json(results)? + "\n" } else { report::text(results) };
    let is_found = results.limits.iter().any(|limit| limit.recommended);
    let outcome = finish(print(text), if is_found { CommandOutcome::Success } else { CommandOutcome::Failure });
    if !is_found {
        print_error("no limit rejects so few keys (raise --rejected-keys)");
    }
    Ok(outcome)
}

/// Checks the combination of flags.
fn check_usage(args: &Args) -> Result<(), Failure> {
    let reads = [&args.traffic, &args.rules].into_iter().flatten();
    let problem = if args.traffic.len() > MAX_FILES {
        format!("--traffic has more than {MAX_FILES} files (read them in parts)")
    } else if reads.filter(|path| *path == Path::new("-")).count() > 1 {
        "standard input (-) can be read only once".to_owned()
    } else {
        return Ok(());
    };
    Err(Failure::usage(problem))
}

/// Checks that one of the rule sets has the limit.
fn check_path(path: &str, rule_sets: &[Arc<RuleSet>]) -> Result<(), Failure> {
    let paths = || rule_sets.iter().flat_map(|rules| limit_paths(rules));
    if paths().any(|known| known == path) {
        return Ok(());
    }
    let mut rules = rule_sets.iter().flat_map(|rules| rules.rules());
    let problem = if rules.any(|compiled| compiled.rule.path == path) {
        format!("--rule {path}: the rule is unlimited (give --rules with any limit for it)")
    } else if rule_sets.is_empty() {
        "the traffic has no rules (give --rules)".to_owned()
    } else {
        format!("--rule {path}: the rules have no limit of that path{}", nearest_hint(paths(), path))
    };
    Err(Failure::usage(printable(&problem)))
}

/// Builds the progress bar of the search, hidden if standard error is not a terminal.
fn search_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] searched {pos} of {len} kinds of limits");
    progress_bar(&[]).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
