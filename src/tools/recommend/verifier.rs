//! Verification: all traffic again, with the limits found as candidates beside the limits of the rule.
//!
//! A candidate is charged as if it were the only limit of its rule, so one replay verifies all of them.
//!
//! Decides: when a recommendation is `verified`.

use std::sync::Arc;

use super::demand::{ExistingLimit, KeyHashes};
use super::results::VerifiedFigures;
use crate::decide::results::DescriptorResults;
use crate::limit::Limit;
use crate::limit::request::Hits;
use crate::rules::rule::set::RuleSet;
use crate::rules::rule::{Rule, RuleAllowance, RuleLimit};
use crate::tools::replay::recorded_request::RecordedRequest;
use crate::tools::replay::replayer::{
    CounterLosses, RecordedHeader, ReplayError, ReplayOptions, ReplayRules, ReplayedAnswer, Replayer,
};
use crate::tools::simulate::results::{TimelineResults, build_timeline};
use crate::tools::simulate::tally::Timeline;

/// Beginning of the names of the candidates.
const CANDIDATE_NAME_PREFIX: &str = "recommended-";

/// Replays traffic under limits that were found.
#[derive(Debug)]
pub struct Verifier {
    replayer: Replayer,
    editor: CandidateInserter,
    keys: KeyHashes,
    tallies: Vec<CandidateTally>,
    /// Charges over time, as the first limit decides them; `None` before the first charge.
    timeline: Option<Timeline>,
}

/// Inserts the found limits into rule sets, as candidates beside the limits of the rule.
#[derive(Debug)]
struct CandidateInserter {
    rule: String,
    name: String,
    limits: Vec<Limit>,
    /// Rule sets that were edited so far.
    edited: Vec<RulesWithCandidates>,
}

#[derive(Debug)]
struct RulesWithCandidates {
    before: Arc<RuleSet>,
    after: Arc<RuleSet>,
}

#[derive(Debug, Default)]
struct CandidateTally {
    figures: VerifiedFigures,
    rejected: KeyHashes,
}

impl Verifier {
    /// Creates a verifier of `limits`, the recommended one first; only keys of `keys` are counted.
    pub fn new(
        asked: &ExistingLimit,
        limits: Vec<Limit>,
        keys: KeyHashes,
        rules: ReplayRules,
        options: ReplayOptions,
    ) -> Self {
        let tallies = limits.iter().map(|_| CandidateTally::default()).collect();
        let mut editor =
            CandidateInserter { rule: asked.rule.clone(), name: asked.name.clone(), limits, edited: Vec::new() };
        let rules = match rules {
            ReplayRules::Fixed(rules) => ReplayRules::Fixed(editor.insert_candidates(&rules)),
            ReplayRules::Recorded => ReplayRules::Recorded,
        };
        Self { replayer: Replayer::new(rules, options), editor, keys, tallies, timeline: None }
    }

    /// Takes over settings and rules of a process.
    ///
    /// # Errors
    /// There are too many processes.
    pub fn apply_header(&mut self, header: &RecordedHeader) -> Result<(), ReplayError> {
        let rules = header.rules.as_ref().map(|rules| self.editor.insert_candidates(rules));
        self.replayer.apply_header(&RecordedHeader { rules, ..header.clone() })
    }

    /// Replays a request.
    ///
    /// # Errors
    /// There are too many processes, or their counters need too much memory.
    pub fn replay_request(&mut self, recorded: &RecordedRequest) -> Result<ReplayedAnswer, ReplayError> {
        let mut with_rules;
        let recorded = match &recorded.rules {
            // Rare: a decision that was logged after the header of later rules.
            Some(rules) => {
                with_rules = recorded.clone();
                with_rules.rules = Some(self.editor.insert_candidates(rules));
                &with_rules
            }
            None => recorded,
        };
        let request = recorded.to_request();
        let Self { replayer, editor, keys, tallies, timeline } = self;
        replayer.decide(recorded, &request, |descriptor| {
            let Some(of) = recorded.descriptors().get(descriptor.index) else { return };
            let is_charge = of.is_sampled && matches!(of.hits, Hits::Charge(_));
            let of_rule = descriptor.rule().is_some_and(|compiled| compiled.rule.path == editor.rule);
            if is_charge && of_rule && keys.contains(descriptor.path_hash()) {
                let recommended_admits = tally_candidate_results(tallies, &descriptor);
                if let Some(admitted) = recommended_admits {
                    let at = of.charged_at.unwrap_or(recorded.arrival);
                    timeline.get_or_insert_with(|| Timeline::new(at)).add_request(at, !admitted);
                }
            }
        })
    }

    /// Figures of each limit.
    pub fn verified_figures(&self) -> impl Iterator<Item = VerifiedFigures> {
        self.tallies.iter().map(|tally| VerifiedFigures { rejected_keys: tally.rejected.len() as u64, ..tally.figures })
    }

    /// Charges over time under the recommended limit; `None` without one.
    pub fn recommended_timeline(&self) -> Option<TimelineResults> {
        self.timeline.as_ref().map(|timeline| build_timeline(Some(timeline), None))
    }

    /// Counters that the replay lost.
    pub fn counter_losses(&self) -> CounterLosses {
        self.replayer.counter_losses()
    }
}

/// Counts the results of all candidates. Returns whether the first one admits the charge.
fn tally_candidate_results(tallies: &mut [CandidateTally], descriptor: &DescriptorResults<'_, '_>) -> Option<bool> {
    let mut first_admits = None;
    for limit in descriptor.limits() {
        let index = limit
            .name
            .strip_prefix(CANDIDATE_NAME_PREFIX)
            .filter(|_| limit.candidate)
            .and_then(|index| index.parse().ok());
        let Some(tally) = index.and_then(|index: usize| tallies.get_mut(index)) else { continue };
        if index == Some(0) {
            first_admits = Some(limit.result.admitted);
        }
        tally.figures.requests += 1;
        if !limit.result.admitted {
            tally.figures.rejected_requests += 1;
            tally.rejected.insert(descriptor.path_hash());
        }
    }
    first_admits
}

impl CandidateInserter {
    /// Returns the rules with the limits as candidates; the same result for the same rules.
    fn insert_candidates(&mut self, rules: &Arc<RuleSet>) -> Arc<RuleSet> {
        if let Some(known) = self.edited.iter().find(|known| Arc::ptr_eq(&known.before, rules)) {
            return Arc::clone(&known.after);
        }
        let mut after = RuleSet::new(rules.to_edited_domains(|rule| self.insert_candidates_into_rule(rule)));
        after.use_table_rows_of(rules);
        let after = Arc::new(after);
        self.edited.push(RulesWithCandidates { before: Arc::clone(rules), after: Arc::clone(&after) });
        after
    }

    fn insert_candidates_into_rule(&self, rule: &mut Rule) {
        let name = |index: usize| format!("{CANDIDATE_NAME_PREFIX}{index}");
        // A rule that replaces the limit replaces the candidates too.
        if !self.name.is_empty() && rule.replaces.contains(&self.name) {
            rule.replaces.extend((0..self.limits.len()).map(name));
        }
        let RuleAllowance::Limits(limits) = &mut rule.allowance else { return };
        if rule.path != self.rule {
            return;
        }
        let active = limits.iter().find(|limit| limit.name == self.name).and_then(|limit| limit.active);
        limits.retain(|limit| !limit.candidate);
        limits.extend(self.limits.iter().enumerate().map(|(index, limit)| RuleLimit {
            limit: *limit,
            name: name(index),
            replaces: Vec::new(),
            active,
            shadow: true,
            quota: false,
            candidate: true,
            epoch: 0,
            left_out_defaults: Vec::new(),
        }));
    }
}
