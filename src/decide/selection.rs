//! Which limits decide each descriptor of a request.
//!
//! A limit that travels with the request goes before the rules, if its period means something; one that does not is
//! passed over, and the configured rule decides. Rules may switch off named limits of the same request, whichever
//! descriptor met them.

use std::cmp::Reverse;
use std::sync::Once;

use smallvec::SmallVec;

use crate::algorithm::ChargeRequest;
use crate::counter::{Charge, Counter, Path};
use crate::limit::algorithm::{Algorithm, Capacity, Delay, RejectedHits};
use crate::limit::period::{Period, Unit};
use crate::limit::{Limit, LimitSpec, StorePolicy};
use crate::request::{Descriptor, Hits, LimitOverride, Request};
use crate::rule::set::{CompiledLimit, CompiledRule, DomainRules, RuleSet, counter_tag};
use crate::rule::{Allowance, OverLimitBody, OverrideDefaults};
use crate::settings::decisions::DecisionSettings;
use crate::store::outcome::StoreOutcome;
use crate::telemetry::metrics::limit_stats::LimitStats;

/// What decides one descriptor.
#[derive(Debug, Default)]
pub(super) struct Selection<'r> {
    /// The rule that was met, if it was the rule that was used.
    pub(super) rule: Option<&'r CompiledRule>,
    /// The limits to charge from; none if nothing matched or all were replaced.
    pub(super) limits: SmallVec<[SelectedLimit<'r>; 1]>,
    /// The rule is unlimited.
    pub(super) unlimited: bool,
    /// Entries whose values share a counter.
    shared: SmallVec<[(usize, &'r [u8]); 1]>,
    /// The key of its path, if it has limits.
    pub(super) key: u128,
    /// What a refusal says.
    pub(super) refusal: Option<&'r OverLimitBody>,
    /// The domain, if it has rules.
    pub(super) domain: Option<&'r DomainRules>,
}

/// One limit of a selection.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelectedLimit<'r> {
    pub(super) limit: Limit,
    /// Its place among the limits of its rule.
    pub(super) place: usize,
    pub(super) name: &'r str,
    pub(super) shadow: bool,
    pub(super) quota: bool,
    /// What is counted of it; `None`: it came with the request.
    pub(super) stats: Option<&'r LimitStats>,
    tag: u128,
    epoch: u64,
}

/// Selects the limits of every descriptor, in their order.
pub(super) fn select<'r>(
    behaviour: &DecisionSettings,
    rules: &'r RuleSet,
    request: &Request<'_>,
) -> SmallVec<[Selection<'r>; 2]> {
    let Some(domain) = rules.domain(request.domain) else {
        return request.descriptors.iter().map(|_| Selection::default()).collect();
    };
    let mut selections: SmallVec<[Selection<'r>; 2]> =
        request.descriptors.iter().map(|descriptor| Selection::of(behaviour, rules, domain, descriptor)).collect();
    drop_replaced(&mut selections);
    selections.iter_mut().enumerate().for_each(|(index, selection)| selection.find_key(request, index));
    selections
}

/// Switches off the limits that some rule of the request replaces.
fn drop_replaced(selections: &mut [Selection<'_>]) {
    let replaced: SmallVec<[&str; 4]> = selections
        .iter()
        .filter_map(|selection| selection.rule)
        .flat_map(|compiled| compiled.rule.replaces.iter().map(String::as_str))
        .collect();
    if !replaced.is_empty() {
        for selection in selections {
            selection.limits.retain(|selected| selected.name.is_empty() || !replaced.contains(&selected.name));
        }
    }
}

impl<'r> Selection<'r> {
    fn of(
        behaviour: &DecisionSettings,
        rules: &'r RuleSet,
        domain: &'r DomainRules,
        descriptor: &Descriptor<'_>,
    ) -> Self {
        if let Some(limit_override) = &descriptor.limit_override {
            match override_limit(behaviour, &domain.defaults, limit_override) {
                Some(limit) => return Self::of_override(limit, domain),
                None => warn_ignored(limit_override),
            }
        }
        match rules.find(domain, &descriptor.entries) {
            None => Self { domain: Some(domain), ..Self::default() },
            Some(found) => Self {
                rule: Some(found.rule),
                limits: limits_of(found.rule),
                unlimited: matches!(found.rule.rule.allowance, Allowance::Unlimited { .. }),
                shared: found.shared,
                key: 0,
                refusal: Some(&found.rule.rule.over_limit_body),
                domain: Some(domain),
            },
        }
    }

    fn of_override(limit: Limit, domain: &'r DomainRules) -> Self {
        let defaults = &domain.defaults;
        let (tag, epoch) = (counter_tag(&limit, defaults.epoch), defaults.epoch);
        let selected =
            SelectedLimit { limit, place: 0, name: "", shadow: false, quota: false, stats: None, tag, epoch };
        let (limits, refusal) = (SmallVec::from([selected]), Some(&defaults.over_limit_body));
        Self { limits, refusal, domain: Some(domain), ..Self::default() }
    }

    /// What is charged for this selection, the one at `place`; `None` if it has no limit.
    pub(super) fn charge<'a>(
        &'a self,
        request: &'a Request<'_>,
        index: usize,
        max_delay_us: u64,
    ) -> Option<Charge<'a>> {
        if self.limits.is_empty() {
            return None;
        }
        let hits = request.descriptors[index].hits;
        let counter = |selected: &'a SelectedLimit<'_>| Counter {
            limit: &selected.limit,
            enforced: !selected.shadow,
            tag: selected.tag,
            epoch: selected.epoch,
        };
        Some(Charge {
            path: self.path(request, index),
            key: self.key,
            counters: self.limits.iter().map(counter).collect(),
            request: ChargeRequest::new(hits, max_delay_us),
        })
    }

    /// What the counters of this selection, the one at `place`, are found by.
    pub(super) fn path<'a>(&'a self, request: &'a Request<'_>, index: usize) -> Path<'a> {
        Path { domain: request.domain, entries: &request.descriptors[index].entries, shared: &self.shared }
    }

    /// All limits of a rule, for the descriptor at a place; `shared` are the places of values that share a counter,
    /// with their patterns.
    pub(super) fn of_rule(
        rule: &'r CompiledRule,
        shared: SmallVec<[(usize, &'r [u8]); 1]>,
        request: &Request<'_>,
        index: usize,
    ) -> Self {
        let mut selection = Self { rule: Some(rule), limits: limits_of(rule), shared, ..Self::default() };
        selection.find_key(request, index);
        selection
    }

    /// Hashes the path once, for all who need its key.
    fn find_key(&mut self, request: &Request<'_>, index: usize) {
        if !self.limits.is_empty() {
            self.key = self.path(request, index).key();
        }
    }

    /// Says once of a rule that is looked at before and then refuses what is reported that such a report is lost,
    /// unless refused hits count.
    pub(super) fn warn_lost_reports(&self, hits: Hits, outcome: &StoreOutcome) {
        let Some(compiled) = self.rule else { return };
        match hits {
            Hits::Peek => compiled.peek_warning.record_peek(),
            Hits::Charge(_) => {
                let lost = self.limits.iter().zip(&outcome.results);
                let mut lost = lost.filter(|(selected, result)| !result.admitted && !selected.limit.count_rejected());
                if lost.next().is_some() && compiled.peek_warning.is_due() {
                    tracing::warn!(
                        rule = %compiled.rule.path,
                        origin = %compiled.rule.location,
                        "this rule is looked at first and then refused a report, which costs the reporter nothing: \
                         it wants `count_rejected: true`"
                    );
                }
            }
            Hits::Refund(_) => {}
        }
    }

    /// What decides a charge of `hits` that the store failed: the least lenient policy of its enforced limits. A trial is
    /// never refused, nor is what takes nothing: where no other process is asked it passes.
    pub(super) fn store_policy(&self, hits: Hits) -> StorePolicy {
        let takes = matches!(hits, Hits::Charge(_));
        match self.least_lenient() {
            Some((_, StorePolicy::Local)) => StorePolicy::Local,
            Some((_, policy)) if takes => policy,
            _ => StorePolicy::Allow,
        }
    }

    /// The place of the limit that speaks for all when the store fails: the first with the least lenient policy, one
    /// that is no quota before quotas; the first of all if all are trials.
    pub(super) fn governing_limit(&self) -> usize {
        self.least_lenient().map_or(0, |(place, _)| place)
    }

    fn least_lenient(&self) -> Option<(usize, StorePolicy)> {
        let strictness = |policy| match policy {
            StorePolicy::Allow => 0,
            StorePolicy::Local => 1,
            StorePolicy::Deny => 2,
            StorePolicy::Error => 3,
        };
        let enforced = self.limits.iter().enumerate().filter(|(_, selected)| !selected.shadow);
        // `min_by_key` gives the first on a tie.
        let least =
            enforced.min_by_key(|(_, selected)| (Reverse(strictness(selected.limit.on_store_error())), selected.quota));
        least.map(|(place, selected)| (place, selected.limit.on_store_error()))
    }
}

fn limits_of<'r>(compiled: &'r CompiledRule) -> SmallVec<[SelectedLimit<'r>; 1]> {
    let select = |(place, limit): (usize, &'r CompiledLimit)| SelectedLimit {
        limit: limit.limit,
        place,
        name: compiled.limit_name(place),
        shadow: limit.shadow,
        quota: limit.quota,
        stats: Some(&limit.stats),
        tag: limit.tag,
        epoch: limit.epoch,
    };
    compiled.limits.iter().enumerate().map(select).collect()
}

/// The limit that came with a request, under the domain's defaults; `None` if its period means nothing.
fn override_limit(behaviour: &DecisionSettings, defaults: &OverrideDefaults, sent: &LimitOverride) -> Option<Limit> {
    let unit = Unit::ALL.into_iter().find(|unit| unit.number() == sent.unit)?;
    let period = Period::new(unit, sent.unit_multiplier)?;
    let log_is_too_long = defaults.algorithm.properties().has_log && sent.requests_per_unit > behaviour.log_max;
    let algorithm = if log_is_too_long { Algorithm::SlidingWindowCounter } else { defaults.algorithm };
    let properties = algorithm.properties();
    let spec = LimitSpec {
        queue_size: defaults.queue_size.filter(|_| properties.capacity == Capacity::QueueSize),
        max_wait_us: defaults.max_wait_us.filter(|_| properties.delay != Delay::Never),
        count_rejected: defaults.count_rejected.filter(|_| properties.rejected_hits != RejectedHits::NeverCounted),
        consistency: defaults.consistency,
        on_store_error: defaults.on_store_error,
        calendar_months: behaviour.calendar_months,
        log_max: behaviour.log_max,
        ..LimitSpec::new(algorithm, sent.requests_per_unit, period)
    };
    // What `eventual` can not be kept with is decided strictly, as `check` says of the domain's defaults.
    Limit::new(&spec).or_else(|_| Limit::new(&LimitSpec { consistency: None, ..spec })).ok()
}

/// Says once that such overrides come in and what becomes of them.
fn warn_ignored(sent: &LimitOverride) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            unit = sent.unit,
            unit_multiplier = sent.unit_multiplier,
            "a request carried a limit whose period means nothing; such limits are ignored and the rules decide"
        );
    });
}
