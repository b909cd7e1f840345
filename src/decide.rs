//! The pipeline on one screen: select, draw, merge.
//!
//! The service, `/json`, `explain` and the benches all come through here, so they can not disagree. Limits are selected
//! for a request as a whole, because a rule may replace others of the same request; then each descriptor draws from
//! its counters; then the verdicts merge. A store failure becomes a verdict by the rule's policy here and only here.

pub mod explain;
mod merge;
mod metadata;
mod selection;
mod verdict;

use std::time::Duration;

use smallvec::SmallVec;

use self::merge::merge;
use self::selection::{Selection, select};
use crate::algorithm::Level;
use crate::clock::Time;
use crate::decision::Decision;
use crate::limit::StorePolicy;
use crate::request::{Hits, Request};
use crate::rule::set::RuleSet;
use crate::settings::Behaviour;
use crate::store::memory::{Full, Memory};
use crate::telemetry::occasionally::Occasionally;

/// Decides requests: the counters, and what the process was told about deciding.
#[derive(Debug)]
pub struct Decider {
    /// Where the counters live.
    pub store: Memory,
    /// What the process was told.
    pub behaviour: Behaviour,
}

/// What is taken once for a decision, where the request came in.
#[derive(Clone, Copy, Debug)]
pub struct Edge<'r> {
    /// The rules; `None` before any were loaded.
    pub rules: Option<&'r RuleSet>,
    /// The time.
    pub now: Time,
    /// How long the caller can wait for its answer, in microseconds.
    pub hold_us: u64,
}

/// Why a request has no decision. The texts are envoyproxy/ratelimit's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecideError {
    /// The caller's fault.
    #[error("rate limit domain must not be empty")]
    EmptyDomain,
    /// The caller's fault.
    #[error("rate limit descriptor list must not be empty")]
    NoDescriptors,
    /// Ours: no rules were ever loaded.
    #[error("no rate limit configuration loaded")]
    NoRules,
    /// The store's: it failed, and the policy of a rule is `error`.
    #[error("the counter could not be asked, and the rule says `on_store_error: error`")]
    Store,
}

/// What came of the draw of one descriptor.
#[derive(Clone, Debug)]
enum Outcome {
    /// It has no limit.
    Free,
    /// The levels of its limits, in their order.
    Drawn(SmallVec<[Level; 1]>),
    /// The store failed, and this is the rule's policy.
    Failed(StorePolicy),
}

impl Decider {
    /// Decides a request.
    pub fn decide<'r>(&'r self, edge: Edge<'r>, request: &Request<'_>) -> Result<Decision<'r>, DecideError> {
        if request.domain.is_empty() {
            return Err(DecideError::EmptyDomain);
        }
        if request.descriptors.is_empty() {
            return Err(DecideError::NoDescriptors);
        }
        let rules = edge.rules.ok_or(DecideError::NoRules)?;
        let selections = select(&self.behaviour, rules, request);
        let spares =
            self.behaviour.stop_cache_key_increment_when_overlimit && self.refuses_any(edge, request, &selections);
        let outcomes: SmallVec<[Outcome; 2]> = selections
            .iter()
            .enumerate()
            .map(|(place, selection)| self.draw(edge, (request, place), selection, spares))
            .collect();
        merge(&self.behaviour, request, &selections, &outcomes)
    }

    /// Draws for the descriptor at `place`. If another is known to refuse, one that would pass is spared, and only
    /// looks; those that refuse draw, as in envoyproxy/ratelimit.
    fn draw(
        &self,
        edge: Edge<'_>,
        (request, place): (&Request<'_>, usize),
        selection: &Selection<'_>,
        spares: bool,
    ) -> Outcome {
        let Some(mut draw) = selection.draw((request, place), edge.hold_us) else { return Outcome::Free };
        if spares && matches!(draw.ask.hits, Hits::Take(_)) && self.store.admits(&draw, edge.now) {
            draw.ask.hits = Hits::Look;
        }
        match self.store.draw(&draw, edge.now) {
            Ok(levels) => {
                selection.notice_reports(request.descriptors[place].hits, &levels);
                Outcome::Drawn(levels)
            }
            Err(error) => {
                self.complain(&error, edge.now);
                match selection.store_policy() {
                    StorePolicy::Local => Outcome::Drawn(self.store.draw_spilled(&draw, edge.now)),
                    policy => Outcome::Failed(policy),
                }
            }
        }
    }

    /// Says now and then that the store fails; which verdicts follow is the rules' affair.
    fn complain(&self, error: &Full, now: Time) {
        static COMPLAINTS: Occasionally = Occasionally::every(Duration::from_secs(10));
        if let Some(suppressed) = COMPLAINTS.due(now) {
            tracing::error!(suppressed, "{error}; `on_store_error` decides. TOLLKEEPER_MEMORY_BYTES makes more room");
        }
    }

    /// Whether any descriptor would be refused now.
    fn refuses_any(&self, edge: Edge<'_>, request: &Request<'_>, selections: &[Selection<'_>]) -> bool {
        selections.iter().enumerate().any(|(place, selection)| {
            let draw = selection.draw((request, place), edge.hold_us);
            draw.is_some_and(|draw| !self.store.admits(&draw, edge.now))
        })
    }
}
