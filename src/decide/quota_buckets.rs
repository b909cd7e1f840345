//! Buckets of rate limit quotas: the limits that a proxy decides by itself, and the decisions that it reports.
//!
//! A bucket selects limits as a descriptor does; only the order of its entries is unknown. A report becomes up to two
//! ordinary decisions, one of the hits that passed and one of those that were denied, with metrics, candidates and
//! records as any other. They charge nothing that the proxy's assignment stands for; limits in shadow mode and
//! candidates, which no assignment stands for, are charged here.
//!
//! Decides: what limits a bucket of RLQS, also unlimited, in shadow mode or without a rule.
//! Decides: what becomes of its reports; SHADOW_MODE over RLQS.

use bytes::Bytes;
use smallvec::SmallVec;

use super::candidates::CandidateCharges;
use super::decider::Decider;
use super::decision::DecisionContext;
use super::key_text::{KeyEntry, key_text};
use super::log::value_form::ValueForm;
use super::outcome::DescriptorOutcome;
use super::prepared_request::PreparedRequest;
use super::selected_request::SelectedRequest;
use super::selection::{SelectedLimit, Selection, select_limits};
use crate::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter};
use crate::limit::counter_path::CounterPath;
use crate::limit::request::{Descriptor, Entry, Hits, MAX_HITS_OF_DESCRIPTOR, Request};
use crate::limit::{Limit, StoreFailurePolicy};
use crate::rules::rule::RuleLogging;
use crate::rules::rule::set::CompiledRule;
use crate::store::charge::{ChargeResults, DecidedBy, DeferredOutcomes, StoreOutcome, spawn_outcome_handler};

/// Entry in owned form: parts of the id of the bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedEntry {
    /// Key as raw bytes.
    pub key: Bytes,
    /// Value as raw bytes.
    pub value: Bytes,
}

/// Part of the bytes `whole`, without a copy if it lies in them.
fn share_part(whole: &Bytes, part: &[u8]) -> Bytes {
    let start = part.as_ptr().addr().wrapping_sub(whole.as_ptr().addr());
    match start.checked_add(part.len()) {
        Some(end) if end <= whole.len() => whole.slice(start..end),
        _ => Bytes::copy_from_slice(part),
    }
}

/// Counter of a limit that a proxy decides by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaBucketCounterId {
    /// The limit.
    pub limit: Limit,
    /// Distinguishes the counter from others of its path.
    pub tag: u128,
    /// Epoch of the rule.
    pub epoch: u64,
}

/// Counters that are divided for a bucket, in owned form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketCounters {
    /// Domain.
    pub domain: Box<str>,
    /// Entries in the order of the rule.
    pub entries: Box<[OwnedEntry]>,
    /// Entries whose values share a counter: index, and pattern.
    pub shared: Box<[CounterSharingEntry]>,
    /// Hash of the path in this process.
    pub path_hash: u128,
    /// One for each limit, at least one.
    pub counters: SmallVec<[QuotaBucketCounterId; 1]>,
    /// Name of the rule.
    pub rule: Box<str>,
    /// Reports leave the values out, because the rule has `decision_log: none`.
    pub has_private_values: bool,
}

/// Entry whose values share a counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterSharingEntry {
    /// Index of the entry.
    pub index: usize,
    /// Pattern of the values.
    pub pattern: Box<[u8]>,
}

/// Limits of a bucket, and how long they hold.
#[derive(Debug)]
pub struct BucketMatch {
    /// The limits.
    pub limits: BucketLimits,
    /// They may change without a change of the rules: by the time, or by a row of a table.
    pub may_change: bool,
}

/// Limits of a bucket.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it was made")]
pub enum BucketLimits {
    /// No rule matches.
    Unmatched,
    /// Nothing is limited: the rule is unlimited, or its limits are in shadow mode, inactive or replaced.
    Unlimited,
    /// These counters are divided.
    Divided(BucketCounters),
    /// A limit cannot be divided.
    Refused(IndivisibleLimit),
}

/// A limit that cannot be divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndivisibleLimit {
    /// Name of the rule.
    pub rule: Box<str>,
    /// Reason, for people.
    pub reason: &'static str,
}

/// Requests that a proxy reports of a bucket.
#[derive(Clone, Copy, Debug)]
pub struct ReportedHits {
    /// Requests that passed.
    pub allowed: u64,
    /// Requests that were denied.
    pub denied: u64,
}

impl QuotaBucketCounterId {
    const fn new(counter: Counter<'_>) -> Self {
        Self { limit: *counter.limit, tag: counter.tag, epoch: counter.epoch }
    }
}

impl BucketCounters {
    /// Strictest policy for failures of the store.
    pub fn strictest_failure_policy(&self) -> StoreFailurePolicy {
        let policies = self.counters.iter().map(|counter| counter.limit.on_store_error());
        policies.max_by_key(|policy| super::store_failures::strictness(*policy)).unwrap_or_default()
    }

    /// Passes a charge without hits on the counter at `index` to `make`.
    pub fn call_with_charge<T>(&self, index: usize, make: impl FnOnce(&Charge<'_>) -> T) -> Option<T> {
        let entries = self.entries_as_refs();
        let shared: SmallVec<[(usize, &[u8]); 1]> =
            self.shared.iter().map(|shared| (shared.index, &*shared.pattern)).collect();
        let path = CounterPath { domain: &self.domain, entries: &entries, shared: &shared, candidate: None };
        let QuotaBucketCounterId { limit, tag, epoch } = self.counters.get(index)?;
        let counter = Counter { limit, shadow: false, quota: false, tag: *tag, epoch: *epoch };
        let charge = Charge {
            path,
            path_hash: self.path_hash,
            counters: SmallVec::from_iter([counter]),
            request: ChargeRequest::new(Hits::Peek, 0),
            slot: None,
        };
        Some(make(&charge))
    }

    /// Entries in the order of the rule.
    pub fn entries_as_refs(&self) -> SmallVec<[Entry<'_>; 4]> {
        self.entries.iter().map(|entry| Entry { key: &entry.key, value: &entry.value }).collect()
    }
}

impl Decider {
    /// Text of the entries of a bucket, with values in the form of the settings.
    pub fn bucket_key_text(&self, counters: &BucketCounters) -> String {
        let form = if counters.has_private_values { &ValueForm::Omitted } else { &self.key_values };
        let text = |charge: &Charge<'_>| key_text(&charge.path, form).to_string();
        counters.call_with_charge(0, text).unwrap_or_default()
    }

    /// Entries of a bucket; `None` unless reports show values as they are, and they are UTF-8.
    pub fn shown_bucket_entries(&self, counters: &BucketCounters) -> Option<Vec<KeyEntry>> {
        let is_shown = !counters.has_private_values && matches!(self.key_values, ValueForm::Plain);
        let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(str::to_owned);
        let entry = |(index, entry): (usize, &OwnedEntry)| {
            let shared = counters.shared.iter().find(|shared| shared.index == index);
            let value = text(shared.map_or(&entry.value, |shared| &shared.pattern))?;
            Some(KeyEntry { key: text(&entry.key)?, value: Some(value) })
        };
        is_shown.then(|| counters.entries.iter().enumerate().map(entry).collect()).flatten()
    }

    /// Returns true if the rows of tables must be read before limits of buckets are selected.
    pub fn must_read_bucket_rows(context: DecisionContext<'_>) -> bool {
        context.rules.is_some_and(crate::rules::rule::set::RuleSet::reads_rows_from_redis)
    }

    /// Reads the rows of tables that the entries of buckets need.
    pub async fn read_bucket_rows(&self, context: DecisionContext<'_>, request: &Request<'_>) {
        self.row_reader.read_missing_rows(&self.store, &self.key_values, context, request).await;
    }

    /// Selects the limits of a bucket with these entries, which are in no order, and parts of `id`.
    pub fn select_bucket_limits(
        &self,
        context: DecisionContext<'_>,
        domain: &str,
        id: &Bytes,
        entries: &[Entry<'_>],
    ) -> BucketMatch {
        let unmatched = BucketMatch { limits: BucketLimits::Unmatched, may_change: false };
        let Some((rules, request)) = context.rules.zip(build_bucket_request(context, domain, entries)) else {
            return unmatched;
        };
        let prepared = PreparedRequest::as_sent(rules, &request);
        let selections = select_limits(&self.behaviour, &prepared, Some(context.store.now));
        let Some((selection, compiled)) = selections.first().and_then(|selection| Some((selection, selection.rule?)))
        else {
            return unmatched;
        };
        let limits = self.build_bucket_limits(&request, id, selection, compiled);
        BucketMatch { limits, may_change: compiled.has_active_times || selection.plan_source.is_some() }
    }

    fn build_bucket_limits(
        &self,
        request: &Request<'_>,
        id: &Bytes,
        selection: &Selection<'_>,
        compiled: &CompiledRule,
    ) -> BucketLimits {
        let deciding = || selection.limits.iter().filter(|selected| !selected.shadow);
        let rule = || compiled.rule.path.clone().into_boxed_str();
        if let Some(reason) = deciding().find_map(|selected| self.store.reason_against_holds(&selected.limit)) {
            return BucketLimits::Refused(IndivisibleLimit { rule: rule(), reason });
        }
        let counters: SmallVec<[QuotaBucketCounterId; 1]> =
            deciding().map(|selected| QuotaBucketCounterId::new(selected.counter())).collect();
        // Under SHADOW_MODE nothing is rejected.
        if counters.is_empty() || self.behaviour.shadow_mode {
            return BucketLimits::Unlimited;
        }
        let path = selection.counter_path(request, 0);
        let own = |bytes: &[u8]| bytes.to_vec().into_boxed_slice();
        let share =
            |entry: &Entry<'_>| OwnedEntry { key: share_part(id, entry.key), value: share_part(id, entry.value) };
        BucketLimits::Divided(BucketCounters {
            domain: request.domain.into(),
            entries: path.entries.iter().map(share).collect(),
            shared: path.shared.iter().map(|(at, it)| CounterSharingEntry { index: *at, pattern: own(it) }).collect(),
            path_hash: selection.key,
            counters,
            rule: rule(),
            has_private_values: compiled.rule.logging == Some(RuleLogging::None),
        })
    }

    /// Records what a proxy reports of a bucket, as decisions of this process.
    pub fn record_bucket_report(
        &self,
        context: DecisionContext<'_>,
        domain: &str,
        entries: &[Entry<'_>],
        reported: ReportedHits,
    ) {
        for (hits, admitted) in [(reported.allowed, true), (reported.denied, false)] {
            if hits > 0 {
                self.record_bucket_hits(context, domain, entries, ReportedHitsWithVerdict { hits, admitted });
            }
        }
    }

    fn record_bucket_hits(
        &self,
        context: DecisionContext<'_>,
        domain: &str,
        entries: &[Entry<'_>],
        ReportedHitsWithVerdict { hits, admitted }: ReportedHitsWithVerdict,
    ) {
        let Some(mut request) = build_bucket_request(context, domain, entries) else { return };
        let Some(rules) = context.rules else { return };
        request
            .descriptors
            .iter_mut()
            .for_each(|descriptor| descriptor.hits = Hits::Charge(hits.min(MAX_HITS_OF_DESCRIPTOR)));
        let prepared = PreparedRequest::as_sent(rules, &request);
        let selections = select_limits(&self.behaviour, &prepared, Some(context.store.now));
        let Some(selection) = selections.first() else { return };
        let (request, selections, context) = (&request, &*selections, &context);
        let selected = SelectedRequest { decider: self, context, request, selections, blocked: None };
        let candidates = CandidateCharges::begin_charging(&selected);
        let outcome = match selection.limits.is_empty() {
            true => DescriptorOutcome::WithoutLimits,
            false => {
                let results = build_report_results(&selected, ReportedHitsWithVerdict { hits, admitted });
                DescriptorOutcome::Charged(StoreOutcome {
                    results,
                    decided_by: DecidedBy::Rlqs,
                    now: context.store.now,
                })
            }
        };
        // The decision was the proxy's; nobody waits for this one.
        drop(selected.decide(&[outcome], candidates));
    }
}

/// Results of the limits: the proxy's verdict, and those of limits in shadow mode, which are charged.
fn build_report_results(
    selected: &SelectedRequest<'_, '_, '_>,
    ReportedHitsWithVerdict { hits, admitted }: ReportedHitsWithVerdict,
) -> ChargeResults {
    let charged = charge_shadow_limits(selected);
    let mut shadow = charged.iter().flatten().flat_map(|outcome| &outcome.results);
    let result = |limit: &SelectedLimit<'_>| {
        let admitted = admitted || limit.shadow;
        let by_proxy = ChargeResult {
            admitted,
            before: if admitted { 0 } else { limit.limit.capacity() },
            after: if admitted { hits } else { limit.limit.capacity() },
            retry_after_us: (!admitted).then(|| limit.limit.period_us()),
            ..ChargeResult::default()
        };
        if limit.shadow { shadow.next().copied().unwrap_or(by_proxy) } else { by_proxy }
    };
    selected.selections[0].limits.iter().map(result).collect()
}

/// Charges the limits in shadow mode of a bucket; returns the outcomes that are known at once.
fn charge_shadow_limits(selected: &SelectedRequest<'_, '_, '_>) -> Vec<Option<StoreOutcome>> {
    let SelectedRequest { decider, context, request, selections, .. } = *selected;
    let Some(mut charge) = selections[0].build_charge(request, 0, 0) else { return Vec::new() };
    charge.counters.retain(|counter| counter.shadow);
    if charge.counters.is_empty() {
        return Vec::new();
    }
    match decider.store.charge_without_waiting(&[(0, charge)], context.store).resolve_arrived() {
        DeferredOutcomes::Ready(outcomes) => outcomes.into_iter().map(Result::ok).collect(),
        DeferredOutcomes::Pending(pending) => {
            spawn_outcome_handler(pending, drop);
            Vec::new()
        }
    }
}

/// Hits of a report that a proxy decided alike.
#[derive(Clone, Copy)]
struct ReportedHitsWithVerdict {
    hits: u64,
    admitted: bool,
}

/// Request of a bucket with its entries in the order of the rule, without hits; `None` without rules for its domain.
fn build_bucket_request<'m>(
    context: DecisionContext<'_>,
    domain: &'m str,
    entries: &[Entry<'m>],
) -> Option<Request<'m>> {
    let rules = context.rules?;
    let entries = rules.order_bucket_entries(rules.domain(domain)?, entries.iter().copied().collect());
    let descriptor = Descriptor { entries, hits: Hits::Peek, hits_addend: None, limit_override: None };
    Some(Request { domain, descriptors: SmallVec::from_iter([descriptor]), hits_addend: 0 })
}
