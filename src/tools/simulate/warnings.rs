//! Reasons why the figures of a simulation may differ from those of a server.

use super::results::SimulationResults;
use super::simulation::{LogProperties, Simulation};
use crate::limit::{Consistency, Limit};
use crate::rules::rule::set::RuleSet;
use crate::tools::replay::source::SourceSummary;

/// Returns the reasons that apply, each with a fix if there is one.
pub fn collect_warnings(simulation: &Simulation, summary: SourceSummary, results: &SimulationResults) -> Vec<String> {
    let mut warnings = collect_input_warnings(&simulation.log, summary);
    let mut warn = |applies: bool, text: String| {
        if applies {
            warnings.push(text);
        }
    };
    for (rules, totals) in [("new", Some(&results.new)), ("old", results.old.as_ref())] {
        let Some(totals) = totals else { continue };
        let evicted = totals.evicted_counters;
        warn(
            evicted > 0,
            format!("{rules}: {evicted} counters were evicted, so too little is rejected (raise --memory)"),
        );
        let failed = totals.failed;
        warn(failed > 0, format!("{rules}: {failed} requests got no answer: no rules, or no room for a counter"));
        let without = totals.charges_without_counter;
        warn(without > 0, format!("{rules}: {without} charges found no room for a counter (raise --memory)"));
        let untracked = totals.untracked_requests;
        warn(
            untracked > 0,
            format!("{rules}: {untracked} requests of keys beyond --max-keys: keys are estimates, runs are incomplete"),
        );
    }
    warnings
}

/// Returns the reasons that lie in the files.
pub fn collect_input_warnings(log: &LogProperties, summary: SourceSummary) -> Vec<String> {
    let mut warnings = collect_log_warnings(log);
    let mut warn = |applies: bool, text: String| {
        if applies {
            warnings.push(text);
        }
    };
    let SourceSummary { skipped, hidden, late, truncated } = summary;
    warn(
        hidden > 0,
        format!("{hidden} descriptors have no values, as rules with `decision_log: none` say: not replayed"),
    );
    warn(truncated, "a file ends within a record: its end is missing".to_owned());
    warn(skipped > 0, format!("{skipped} rows have no descriptor: a field of each is absent"));
    warn(late > 0, format!("{late} rows are too far out of order and were replayed late (sort the file by time)"));
    warnings
}

fn collect_log_warnings(log: &LogProperties) -> Vec<String> {
    let mut warnings = Vec::new();
    if log.dropped > 0 {
        warnings.push(format!("the log lost {} decisions, so counters see too few requests", log.dropped));
    }
    if let Some(sample) = log.sample.filter(|sample| *sample < 1.0) {
        let percent = sample * 100.0;
        warnings.push(format!("the log has {percent} % of the keys: numbers are of these, other keys are not counted"));
    }
    if log.is_incomplete {
        warnings.push(
            "the log leaves out admitted decisions, so counters see too few requests \
             (record with TOLLKEEPER_DECISION_LOG_WHEN=all)"
                .to_owned(),
        );
    }
    if log.sample.is_some() && log.starts == 0 {
        warnings.push("the log does not begin with the start of a process: its counters had been in use".to_owned());
    }
    warnings
}

/// Returns warnings about rules that a replay decides in another way than a server.
pub fn collect_rule_warnings(rules: &RuleSet) -> Vec<String> {
    let count = |has: fn(&Limit) -> bool| {
        rules.rules().flat_map(|rule| &rule.limits).filter(|compiled| has(&compiled.limit)).count()
    };
    let eventual = count(|limit| matches!(limit.consistency(), Consistency::Eventual(_)));
    let eventual =
        (eventual > 0).then(|| format!("{eventual} limits with `consistency: eventual` are replayed as strict"));
    let global = count(|limit| limit.global_scope().is_some());
    let global = (global > 0).then(|| {
        format!(
            "{global} limits with `scope: global` are replayed as one limit without regions \
             (give the logs of all regions)"
        )
    });
    eventual.into_iter().chain(global).collect()
}
