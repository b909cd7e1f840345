//! Selection of the limits that decide each descriptor of a request.
//!
//! A limit that came with the request takes precedence over the rules if its period is valid; otherwise it is ignored
//! and the rules decide. A rule may replace named limits of the same request, on any descriptor. Candidates are kept
//! apart from the limits that decide, so that nothing that decides can see them.
//!
//! Decides: whether an override takes precedence, and which `defaults` apply to it (`build_override_limit`).
//! Decides: what `replaces` takes away at a request; limits that are not active; that candidates are kept apart.
//! Decides: of which limits a release frees a slot, also if plan or active times changed meanwhile.
//! Decides: the warning that hits reported after a peek are lost.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::{Arc, Once};

use smallvec::SmallVec;

use super::prepared_request::PreparedRequest;
use crate::base::clock::Time;
use crate::limit::algorithm::{Algorithm, CapacityRuleKey, DelayPolicy, RejectedHitsPolicy};
use crate::limit::charge::{Charge, ChargeRequest, Counter, MAX_COUNT};
use crate::limit::counter_path::CounterPath;
use crate::limit::overflow::ChainPosition;
use crate::limit::period::{Period, Unit};
use crate::limit::request::{Descriptor, Entry, Hits, LimitOverride, MAX_HITS, Request};
use crate::limit::slot::{SlotAction, SlotUse};
use crate::limit::{Limit, LimitSpec};
use crate::rules::plan_table::OwnLimit;
use crate::rules::plan_table::live::{LiveTable, PlanSource};
use crate::rules::rule::matching::{MatchedRule, RuleMatch};
use crate::rules::rule::set::{CompiledLimit, CompiledRule, DomainRules, RuleSet, TableChoice, hash_limit_identity};
use crate::rules::rule::{RejectionResponse, RuleAllowance, RulePlan};
use crate::settings::decisions::DecisionSettings;
use crate::store::charge::StoreOutcome;
use crate::telemetry::metrics::limit_stats::LimitStats;

/// Limits that decide one descriptor.
#[derive(Debug, Default)]
pub(super) struct Selection<'r> {
    /// The rule that matched, unless a limit of the request took precedence.
    pub(super) rule: Option<&'r CompiledRule>,
    /// Limits to charge; none if nothing matched or all were replaced.
    pub(super) limits: SmallVec<[SelectedLimit<'r>; 1]>,
    /// Candidates of the rule, each charged on its own; empty for most rules.
    pub(super) candidates: Vec<SelectedLimit<'r>>,
    /// The rule is unlimited.
    pub(super) unlimited: bool,
    /// The domain has rules, and neither one of them nor a limit of the request applies.
    pub(super) matches_nothing: bool,
    /// Indices of the rule's limits that are not active now; empty for most rules.
    pub(super) inactive: SmallVec<[usize; 1]>,
    /// How the plan was found; `None` if the rule has no plans.
    pub(super) plan_source: Option<PlanSource>,
    /// Entries whose values share a counter: index of the entry, and pattern of the value.
    shared: SmallVec<[(usize, &'r [u8]); 1]>,
    /// Hash of the path of its counters, stable within this process; 0 without limits.
    pub(super) key: u128,
    /// Response to a rejection.
    pub(super) rejection: Option<&'r RejectionResponse>,
    /// Rules of the domain, if it has any.
    pub(super) domain: Option<&'r DomainRules>,
    /// Slot that the descriptor takes or frees; `None` without a concurrent limit.
    pub(super) slot: Option<Box<SlotUse>>,
}

/// A limit of a rule, or one that was built for the request.
#[derive(Clone, Debug)]
pub(super) enum LimitRef<'r> {
    OfRule(&'r Limit),
    Built(Box<Limit>),
}

impl Deref for LimitRef<'_> {
    type Target = Limit;

    fn deref(&self) -> &Limit {
        match self {
            Self::OfRule(limit) => limit,
            Self::Built(limit) => limit,
        }
    }
}

/// One limit of a selection.
#[derive(Clone, Debug)]
pub(super) struct SelectedLimit<'r> {
    pub(super) limit: LimitRef<'r>,
    /// Index among the limits of its rule.
    pub(super) index: usize,
    pub(super) name: &'r str,
    pub(super) shadow: bool,
    /// Rejects a request only together with all its other quotas; all limits do under QUOTA_MODE.
    pub(super) quota: bool,
    /// Statistics of the limit; `None`: it came with the request.
    pub(super) stats: Option<&'r Arc<LimitStats>>,
    tag: u128,
    epoch: u64,
}

/// Limits selected for a request, for each of its descriptors.
pub(super) type SelectionsByDescriptor<'r> = SmallVec<[Selection<'r>; 2]>;

/// Rules to select from, and the time of the selection.
#[derive(Clone, Copy)]
struct RulesAtTime<'r> {
    rules: &'r RuleSet,
    /// Only limits that are active at this time are selected; `None`: all are.
    active_at: Option<Time>,
}

/// Selects the limits of every descriptor that are active at a time; `None`: all are, for commands on their counters.
pub(super) fn select_limits<'r>(
    behaviour: &DecisionSettings,
    prepared: &PreparedRequest<'_, 'r, '_>,
    active_at: Option<Time>,
) -> SelectionsByDescriptor<'r> {
    let (request, slots) = (prepared.request(), prepared.slot_uses());
    let terms = RulesAtTime { rules: prepared.rules, active_at };
    // One variable for every return, so that the selections are built where the caller has them.
    let mut selections = SmallVec::new();
    selections.reserve_exact(request.descriptors.len());
    let Some(domain) = terms.rules.domain(request.domain) else {
        selections.extend(request.descriptors.iter().map(|_| Selection::default()));
        return selections;
    };
    for (index, descriptor) in request.descriptors.iter().enumerate() {
        selections.push(match slots.get(index) {
            None => Selection::for_descriptor(behaviour, terms, domain, descriptor),
            Some(slot) => Selection::for_descriptor_with_slot(behaviour, terms, domain, descriptor, *slot),
        });
    }
    if selections.iter().any(|selection| selection.rule.is_some_and(|compiled| !compiled.rule.replaces.is_empty())) {
        drop_replaced_limits(&mut selections);
    }
    selections.iter_mut().enumerate().for_each(|(index, selection)| selection.set_path_hash(request, index));
    selections
}

/// Leaves a request with blocked entries the limits of its refunds: nothing else of it reaches a counter.
#[cold]
pub(super) fn keep_limits_of_refunds(selections: &mut [Selection<'_>], request: &Request<'_>) {
    for (selection, descriptor) in selections.iter_mut().zip(&request.descriptors) {
        if !matches!(descriptor.hits, Hits::Refund(_)) {
            selection.limits.clear();
            selection.candidates.clear();
        }
    }
}

/// Drops the limits that a rule of the request replaces.
fn drop_replaced_limits(selections: &mut [Selection<'_>]) {
    let replaced: SmallVec<[&str; 4]> = selections
        .iter()
        .filter_map(|selection| Some((selection.rule?, selection)))
        .flat_map(|(compiled, selection)| {
            let names = compiled.rule.replaces.iter().map(String::as_str);
            // An inactive limit replaces nothing.
            names.filter(|name| selection.inactive.is_empty() || selection.replaces(compiled, name))
        })
        .collect();
    if !replaced.is_empty() {
        // A release frees what its request took when other limits may have been active; else it frees nothing.
        for selection in selections.iter_mut().filter(|selection| !selection.is_release()) {
            let stays = |selected: &SelectedLimit<'_>| selected.name.is_empty() || !replaced.contains(&selected.name);
            selection.limits.retain(|selected| stays(selected));
            selection.candidates.retain(stays);
            selection.remove_limits_of_broken_chains();
        }
    }
}

impl<'r> Selection<'r> {
    /// Name of one of its limits, as clients know it: `name`, else the path as in `/rlconfig`, `override` if the limit came
    /// with the request.
    pub(super) fn limit_name(&self, selected: &SelectedLimit<'r>) -> Cow<'r, str> {
        match (selected.name, self.rule) {
            ("", Some(compiled)) => Cow::Owned(compiled.rule.limit_path(selected.index)),
            ("", None) => Cow::Borrowed("override"),
            (name, _) => Cow::Borrowed(name),
        }
    }

    fn for_descriptor(
        behaviour: &DecisionSettings,
        terms: RulesAtTime<'r>,
        domain: &'r DomainRules,
        descriptor: &Descriptor<'_>,
    ) -> Self {
        if let Some(limit_override) = &descriptor.limit_override {
            match own_limit_of_override(limit_override).and_then(|sent| build_override_limit(behaviour, domain, sent)) {
                Some(limit) => return Self::for_override(limit, domain, behaviour.quota_mode),
                None => warn_ignored_override(limit_override),
            }
        }
        match terms.rules.match_path(domain, &descriptor.entries) {
            RuleMatch::Exempt => Self { domain: Some(domain), ..Self::default() },
            RuleMatch::None => Self { domain: Some(domain), matches_nothing: true, ..Self::default() },
            RuleMatch::Rule(found) => Self::for_rule_or_its_plan(behaviour, terms, domain, descriptor, found),
        }
    }

    /// Selects the active limits of the rule that matched, or of the plan that its table chooses.
    fn for_rule_or_its_plan(
        behaviour: &DecisionSettings,
        terms: RulesAtTime<'r>,
        domain: &'r DomainRules,
        descriptor: &Descriptor<'_>,
        found: MatchedRule<'r>,
    ) -> Self {
        // One variable, so that it is built where the caller has it.
        let mut selection = match found.rule.choose_plan(domain, &descriptor.entries) {
            None => Self::for_matched_rule(behaviour, domain, found),
            Some(chosen) => Self::for_plan(behaviour, domain, found, chosen),
        };
        selection.drop_inactive_limits(terms.active_at);
        if let Some(share) = selection.rule.and_then(|compiled| compiled.rule.enforced_share) {
            let is_enforced = share.contains(&selection.path_of_entries(&domain.name, &descriptor.entries));
            selection.limits.iter_mut().for_each(|selected| selected.shadow |= !is_enforced);
        }
        selection
    }

    /// Selects the limits of a descriptor of a domain with limits that follow streams.
    #[cold]
    fn for_descriptor_with_slot(
        behaviour: &DecisionSettings,
        terms: RulesAtTime<'r>,
        domain: &'r DomainRules,
        descriptor: &Descriptor<'_>,
        slot: SlotUse,
    ) -> Self {
        let is_release = slot.action.is_release();
        // A slot is freed although its limit is not active any more.
        let active_at = terms.active_at.filter(|_| !is_release);
        let mut selection = Self::for_descriptor(behaviour, RulesAtTime { active_at, ..terms }, domain, descriptor);
        if let Some(sent) = &descriptor.limit_override {
            let without = Descriptor { limit_override: None, ..descriptor.clone() };
            let of_rule = Self::for_descriptor(behaviour, RulesAtTime { active_at, ..terms }, domain, &without);
            // The number that came with the request is one of streams at once; it has no period.
            if of_rule.limits.iter().any(|selected| selected.limit.is_concurrent()) {
                selection = of_rule;
                selection.limits.retain(|selected| selected.limit.is_concurrent());
                for selected in &mut selection.limits {
                    let limit = selected.limit.with_requests_per_unit(sent.requests_per_unit.into());
                    selected.limit = LimitRef::Built(Box::new(limit));
                }
            } else {
                selection.inherit_reservations(of_rule.limits.iter().map(|selected| &*selected.limit));
            }
        }
        if is_release {
            let is_freed = |selected: &SelectedLimit<'_>| {
                selected.limit.follows_streams() && slot.action != SlotAction::ReleaseRejected
            };
            if selection.plan_source.is_some() {
                selection.add_limits_of_other_plans(terms.rules.find_rule(domain, &descriptor.entries));
            }
            selection.limits.retain(|selected| is_freed(selected));
            selection.candidates.retain(is_freed);
        }
        let mut limits = selection.limits.iter().chain(&selection.candidates);
        selection.slot =
            (is_release || limits.any(|selected| selected.limit.follows_streams())).then(|| Box::new(slot));
        selection
    }

    /// Adds the limits of the other plans of a rule: the request may have had another plan than its release.
    fn add_limits_of_other_plans(&mut self, rule: Option<MatchedRule<'r>>) {
        for compiled in rule.into_iter().flat_map(|found| found.rule.under_each_plan()) {
            for selected in select_deciding_limits(compiled, false) {
                if self.limits.iter().all(|known| known.tag != selected.tag) {
                    self.limits.push(selected);
                }
            }
            for selected in select_candidates(compiled) {
                if self.candidates.iter().all(|known| known.tag != selected.tag) {
                    self.candidates.push(selected);
                }
            }
        }
    }

    /// Gives the selected limits, which came with a request or from a row of a table, the reservations of the first
    /// limit of `of_rule` that has some.
    fn inherit_reservations<'l>(&mut self, mut of_rule: impl Iterator<Item = &'l Limit>) {
        if let Some(reservations) = of_rule.find_map(Limit::reservations) {
            for selected in &mut self.limits {
                let limit = selected.limit.with_reservations(reservations);
                selected.limit = LimitRef::Built(Box::new(limit));
            }
        }
    }

    /// Returns true if the descriptor frees slots: it charges no limit.
    pub(super) fn is_release(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.action.is_release())
    }

    fn for_matched_rule(behaviour: &DecisionSettings, domain: &'r DomainRules, found: MatchedRule<'r>) -> Self {
        Self {
            rule: Some(found.rule),
            limits: select_deciding_limits(found.rule, behaviour.quota_mode),
            candidates: select_candidates(found.rule),
            unlimited: matches!(found.rule.rule.allowance, RuleAllowance::Unlimited { .. }),
            matches_nothing: false,
            plan_source: None,
            shared: found.shared,
            key: 0,
            rejection: Some(&found.rule.rule.rejection),
            domain: Some(domain),
            inactive: SmallVec::new(),
            slot: None,
        }
    }

    /// Selects the limits of the plan that a table chose for the rule that matched.
    fn for_plan(
        behaviour: &DecisionSettings,
        domain: &'r DomainRules,
        found: MatchedRule<'r>,
        chosen: TableChoice<'r>,
    ) -> Self {
        let TableChoice { rule, source, own } = chosen;
        let mut selection = Self::for_matched_rule(behaviour, domain, MatchedRule { rule, ..found });
        selection.plan_source = Some(source);
        if let Some(own) = own {
            // Its period is valid, and defaults that do not apply are left out, so there is always a limit.
            let limit = build_override_limit(behaviour, domain, own.limit);
            selection.limits = limit
                .into_iter()
                .map(|limit| {
                    let epoch = domain.defaults_for_override(limit.period().unit()).epoch;
                    let (tag, stats) = (hash_limit_identity(&limit, epoch), Some(own.stats));
                    let quota = own.quota || behaviour.quota_mode;
                    let limit = LimitRef::Built(Box::new(limit));
                    SelectedLimit { limit, index: 0, name: "", shadow: own.shadow, quota, stats, tag, epoch }
                })
                .collect();
            selection.inherit_reservations(rule.deciding_limits().iter().map(|compiled| &compiled.limit));
        }
        selection
    }

    /// The plan whose limits decide, if the rule has plans.
    pub(super) fn plan(&self) -> Option<&'r RulePlan> {
        self.plan_source.and(self.rule).and_then(|compiled| compiled.rule.plan.as_deref())
    }

    /// The table that chose the plan, if the rule has plans.
    pub(super) fn plan_table(&self) -> Option<&'r LiveTable> {
        self.domain?.tables.get(self.plan()?.table)
    }

    /// Drops the limits that are not active now.
    #[inline]
    fn drop_inactive_limits(&mut self, active_at: Option<Time>) {
        let (Some(compiled), Some(now)) = (self.rule.filter(|compiled| compiled.has_active_times), active_at) else {
            return;
        };
        let inactive = compiled.limits.iter().enumerate();
        let inactive = inactive.filter(|(_, limit)| limit.active.is_some_and(|active| !active.contains(now)));
        self.inactive = inactive.map(|(index, _)| index).collect();
        let Self { limits, candidates, inactive, .. } = self;
        limits.retain(|selected| !inactive.contains(&selected.index));
        candidates.retain(|selected| !inactive.contains(&selected.index));
    }

    /// Drops the limits that take the overflow of one that was replaced.
    fn remove_limits_of_broken_chains(&mut self) {
        // The limits of a chain follow one another in their rule.
        let mut last_of_chain = None;
        self.limits.retain(|selected| {
            let position = selected.limit.chain_position();
            let has_source = last_of_chain.is_some_and(|index| index + 1 == selected.index);
            let stays = !position.takes_overflow() || has_source;
            if stays {
                last_of_chain = (position != ChainPosition::NotInChain).then_some(selected.index);
            }
            stays
        });
    }

    /// Returns true if an active limit of the rule replaces the limits of that name.
    fn replaces(&self, compiled: &CompiledRule, name: &str) -> bool {
        let RuleAllowance::Limits(limits) = &compiled.rule.allowance else { return true };
        let mut active = limits.iter().enumerate().filter(|(index, _)| !self.inactive.contains(index));
        active.any(|(_, limit)| limit.replaces.iter().any(|replaced| replaced == name))
    }

    fn for_override(limit: Limit, domain: &'r DomainRules, quota: bool) -> Self {
        let defaults = domain.defaults_for_override(limit.period().unit());
        let (tag, epoch) = (hash_limit_identity(&limit, defaults.epoch), defaults.epoch);
        let limit = LimitRef::Built(Box::new(limit));
        let selected = SelectedLimit { limit, index: 0, name: "", shadow: false, quota, stats: None, tag, epoch };
        let (limits, rejection) = (SmallVec::from([selected]), Some(&defaults.rejection));
        Self { limits, rejection, domain: Some(domain), ..Self::default() }
    }

    /// The charge of this selection, which is that of the descriptor at `index`; `None` if it has no limits.
    pub(super) fn build_charge<'a>(
        &'a self,
        request: &'a Request<'_>,
        index: usize,
        max_delay_us: u64,
    ) -> Option<Charge<'a>> {
        if self.limits.is_empty() {
            return None;
        }
        let hits = clamp_hits(request.descriptors[index].hits, &self.limits);
        let counter = |selected: &'a SelectedLimit<'_>| Counter { shadow: selected.shadow, ..selected.counter() };
        Some(Charge {
            path: self.counter_path(request, index),
            path_hash: self.key,
            counters: match &*self.limits {
                [only] => SmallVec::from([counter(only)]),
                limits => limits.iter().map(counter).collect(),
            },
            request: ChargeRequest::sent_by_client(hits, max_delay_us),
            slot: self.slot_of(&self.limits),
        })
    }

    /// The charge of the candidate at `at`: that of its limit if it were the only one, and not in shadow mode.
    pub(super) fn build_shadow_candidate_charge<'a>(
        &'a self,
        request: &'a Request<'_>,
        index: usize,
        at: usize,
        max_delay_us: u64,
    ) -> Charge<'a> {
        let selected = &self.candidates[at];
        let path = CounterPath { candidate: Some(selected.name), ..self.counter_path(request, index) };
        let counters = SmallVec::from_iter([selected.counter()]);
        let slot = self.slot_of(std::slice::from_ref(selected));
        let hits = clamp_hits(request.descriptors[index].hits, std::slice::from_ref(selected));
        Charge { slot, ..Charge::new(path, counters, ChargeRequest::sent_by_client(hits, max_delay_us)) }
    }

    /// The slot, if one of these limits has slots.
    fn slot_of(&self, limits: &[SelectedLimit<'_>]) -> Option<&SlotUse> {
        self.slot.as_deref().filter(|_| limits.iter().any(|selected| selected.limit.follows_streams()))
    }

    /// All charges of this selection: that of the limits that decide, if there are any, then those of candidates.
    pub(super) fn build_all_charges<'a>(
        &'a self,
        request: &'a Request<'_>,
        index: usize,
        max_delay_us: u64,
    ) -> impl Iterator<Item = Charge<'a>> {
        let candidates = 0..self.candidates.len();
        let candidates = candidates.map(move |at| self.build_shadow_candidate_charge(request, index, at, max_delay_us));
        self.build_charge(request, index, max_delay_us).into_iter().chain(candidates)
    }

    /// Path of the counters of this selection, which is that of the descriptor at `index`.
    pub(super) fn counter_path<'a>(&'a self, request: &'a Request<'_>, index: usize) -> CounterPath<'a> {
        self.path_of_entries(request.domain, &request.descriptors[index].entries)
    }

    /// Path of the counters of this selection, whose descriptor has these entries.
    pub(super) fn path_of_entries<'a>(&'a self, domain: &'a str, entries: &'a [Entry<'a>]) -> CounterPath<'a> {
        CounterPath { domain, entries, shared: &self.shared, candidate: None }
    }

    /// True if the values of an entry share one counter (`share_threshold`).
    pub(super) fn values_share_counter(&self) -> bool {
        !self.shared.is_empty()
    }

    /// Selects all limits of a rule for the descriptor at `index`; `shared` has the entries whose values share a
    /// counter.
    pub(super) fn for_rule(
        rule: &'r CompiledRule,
        shared: SmallVec<[(usize, &'r [u8]); 1]>,
        request: &Request<'_>,
        index: usize,
    ) -> Self {
        let (limits, candidates) = (select_deciding_limits(rule, false), select_candidates(rule));
        let mut selection = Self { rule: Some(rule), limits, candidates, shared, ..Self::default() };
        let follows_streams = rule.limits.iter().any(|limit| limit.limit.follows_streams());
        selection.slot = follows_streams.then(|| Box::new(SlotUse::unnamed()));
        selection.set_path_hash(request, index);
        selection
    }

    /// Hashes the path once, for every user of the key.
    fn set_path_hash(&mut self, request: &Request<'_>, index: usize) {
        if !self.limits.is_empty() {
            self.key = self.counter_path(request, index).hash_for_process();
        }
    }

    /// Records that a rule is peeked at. Warns, once per such rule, if it rejects a charge without counting the hits:
    /// hits that are reported after a peek are then lost.
    pub(super) fn warn_if_hits_lost_after_peek(&self, hits: Hits, outcome: &StoreOutcome) {
        let Some(compiled) = self.rule else { return };
        match hits {
            Hits::Peek => compiled.peek_warning.record_peek(),
            Hits::Charge(_) => {
                let lost = self.limits.iter().zip(&outcome.results);
                // The limits of a chain cannot count rejected hits, and `concurrent` has no such hits.
                let can_count =
                    |limit: &Limit| limit.chain_position() == ChainPosition::NotInChain && !limit.is_concurrent();
                let mut lost = lost.filter(|(selected, result)| {
                    !result.admitted && !selected.limit.counts_rejected_hits() && can_count(&selected.limit)
                });
                if lost.next().is_some() && compiled.peek_warning.should_warn_once() {
                    tracing::warn!(
                        rule = %compiled.rule.path,
                        origin = %compiled.rule.location,
                        "hits reported after a peek were rejected and not counted: set `count_rejected: true` on this \
                         rule"
                    );
                }
            }
            Hits::Refund(_) => {}
        }
    }
}

impl<'r> SelectedLimit<'r> {
    fn from_compiled(compiled: &'r CompiledRule, index: usize, limit: &'r CompiledLimit) -> Self {
        Self {
            limit: LimitRef::OfRule(&limit.limit),
            index,
            name: compiled.limit_name(index),
            shadow: limit.shadow,
            quota: limit.quota,
            stats: Some(&limit.stats),
            tag: limit.tag,
            epoch: limit.epoch,
        }
    }

    /// Counter of the limit, as if it were not in shadow mode.
    pub(super) fn counter(&self) -> Counter<'_> {
        let Self { limit, quota, tag, epoch, .. } = self;
        Counter { limit, shadow: false, quota: *quota, tag: *tag, epoch: *epoch }
    }
}

/// Clamps the hits of a charge on these limits to what they count exactly ([`MAX_HITS`]).
#[inline]
fn clamp_hits(hits: Hits, limits: &[SelectedLimit<'_>]) -> Hits {
    match hits {
        Hits::Charge(count) if count > MAX_HITS => Hits::Charge(clamp_large_count(count, limits)),
        Hits::Refund(count) if count > MAX_HITS => Hits::Refund(clamp_large_count(count, limits)),
        _ => hits,
    }
}

/// Clamps a count above [`MAX_HITS`]: beside a limit above 32 bits, algorithms that can count all up to [`MAX_COUNT`].
#[cold]
fn clamp_large_count(count: u64, limits: &[SelectedLimit<'_>]) -> u64 {
    let count_large = |selected: &SelectedLimit<'_>| selected.limit.algorithm().counts_above_32_bits();
    let any_is_above_32_bits = limits.iter().any(|selected| selected.limit.requests_per_unit() > u64::from(u32::MAX));
    count.min(if limits.iter().all(count_large) && any_is_above_32_bits { MAX_COUNT } else { MAX_HITS })
}

/// Limits of a rule that decide; `all_are_quotas` under QUOTA_MODE.
fn select_deciding_limits<'r>(compiled: &'r CompiledRule, all_are_quotas: bool) -> SmallVec<[SelectedLimit<'r>; 1]> {
    let select = |(index, limit): (usize, &'r CompiledLimit)| {
        let selected = SelectedLimit::from_compiled(compiled, index, limit);
        SelectedLimit { quota: selected.quota || all_are_quotas, ..selected }
    };
    match compiled.deciding_limits() {
        // Most rules have one, which costs half as much without an iterator.
        [only] => SmallVec::from([select((0, only))]),
        limits => limits.iter().enumerate().map(select).collect(),
    }
}

/// Candidates of a rule; never allocates for a rule without any.
fn select_candidates(compiled: &CompiledRule) -> Vec<SelectedLimit<'_>> {
    let deciding = compiled.deciding_limits().len();
    if compiled.limits.len() == deciding {
        return Vec::new();
    }
    let candidates = compiled.limits.iter().enumerate().skip(deciding);
    candidates.map(|(index, limit)| SelectedLimit::from_compiled(compiled, index, limit)).collect()
}

/// Returns number and period of the limit that came with a descriptor; `None` if the period is invalid.
fn own_limit_of_override(sent: &LimitOverride) -> Option<OwnLimit> {
    let period = Period::new(Unit::from_protobuf_number(sent.unit)?, sent.unit_multiplier)?;
    Some(OwnLimit { requests_per_unit: sent.requests_per_unit, period })
}

/// Limit that came with a request, or of a row of a table, under the domain's defaults.
fn build_override_limit(behaviour: &DecisionSettings, domain: &DomainRules, sent: OwnLimit) -> Option<Limit> {
    let OwnLimit { requests_per_unit, period } = sent;
    let unit = period.unit();
    let defaults = domain.defaults_for_override(unit);
    let log_is_too_long = defaults.algorithm.properties().keeps_hit_log() && requests_per_unit > behaviour.log_max;
    let algorithm = if log_is_too_long { Algorithm::SlidingWindowCounter } else { defaults.algorithm };
    let properties = algorithm.properties();
    let spec = LimitSpec {
        queue_size: defaults.queue_size.filter(|_| properties.capacity == CapacityRuleKey::QueueSize),
        max_wait_us: defaults.max_wait_us.filter(|_| properties.delay != DelayPolicy::Never),
        count_rejected: defaults
            .count_rejected
            .filter(|_| properties.rejected_hits != RejectedHitsPolicy::NeverCounted),
        consistency: defaults.consistency,
        on_store_error: defaults.on_store_error,
        calendar_months: behaviour.calendar_months,
        window: defaults.window.filter(|window| properties.follows_calendar && window.applies_to(period)),
        log_max: behaviour.log_max,
        ..LimitSpec::new(algorithm, requests_per_unit.into(), period)
    };
    // Limits that do not support `eventual` are decided strictly; `check` reports such defaults of a domain.
    Limit::new(&spec).or_else(|_| Limit::new(&LimitSpec { consistency: None, ..spec })).ok()
}

/// Warns once that limits of requests are ignored.
fn warn_ignored_override(sent: &LimitOverride) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            unit = sent.unit,
            unit_multiplier = sent.unit_multiplier,
            "ignored the limit of a request, whose unit or multiplier is invalid: the rules decide such requests"
        );
    });
}
