//! Conditions under which a simulation fails, for CI: `rejected(shop.login) > 1%`; and whether they hold.
//!
//! A condition compares a figure of one limit, or of all requests (`*`), with a number or, with `%`, a share.
//!
//! A figure proves nothing if there was too little to compare with, if the replay does not repeat what was recorded, or
//! if no request of the traffic concerns it. Such a condition neither passes nor fails.
//!
//! Decides: when `simulate --fail-if` fails, and when it refuses to judge (`find_judging_obstacle`).

use std::fmt;
use std::str::FromStr;

use super::results::{ConditionResult, LimitResults, SimulationResults, compute_share};
use super::tally::LimitFigures;
use crate::tools::replay::source::SourceSummary;

/// Condition on the figures of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct FailCondition {
    text: String,
    metric: ConditionMetric,
    /// Path of a limit; `None`: all requests.
    limit_path: Option<String>,
    comparison: Comparison,
    threshold: f64,
    is_percentage: bool,
}

/// Kind of figure that a condition is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConditionMetric {
    Rejected,
    RejectedKeys,
    NewlyRejected,
    NewlyAdmitted,
    Delayed,
    LongestRun,
}

/// Comparison of a figure with a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Above,
    AtLeast,
    Below,
    AtMost,
}

/// A figure that a condition compares, with its whole for a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ConditionFigure {
    part: u64,
    /// `None` if the figure is not a share.
    whole: Option<u64>,
    what: &'static str,
}

const METRICS: [(&str, ConditionMetric); 6] = [
    ("rejected", ConditionMetric::Rejected),
    ("rejected_keys", ConditionMetric::RejectedKeys),
    ("newly_rejected", ConditionMetric::NewlyRejected),
    ("newly_admitted", ConditionMetric::NewlyAdmitted),
    ("delayed", ConditionMetric::Delayed),
    ("longest_run", ConditionMetric::LongestRun),
];
/// Longer comparisons first, because `>` begins `>=`.
const COMPARISONS: [(&str, Comparison); 4] =
    [(">=", Comparison::AtLeast), ("<=", Comparison::AtMost), (">", Comparison::Above), ("<", Comparison::Below)];
/// Path that stands for all requests.
const ALL_REQUESTS_PATH: &str = "*";

/// The error completes a sentence that begins with the condition, and shows the fix.
impl FromStr for FailCondition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "write METRIC(LIMIT) > NUMBER, such as 'rejected(shop.login) > 1%'";
        let text = text.trim();
        let (metric, rest) = text.split_once('(').ok_or_else(|| format!("there is no `(` ({form})"))?;
        let (limit_path, rest) = rest.rsplit_once(')').ok_or_else(|| format!("there is no `)` ({form})"))?;
        let metric = metric.trim();
        let metric =
            METRICS.into_iter().find(|(name, _)| *name == metric).map(|(_, known)| known).ok_or_else(|| {
                let names = METRICS.map(|(name, _)| name).join(", ");
                format!("'{metric}' is no metric (use one of {names})")
            })?;
        let limit_path = limit_path.trim();
        if limit_path.is_empty() {
            return Err("the limit is missing (write its path, such as shop.login, or * for all requests)".to_owned());
        }
        let rest = rest.trim();
        let compared =
            COMPARISONS.into_iter().find_map(|(sign, comparison)| Some((comparison, rest.strip_prefix(sign)?.trim())));
        let (comparison, number) = compared.ok_or_else(|| format!("there is no >, >=, < or <= after `)` ({form})"))?;
        let percentage = number.strip_suffix('%').map(str::trim);
        let threshold =
            percentage.unwrap_or(number).parse().ok().filter(|number: &f64| *number >= 0.0 && number.is_finite());
        let threshold = threshold.ok_or_else(|| format!("'{number}' is not a number from 0 on ({form})"))?;
        let is_percentage = percentage.is_some();
        if is_percentage && metric == ConditionMetric::LongestRun {
            return Err("longest_run is a number of requests (leave out the %)".to_owned());
        }
        if metric != ConditionMetric::Rejected && limit_path == ALL_REQUESTS_PATH && !metric.applies_to_all_requests() {
            return Err("this metric needs a limit (write its path, such as shop.login)".to_owned());
        }
        let limit_path = (limit_path != ALL_REQUESTS_PATH).then(|| limit_path.to_owned());
        Ok(Self { text: text.to_owned(), metric, limit_path, comparison, threshold, is_percentage })
    }
}

impl fmt::Display for FailCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl ConditionMetric {
    /// True if there is such a figure of all requests.
    const fn applies_to_all_requests(self) -> bool {
        matches!(self, Self::Rejected | Self::NewlyRejected | Self::NewlyAdmitted)
    }
}

impl FailCondition {
    /// Path of the limit; `None`: all requests.
    pub fn limit_path(&self) -> Option<&str> {
        self.limit_path.as_deref()
    }

    /// True if the condition is about a change, so that there must be old rules.
    pub const fn needs_old_rules(&self) -> bool {
        matches!(self.metric, ConditionMetric::NewlyRejected | ConditionMetric::NewlyAdmitted)
    }

    /// Evaluates the condition. A limit without traffic has the figure 0.
    pub fn evaluate(&self, results: &SimulationResults) -> ConditionResult {
        let figure = match &self.limit_path {
            None => self.find_figure_of_requests(results),
            Some(path) => self.find_figure_of_limit(results.limits.iter().find(|limit| limit.path == *path)),
        };
        let value = match figure.whole {
            Some(whole) if self.is_percentage => compute_share(figure.part, whole) * 100.0,
            _ => figure.part as f64,
        };
        let fails = match self.comparison {
            Comparison::Above => value > self.threshold,
            Comparison::AtLeast => value >= self.threshold,
            Comparison::Below => value < self.threshold,
            Comparison::AtMost => value <= self.threshold,
        };
        ConditionResult { condition: self.text.clone(), figure: figure.to_string(), fails, not_judged: None }
    }

    /// True if requests of the traffic charged the limit, under one of the rule sets.
    pub fn has_charged_requests(&self, results: &SimulationResults) -> bool {
        let Some(path) = &self.limit_path else { return results.traffic.requests > 0 };
        let limit = results.limits.iter().find(|limit| limit.path == *path);
        let figures = limit.into_iter().flat_map(|limit| [&limit.new, &limit.old]).flatten();
        figures.map(|figures| figures.requests).sum::<u64>() > 0
    }

    fn find_figure_of_requests(&self, results: &SimulationResults) -> ConditionFigure {
        let changes = results.changes.as_ref();
        let part = match self.metric {
            ConditionMetric::NewlyRejected => changes.map_or(0, |changes| changes.newly_rejected),
            ConditionMetric::NewlyAdmitted => changes.map_or(0, |changes| changes.newly_admitted),
            _ => results.new.rejected,
        };
        let compared = changes.filter(|_| self.needs_old_rules()).map(|changes| changes.compared);
        ConditionFigure { part, whole: Some(compared.unwrap_or(results.traffic.requests)), what: "requests" }
    }

    fn find_figure_of_limit(&self, limit: Option<&LimitResults>) -> ConditionFigure {
        let (none, none_before) = (LimitFigures::default(), LimitFigures::default());
        let new = limit.and_then(|limit| limit.new.as_ref()).unwrap_or(&none);
        let old = limit.and_then(|limit| limit.old.as_ref()).unwrap_or(&none_before);
        let of_requests = |part, whole| ConditionFigure { part, whole: Some(whole), what: "requests" };
        match self.metric {
            ConditionMetric::Rejected => of_requests(new.rejected, new.requests),
            ConditionMetric::RejectedKeys => {
                ConditionFigure { part: new.rejected_keys, whole: Some(new.keys), what: "keys" }
            }
            ConditionMetric::NewlyRejected => of_requests(new.rejected_here_only, new.requests),
            ConditionMetric::NewlyAdmitted => of_requests(old.rejected_here_only, old.requests),
            ConditionMetric::Delayed => of_requests(new.delays.map_or(0, |delays| delays.requests), new.requests),
            ConditionMetric::LongestRun => {
                let part = new.longest_run.as_ref().map_or(0, |run| u64::from(run.requests));
                ConditionFigure { part, whole: None, what: "requests" }
            }
        }
    }
}

impl fmt::Display for ConditionFigure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, whole, what } = self;
        match whole {
            Some(whole) => write!(f, "{:.2} % ({part} of {whole} {what})", compute_share(*part, *whole) * 100.0),
            None => write!(f, "{part} {what}"),
        }
    }
}

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
