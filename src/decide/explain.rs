//! Explanation of a request for people: the steps of matching, and its counters without charging them.
//!
//! It selects limits as a decision does and peeks at the same store, so that it cannot disagree with the decision. Text
//! of the request is included as it came; the code that prints it escapes it.
//!
//! Decides: that `/explain` peeks; how many Envoys it shows (`MAX_EXPLAINED_HOLDERS`).

use std::borrow::Cow;
use std::cmp::Reverse;

use super::decider::Decider;
use super::decision::DecisionContext;
use super::prepared_request::PreparedRequest;
use super::selection::{SelectedLimit, Selection, select_limits};
use super::store_failures::FailurePolicies;
use crate::base::clock::Time;
use crate::limit::RegionConnection;
use crate::limit::charge::{Charge, ChargeRequest, ChargeResult};
use crate::limit::request::{Descriptor, Entry, Hits, Request};
use crate::limit::reservation::ReservationPolicy;
use crate::limit::slot::SlotCaller;
use crate::limit::slot_table::SlotSummary;
use crate::limit::{Consistency, GlobalScope, Limit, Overshoot, RegionLossPolicy};
use crate::rules::rule::near_miss::{MissReason, NearMiss, PossibleEntry};
use crate::rules::rule::set::{CompiledRule, DomainRules, RuleSet};
use crate::rules::rule::trace::{NodeRef, PassedOverReason, TraceEnd, TraceStep};
use crate::settings::decisions::DecisionSettings;
use crate::store::charge::StoreOutcome;
use crate::store::error::ChargeError;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Maximum number of slot holders in an explanation; those with the most slots come first.
const MAX_EXPLAINED_HOLDERS: usize = 20;

/// Explanation of a request.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Explanation {
    /// Domain of the request.
    pub domain: String,
    /// True if rules for the domain are loaded.
    pub known_domain: bool,
    /// Version of the rules at their source; absent if it has no versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_version: Option<String>,
    /// Region of the process; absent if there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<ExplainedRegion>,
    /// Blocked entries of the request, because of which it is rejected before any rule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<ExplainedBlock>,
    /// One for each descriptor, in its order.
    pub descriptors: Vec<ExplainedDescriptor>,
}

/// A blocked entry.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedBlock {
    /// `key=value`.
    pub entry: String,
    /// End of the block, RFC 3339 in UTC.
    pub until: String,
    /// Reason that the operator gave.
    pub reason: String,
}

/// Region whose counters are shown.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedRegion {
    /// Its name.
    pub name: String,
    /// True if the global Redis does not answer it.
    pub cut_off: bool,
}

/// Explanation of one descriptor.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedDescriptor {
    /// `key=value,key=value`.
    pub descriptor: String,
    /// Match of each entry.
    pub steps: Vec<ExplainedEntryMatch>,
    /// Result, in a sentence.
    pub outcome: String,
    /// The rule for which the descriptor was probably meant, in a sentence; absent if a rule matched or none is near.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub near_miss: Option<ExplainedNearMiss>,
    /// The rule that matched.
    pub rule: Option<ExplainedRule>,
    /// Limits that decide, with their counters.
    pub limits: Vec<ExplainedLimit>,
    /// Slots of each concurrent limit; empty for most rules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<ExplainedSlots>,
    /// Who holds what of the limits over the rate limit quota service; absent if nobody does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<ExplainedProxyShares>,
}

/// How limits of a descriptor are divided among proxies that decide by themselves, by this replica.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct ExplainedProxyShares {
    /// Each limit, and what this replica holds of it.
    pub limits: Vec<LimitShareReport>,
    /// Proxies that share it, up to 100, those with most hits first.
    pub proxies: Vec<ProxyShareReport>,
    /// Number of proxies that share it.
    #[serde(default)]
    pub proxy_count: usize,
    /// The store does not answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub store_failed: bool,
}

/// Part of one limit of a key that this replica holds, to divide it among proxies.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct LimitShareReport {
    /// The limit in words.
    pub limit: String,
    /// `rate`: shares per period; `hits`: lent hits.
    pub form: String,
    /// What this replica holds of it.
    pub held: u64,
    /// What of that no proxy has.
    pub free: u64,
    /// Seconds until the hold ends, unless it is renewed.
    pub held_for_s: u64,
}

/// A proxy's part of a key.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ProxyShareReport {
    /// Number of its stream.
    pub stream: u64,
    /// Its address.
    pub peer: String,
    /// Demand in requests per second.
    pub demand_per_s: f64,
    /// What it was told: `allow`, `deny`, or its bucket.
    pub assignment: String,
    /// Hits that it may still admit, or admitted and did not report; per period, for rates.
    pub reserved: u64,
    /// Seconds until its assignment ends, unless it is renewed.
    pub ends_s: u64,
}

/// Slots of a concurrent limit.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct ExplainedSlots {
    /// Slots in use.
    pub slots: u64,
    /// Seats that they take.
    pub seats: u64,
    /// Seconds until the slot that ends first is over if nobody frees it; absent without slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_end_s: Option<u64>,
    /// Seconds since the oldest slot was taken or renewed, by the `max_duration` of now; absent without slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_s: Option<u64>,
    /// Releases that came before their requests, in the last 15 s.
    pub tombstones: u64,
    /// Envoys that hold slots, with their number.
    pub holders: Vec<ExplainedHolder>,
    /// True if there are more slots than were looked at.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// True if these are open reservations, whose hits are `seats`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reservations: bool,
}

/// An Envoy that holds slots.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedHolder {
    /// Its name, or its number if this process never heard of it; empty if nothing names it.
    pub holder: String,
    /// Slots that it holds.
    pub slots: u64,
}

/// A rule that a descriptor nearly matches.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ExplainedNearMiss {
    /// What differs: `case`, `order`, `too_short`, `too_long`, `key`, `domain` or `value`.
    pub reason: String,
    /// The difference in a sentence, with what would match.
    pub why: String,
    /// `file:line:column` of the rule; absent for a domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Descriptor, or domain, that would match.
    pub suggestion: String,
}

impl ExplainedNearMiss {
    /// The rule that a descriptor without one nearly matches.
    fn find(rules: &RuleSet, domain: &DomainRules, descriptor: &Descriptor<'_>) -> Option<Self> {
        let entries: Vec<PossibleEntry<'_>> = descriptor.entries.iter().map(PossibleEntry::from).collect();
        let near = rules.find_near_miss(domain, &entries)?;
        let why = near.describe();
        let NearMiss { reason, location, suggestion, .. } = near;
        let origin = location.map(|location| location.to_string());
        Some(Self { reason: reason.name().to_owned(), why, origin, suggestion })
    }

    /// The domain for which that of a request was probably meant.
    fn find_domain_near_miss(rules: &RuleSet, domain: &str) -> Option<Self> {
        let suggestion = rules.find_similar_domain(domain)?.to_owned();
        let why = format!("did you mean the domain {suggestion}?");
        Some(Self { reason: MissReason::Domain.name().to_owned(), why, origin: None, suggestion })
    }
}

/// Match of one entry of a descriptor.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedEntryMatch {
    /// `key=value`.
    pub entry: String,
    /// Kind of match (`exact`, `wildcard` or `default`), the node's key and value, and its location; `null`: no match.
    pub matched: Option<[String; 3]>,
    /// Nodes that match too and do not decide: key and value, location, and reason.
    pub other_matches: Vec<[String; 3]>,
    /// Number of others beyond those.
    pub more_other_matches: usize,
}

/// Rule that matched a descriptor.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedRule {
    /// Path of the rule, as in `/rlconfig`.
    pub path: String,
    /// `file:line:column`.
    pub origin: String,
    /// Plan whose limits decide; absent if the rule has no plans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<ExplainedTablePlan>,
}

/// Plan that a table chose.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedTablePlan {
    /// Name of the plan; `own` for the limit of a row.
    pub name: String,
    /// Name of the table.
    pub table: String,
    /// `row`, `own` or `default`.
    pub found: String,
    /// How the plan was found, in words.
    pub reason: String,
}

/// A limit and its counter.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedLimit {
    /// Name of the limit; empty if it has none.
    pub name: String,
    /// The limit in words.
    pub limit: String,
    /// Guarantee over all replicas.
    pub guarantee: Cow<'static, str>,
    /// The limit never rejects a request.
    pub shadow_mode: bool,
    /// `enforced_share` of its rule, such as `10%`; in shadow mode the key is not one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforced_share: Option<String>,
    /// The limit rejects only together with all other quotas.
    pub quota_mode: bool,
    /// The limit is a candidate: charged as if it were the only one.
    #[serde(default)]
    pub candidate: bool,
    /// The counter; `null` if the store failed.
    pub counter: Option<ExplainedCounter>,
}

/// State of a counter, found by a peek.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ExplainedCounter {
    /// True if one more hit would be admitted.
    pub passes: bool,
    /// Number of hits counted.
    pub used: u64,
    /// Number of hits that would still be admitted.
    pub remaining: u64,
    /// Time until the full limit is available again, in microseconds.
    pub reset_us: u64,
    /// Time until one more hit can be admitted, in microseconds.
    pub retry_after_us: Option<u64>,
    /// Time until the ban of the client ends, in microseconds; 0: it is not banned.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub banned_us: u64,
    /// True for the counter of this process that decides under `on_store_error: local`, because the store failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub local: bool,
}

/// Result of a peek at one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeekedCounter {
    /// The result.
    pub result: ChargeResult,
    /// The store failed, and this is the fallback counter of this process.
    pub is_fallback: bool,
}

impl Explanation {
    /// Explains `request` by these rules. `counters` has the results of each descriptor's limits, as
    /// [`Decider::peek_counters`] returns them at `now`.
    pub fn explain_request(
        behaviour: &DecisionSettings,
        rules: &RuleSet,
        request: &Request<'_>,
        counters: &[Vec<Option<PeekedCounter>>],
        now: Time,
    ) -> Self {
        let domain = rules.domain(request.domain);
        let prepared = PreparedRequest::new_or_as_sent(rules, SlotCaller::default(), request);
        let (request, selections) = (prepared.request(), select_limits(behaviour, &prepared, Some(now)));
        let descriptors =
            request.descriptors.iter().zip(&selections).enumerate().map(|(index, (descriptor, selection))| {
                let mut results = counters.get(index).map_or(&[][..], Vec::as_slice).iter().map(Option::as_ref);
                let strict = selection.limits.iter().any(|one| one.limit.consistency() == Consistency::Strict);
                let share = selection.rule.and_then(|compiled| compiled.rule.enforced_share);
                let deciding = selection.limits.iter().map(|one| ExplainedLimit {
                    enforced_share: share.map(|share| share.to_string()),
                    ..explain_limit(one, strict, false)
                });
                let candidates = selection.candidates.iter().map(|one| explain_limit(one, false, true));
                let with_counter = |mut limit: ExplainedLimit| {
                    limit.counter = results.next().flatten().map(ExplainedCounter::from_peek);
                    limit
                };
                let limits = deciding.chain(candidates).map(with_counter).collect();
                match domain {
                    None => explain_unknown_domain(rules, request.domain, descriptor),
                    Some(domain) => explain_descriptor(rules, domain, descriptor, selection, limits),
                }
            });
        Self {
            domain: request.domain.to_owned(),
            known_domain: domain.is_some(),
            source_version: None,
            region: None,
            blocked: Vec::new(),
            descriptors: descriptors.collect(),
        }
    }
}

impl Decider {
    /// Slots of the concurrent limits of each descriptor, and reservations of others, by `deadline`.
    pub async fn explain_slots(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Vec<Vec<ExplainedSlots>> {
        let Some(rules) = context.rules.filter(|rules| rules.follows_streams()) else { return Vec::new() };
        let prepared = PreparedRequest::new_or_as_sent(rules, context.slots, request);
        let now = context.store.now;
        let mut explained = Vec::with_capacity(request.descriptors.len());
        for (index, selection) in select_limits(&self.behaviour, &prepared, None).iter().enumerate() {
            let mut of_descriptor = Vec::new();
            if let Some(charge) = selection.build_charge(prepared.request(), index, 0) {
                let summaries = self.store.summarize_slots(&charge, now, deadline).await;
                let of_streams = charge.counters.iter().filter(|counter| counter.limit.follows_streams());
                let of_limits = of_streams.zip(summaries);
                of_descriptor.extend(of_limits.filter_map(|(counter, summary)| {
                    let reservations = counter.limit.reservations();
                    let longest_us =
                        reservations.map_or(counter.limit.period_us(), ReservationPolicy::settle_within_us);
                    Some(self.explain_slot_summary(summary?, longest_us, now))
                }));
            }
            explained.push(of_descriptor);
        }
        explained
    }

    fn explain_slot_summary(&self, summary: SlotSummary, longest_us: u64, now: Time) -> ExplainedSlots {
        let SlotSummary { seats, slots, tombstones, expires, mut holders, is_partial: partial, is_of_reservations } =
            summary;
        holders.sort_by_key(|(_, slots)| Reverse(*slots));
        let name = |(holder, slots)| ExplainedHolder { holder: self.store.slot_holders().name(holder), slots };
        let holders = holders.into_iter().take(MAX_EXPLAINED_HOLDERS).map(name).collect();
        let until_end_us = expires.map(|expires| expires.since_us(now));
        let first_end_s = until_end_us.map(|left_us| left_us / 1_000_000);
        let oldest_s = until_end_us.map(|left_us| longest_us.saturating_sub(left_us) / 1_000_000);
        let reservations = is_of_reservations;
        ExplainedSlots { slots, seats, first_end_s, oldest_s, tombstones, holders, partial, reservations }
    }

    /// Blocked entries of a request, each once.
    pub fn explain_blocks(&self, context: DecisionContext<'_>, request: &Request<'_>) -> Vec<ExplainedBlock> {
        let entries = request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
        let find = |entry: &Entry<'_>| {
            let block = self.blocks.find_block_of_entry(request.domain, entry.key, entry.value, context.store.now)?;
            let reason = block.reason.clone();
            Some(ExplainedBlock { entry: entry.to_string(), until: block.until.to_string(), reason })
        };
        let mut found: Vec<ExplainedBlock> = entries.filter_map(find).collect();
        found.sort_by(|a, b| a.entry.cmp(&b.entry));
        found.dedup_by(|a, b| a.entry == b.entry);
        found
    }

    /// Region of this process; `None` if there is only one.
    pub fn explain_own_region(&self) -> Option<ExplainedRegion> {
        let stats = self.store.stats().shared?.regions?;
        Some(ExplainedRegion { name: stats.region, cut_off: !stats.connected })
    }

    /// Peeks at the counters that `request` would charge: the results of each descriptor's limits, candidates last.
    /// Where the store failed, those of the fallback counters if these decide, else `None`.
    pub async fn peek_counters(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'_>,
    ) -> Vec<Vec<Option<PeekedCounter>>> {
        let Some(rules) = context.rules else { return vec![Vec::new(); request.descriptors.len()] };
        let prepared = PreparedRequest::new_or_as_sent(rules, context.slots, request);
        let request = prepared.request();
        if rules.reads_rows_from_redis() {
            self.row_reader.read_missing_rows(&self.store, &self.key_values, context, request).await;
        }
        let selections = select_limits(&self.behaviour, &prepared, Some(context.store.now));
        self.peek_selected_counters(context, request, &selections).await
    }

    /// Peeks at the counters of selected limits, as [`Decider::peek_counters`] does.
    pub(super) async fn peek_selected_counters(
        &self,
        context: DecisionContext<'_>,
        request: &Request<'_>,
        selections: &[Selection<'_>],
    ) -> Vec<Vec<Option<PeekedCounter>>> {
        let charges = selections.iter().enumerate().flat_map(|(index, selection)| {
            selection.build_all_charges(request, index, context.max_delay_us).map(move |charge| (index, charge))
        });
        let charges: Vec<(usize, Charge<'_>)> = charges.collect();
        let mut outcomes = vec![None; charges.len()];
        let record = |at: usize, _: &Charge<'_>, outcome: Result<StoreOutcome, ChargeError>| {
            outcomes[at] = outcome.ok().map(|outcome| outcome.results);
        };
        let peeks = charges.iter().map(|(_, charge)| charge.clone()).enumerate();
        self.store.peek_all(peeks, context.store, record).await;
        let mut counters = vec![Vec::new(); selections.len()];
        for ((index, charge), results) in charges.iter().zip(outcomes) {
            let is_fallback = results.is_none();
            let limits = &selections[*index].limits;
            // The first charge of a descriptor is that of its deciding limits, if it has any.
            let is_deciding = counters[*index].is_empty() && !limits.is_empty();
            let results = results.or_else(|| {
                let is_local = is_deciding && FailurePolicies::for_charge(limits, charge.request.hits).uses_fallback();
                let peek =
                    || Charge { request: ChargeRequest { hits: Hits::Peek, ..charge.request }, ..charge.clone() };
                is_local.then(|| self.store.charge_fallback(&peek(), context.store.now))
            });
            let result = |at: usize| {
                let result = results.as_ref().and_then(|results| results.get(at).copied());
                result.map(|result| PeekedCounter { result, is_fallback })
            };
            counters[*index].extend((0..charge.counters.len()).map(result));
        }
        counters
    }
}

fn explain_unknown_domain(rules: &RuleSet, domain: &str, descriptor: &Descriptor<'_>) -> ExplainedDescriptor {
    ExplainedDescriptor {
        near_miss: ExplainedNearMiss::find_domain_near_miss(rules, domain),
        descriptor: descriptor.to_string(),
        steps: Vec::new(),
        outcome: "no rule file has this domain, so everything passes".to_owned(),
        rule: None,
        limits: Vec::new(),
        slots: Vec::new(),
        quota: None,
    }
}

/// Result of a descriptor in a sentence.
fn describe_outcome(end: &TraceEnd<'_>, selection: &Selection<'_>, has_override: bool) -> String {
    match (end, selection.rule, has_override) {
        (_, None, true) if !selection.limits.is_empty() => {
            "the limit that came with the request decides; the rules are ignored".to_owned()
        }
        (TraceEnd::Rule(_), _, _) if selection.unlimited => "this rule is unlimited: everything passes".to_owned(),
        (TraceEnd::Rule(compiled), _, _) if selection.limits.is_empty() && !selection.inactive.is_empty() => {
            let others = describe_inactive_limits(compiled, &selection.inactive);
            format!("no limit of this rule is active at this time, so it passes; {others}")
        }
        (TraceEnd::Rule(_), _, _) if selection.limits.is_empty() => {
            "another rule of this request replaces this one, so it passes".to_owned()
        }
        (TraceEnd::Rule(compiled), _, _) if !selection.inactive.is_empty() => {
            format!("this rule decides; {}", describe_inactive_limits(compiled, &selection.inactive))
        }
        (TraceEnd::Rule(_), _, _) => "this rule decides".to_owned(),
        (TraceEnd::NoEntries, _, _) => "it has no entries, so no limit applies".to_owned(),
        (TraceEnd::NoMatch, _, _) => "this entry matched nothing, so no limit applies".to_owned(),
        (TraceEnd::NoLimit { children: 0 }, _, _) => {
            "it ends at a node without a rate_limit, so everything passes".to_owned()
        }
        (TraceEnd::NoLimit { children }, _, _) => {
            format!("it ends at a node without a rate_limit, with {children} nodes below it: no limit applies")
        }
        (TraceEnd::TooLong { beyond }, _, _) => {
            let entries = if *beyond == 1 { "entry" } else { "entries" };
            format!(
                "it has {beyond} more {entries} than the path in the rules, which must match in full: no limit applies"
            )
        }
    }
}

fn explain_descriptor(
    rules: &RuleSet,
    domain: &DomainRules,
    descriptor: &Descriptor<'_>,
    selection: &Selection<'_>,
    limits: Vec<ExplainedLimit>,
) -> ExplainedDescriptor {
    let trace = rules.trace_match(domain, &descriptor.entries);
    let rule = match trace.end {
        TraceEnd::Rule(compiled) if selection.rule.is_some() => Some(&compiled.rule),
        _ => None,
    };
    let outcome = describe_outcome(&trace.end, selection, descriptor.limit_override.is_some());
    let near_miss = selection.matches_nothing.then(|| ExplainedNearMiss::find(rules, domain, descriptor)).flatten();
    ExplainedDescriptor {
        descriptor: descriptor.to_string(),
        near_miss,
        steps: trace
            .steps
            .iter()
            .zip(&descriptor.entries)
            .map(|(step, entry)| explain_entry_match(step, entry))
            .collect(),
        outcome,
        rule: rule.map(|rule| ExplainedRule {
            path: rule.path.clone(),
            origin: rule.location.to_string(),
            plan: explain_plan(selection),
        }),
        limits,
        slots: Vec::new(),
        quota: None,
    }
}

/// Describes the limits of a rule that are not active at this time.
fn describe_inactive_limits(compiled: &CompiledRule, inactive: &[usize]) -> String {
    let limits = inactive.iter().filter_map(|index| compiled.limits.get(*index));
    let limits = limits.map(|one| {
        let active = one.active.map(|active| active.spec().to_string()).unwrap_or_default();
        format!("{} {active}", one.limit)
    });
    format!("limits of other times: {}", limits.collect::<Vec<_>>().join("; "))
}

fn explain_plan(selection: &Selection<'_>) -> Option<ExplainedTablePlan> {
    let (plan, source) = selection.plan().zip(selection.plan_source)?;
    Some(ExplainedTablePlan {
        name: plan.name.to_string(),
        table: selection.plan_table().map(|table| table.name.to_string()).unwrap_or_default(),
        found: source.name().to_owned(),
        reason: source.describe().to_owned(),
    })
}

fn explain_entry_match(step: &TraceStep<'_>, entry: &Entry<'_>) -> ExplainedEntryMatch {
    let name = |node: &NodeRef<'_>| String::from_utf8_lossy(node.composite).into_owned();
    let reason = |why| match why {
        PassedOverReason::LaterPattern => "it matches too, but an earlier wildcard or `match` takes precedence",
        PassedOverReason::NoRuleBelow => "it matches better, but has no rule for the entries after it",
        PassedOverReason::LessExact => {
            "it matches too, but values take precedence over wildcards and `match`, and those over bare keys"
        }
    };
    ExplainedEntryMatch {
        entry: entry.to_string(),
        matched: step
            .matched
            .as_ref()
            .map(|(kind, node)| [kind.name().to_owned(), name(node), node.location.to_string()]),
        other_matches: step
            .other_matches
            .iter()
            .map(|(node, why)| [name(node), node.location.to_string(), reason(*why).to_owned()])
            .collect(),
        more_other_matches: step.more_other_matches,
    }
}

fn explain_limit(selected: &SelectedLimit<'_>, any_is_strict: bool, candidate: bool) -> ExplainedLimit {
    ExplainedLimit {
        name: selected.name.to_owned(),
        limit: selected.limit.to_string(),
        guarantee: describe_guarantee(&selected.limit, any_is_strict),
        shadow_mode: selected.shadow,
        enforced_share: None,
        quota_mode: selected.quota,
        candidate,
        counter: None,
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl ExplainedCounter {
    /// Counter of a peek's result.
    pub(super) const fn from_peek(PeekedCounter { result, is_fallback }: &PeekedCounter) -> Self {
        Self {
            passes: result.admitted,
            used: result.after,
            remaining: result.remaining,
            reset_us: result.reset_us,
            retry_after_us: result.retry_after_us,
            banned_us: result.ban_left_us,
            local: *is_fallback,
        }
    }
}

fn describe_guarantee(limit: &Limit, any_is_strict: bool) -> Cow<'static, str> {
    if let Some(scope) = limit.global_scope() {
        let leases = match limit.consistency() {
            Consistency::Eventual(_) if !any_is_strict => "; replicas lease hits of their region",
            _ => "",
        };
        return (describe_global_guarantee(limit, scope) + leases).into();
    }
    let most = match limit.consistency() {
        Consistency::Strict => return "strict: every admitted hit is counted first".into(),
        Consistency::Eventual(_) if any_is_strict => {
            return "eventual, but strict like another limit of the descriptor: every admitted hit is counted first"
                .into();
        }
        Consistency::Eventual(overshoot) => describe_overshoot(overshoot),
    };
    format!("eventual: all replicas together admit at most {most} more than a strict limit in any span of a period")
        .into()
}

/// Promise of a global limit, and what one of its regions may admit alone.
fn describe_global_guarantee(limit: &Limit, scope: GlobalScope) -> String {
    let most = describe_overshoot(scope.max_overshoot);
    let (regions, reserve) = (scope.regions, limit.region_reserve());
    let part = limit.as_counted_in_region(RegionConnection::CutOff).region_part();
    let promise = match scope.on_region_loss {
        RegionLossPolicy::Share | RegionLossPolicy::Deny => {
            format!(
                "all {regions} regions together admit at most {most} more than one region with this limit in any span \
                 of a period"
            )
        }
        RegionLossPolicy::Local | RegionLossPolicy::Allow => {
            format!("no bound over all {regions} regions while one is cut off; otherwise as in one region")
        }
    };
    let policy = scope.on_region_loss.name();
    let cut_off = match scope.on_region_loss {
        RegionLossPolicy::Allow => format!("any number (on_region_loss: {policy})"),
        _ => format!("{} per period (on_region_loss: {policy})", part.requests_per_unit()),
    };
    format!("global: {promise}; reserve of a region: {reserve}; when cut off, beyond what it holds: {cut_off}")
}

fn describe_overshoot(overshoot: Overshoot) -> String {
    match overshoot {
        Overshoot::Hits(hits) => format!("{hits} hits"),
        Overshoot::MilliPercent(part) => {
            let percent = format!("{}.{:03}", part / 1000, part % 1000);
            format!("{} %", percent.trim_end_matches('0').trim_end_matches('.'))
        }
    }
}
