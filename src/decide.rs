//! The pipeline: select, charge, merge.
//!
//! The gRPC service, `/json`, `explain` and the benches all use [`Decider`], so that they cannot disagree. Limits are
//! selected for a request as a whole, because a rule may replace others of the same request. Then all descriptors are
//! charged together, and their verdicts merge. A failure of the store becomes a verdict by the rule's failure policy
//! here and nowhere else.
//!
//! Decides: an empty domain or list of descriptors (INVALID_ARGUMENT).
//! Decides: the answer while no rules are loaded (`prepare_request`), and with too much backtracking.
//! Decides: which requests a block rejects: over RLS, no release, none in shadow mode (`find_block`).
//! Decides: the log of requests without a decision (`log_undecided_request`).

pub mod decision;
pub mod log;
pub mod blocks;
pub mod slot_entries;
pub mod key_text;
pub mod prepared_request;
mod selection;
pub mod table_rows;
mod store_failures;
pub mod explain;
pub mod counter_commands;
mod outcome;
mod slot_answers;
mod charge;
mod metrics;
mod candidates;
pub mod tap;
mod decided_request;
pub mod results;
pub mod store_totals;
mod status;
mod metadata;
pub mod merge;
pub mod quota_buckets;

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::OptionFuture;
use smallvec::SmallVec;

use self::blocks::{BlockMatch, Blocks};
use self::candidates::CandidateCharges;
use self::charge::{DryRuns, OutcomesByDescriptor, RequestCharger};
use self::decided_request::DecidedRequest;
use self::merge::{build_block_rejection, merge_outcomes};
use self::metrics::MetricsRecorder;
use self::outcome::DescriptorOutcome;
use self::prepared_request::PreparedRequest;
use self::results::DescriptorResults;
use self::selection::{RequestWithSelections, select_limits};
use self::store_failures::FailedChargeCounters;
use self::table_rows::PlanRowReader;
use self::tap::DecisionTap;
use crate::decide::decision::{DecideError, Decision, DecisionContext};
use crate::decide::log::DecisionLog;
use crate::decide::log::value_form::ValueForm;
use crate::limit::StoreFailurePolicy;
use crate::limit::request::{Hits, Request};
use crate::settings::decisions::DecisionSettings;
use crate::settings::redis::TableLookupSettings;
use crate::store::Store;
use crate::store::error::ChargeError;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::service_metrics::ServiceMetrics;

/// Interval of log lines about refused calls.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Decides requests.
#[derive(Debug)]
pub struct Decider {
    /// The counters.
    pub store: Store,
    /// Settings of decisions.
    pub behaviour: DecisionSettings,
    /// Metrics of decisions and limits.
    pub metrics: Arc<ServiceMetrics>,
    /// Decision log; `None` if it is off.
    pub log: Option<Arc<DecisionLog>>,
    /// Blocked values.
    pub blocks: Blocks,
    /// Operators that listen to decisions.
    pub tap: Arc<DecisionTap>,
    /// Form of the values in rejected keys.
    pub key_values: ValueForm,
    failures: FailedChargeCounters,
    row_reader: PlanRowReader,
}

impl Decider {
    /// Creates a decider that has not seen a failure.
    pub fn new(store: Store, behaviour: DecisionSettings, metrics: Arc<ServiceMetrics>) -> Self {
        Self {
            store,
            behaviour,
            metrics,
            log: None,
            blocks: Blocks::default(),
            tap: Arc::default(),
            key_values: ValueForm::Plain,
            failures: FailedChargeCounters::default(),
            row_reader: PlanRowReader::new(TableLookupSettings::default().unknown_reads_per_s),
        }
    }

    /// Sets the maximum number of reads of unknown values of a table in Redis, per second.
    pub fn set_max_unknown_row_reads_per_s(&mut self, per_s: u32) {
        self.row_reader = PlanRowReader::new(per_s);
    }

    /// Decides a request, by the context's deadline.
    ///
    /// # Errors
    /// The request is invalid, no rules are loaded, or the store failed under a rule with the policy `error`.
    pub async fn decide<'r>(
        &'r self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
    ) -> Result<Decision<'r>, DecideError> {
        let prepared = self.prepare_request(context, request)?;
        let request = prepared.request();
        if let Some(blocked) = self.find_block(context, &prepared) {
            return Box::pin(self.reject_blocked_but_apply_its_refunds(context, &prepared, blocked)).await;
        }
        OptionFuture::from(
            prepared
                .rules
                .reads_rows_from_redis()
                .then(|| Box::pin(self.row_reader.read_missing_rows(&self.store, &self.key_values, context, request))),
        )
        .await;
        let selections = select_limits(&self.behaviour, &prepared, Some(context.store.now));
        let selected = RequestWithSelections { request, selections: &selections };
        let candidates = CandidateCharges::begin_charging(&self.store, context, selected);
        let charger = self.build_charger(&context, selected);
        let (mut dry_runs, mut outcomes) = (DryRuns::new(), OutcomesByDescriptor::new());
        // `if let` would keep a second copy of each future in the state of this one.
        if self.behaviour.stop_cache_key_increment_when_overlimit {
            OptionFuture::from(charger.dry_run_descriptors(&mut dry_runs)).await;
        }
        OptionFuture::from(charger.charge_descriptors(&dry_runs, &mut outcomes)).await;
        if self.behaviour.stop_cache_key_increment_when_overlimit {
            OptionFuture::from(charger.charge_held_back_descriptors(&dry_runs, &mut outcomes)).await;
        }
        self.record_and_merge_outcomes(&context, selected, &outcomes, candidates)
    }

    /// Decides a request with an immediate store.
    ///
    /// The steps are those of [`Decider::decide`] without its awaits: a future would keep the selections in its state,
    /// which costs a tenth of a decision from memory.
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
        mut observe: impl FnMut(DescriptorResults<'_, 'r>),
    ) -> Result<Decision<'r>, DecideError> {
        if !self.store.is_immediate() {
            return Err(DecideError::Store);
        }
        let prepared = self.prepare_request(context, request)?;
        let request = prepared.request();
        if let Some(blocked) = self.find_block(context, &prepared) {
            let decided =
                Box::pin(self.reject_blocked_but_apply_its_refunds(context, &prepared, blocked)).now_or_never();
            return decided.unwrap_or(Err(DecideError::Store));
        }
        let selections = select_limits(&self.behaviour, &prepared, Some(context.store.now));
        let selected = RequestWithSelections { request, selections: &selections };
        let candidates = CandidateCharges::begin_charging(&self.store, context, selected);
        let charger = self.build_charger(&context, selected);
        let (mut dry_runs, mut outcomes) = (DryRuns::new(), OutcomesByDescriptor::new());
        if self.behaviour.stop_cache_key_increment_when_overlimit {
            assert_completed_at_once(&charger.dry_run_descriptors(&mut dry_runs));
        }
        assert_completed_at_once(&charger.charge_descriptors(&dry_runs, &mut outcomes));
        if self.behaviour.stop_cache_key_increment_when_overlimit {
            assert_completed_at_once(&charger.charge_held_back_descriptors(&dry_runs, &mut outcomes));
        }
        for (index, (selection, outcome)) in selections.iter().zip(&outcomes).enumerate() {
            let (path, candidates) = (selection.counter_path(request, index), candidates.as_ref());
            observe(DescriptorResults { path, index, selection, outcome, candidates });
        }
        self.record_and_merge_outcomes(&context, selected, &outcomes, candidates)
    }

    /// Returns the blocks that a request meets; `None` for a release, and under SHADOW_MODE, which rejects nothing.
    #[inline]
    fn find_block(&self, context: DecisionContext<'_>, prepared: &PreparedRequest<'_, '_, '_>) -> Option<BlockMatch> {
        let found = self.blocks.find_for_request(prepared.request(), context.store.now);
        found.filter(|_| !self.behaviour.shadow_mode && !prepared.is_release())
    }

    /// Rejects a request with blocked entries. Only the refunds that it asks for itself reach counters.
    #[cold]
    async fn reject_blocked_but_apply_its_refunds<'r>(
        &'r self,
        context: DecisionContext<'r>,
        prepared: &PreparedRequest<'_, 'r, '_>,
        blocked: BlockMatch,
    ) -> Result<Decision<'r>, DecideError> {
        let request = prepared.request();
        if !blocked.has_refund {
            let selected = RequestWithSelections { request, selections: &[] };
            return self.reject_blocked(context, selected, &[], None, &blocked);
        }
        OptionFuture::from(
            prepared
                .rules
                .reads_rows_from_redis()
                .then(|| self.row_reader.read_missing_rows(&self.store, &self.key_values, context, request)),
        )
        .await;
        let mut selections = select_limits(&self.behaviour, prepared, Some(context.store.now));
        for (selection, descriptor) in selections.iter_mut().zip(&request.descriptors) {
            if !matches!(descriptor.hits, Hits::Refund(_)) {
                selection.limits.clear();
                selection.candidates.clear();
            }
        }
        let selected = RequestWithSelections { request, selections: &selections };
        let candidates = CandidateCharges::begin_charging(&self.store, context, selected);
        let (dry_runs, mut outcomes) = (DryRuns::new(), OutcomesByDescriptor::new());
        let charger = self.build_charger(&context, selected);
        OptionFuture::from(charger.charge_descriptors(&dry_runs, &mut outcomes)).await;
        if !self.metrics.is_off() {
            self.metrics_recorder().record_outcomes(&context, selected, &outcomes);
        }
        let candidates = candidates.map(CandidateCharges::poll_outcomes);
        let decided = self.reject_blocked(context, selected, &outcomes, candidates.as_ref(), &blocked);
        if let Some(candidates) = candidates {
            candidates.record_outcomes(self.metrics_recorder(), &context, selected);
        }
        decided
    }

    /// Builds the rejection of a request with blocked entries, counts and logs it.
    #[expect(clippy::too_many_arguments, reason = "the parts of a decision that the log needs")]
    fn reject_blocked<'r>(
        &'r self,
        context: DecisionContext<'r>,
        selected: RequestWithSelections<'_, 'r, '_>,
        outcomes: &[DescriptorOutcome],
        candidates: Option<&CandidateCharges>,
        blocked: &BlockMatch,
    ) -> Result<Decision<'r>, DecideError> {
        let behaviour = &self.behaviour;
        let mut decision = build_block_rejection(behaviour, context.store.now, selected, outcomes, blocked);
        self.mark_blocked_request_without_slot(context, selected.request, &mut decision);
        if !self.metrics.is_off() {
            self.blocks.count_rejection(selected.request.domain);
        }
        let (context, blocked) = (&context, Some(blocked));
        self.log_decision(
            DecidedRequest { behaviour, context, selected, outcomes, candidates, blocked },
            Ok(&decision),
        );
        Ok(decision)
    }

    const fn build_charger<'a, 'r, 'm>(
        &'a self,
        context: &'a DecisionContext<'r>,
        selected: RequestWithSelections<'a, 'r, 'm>,
    ) -> RequestCharger<'a, 'r, 'm> {
        RequestCharger { store: &self.store, behaviour: &self.behaviour, failures: &self.failures, context, selected }
    }

    /// Records metrics of the outcomes, merges the outcomes, and logs the decision.
    fn record_and_merge_outcomes<'r>(
        &'r self,
        context: &DecisionContext<'r>,
        selected: RequestWithSelections<'_, 'r, '_>,
        outcomes: &[DescriptorOutcome],
        candidates: Option<CandidateCharges>,
    ) -> Result<Decision<'r>, DecideError> {
        if !self.metrics.is_off() {
            self.metrics_recorder().record_outcomes(context, selected, outcomes);
        }
        let candidates = candidates.map(CandidateCharges::poll_outcomes);
        let mut decision = Decision::default();
        let merged = merge_outcomes(&self.behaviour, selected, outcomes, &mut decision);
        if selected.selections.iter().any(|selection| selection.slot.is_some()) {
            self.record_slot_holder(context, selected.selections);
            if merged.is_ok() {
                self.add_slot_token_or_free_slots(context, selected, outcomes, &mut decision);
            }
        }
        if merged.is_ok() && decision.shadowed {
            self.metrics.record_global_shadow_mode();
        }
        let (behaviour, charges) = (&self.behaviour, candidates.as_ref());
        self.log_decision(
            DecidedRequest { behaviour, context, selected, outcomes, candidates: charges, blocked: None },
            merged.map(|()| &decision),
        );
        if let Some(candidates) = candidates {
            candidates.record_outcomes(self.metrics_recorder(), context, selected);
        }
        merged.map(|()| decision)
    }

    /// Logs a decision: in the decision log, to operators that listen, and as a line at the level debug.
    fn log_decision(&self, request: DecidedRequest<'_, '_, '_>, decided: Result<&Decision<'_>, DecideError>) {
        if let Some(log) = &self.log {
            request.log_if_selected(log, decided);
        }
        if self.tap.has_listeners() {
            request.send_to_tap(&self.tap, &self.key_values, decided);
        }
        if tracing::enabled!(tracing::Level::DEBUG) {
            let values = self.log.as_ref().map_or(&ValueForm::Plain, |log| &log.values);
            request.log_debug_line(values, decided);
        }
    }

    fn metrics_recorder(&self) -> MetricsRecorder<'_> {
        MetricsRecorder {
            metrics: &self.metrics,
            near_limit_ratio: self.behaviour.near_limit_ratio,
            records_recent_keys: !self.store.can_list_counters(),
            key_values: &self.key_values,
        }
    }

    /// Number of charges that the store failed to decide since the start, by kind of failure.
    pub fn failed_charge_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ChargeError::all_kinds().map(|error| (error.name(), self.failures.count_of_kind(error)))
    }

    /// Number of charges since the start that the store failed to decide and this policy decided.
    pub fn policy_decided_charge_count(&self, policy: StoreFailurePolicy) -> u64 {
        self.failures.count_decided_by(policy)
    }

    /// Prepares a request, and checks that it can be decided; logs it if it cannot.
    #[inline]
    fn prepare_request<'a, 'r, 'm>(
        &self,
        context: DecisionContext<'r>,
        request: &'a Request<'m>,
    ) -> Result<PreparedRequest<'a, 'r, 'm>, DecideError> {
        let refuse = |request: &Request<'m>, error| self.log_undecided_request(context, request, error);
        let Some(rules) = context.rules.filter(|_| !request.domain.is_empty() && !request.descriptors.is_empty())
        else {
            return Err(refuse(
                request,
                match request {
                    Request { domain: "", .. } => DecideError::EmptyDomain,
                    Request { descriptors, .. } if descriptors.is_empty() => DecideError::NoDescriptors,
                    _ => DecideError::NoRules,
                },
            ));
        };
        let prepared = PreparedRequest::new(rules, context.slots, request).map_err(|error| refuse(request, error))?;
        match rules.find_max_descriptors_if_exceeded(prepared.request()) {
            None => Ok(prepared),
            Some(max_descriptors) => {
                Err(refuse(prepared.request(), DecideError::TooMuchBacktracking { max_descriptors }))
            }
        }
    }

    /// Logs a request that has no decision, and returns the reason.
    #[cold]
    fn log_undecided_request(
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
        let selected = RequestWithSelections { request, selections: &[] };
        let (behaviour, context) = (&self.behaviour, &context);
        self.log_decision(
            DecidedRequest { behaviour, context, selected, outcomes: &[], candidates: None, blocked: None },
            Err(error),
        );
        error
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
