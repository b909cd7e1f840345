//! The pipeline: select, charge, merge.
//!
//! The gRPC service, `/json`, `explain` and the benches all use [`Decider`], so that they cannot disagree. Limits are
//! selected for a request as a whole, because a rule may replace others of the same request. Then all descriptors are
//! charged together, and their verdicts merge. A failure of the store becomes a verdict by the rule's failure policy
//! here and nowhere else.
//!
//! Decides: an empty domain or list of descriptors (INVALID_ARGUMENT).
//! Decides: the answer while no rules are loaded (`check_request_and_get_rules`), and with too much backtracking.
//! Decides: which requests a block rejects: over RLS, no release, none in shadow mode (`find_block`).
//! Decides: the log of requests without a decision (`log_undecided_request`).

pub mod decision;
pub mod log;
pub mod blocks;
pub mod slot_entries;
pub mod key_text;
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
use self::results::DescriptorResults;
use self::selection::{RequestWithSelections, RulesAtTime, Selection, select_limits};
use self::slot_entries::RequestAndSlotUses;
use self::store_failures::FailedChargeCounters;
use self::table_rows::PlanRowReader;
use self::tap::DecisionTap;
use crate::decide::decision::{DecideError, Decision, DecisionContext};
use crate::decide::log::DecisionLog;
use crate::decide::log::value_form::ValueForm;
use crate::limit::StoreFailurePolicy;
use crate::limit::request::{Hits, Request};
use crate::limit::slot::SlotUse;
use crate::rules::rule::set::RuleSet;
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
        let separated = self.separate_slot_entries(context, request)?;
        let is_release = separated.as_deref().is_some_and(RequestAndSlotUses::is_release);
        let (request, uses) = RequestAndSlotUses::parts_or_whole_request(separated.as_deref(), request);
        if let Some(blocked) = self.find_block(context, request).filter(|_| !is_release) {
            return Box::pin(self.reject_blocked_but_apply_its_refunds(context, request, uses, blocked)).await;
        }
        let rules = self.check_request_and_get_rules(context, request)?;
        let ordered = rules.copy_request_in_rule_order(request);
        let request = ordered.as_deref().unwrap_or(request);
        OptionFuture::from(
            rules
                .reads_rows_from_redis()
                .then(|| Box::pin(self.row_reader.read_missing_rows(&self.store, &self.key_values, context, request))),
        )
        .await;
        let selections = self.select_limits(context, rules, request, uses);
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
        let separated = self.separate_slot_entries(context, request)?;
        let is_release = separated.as_deref().is_some_and(RequestAndSlotUses::is_release);
        let (request, uses) = RequestAndSlotUses::parts_or_whole_request(separated.as_deref(), request);
        if let Some(blocked) = self.find_block(context, request).filter(|_| !is_release) {
            let decided =
                Box::pin(self.reject_blocked_but_apply_its_refunds(context, request, uses, blocked)).now_or_never();
            return decided.unwrap_or(Err(DecideError::Store));
        }
        let rules = self.check_request_and_get_rules(context, request)?;
        let ordered = rules.copy_request_in_rule_order(request);
        let request = ordered.as_deref().unwrap_or(request);
        let selections = self.select_limits(context, rules, request, uses);
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
            let ordered = ordered.as_ref().map(|request| &*request.descriptors[index].entries);
            let candidates = candidates.as_ref();
            observe(DescriptorResults { index, selection, outcome, candidates, ordered });
        }
        self.record_and_merge_outcomes(&context, selected, &outcomes, candidates)
    }

    /// Returns the blocks that a request meets; `None` under SHADOW_MODE, which rejects nothing.
    #[inline]
    fn find_block(&self, context: DecisionContext<'_>, request: &Request<'_>) -> Option<BlockMatch> {
        self.blocks.find_for_request(request, context.store.now).filter(|_| !self.behaviour.shadow_mode)
    }

    /// Rejects a request with blocked entries. Only the refunds that it asks for itself reach counters.
    #[cold]
    async fn reject_blocked_but_apply_its_refunds<'r>(
        &'r self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
        uses: &[SlotUse],
        blocked: BlockMatch,
    ) -> Result<Decision<'r>, DecideError> {
        if !blocked.has_refund || context.rules.is_none() {
            let selected = RequestWithSelections { request, selections: &[] };
            return self.reject_blocked(context, selected, &[], None, &blocked);
        }
        let rules = self.check_request_and_get_rules(context, request)?;
        let ordered = rules.copy_request_in_rule_order(request);
        let request = ordered.as_deref().unwrap_or(request);
        OptionFuture::from(
            rules
                .reads_rows_from_redis()
                .then(|| self.row_reader.read_missing_rows(&self.store, &self.key_values, context, request)),
        )
        .await;
        let mut selections = self.select_limits(context, rules, request, uses);
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

    /// Returns the rules that decide a request; an error if it is invalid, if there are none, or if it could take too many
    /// steps of backtracking.
    fn check_request_and_get_rules<'r>(
        &self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
    ) -> Result<&'r RuleSet, DecideError> {
        let error = match context.rules {
            _ if request.domain.is_empty() => DecideError::EmptyDomain,
            _ if request.descriptors.is_empty() => DecideError::NoDescriptors,
            Some(rules) => match rules.find_max_descriptors_if_exceeded(request) {
                None => return Ok(rules),
                Some(max_descriptors) => {
                    let error = DecideError::TooMuchBacktracking { max_descriptors };
                    warn_about_refused_call(context, request, error);
                    error
                }
            },
            None => DecideError::NoRules,
        };
        self.log_undecided_request(context, request, error);
        Err(error)
    }

    /// Selects the limits of each descriptor.
    fn select_limits<'r>(
        &self,
        context: DecisionContext<'_>,
        rules: &'r RuleSet,
        request: &Request<'_>,
        uses: &[SlotUse],
    ) -> SmallVec<[Selection<'r>; 2]> {
        let terms = RulesAtTime { rules, active_at: Some(context.store.now) };
        select_limits(&self.behaviour, terms, request, uses)
    }

    /// Takes the entries that identify a stream off a request; `None` in a domain without concurrent limits.
    #[inline]
    fn separate_slot_entries<'m>(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'m>,
    ) -> Result<Option<Box<RequestAndSlotUses<'m>>>, DecideError> {
        let Some(rules) = context.rules.filter(|rules| rules.follows_streams()) else { return Ok(None) };
        RequestAndSlotUses::separate(rules, context.slots, request).inspect_err(|error| {
            warn_about_refused_call(context, request, *error);
            let unnamed = Request { descriptors: SmallVec::new(), ..request.clone() };
            self.log_undecided_request(context, &unnamed, *error);
        })
    }

    /// Logs a request that has no decision.
    fn log_undecided_request(&self, context: DecisionContext<'_>, request: &Request<'_>, error: DecideError) {
        let selected = RequestWithSelections { request, selections: &[] };
        let behaviour = &self.behaviour;
        let blocked = None;
        self.log_decision(
            DecidedRequest { behaviour, context: &context, selected, outcomes: &[], candidates: None, blocked },
            Err(error),
        );
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
