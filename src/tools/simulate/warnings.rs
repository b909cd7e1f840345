//! Reasons why the figures of a simulation may differ from those of a server, or the replay from the record.
//!
//! Decides: why a simulation may differ from the server (`list_infidelity_reasons`).
//! Decides: its warnings, such as descriptors that the new rules do not have.

use super::results::{SimulationResults, compute_share};
use super::simulation::{LogProperties, Simulation};
use crate::limit::{Consistency, Limit};
use crate::rules::rule::set::RuleSet;
use crate::tools::replay::log_completeness::SequenceFindings;
use crate::tools::replay::source::SourceSummary;

/// Maximum number of processes whose irregular records get warnings of their own.
const MAX_REPORTED_PROCESSES: usize = 5;

/// Returns the reasons that apply, each with a fix if there is one.
pub fn collect_warnings(simulation: &Simulation, summary: &SourceSummary, results: &SimulationResults) -> Vec<String> {
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
        let unknown = totals.without_recorded_rules;
        let share = compute_share(unknown, results.traffic.requests) * 100.0;
        let done = if rules == "old" { "compared" } else { "replayed" };
        warn(
            unknown > 0,
            format!(
                "{unknown} requests ({share:.2} %) are not {done}: the log does not have their rules (give the files \
                 with the headers of their processes, or --rules and --against)"
            ),
        );
        let failed = totals.failed - unknown;
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
pub fn collect_input_warnings(log: &LogProperties, summary: &SourceSummary) -> Vec<String> {
    let mut warnings = collect_log_warnings(log);
    warnings.extend(collect_sequence_warnings(&summary.sequences));
    let mut warn = |applies: bool, text: String| {
        if applies {
            warnings.push(text);
        }
    };
    let SourceSummary { rows, skipped, hidden, late, truncated, absent_fields, .. } = summary;
    warn(
        *hidden > 0,
        format!("{hidden} descriptors have no values, as rules with `decision_log: none` say: not replayed"),
    );
    warn(*truncated, "a file ends within a record: its end is missing".to_owned());
    for absent in absent_fields {
        let field = format!("field '{}' of --map is absent in", absent.field);
        warn(absent.rows == *rows, format!("{field} all {rows} rows (is it misspelt?)"));
        warn(absent.rows != *rows, format!("{field} {} of {rows} rows", absent.rows));
    }
    warn(*skipped > 0, format!("{skipped} rows have no descriptor: a field of each is absent"));
    warn(*late > 0, format!("{late} rows are too far out of order and were replayed late (sort the file by time)"));
    warnings
}

fn collect_sequence_warnings(sequences: &[SequenceFindings]) -> Vec<String> {
    let mut warnings = Vec::new();
    for found in sequences.iter().take(MAX_REPORTED_PROCESSES) {
        let process = &found.process;
        if let Some(gap) = &found.first_gap {
            let (missing, from, to) = (found.missing, gap.start(), gap.end());
            warnings.push(format!(
                "process {process}: {missing} records are missing (first {from} to {to}): they were lost, or a file \
                 was left out"
            ));
        }
        if found.repeated > 0 {
            let repeated = found.repeated;
            warnings.push(format!(
                "process {process}: {repeated} records occur again and were counted once (is a file given twice?)"
            ));
        }
    }
    if sequences.len() > MAX_REPORTED_PROCESSES {
        let more = sequences.len() - MAX_REPORTED_PROCESSES;
        warnings.push(format!("{more} more processes have missing or repeated records"));
    }
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

/// Returns likely reasons why a replay under the recorded rules differs from the record.
pub fn list_infidelity_reasons(
    log: &LogProperties,
    summary: &SourceSummary,
    results: &SimulationResults,
) -> Vec<String> {
    let lacks_records = summary.sequences.iter().any(|found| found.missing > 0);
    let mut totals = [Some(&results.new), results.old.as_ref()].into_iter().flatten();
    let lost_counters = totals.any(|totals| totals.evicted_counters + totals.charges_without_counter > 0);
    let known = [
        (lacks_records, "records are missing"),
        (log.dropped > 0, "the log lost decisions"),
        (log.is_incomplete, "the log leaves out admitted decisions"),
        (log.starts == 0, "counters had been in use before the log begins"),
        (summary.hidden > 0, "descriptors without values are not replayed"),
        (lost_counters, "counters were evicted"),
        (log.has_loose_limits, "limits with `consistency: eventual` or `scope: global` are replayed as strict"),
    ];
    let applying = known.into_iter().filter(|(applies, _)| *applies);
    let mut reasons: Vec<String> = applying.map(|(_, reason)| reason.to_owned()).collect();
    if reasons.is_empty() {
        let unknown = "none in the log: charges at once may have been decided in another order, or counters were in \
                       use before or reset";
        reasons.push(unknown.to_owned());
    }
    reasons
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
