//! The pipeline: prepare, select, charge, merge, record (`decide_in_steps`).
//!
//! The gRPC service, `/json`, `explain` and the benches all use [`Decider`], so that they cannot disagree. Limits are
//! selected for a request as a whole, because a rule may replace others of the same request. Then all descriptors are
//! charged together, and their verdicts merge. A failure of the store becomes a verdict by the rule's failure policy
//! here and nowhere else.
//!
//! Decides: an empty domain or list of descriptors (INVALID_ARGUMENT).
//! Decides: the answer while no rules are loaded (`prepare_request`), and with too much backtracking.
//! Decides: which requests a block rejects: over RLS, no release, none in shadow mode (`find_blocks`).
//! Decides: the log of requests without a decision (`record_undecided_request`).

pub mod decision;
pub mod log;
pub mod blocks;
pub mod slot_entries;
pub mod key_text;
pub mod prepared_request;
mod selection;
pub mod table_rows;
mod store_failures;
pub mod tap;
pub mod reached_levels;
pub mod decider;
pub mod explain;
pub mod counter_commands;
mod outcome;
mod selected_request;
mod charge;
mod metrics;
mod candidates;
mod status;
mod charged_request;
mod slot_answers;
pub mod results;
pub mod store_totals;
mod metadata;
mod policy_headers;
pub mod merge;
mod decision_records;
mod level_detection;
pub mod quota_buckets;

use std::time::Duration;

use futures_util::future::OptionFuture;
use smallvec::SmallVec;

use self::blocks::BlockMatch;
use self::candidates::CandidateCharges;
use self::charge::{DryRuns, OutcomesByDescriptor};
use self::charged_request::ChargedRequest;
use self::decider::Decider;
use self::decision::{DecideError, Decision, DecisionContext};
use self::merge::merge_outcomes;
use self::outcome::DescriptorOutcome;
use self::prepared_request::{NO_RULES, PreparedRequest};
use self::results::DescriptorResults;
use self::selected_request::SelectedRequest;
use self::selection::{keep_limits_of_refunds, select_limits};
use self::status::DescriptorStatus;
use crate::limit::request::Request;
use crate::telemetry::log_throttle::LogThrottle;

/// Interval of log lines about refused calls.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Decides a request: the steps of every decision. `$complete!` completes a step that may wait for Redis, and `$observe`
/// gets the results of each descriptor's limits.
///
/// It is a macro because only an immediate store must do without a future: a future keeps the selections in its state,
/// which costs a tenth of a decision from memory.
macro_rules! decide_in_steps {
    ($decider:ident, $context:ident, $request:ident, $complete:ident, $observe:expr) => {{
        let (prepared, blocked) = $decider.prepare_request($context, $request)?;
        let request = prepared.request();
        $complete!($decider.read_missing_rows($context, &prepared, blocked.as_ref()));
        let mut selections = select_limits(&$decider.behaviour, &prepared, Some($context.store.now));
        if blocked.is_some() {
            keep_limits_of_refunds(&mut selections, request);
        }
        let (context, blocked) = (&$context, blocked.as_ref());
        let selected = SelectedRequest { decider: $decider, context, request, selections: &selections, blocked };
        let candidates = CandidateCharges::begin_charging(&selected);
        let (mut dry_runs, mut outcomes) = (DryRuns::new(), OutcomesByDescriptor::new());
        let runs_dry = $decider.behaviour.stop_cache_key_increment_when_overlimit;
        if runs_dry {
            $complete!(selected.dry_run_descriptors(&mut dry_runs));
        }
        $complete!(selected.charge_descriptors(&dry_runs, &mut outcomes));
        if runs_dry {
            $complete!(selected.charge_held_back_descriptors(&dry_runs, &mut outcomes));
        }
        selected.results(&outcomes, candidates.as_ref()).for_each($observe);
        selected.decide(&outcomes, candidates)
    }};
}

/// Waits for a step. `if let` would keep a second copy of its future in the state of the caller's.
macro_rules! wait_for_step {
    ($left:expr) => {
        OptionFuture::from($left).await
    };
}

/// Checks that nothing is left of a step: an immediate store does all of it within the call.
macro_rules! expect_completed_step {
    ($left:expr) => {
        assert_completed_at_once(&$left)
    };
}

impl Decider {
    /// Decides a request, by the context's deadline.
    ///
    /// # Errors
    /// The request is invalid, no rules are loaded, or the store failed under a rule with the policy `error`.
    pub async fn decide<'r>(
        &'r self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
    ) -> Result<Decision<'r>, DecideError> {
        decide_in_steps!(self, context, request, wait_for_step, |_| ())
    }

    /// Decides a request with an immediate store.
    ///
    /// # Errors
    /// As [`Decider::decide`]; [`DecideError::Store`] if the store is not immediate.
    pub fn decide_synchronously<'r>(
        &'r self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
    ) -> Result<Decision<'r>, DecideError> {
        self.decide_synchronously_with_observer(context, request, |_| ())
    }

    /// Decides as [`Decider::decide_synchronously`], and passes the results of each descriptor's limits to `observe`.
    ///
    /// # Errors
    /// As [`Decider::decide_synchronously`].
    pub fn decide_synchronously_with_observer<'r>(
        &'r self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
        observe: impl FnMut(DescriptorResults<'_, 'r>),
    ) -> Result<Decision<'r>, DecideError> {
        if !self.store.is_immediate() {
            return Err(DecideError::Store);
        }
        decide_in_steps!(self, context, request, expect_completed_step, observe)
    }

    /// Prepares a request, finds the blocks that it meets, and checks that it can be decided; logs it if it cannot.
    ///
    /// A block rejects the request also while no rules are loaded, or if it has more descriptors than they can match: an
    /// error would let it pass a proxy that admits requests on errors.
    #[inline]
    fn prepare_request<'a, 'r, 'm>(
        &self,
        context: DecisionContext<'r>,
        request: &'a Request<'m>,
    ) -> Result<(PreparedRequest<'a, 'r, 'm>, Option<BlockMatch>), DecideError> {
        let refuse = |request: &Request<'m>, error| self.record_undecided_request(context, request, error);
        let rules = match context.rules {
            _ if request.domain.is_empty() => return Err(refuse(request, DecideError::EmptyDomain)),
            _ if request.descriptors.is_empty() => return Err(refuse(request, DecideError::NoDescriptors)),
            Some(rules) => rules,
            None => &NO_RULES,
        };
        let prepared = PreparedRequest::new(rules, context.slots, request).map_err(|error| refuse(request, error))?;
        let blocked = self.find_blocks(context, &prepared);
        let error = match rules.find_max_descriptors_if_exceeded(prepared.request()) {
            _ if context.rules.is_none() => DecideError::NoRules,
            Some(max_descriptors) => DecideError::TooMuchBacktracking { max_descriptors },
            None => return Ok((prepared, blocked)),
        };
        match blocked {
            Some(_) => Ok((prepared.with_empty_rules(), blocked)),
            None => Err(refuse(prepared.request(), error)),
        }
    }

    /// Logs a request that has no decision, and returns the reason.
    #[cold]
    fn record_undecided_request(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'_>,
        error: DecideError,
    ) -> DecideError {
        let unnamed;
        let request = match error {
            // Entries that identify a stream are in no log.
            DecideError::LiteralFormatter => {
                unnamed = Request { descriptors: SmallVec::new(), ..request.clone() };
                &unnamed
            }
            _ => request,
        };
        if matches!(error, DecideError::LiteralFormatter | DecideError::TooMuchBacktracking { .. }) {
            warn_about_refused_call(context, request, error);
        }
        SelectedRequest { decider: self, context: &context, request, selections: &[], blocked: None }
            .record_no_decision(error);
        error
    }

    /// Returns the blocks that a request meets; `None` for a release, and under SHADOW_MODE, which rejects nothing.
    #[inline]
    fn find_blocks(&self, context: DecisionContext<'_>, prepared: &PreparedRequest<'_, '_, '_>) -> Option<BlockMatch> {
        let found = self.blocks.find_for_request(prepared.request(), context.store.now);
        found.filter(|_| !self.behaviour.shadow_mode && !prepared.is_release())
    }

    /// Reads the rows of tables in Redis that the selection of limits needs; `None` if there is nothing to read.
    #[inline]
    fn read_missing_rows<'a>(
        &'a self,
        context: DecisionContext<'a>,
        prepared: &'a PreparedRequest<'_, '_, '_>,
        blocked: Option<&BlockMatch>,
    ) -> Option<impl Future<Output = ()>> {
        // A block waits for Redis only if hits are to be given back.
        let reads = prepared.rules.reads_rows_from_redis()
            && !self.store.is_immediate()
            && blocked.is_none_or(|blocked| blocked.has_refund);
        let read = || self.row_reader.read_missing_rows(&self.store, &self.key_values, context, prepared.request());
        reads.then(|| Box::pin(read()))
    }
}

impl<'r> SelectedRequest<'_, 'r, '_> {
    /// Decides the request by the outcomes of its charges, one for each selection, and records the decision.
    fn decide(
        &self,
        outcomes: &[DescriptorOutcome],
        candidates: Option<CandidateCharges>,
    ) -> Result<Decision<'r>, DecideError> {
        let candidates = candidates.map(CandidateCharges::poll_outcomes);
        let mut statuses: SmallVec<[DescriptorStatus<'r>; 2]> = SmallVec::new();
        // Not `with_capacity`, which is copied; and no more than needed, which extending alone would round up.
        statuses.reserve_exact(outcomes.len());
        let status_of =
            |(selection, outcome)| DescriptorStatus::from_outcome(&self.decider.behaviour, selection, outcome);
        statuses.extend(self.selections.iter().zip(outcomes).map(status_of));
        let charged = ChargedRequest { selected: self, outcomes, statuses: &statuses, candidates: candidates.as_ref() };
        let mut decision = Decision::default();
        let merged = merge_outcomes(&charged, &mut decision);
        if self.selections.iter().any(|selection| selection.slot.is_some()) {
            self.record_slot_holder();
            if merged.is_ok() {
                charged.add_slot_token_or_free_slots(&mut decision);
            }
        }
        charged.record(merged.map(|()| &decision));
        if let Some(candidates) = candidates {
            candidates.record_outcomes(self);
        }
        merged.map(|()| decision)
    }

    /// Records that the request has no decision.
    fn record_no_decision(&self, reason: DecideError) {
        ChargedRequest { selected: self, outcomes: &[], statuses: &[], candidates: None }.record(Err(reason));
    }
}

impl ChargedRequest<'_, '_, '_> {
    /// Records the decision: in the metrics, in the decision log, for operators that listen, and as a line at the level
    /// debug.
    fn record(&self, decided: Result<&Decision<'_>, DecideError>) {
        let SelectedRequest { decider, request, blocked, .. } = *self.selected;
        if !decider.metrics.is_off() {
            self.selected.record_metrics(self.outcomes);
            if blocked.is_some() {
                decider.blocks.count_rejection(request.domain);
            }
        }
        if decided.is_ok_and(|decision| decision.shadowed) {
            decider.metrics.record_global_shadow_mode();
        }
        self.log(decided);
        self.send_reached_levels();
    }
}

/// Warns about a call that is refused by what the proxy sends or the rules bound, now and then for each reason.
fn warn_about_refused_call(context: DecisionContext<'_>, request: &Request<'_>, error: DecideError) {
    static LITERAL_FORMATTER_LOG: LogThrottle = LogThrottle::every(LOG_INTERVAL);
    static BACKTRACKING_LOG: LogThrottle = LogThrottle::every(LOG_INTERVAL);
    let throttle = if error == DecideError::LiteralFormatter { &LITERAL_FORMATTER_LOG } else { &BACKTRACKING_LOG };
    if let Some(suppressed) = throttle.allow(context.store.now) {
        tracing::warn!(domain = request.domain, suppressed, "call refused: {error}");
    }
}

/// Checks that nothing is left of a step of the pipeline: an immediate store does all of it within the call.
///
/// Takes a reference: the future would be copied, which costs a sixteenth of a decision from memory.
fn assert_completed_at_once(left: &Option<impl Future<Output = ()>>) {
    debug_assert!(left.is_none(), "an immediate store leaves no future");
}
