//! One pass over the traffic: replays each request under the new rules and under those to compare with.
//!
//! Under the recorded rules, the replayed answers are compared with the recorded ones.
//!
//! Decides: when a replayed and a recorded decision agree (`Verification`).
//! Decides: how many keys are told apart (`MAX_SKETCHED_KEYS`).

use std::sync::Arc;

use serde::Serialize;
use smallvec::SmallVec;

use super::tally::{DescriptorRejection, DescriptorRejections, ReplayTally};
use crate::base::clock::Time;
use crate::decide::results::{DescriptorResults, descriptor_key_text};
use crate::limit::request::Request;
use crate::limit::{Consistency, Limit};
use crate::telemetry::top_keys::space_saving::SpaceSaving;
use crate::tools::replay::recorded_request::RecordedRequest;
use crate::tools::replay::replayer::{
    CounterLosses, RecordedHeader, ReplayError, ReplayOptions, ReplayRules, ReplayedAnswer, Replayer,
};

/// Keys in each sketch of top keys.
const MAX_SKETCHED_KEYS: usize = 2000;

/// Bounds of a simulation.
#[derive(Clone, Debug)]
pub struct SimulationOptions {
    /// Bounds and defaults of each replay.
    pub replay: ReplayOptions,
    /// Keys that are told apart, in each replay.
    pub max_keys: usize,
}

/// Replay of all traffic under one or two rule sets.
#[derive(Debug)]
pub struct Simulation {
    /// Replay under the new rules.
    pub new: RuleReplay,
    /// Replay under the rules to compare with.
    pub old: Option<RuleReplay>,
    /// Replay under the recorded rules, if these are neither: it only tells the fidelity.
    pub verifier: Option<RuleReplay>,
    /// Requests that both rule sets answer.
    pub compared: u64,
    /// Requests.
    pub requests: u64,
    /// Times of the first and the last request.
    pub span: Option<TrafficSpan>,
    /// Properties of the log.
    pub log: LogProperties,
    /// Requests that only the new rules reject.
    pub newly_rejected: u64,
    /// Requests that only the old rules reject.
    pub newly_admitted: u64,
    /// Keys with changed answers, or else the rejected keys.
    pub top: TopKeySketches,
}

/// First and last time of the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrafficSpan {
    /// Time of the first request.
    pub first: Time,
    /// Latest time.
    pub last: Time,
}

/// Properties of a decision log, from its headers and records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogProperties {
    /// Headers with rules.
    pub rule_sets: u64,
    /// Starts of processes.
    pub starts: u64,
    /// Records that the log lost.
    pub dropped: u64,
    /// Smallest sample of keys of a header, 0 to 1.
    pub sample: Option<f64>,
    /// The log of a process leaves out decisions.
    pub is_incomplete: bool,
    /// Values are hashed.
    pub hashed_values: bool,
    /// Recorded rules have limits that several replicas or regions decide apart.
    pub has_loose_limits: bool,
}

/// Top keys by change.
#[derive(Debug)]
pub struct TopKeySketches {
    /// Keys that are rejected, where there is no answer to compare with.
    pub rejected: SpaceSaving<KeyWithRejectingLimit>,
    /// Keys that only the new rules reject.
    pub newly_rejected: SpaceSaving<KeyWithRejectingLimit>,
    /// Keys that only the old rules reject.
    pub newly_admitted: SpaceSaving<KeyWithRejectingLimit>,
}

/// Key with the limit that rejects it.
#[derive(Clone, Debug)]
pub struct KeyWithRejectingLimit {
    /// Index of the limit in the counts of its replay.
    pub limit: usize,
    /// `key=value,key=value`.
    pub text: Arc<str>,
}

/// Replay under one rule set, with its counts.
#[derive(Debug)]
pub struct RuleReplay {
    replayer: Replayer,
    /// Counts; `None` before the first request.
    pub tally: Option<ReplayTally>,
    /// Agreement with the record; `None` unless the rules are the recorded ones.
    pub verification: Option<Verification>,
    max_keys: usize,
}

/// Replayed decision with the rejection of each descriptor.
struct ReplayedDecision {
    rejected: bool,
    failed: bool,
    descriptors: DescriptorRejections,
}

impl LogProperties {
    /// Takes over a header.
    pub fn add_header(&mut self, header: &RecordedHeader) {
        self.rule_sets += u64::from(header.rules.is_some());
        self.starts += u64::from(header.is_start);
        self.sample = Some(self.sample.unwrap_or(1.0).min(header.sample));
        self.is_incomplete |= !header.is_complete;
        self.hashed_values |= header.hashed_values;
        let is_loose = |limit: &Limit| limit.consistency() != Consistency::Strict || limit.global_scope().is_some();
        let mut rules = header.rules.iter().flat_map(|rules| rules.rules());
        self.has_loose_limits |= rules.any(|rule| rule.limits.iter().any(|compiled| is_loose(&compiled.limit)));
    }
}

impl Simulation {
    /// Creates a simulation of `new` rules, compared with `old` ones.
    pub fn new(new: ReplayRules, old: Option<ReplayRules>, options: &SimulationOptions) -> Self {
        let sketch = || SpaceSaving::new(MAX_SKETCHED_KEYS);
        Self {
            new: RuleReplay::new(new, options),
            old: old.map(|rules| RuleReplay::new(rules, options)),
            verifier: None,
            compared: 0,
            requests: 0,
            span: None,
            log: LogProperties::default(),
            newly_rejected: 0,
            newly_admitted: 0,
            top: TopKeySketches { rejected: sketch(), newly_rejected: sketch(), newly_admitted: sketch() },
        }
    }

    /// Takes over settings and rules of a process.
    ///
    /// # Errors
    /// There are too many processes.
    pub fn apply_header(&mut self, header: &RecordedHeader) -> Result<(), ReplayError> {
        self.log.add_header(header);
        let replays = [Some(&mut self.new), self.old.as_mut(), self.verifier.as_mut()];
        replays.into_iter().flatten().try_for_each(|replay| replay.replayer.apply_header(header))
    }

    /// From now on, replays the traffic under its recorded rules too, to measure the fidelity.
    pub fn enable_verification(&mut self, options: &SimulationOptions) {
        self.verifier = Some(RuleReplay::new(ReplayRules::Recorded, options));
    }

    /// Replays a request.
    ///
    /// # Errors
    /// There are too many processes, or their counters need too much memory.
    pub fn replay_request(&mut self, recorded: &RecordedRequest) -> Result<(), ReplayError> {
        let at = recorded.arrival;
        self.requests += 1;
        let span = self.span.get_or_insert(TrafficSpan { first: at, last: at });
        span.last = span.last.max(at);
        let request = recorded.to_request();
        if let Some(verifier) = &mut self.verifier {
            verifier.replay_and_tally(recorded, &request)?;
        }
        let new = self.new.replay_and_tally(recorded, &request)?;
        let before = self.old.as_mut().map(|old| old.replay_and_tally(recorded, &request)).transpose()?;
        let (Some(old), Some(before)) = (&mut self.old, before.filter(|before| !before.failed)) else {
            if new.rejected {
                add_rejected_keys(&mut self.top.rejected, &request, new.descriptors.iter());
            }
            return Ok(());
        };
        if new.failed {
            return Ok(());
        }
        self.compared += 1;
        if before.rejected == new.rejected {
            return Ok(());
        }
        if new.rejected {
            self.newly_rejected += 1;
            self.new.count_new_rejection_by_limit(&new.descriptors);
            add_rejected_keys(&mut self.top.newly_rejected, &request, new.descriptors.iter());
        } else {
            self.newly_admitted += 1;
            old.count_new_rejection_by_limit(&before.descriptors);
            add_rejected_keys(&mut self.top.newly_admitted, &request, before.descriptors.iter());
        }
        Ok(())
    }

    /// Drops the replay of the recorded rules if the traffic had none. Returns true if it did.
    pub fn discard_replay_if_rules_unknown(&mut self) -> bool {
        let lacks_recorded_rules = self.old.as_ref().is_some_and(|old| old.lacks_recorded_rules(self.requests));
        if lacks_recorded_rules {
            self.old = None;
        }
        lacks_recorded_rules
    }

    /// Number of decisions that were replayed.
    pub fn count_replayed_decisions(&self) -> u64 {
        self.requests * if self.old.is_some() { 2 } else { 1 }
    }
}

/// Adds the rejected keys of a request to a sketch.
fn add_rejected_keys<'d>(
    sketch: &mut SpaceSaving<KeyWithRejectingLimit>,
    request: &Request<'_>,
    descriptors: impl Iterator<Item = &'d DescriptorRejection>,
) {
    for (index, rejection) in descriptors.enumerate() {
        let Some(by) = rejection.by else { continue };
        let id = rejection.path ^ by as u128;
        sketch.add_count(id, 1, 0, |label| {
            *label = Some(KeyWithRejectingLimit {
                limit: by,
                text: rejection.shared_key.clone().unwrap_or_else(|| descriptor_key_text(request, index)),
            });
        });
    }
}

impl RuleReplay {
    fn new(rules: ReplayRules, options: &SimulationOptions) -> Self {
        let verification = matches!(rules, ReplayRules::Recorded).then(Verification::default);
        let replayer = Replayer::new(rules, options.replay.clone());
        Self { replayer, tally: None, verification, max_keys: options.max_keys }
    }

    /// Counts a request that only these rules reject, for the limits that do.
    fn count_new_rejection_by_limit(&mut self, descriptors: &[DescriptorRejection]) {
        let Some(tally) = &mut self.tally else { return };
        for index in descriptors.iter().filter_map(|rejection| rejection.by) {
            tally.limits[index].figures.rejected_here_only += 1;
        }
    }

    /// True if this replays recorded rules and none of `requests` got an answer: the traffic lacks the rules.
    pub fn lacks_recorded_rules(&self, requests: u64) -> bool {
        let failed = self.tally.as_ref().map_or(0, |tally| tally.totals.failed);
        self.verification.is_some() && failed >= requests
    }

    /// Counters that were lost.
    pub fn counter_losses(&self) -> CounterLosses {
        self.replayer.counter_losses()
    }

    fn replay_and_tally(
        &mut self,
        recorded: &RecordedRequest,
        request: &Request<'_>,
    ) -> Result<ReplayedDecision, ReplayError> {
        let max_keys = self.max_keys;
        let tally = self.tally.get_or_insert_with(|| ReplayTally::new(recorded.arrival, max_keys));
        let mut descriptors = DescriptorRejections::new();
        let mut admitted: SmallVec<[DecidingLimitAdmissions; 2]> = SmallVec::new();
        let verifies = self.verification.is_some();
        let answer = self.replayer.decide(recorded, request, |descriptor| {
            if verifies {
                admitted.push(list_admissions(&descriptor));
            }
            descriptors.push(tally.add_descriptor(recorded, &descriptor));
        })?;
        tally.add_answer(recorded.arrival, answer);
        if let Some(verification) = &mut self.verification {
            verification.compare_decision(recorded, answer, &admitted);
        }
        Ok(ReplayedDecision { rejected: answer.over_limit || answer.shadowed, failed: answer.failed, descriptors })
    }
}

/// Agreement of a replay with the record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Decisions that counters made and that were compared.
    pub compared: u64,
    /// Compared decisions whose verdict is the recorded one, of the request and of every limit.
    pub agreed: u64,
    /// The first decision that differs: its process and number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_difference: Option<String>,
    /// Likely reasons, if not all agreed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
}

/// Whether each limit of a descriptor that decides admitted the hits, in the order of the rule.
pub type DecidingLimitAdmissions = SmallVec<[bool; 8]>;

/// Returns the admissions by the limits of a replayed descriptor that decide.
pub fn list_admissions(descriptor: &DescriptorResults<'_, '_>) -> DecidingLimitAdmissions {
    descriptor.limits().filter(|limit| !limit.candidate).map(|limit| limit.result.admitted).collect()
}

impl Verification {
    /// Compares a replayed decision with its record.
    pub fn compare_decision(
        &mut self,
        recorded: &RecordedRequest,
        answer: ReplayedAnswer,
        replayed: &[DecidingLimitAdmissions],
    ) {
        let Some(expected) = recorded.answer.filter(|expected| expected.repeatable) else { return };
        if answer.has_unknown_rules {
            return;
        }
        self.compared += 1;
        let of_limits = recorded.descriptors().iter().map(|descriptor| &descriptor.admitted);
        if !answer.failed && answer.over_limit == expected.rejected && of_limits.eq(replayed) {
            self.agreed += 1;
        } else if self.first_difference.is_none() {
            let name = |rejected: bool| if rejected { "over_limit" } else { "ok" };
            let (was, is) = (name(expected.rejected), name(answer.over_limit));
            let difference = match (answer.failed, was == is) {
                (true, _) => format!("recorded {was}, replayed without an answer"),
                (false, false) => format!("recorded {was}, replayed {is}"),
                (false, true) => format!("recorded and replayed {is}, by other limits"),
            };
            self.first_difference =
                Some(format!("process {}, decision {}: {difference}", recorded.process, recorded.seq));
        }
    }
}
