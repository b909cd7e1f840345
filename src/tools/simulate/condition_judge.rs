//! Judges the conditions of `--fail-if`, and refuses to judge those whose figures prove nothing.
//!
//! A figure proves nothing if there was too little to compare with, if the replay does not repeat what was recorded, or
//! if no request of the traffic concerns it. Such a condition neither passes nor fails.

use std::fmt;
use std::str::FromStr;

use super::fail_condition::FailCondition;
use super::results::{ConditionResult, SimulationResults, compute_share};
use crate::tools::replay::source::SourceSummary;

/// Smallest share of recorded decisions that a replay must repeat, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MinFidelity(f64);

/// The error completes a sentence that begins with the text.
impl FromStr for MinFidelity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
        match percent {
            Some(percent @ 0.0..=100.0) => Ok(Self(percent / 100.0)),
            _ => Err("write a share from 0% to 100%, such as 99%".to_owned()),
        }
    }
}

impl fmt::Display for MinFidelity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0 * 100.0)
    }
}

/// Judge of conditions: the figures of a simulation, and what tells whether these prove anything.
#[derive(Clone, Copy, Debug)]
pub struct ConditionJudge<'r> {
    /// Figures.
    pub results: &'r SimulationResults,
    /// Properties of the files.
    pub summary: &'r SourceSummary,
    /// Smallest fidelity; `None` for traffic that has no recorded decisions.
    pub min_fidelity: Option<MinFidelity>,
}

impl ConditionJudge<'_> {
    /// Evaluates a condition; it does not fail if it cannot be judged.
    pub fn judge_condition(&self, condition: &FailCondition) -> ConditionResult {
        let result = condition.evaluate(self.results);
        let not_judged = self.find_judging_obstacle(condition);
        ConditionResult { fails: result.fails && not_judged.is_none(), not_judged, ..result }
    }

    /// Finds the reason why a condition cannot be judged; `None` if it can.
    fn find_judging_obstacle(&self, condition: &FailCondition) -> Option<String> {
        let SourceSummary { rows, absent_fields, .. } = self.summary;
        if let Some(absent) = absent_fields.iter().find(|absent| absent.rows == *rows) {
            return Some(format!("no row has the field '{}' of --map", absent.field));
        }
        if condition.needs_old_rules() && self.results.changes.is_none() {
            return Some("nothing was compared".to_owned());
        }
        if let Some(obstacle) = self.min_fidelity.and_then(|min| self.find_fidelity_obstacle(condition, min)) {
            return Some(obstacle);
        }
        let limit_path = condition.limit_path()?;
        (!condition.has_charged_requests(self.results)).then(|| format!("no request charged {limit_path}"))
    }

    fn find_fidelity_obstacle(&self, condition: &FailCondition, min: MinFidelity) -> Option<String> {
        let results = self.results;
        let requests = results.traffic.requests;
        let replayed = requests - results.new.without_recorded_rules;
        let compared = results.changes.as_ref().filter(|_| condition.needs_old_rules());
        let known = compared.map_or(replayed, |changes| changes.compared.min(replayed));
        let percent = |part: u64, whole: u64| format!("{:.2} %", compute_share(part, whole) * 100.0);
        if compute_share(known, requests) < min.0 {
            let known = percent(known, requests);
            return Some(format!("only {known} of the requests could be compared, less than --min-fidelity {min}"));
        }
        match &results.verification {
            None if min.0 > 0.0 => Some(
                "the fidelity is unknown, because no recorded decision can be repeated (--min-fidelity 0% judges all \
                 the same)"
                    .to_owned(),
            ),
            Some(found) if compute_share(found.agreed, found.compared) < min.0 => {
                let fidelity = percent(found.agreed, found.compared);
                Some(format!("the fidelity is {fidelity}, less than --min-fidelity {min}"))
            }
            _ => None,
        }
    }
}
