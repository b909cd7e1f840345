//! Candidate limits: each is charged as if it were the only limit of its rule, and changes no answer.
//!
//! The charges are begun before those of the limits that decide, and are never waited for: outcomes that are missing
//! when the answer is ready are recorded by a task. A dry run does not concern candidates, nor does a rejection by any
//! other limit: a looser candidate would otherwise see only the hits that a stricter limit has admitted. A charge that
//! fails is counted as an error of the candidate.
//!
//! Decides: when a candidate is charged, also if the store fails or another limit rejects; its rejected keys.

use std::sync::Arc;

use super::key_text::{key_text, write_entries_text};
use super::metrics::{
    ChargeResultToRecord, LimitStatsRef, hits_in_keys, near_limit_threshold, record_hits,
    record_slot_or_reservation_change,
};
use super::selected_request::SelectedRequest;
use super::selection::SelectedLimit;
use crate::base::clock::Time;
use crate::base::sharded::upper_half;
use crate::limit::Limit;
use crate::limit::charge::{Charge, ChargeResult};
use crate::limit::counter_path::CounterPath;
use crate::limit::request::Hits;
use crate::store::charge::{DeferredOutcomes, StoreOutcome, spawn_outcome_handler};
use crate::store::error::ChargeError;
use crate::telemetry::metrics::limit_stats::{LimitStat, LimitStats};
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::top_keys::{KeyHits, UnenforcedMode};
use crate::telemetry::traces::{SpanKind, SpanRef};

/// Charges of the candidates of a request.
#[derive(Debug)]
pub(super) struct CandidateCharges {
    /// In ascending order.
    refs: Vec<CandidateRef>,
    /// One for each of `refs`.
    outcomes: DeferredOutcomes,
}

/// Candidate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CandidateRef {
    /// Index of the descriptor.
    pub(super) descriptor: usize,
    /// Index among the candidates of its selection.
    pub(super) at: usize,
}

/// Candidate with its outcome.
#[derive(Clone, Copy, Debug)]
pub(super) struct CandidateOutcome<'a> {
    pub(super) candidate: CandidateRef,
    pub(super) outcome: &'a Result<StoreOutcome, ChargeError>,
}

impl CandidateCharges {
    /// Begins to charge the candidates of a request; `None` if it has none.
    pub(super) fn begin_charging(selected: &SelectedRequest<'_, '_, '_>) -> Option<Self> {
        let SelectedRequest { decider, context, request, selections, .. } = *selected;
        if selections.iter().all(|selection| selection.candidates.is_empty()) {
            return None;
        }
        let of_descriptor = |descriptor: usize| {
            (0..selections[descriptor].candidates.len()).map(move |at| CandidateRef { descriptor, at })
        };
        let refs: Vec<_> = (0..selections.len()).flat_map(of_descriptor).collect();
        let charge = |&CandidateRef { descriptor, at }: &CandidateRef| {
            (
                descriptor,
                selections[descriptor].build_shadow_candidate_charge(request, descriptor, at, context.max_delay_us),
            )
        };
        let charges: Vec<(usize, Charge<'_>)> = refs.iter().map(charge).collect();
        Some(Self { refs, outcomes: decider.store.charge_without_waiting(&charges, context.store) })
    }

    /// Outcomes that are known by now.
    pub(super) fn known_outcomes(&self) -> impl Iterator<Item = CandidateOutcome<'_>> + Clone {
        let outcomes: &[_] = match &self.outcomes {
            DeferredOutcomes::Ready(outcomes) => outcomes,
            DeferredOutcomes::Pending(_) => &[],
        };
        self.refs.iter().zip(outcomes).map(|(candidate, outcome)| CandidateOutcome { candidate: *candidate, outcome })
    }

    /// Polls the outstanding outcomes once, without waiting.
    pub(super) fn poll_outcomes(self) -> Self {
        Self { outcomes: self.outcomes.resolve_arrived(), ..self }
    }

    /// Result of a candidate; `None`: not known by now, or the charge failed.
    pub(super) fn result_of(&self, candidate: CandidateRef) -> Option<&ChargeResult> {
        let DeferredOutcomes::Ready(outcomes) = &self.outcomes else { return None };
        let at = self.refs.binary_search(&candidate).ok()?;
        outcomes.get(at)?.as_ref().ok()?.results.first()
    }

    /// True if a candidate is known to be exceeded.
    pub(super) fn would_reject(&self) -> bool {
        let mut charged = self.known_outcomes().filter_map(|known| known.outcome.as_ref().ok()?.results.first());
        charged.any(|result| !result.admitted)
    }

    /// Records the outcomes, those that are still missing as soon as they are known.
    pub(super) fn record_outcomes(self, selected: &SelectedRequest<'_, '_, '_>) {
        let (Self { refs, outcomes }, metrics) = (self, &selected.decider.metrics);
        let form_of =
            |candidate: CandidateRef| selected.decider.value_form_in_keys(&selected.selections[candidate.descriptor]);
        let record_of = |candidate| UnrecordedCandidateCharge::new(selected, candidate);
        match outcomes {
            DeferredOutcomes::Ready(outcomes) => {
                for (candidate, outcome) in refs.iter().zip(outcomes) {
                    let push_text = |text: &mut Vec<u8>| {
                        write_entries_text(text, &candidate_counter_path(selected, *candidate), form_of(*candidate));
                    };
                    record_of(*candidate).record_outcome(metrics, &outcome, push_text);
                }
            }
            DeferredOutcomes::Pending(pending) => {
                let records = refs.iter().map(|candidate| {
                    (record_of(*candidate), candidate_counter_path(selected, *candidate), form_of(*candidate))
                });
                let records: Vec<_> = records.map(|(record, path, form)| (record, key_text(&path, form))).collect();
                let metrics = Arc::clone(metrics);
                spawn_outcome_handler(pending, move |outcomes| {
                    for ((record, text), outcome) in records.into_iter().zip(outcomes) {
                        record.record_outcome(&metrics, &outcome, |pushed| pushed.extend_from_slice(text.as_bytes()));
                    }
                });
            }
        }
    }
}

fn candidate_counter_path<'a>(
    selected: &SelectedRequest<'a, '_, '_>,
    CandidateRef { descriptor, at }: CandidateRef,
) -> CounterPath<'a> {
    let selection = &selected.selections[descriptor];
    CounterPath {
        candidate: Some(selection.candidates[at].name),
        ..selection.counter_path(selected.request, descriptor)
    }
}

/// What the metrics need of a candidate's charge; outlives the request.
struct UnrecordedCandidateCharge {
    limit: Limit,
    /// Hits from which on the limit counts as nearly used up.
    near: u64,
    hits: Hits,
    is_release: bool,
    key: u128,
    now: Time,
    /// Span of the decision, if the request is sampled.
    span_ref: Option<SpanRef>,
    /// Statistics of the limit; `None` if metrics are off.
    of_rule: Option<Arc<LimitStats>>,
    /// Statistics of the name that the request makes, in place of the former.
    of_request: Option<Arc<LimitStats>>,
}

impl UnrecordedCandidateCharge {
    fn new(selected: &SelectedRequest<'_, '_, '_>, candidate: CandidateRef) -> Self {
        let CandidateRef { descriptor, at } = candidate;
        let (decider, context, selection) = (selected.decider, selected.context, &selected.selections[descriptor]);
        let (limit, sent): (&SelectedLimit<'_>, _) =
            (&selection.candidates[at], &selected.request.descriptors[descriptor]);
        let is_on = !decider.metrics.is_off();
        let path = candidate_counter_path(selected, candidate);
        let key = path.hash_for_process();
        let stats = is_on.then(|| decider.limit_stats(context, selection, limit, &sent.entries)).flatten();
        Self {
            limit: *limit.limit,
            near: near_limit_threshold(&limit.limit, decider.behaviour.near_limit_ratio),
            hits: sent.hits,
            is_release: selection.is_release(),
            key,
            now: context.store.now,
            span_ref: context.store.span_ref.cloned(),
            of_rule: limit.stats.filter(|_| is_on).map(Arc::clone),
            of_request: stats.and_then(|stats| match stats {
                LimitStatsRef::Request(stats) => Some(stats),
                LimitStatsRef::Rule(_) => None,
            }),
        }
    }

    /// Records an outcome. `push_text` appends the key as `/top` shows it.
    fn record_outcome(
        self,
        metrics: &ServiceMetrics,
        outcome: &Result<StoreOutcome, ChargeError>,
        push_text: impl FnOnce(&mut Vec<u8>),
    ) {
        let Self { limit, near, hits, is_release, key, now, span_ref, of_rule, of_request } = self;
        let Some(of_rule) = of_rule else { return };
        let stats = of_request.as_ref().unwrap_or(&of_rule);
        let result = outcome.as_ref().ok().and_then(|outcome| Some((outcome.results.first()?, outcome.decided_by)));
        let is_rejected = result.is_some_and(|(result, _)| !result.admitted);
        if is_release {
            if let Some((result, _)) = result {
                record_slot_or_reservation_change(stats, &limit, result);
            }
            return;
        }
        let (verdict, verdict_name) = match result {
            Some((result, decided_by)) => {
                let result = ChargeResultToRecord { result, near, shadow: true, rejected_elsewhere: false, decided_by };
                record_hits(stats, &limit, hits, result);
                if limit.follows_streams() {
                    record_slot_or_reservation_change(stats, &limit, result.result);
                }
                if is_rejected { (LimitStat::Shadow, "shadow") } else { (LimitStat::Ok, "ok") }
            }
            None => {
                if let Hits::Charge(hits) = hits {
                    stats.add_to_counter(LimitStat::TotalHits, hits);
                }
                (LimitStat::Error, "error")
            }
        };
        stats.add_to_counter(verdict, 1);
        if let Some(span_ref) = span_ref {
            let mut span = span_ref.start_child_span("candidate", SpanKind::Internal);
            span.set_text_attribute("tollkeeper.limit", of_rule.name().as_str());
            span.set_attribute("tollkeeper.verdict", verdict_name);
        }
        if of_request.is_some() {
            of_rule.record_decision_under_request_name(is_rejected);
        }
        if let (true, Some(hits)) = (is_rejected, hits_in_keys(hits)) {
            of_rule.rejected_keys.add_hash(upper_half(key));
            let id = of_rule.combine_id_with_key(key);
            metrics.top_keys.record_key(
                KeyHits { id, limit: &of_rule, mode: Some(UnenforcedMode::Candidate), hits },
                now,
                push_text,
            );
        }
    }
}
