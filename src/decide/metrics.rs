//! Metrics of a request's outcomes, by limit.
//!
//! The sums by hits are those of envoyproxy/ratelimit: total, within the limit, near it, over it. A charge that crosses
//! the limit contributes to both `within_limit` and `over_limit`; where rejected hits do not count, a rejected charge
//! is over as a whole. Hits that another limit of the list rejects are neither within the limit nor over it. Beside
//! them each decision counts once under its verdict. Recording changes no counter.
//!
//! Decides: when hits count as within, near or over a limit (`NEAR_LIMIT_RATIO`), or as rejected by the local cache.
//! Decides: which rejections count in `/top`: those in shadow mode apart, peeks as one hit, no `deny`; the hash of distinct keys.

use std::sync::Arc;

use smallvec::SmallVec;

use super::decider::Decider;
use super::decision::DecisionContext;
use super::key_text::write_entries_text;
use super::outcome::DescriptorOutcome;
use super::selected_request::SelectedRequest;
use super::selection::{SelectedLimit, Selection};
use crate::base::clock::Time;
use crate::base::sharded::upper_half;
use crate::decide::log::value_form::ValueForm;
use crate::limit::charge::ChargeResult;
use crate::limit::counter_path::CounterPath;
use crate::limit::overflow::{ChainPosition, split_into_overflow_chains};
use crate::limit::request::{Descriptor, Entry, Hits};
use crate::limit::slot::SlotChange;
use crate::limit::{Limit, StoreFailurePolicy};
use crate::rules::plan_table::live::PlanSource;
use crate::rules::rule::RuleLogging;
use crate::rules::rule::metric_names::build_override_metric_name;
use crate::rules::rule::set::DomainRules;
use crate::store::charge::DecidedBy;
use crate::telemetry::metrics::limit_stats::{LimitStat, LimitStats};
use crate::telemetry::top_keys::{KeyHits, UnenforcedMode};
use crate::telemetry::unmatched_descriptors::UnmatchedDescriptor;

/// Statistics that a limit counts under.
pub(super) enum LimitStatsRef<'r> {
    /// Those of its rule.
    Rule(&'r Arc<LimitStats>),
    /// Those of a name that the request makes.
    Request(Arc<LimitStats>),
}

impl std::ops::Deref for LimitStatsRef<'_> {
    type Target = LimitStats;

    fn deref(&self) -> &LimitStats {
        match self {
            Self::Rule(stats) => stats,
            Self::Request(stats) => stats,
        }
    }
}

/// A descriptor of a request with its limits and their outcome.
#[derive(Clone, Copy)]
struct DecidedDescriptor<'a, 'r, 'm> {
    descriptor: &'a Descriptor<'m>,
    path: CounterPath<'a>,
    selection: &'a Selection<'r>,
    outcome: &'a DescriptorOutcome,
}

/// Result of a charge on one limit, and what else decides which of its metrics count the hits.
#[derive(Clone, Copy)]
pub(super) struct ChargeResultToRecord<'a> {
    pub(super) result: &'a ChargeResult,
    /// Hits from which on the limit counts as nearly used up.
    pub(super) near: u64,
    /// The limit is in shadow mode.
    pub(super) shadow: bool,
    /// Another hard limit of the descriptor rejects the hits: those that this limit admits are not within it either.
    pub(super) rejected_elsewhere: bool,
    pub(super) decided_by: DecidedBy,
}

impl SelectedRequest<'_, '_, '_> {
    /// Records the outcome of each descriptor in the metrics.
    pub(super) fn record_metrics(&self, outcomes: &[DescriptorOutcome]) {
        let Self { decider, context, request, selections, .. } = *self;
        for (index, (selection, outcome)) in selections.iter().zip(outcomes).enumerate() {
            let path = selection.counter_path(request, index);
            if selection.domain.is_none() || selection.matches_nothing {
                decider.record_unmatched_descriptor(context.store.now, selection, &path);
            }
            if let Some(source) = selection.plan_source {
                record_default_plan_use(selection, source);
            }
            if selection.is_release() {
                record_release(selection, outcome);
                continue;
            }
            let descriptor = &request.descriptors[index];
            let decided = DecidedDescriptor { descriptor, path, selection, outcome };
            decider.record_descriptor_key(context.store.now, decided);
            for (at, limit) in selection.limits.iter().enumerate() {
                let Some(stats) = decider.limit_stats(context, selection, limit, &descriptor.entries) else { continue };
                if let (LimitStatsRef::Request(_), Some(rule)) = (&stats, limit.stats) {
                    rule.record_decision_under_request_name(outcome.limit_rejects(at));
                }
                decider.record_limit_outcome(&stats, decided, at);
            }
        }
    }
}

impl Decider {
    /// Records a descriptor that nothing limits, because no rule matches it or its domain has no rules.
    #[cold]
    fn record_unmatched_descriptor(&self, now: Time, selection: &Selection<'_>, path: &CounterPath<'_>) {
        match selection.domain {
            Some(domain) => domain.others.add_to_counter(LimitStat::Unmatched, 1),
            None => self.metrics.limits.record_unknown_domain(path.domain),
        }
        let keys = path.entries.iter().map(|entry| entry.key);
        let descriptor = UnmatchedDescriptor { domain: path.domain, has_rules: selection.domain.is_some(), keys };
        self.metrics.unmatched.record(descriptor, now, |text| write_entries_text(text, path, &self.key_values));
    }

    /// Records the outcome of the limit at `at` of a descriptor.
    fn record_limit_outcome(&self, stats: &LimitStats, decided: DecidedDescriptor<'_, '_, '_>, at: usize) {
        let DecidedDescriptor { descriptor, selection, outcome, .. } = decided;
        let (limit, shadow) = (&selection.limits[at], selection.limits[at].shadow);
        let is_in_chain = limit.limit.chain_position() != ChainPosition::NotInChain;
        let decided = is_in_chain.then(|| hits_decided_by_limit(selection, outcome, at, descriptor.hits));
        let Some(hits) = decided.unwrap_or(Some(descriptor.hits)) else { return };
        let near = near_limit_threshold(&limit.limit, self.behaviour.near_limit_ratio);
        match outcome {
            DescriptorOutcome::WithoutLimits => {}
            DescriptorOutcome::Charged(outcome) => {
                let result = &outcome.results[at];
                let rejected_elsewhere = is_rejected_by_other_limit(selection, &outcome.results, at);
                let decided_by = outcome.decided_by;
                let result_of = ChargeResultToRecord { result, near, shadow, rejected_elsewhere, decided_by };
                record_hits(stats, &limit.limit, hits, result_of);
                if limit.limit.follows_streams() {
                    record_slot_or_reservation_change(stats, &limit.limit, result);
                }
                stats.add_to_counter(stat_of_result(limit, result), 1);
            }
            DescriptorOutcome::Failed(failed) => {
                let policy = failed.policies.policy_for_limit(limit);
                match failed.fallback.get(at).filter(|_| policy == StoreFailurePolicy::Local) {
                    Some(result) => {
                        let rejected_elsewhere = is_rejected_by_other_limit(selection, &failed.fallback, at);
                        let decided_by = DecidedBy::Store;
                        let result_of = ChargeResultToRecord { result, near, shadow, rejected_elsewhere, decided_by };
                        record_hits(stats, &limit.limit, hits, result_of);
                        stats.add_to_counter(LimitStat::LocalRejected, u64::from(!result.admitted && !shadow));
                    }
                    None => {
                        if let Hits::Charge(hits) = hits {
                            stats.add_to_counter(LimitStat::TotalHits, hits);
                        }
                    }
                }
                stats.add_to_counter(stat_of_policy(policy), 1);
            }
        }
    }

    /// Records the key of a descriptor: among the distinct keys, the rejected ones, and those of new counters.
    fn record_descriptor_key(&self, now: Time, decided: DecidedDescriptor<'_, '_, '_>) {
        let DecidedDescriptor { descriptor, path, selection, outcome } = decided;
        let (results, is_charged) = match outcome {
            DescriptorOutcome::Charged(outcome) => (&outcome.results, true),
            DescriptorOutcome::Failed(failed) => (&failed.fallback, false),
            DescriptorOutcome::WithoutLimits => return,
        };
        let Some(hits) = hits_in_keys(descriptor.hits) else { return };
        // A store that cannot list its keys has those of new counters recorded.
        let adds_key = is_charged && descriptor.hits != Hits::Peek && !self.store.can_list_counters();
        let key = selection.key;
        // The lower half chooses the shard of the rejected keys.
        let hash = upper_half(key);
        if let Some(weight) = self.metrics.busiest_keys.weight_if_sampled() {
            self.record_busy_key(now, decided, hits.saturating_mul(weight));
        }
        for (at, (selected, result)) in selection.limits.iter().zip(results).enumerate() {
            // Limits that came with a request share the statistics of their domain.
            let Some(stats) = selected.stats.or_else(|| selection.domain.map(|domain| &domain.others)) else {
                continue;
            };
            if at == 0 {
                stats.keys.add_hash(hash);
                if adds_key && result.before == 0 && result.admitted {
                    let parts = descriptor.entries.iter().flat_map(|entry| [entry.key, entry.value]);
                    self.metrics.recently_created_keys.record_key(stats, parts);
                }
            }
            if !result.admitted {
                stats.rejected_keys.add_hash(hash);
                let id = stats.combine_id_with_key(key);
                let named = selected.stats.is_none().then(|| self.override_stats(selection, descriptor)).flatten();
                let limit = named.as_deref().unwrap_or(stats);
                let in_shadow = selected.shadow || self.behaviour.shadow_mode;
                let mode = in_shadow.then_some(UnenforcedMode::Shadow);
                let rejected = KeyHits { id, limit, mode, hits };
                self.metrics.top_keys.record_key(rejected, now, |text| {
                    write_entries_text(text, &path, self.value_form_in_keys(selection));
                });
            }
        }
    }

    /// Records the key of a decision in the sample, under the first limit of the descriptor.
    #[cold]
    fn record_busy_key(&self, now: Time, decided: DecidedDescriptor<'_, '_, '_>, hits: u64) {
        let DecidedDescriptor { descriptor, path, selection, .. } = decided;
        let Some(first) = selection.limits.first() else { return };
        let Some(stats) = first.stats.or_else(|| selection.domain.map(|domain| &domain.others)) else { return };
        let named = first.stats.is_none().then(|| self.override_stats(selection, descriptor)).flatten();
        let limit = named.as_deref().unwrap_or(stats);
        let busy = KeyHits { id: stats.combine_id_with_key(selection.key), limit, mode: None, hits };
        self.metrics.busiest_keys.record_key(busy, now, |text| {
            write_entries_text(text, &path, self.value_form_in_keys(selection));
        });
    }

    /// Form in which keys of a selection show their values; those of rules with `decision_log: none` are left out.
    pub(super) fn value_form_in_keys(&self, selection: &Selection<'_>) -> &ValueForm {
        let is_private = selection.rule.is_some_and(|compiled| compiled.rule.logging == Some(RuleLogging::None));
        if is_private { &ValueForm::Omitted } else { &self.key_values }
    }

    /// Statistics that a limit counts under: those of its rule, or of a name that the request makes.
    pub(super) fn limit_stats<'r>(
        &self,
        context: &DecisionContext<'r>,
        selection: &Selection<'r>,
        limit: &SelectedLimit<'r>,
        entries: &[Entry<'_>],
    ) -> Option<LimitStatsRef<'r>> {
        let domain = selection.domain?;
        match (limit.stats, selection.rule) {
            (Some(stats), Some(compiled)) if compiled.named_by_request => {
                let mut parts = context.rules?.metric_name_by_request(domain, compiled, entries);
                parts.extend(compiled.rule.limit_suffix(limit.index));
                Some(
                    self.stats_named_by_request(domain, &parts)
                        .map_or(LimitStatsRef::Rule(stats), LimitStatsRef::Request),
                )
            }
            (Some(stats), _) => Some(LimitStatsRef::Rule(stats)),
            (None, _) => {
                let stats = self.stats_named_by_request(domain, &build_override_metric_name(entries));
                Some(stats.map_or(LimitStatsRef::Rule(&domain.others), LimitStatsRef::Request))
            }
        }
    }

    /// Statistics of a limit that came with a request; `None` if there is no room for its name.
    fn override_stats(&self, selection: &Selection<'_>, descriptor: &Descriptor<'_>) -> Option<Arc<LimitStats>> {
        self.stats_named_by_request(selection.domain?, &build_override_metric_name(&descriptor.entries))
    }

    fn stats_named_by_request(&self, domain: &DomainRules, parts: &[String]) -> Option<Arc<LimitStats>> {
        let names: SmallVec<[&str; 6]> =
            std::iter::once(&*domain.name).chain(parts.iter().map(String::as_str)).collect();
        self.metrics.limits.register_request_limit(&names)
    }
}

/// Records slots that a release freed, and reservations that it settled. It is no decision, and has no hits.
#[cold]
fn record_release(selection: &Selection<'_>, outcome: &DescriptorOutcome) {
    for (at, limit) in selection.limits.iter().enumerate() {
        if let (Some(stats), Some(result)) = (limit.stats, outcome.limit_result(at)) {
            record_slot_or_reservation_change(stats, &limit.limit, result);
        }
    }
}

/// Records what became of a slot or reservation, and those that were found over.
pub(super) fn record_slot_or_reservation_change(stats: &LimitStats, limit: &Limit, result: &ChargeResult) {
    let of_reservations = limit.reservations().is_some();
    let stat = match result.slot {
        SlotChange::Taken if of_reservations => Some(LimitStat::Reservations),
        SlotChange::Freed if of_reservations => Some(LimitStat::ReservationsSettled),
        SlotChange::Taken => Some(LimitStat::SlotsTaken),
        SlotChange::Freed => Some(LimitStat::SlotsFreed),
        SlotChange::ReleasedEarly => Some(LimitStat::EarlyReleases),
        SlotChange::Late => Some(LimitStat::LateRequests),
        SlotChange::None | SlotChange::Renewed => None,
    };
    if let Some(stat) = stat {
        stats.add_to_counter(stat, 1);
    }
    if result.expired_seats > 0 {
        let stat = if of_reservations { LimitStat::ReservationsUnsettled } else { LimitStat::SeatsExpired };
        stats.add_to_counter(stat, u64::from(result.expired_seats));
    }
    if result.above_estimate > 0 {
        stats.add_to_counter(LimitStat::ReservationExcessHits, result.above_estimate);
    }
}

/// Records a decision by the default plan of a table: without a row, or because the row could not be read.
fn record_default_plan_use(selection: &Selection<'_>, source: PlanSource) {
    let Some(table) = selection.plan_table() else { return };
    match source {
        PlanSource::Row | PlanSource::OwnLimit => {}
        PlanSource::Default => table.stats.record_absent_row_decision(),
        PlanSource::NotRead => table.stats.record_unread_row_decision(),
    }
}

/// Hits that count for a key: those that had to fit, so that a rejected peek is seen. `None` for a refund.
pub(super) const fn hits_in_keys(hits: Hits) -> Option<u64> {
    match hits {
        Hits::Charge(hits) => Some(hits),
        Hits::Peek => Some(1),
        Hits::Refund(_) => None,
    }
}

/// Hits of a request that the limit at `at` of a chain decides: those that it takes or gives back, `None` if there are
/// none; all if they are rejected.
#[cold]
fn hits_decided_by_limit(
    selection: &Selection<'_>,
    outcome: &DescriptorOutcome,
    at: usize,
    hits: Hits,
) -> Option<Hits> {
    let Some(result) = outcome.limit_result(at) else { return Some(hits) };
    if !result.admitted {
        return Some(hits);
    }
    let (all, of_count): (u64, fn(u64) -> Hits) = match hits {
        Hits::Charge(all) => (all, Hits::Charge),
        Hits::Refund(all) => (all, Hits::Refund),
        Hits::Peek => return Some(hits),
    };
    let mut chains = split_into_overflow_chains(selection.limits.iter().map(|one| one.limit.chain_position()));
    let chain = chains.find(|chain| chain.contains(&at))?;
    let results = || chain.clone().filter_map(|at| Some((at, outcome.limit_result(at)?)));
    let is_charged = results().any(|(_, result)| result.after != result.before);
    // Hits that were not charged, because another descriptor was rejected, count where there is room for them.
    let mut rest = all;
    let mut part = |result: &ChargeResult| {
        let hits = if is_charged { result.after.abs_diff(result.before) } else { result.remaining };
        let part = hits.min(rest);
        rest -= part;
        part
    };
    let decided = results().map(|(index, result)| (index, part(result))).find(|(index, _)| *index == at)?.1;
    (decided > 0).then(|| of_count(decided))
}

/// Returns true if a hard limit of the descriptor, other than that at `at`, rejects the hits.
fn is_rejected_by_other_limit(selection: &Selection<'_>, results: &[ChargeResult], at: usize) -> bool {
    let mut others = selection.limits.iter().zip(results).enumerate().filter(|(index, _)| *index != at);
    others.any(|(_, (other, result))| !other.shadow && !other.quota && !result.admitted)
}

/// Records the hits of one charge on one limit.
pub(super) fn record_hits(stats: &LimitStats, limit: &Limit, hits: Hits, result: ChargeResultToRecord<'_>) {
    let ChargeResultToRecord { result, near, shadow, rejected_elsewhere, decided_by } = result;
    if !result.admitted && result.ban_left_us > 0 {
        stats.add_to_counter(LimitStat::Banned, 1);
        stats.add_to_counter(LimitStat::Bans, u64::from(result.ban_begun));
    }
    let hits = match hits {
        Hits::Charge(hits) => hits,
        Hits::Peek => return,
        Hits::Refund(hits) => return stats.add_to_counter(LimitStat::TotalNegativeHits, hits),
    };
    let capacity = limit.capacity();
    stats.add_to_counter(LimitStat::TotalHits, hits);
    if result.admitted && rejected_elsewhere {
        return;
    }
    if result.admitted {
        // Hits that were not charged because another descriptor was rejected count as if they had been, as in
        // envoyproxy/ratelimit.
        let before = if result.after == result.before { result.before.wrapping_sub(hits) } else { result.before };
        let after = before.wrapping_add(hits);
        if after > near {
            stats.add_to_counter(LimitStat::NearLimit, if before >= near { hits } else { after - near });
        }
        stats.add_to_counter(LimitStat::WithinLimit, hits);
        if decided_by == DecidedBy::Share {
            stats.add_to_counter(LimitStat::Uncharged, hits);
        }
        return;
    }
    let is_counted = limit.counts_rejected_hits() && decided_by != DecidedBy::OverLimitCache;
    let over =
        if is_counted && result.before < capacity { (result.before + hits).saturating_sub(capacity) } else { hits };
    stats.add_to_counter(LimitStat::OverLimit, over);
    stats.add_to_counter(
        LimitStat::NearLimit,
        if is_counted { capacity.saturating_sub(result.before.max(near)) } else { 0 },
    );
    if decided_by == DecidedBy::OverLimitCache {
        stats.add_to_counter(LimitStat::OverLimitWithLocalCache, hits);
    }
    if shadow {
        stats.add_to_counter(LimitStat::ShadowMode, over);
    }
}

/// Hits from which on a limit counts as nearly used up.
pub(super) fn near_limit_threshold(limit: &Limit, ratio: f32) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "in single precision and floored, as envoyproxy/ratelimit has it; never negative"
    )]
    {
        (limit.capacity() as f32 * ratio).floor() as u64
    }
}

const fn stat_of_result(limit: &SelectedLimit<'_>, result: &ChargeResult) -> LimitStat {
    match (result.admitted, limit.shadow) {
        (true, _) => LimitStat::Ok,
        (false, true) => LimitStat::Shadow,
        (false, false) => LimitStat::Over,
    }
}

const fn stat_of_policy(policy: StoreFailurePolicy) -> LimitStat {
    match policy {
        StoreFailurePolicy::Local => LimitStat::Local,
        StoreFailurePolicy::Allow => LimitStat::Allow,
        StoreFailurePolicy::Deny => LimitStat::Deny,
        StoreFailurePolicy::Error => LimitStat::Error,
    }
}
