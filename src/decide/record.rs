//! What came of a request, counted by limit.
//!
//! The sums are those of envoyproxy/ratelimit, by hits: all that were asked for, within the limit, near it and over it,
//! where a charge that crosses a line counts on both sides of it. Where refused hits do not count there is no crossing: a
//! refused charge is over as a whole. Beside them stands the verdict, once for each decision. Counting changes nothing
//! and waits for nothing.

use std::sync::Arc;

use smallvec::SmallVec;

use super::selection::{SelectedLimit, Selection};
use super::{Decider, DecisionContext, DescriptorOutcome};
use crate::algorithm::ChargeResult;
use crate::clock::Time;
use crate::counter::Path;
use crate::limit::StorePolicy;
use crate::request::{Entry, Hits, Request};
use crate::rule::set::DomainRules;
use crate::store::outcome::DecidedBy;
use crate::telemetry::metrics::limit_stats::{LimitStat, LimitStats};
use crate::telemetry::recent_keys::RecentKeys;
use crate::telemetry::top_keys::MAX_KEY_BYTES;

/// Where a limit is counted.
enum Counted<'r> {
    Rule(&'r LimitStats),
    Request(Arc<LimitStats>),
}

impl std::ops::Deref for Counted<'_> {
    type Target = LimitStats;

    fn deref(&self) -> &LimitStats {
        match self {
            Self::Rule(stats) => stats,
            Self::Request(stats) => stats,
        }
    }
}

impl Decider {
    /// Counts what came of each descriptor of a request.
    pub(super) fn record<'r>(
        &self,
        context: DecisionContext<'r>,
        request: &Request<'_>,
        selections: &[Selection<'r>],
        outcomes: &[DescriptorOutcome],
    ) {
        for (place, (selection, outcome)) in selections.iter().zip(outcomes).enumerate() {
            let descriptor = &request.descriptors[place];
            if selection.domain.is_none() {
                self.metrics.limits.record_unknown_domain(request.domain);
            }
            self.note_keys(context.now, request, place, selection, outcome);
            for (at, selected) in selection.limits.iter().enumerate() {
                let Some(stats) = self.counted(context, selection, selected, &descriptor.entries) else { continue };
                if let (Counted::Request(_), Some(rule)) = (&stats, selected.stats) {
                    rule.record_under_request_name(outcome.rejects(at));
                }
                let near = near_hits(selected, self.behaviour.near_limit_ratio);
                match outcome {
                    DescriptorOutcome::Unlimited => {}
                    DescriptorOutcome::Charged(found) => {
                        let result = &found.results[at];
                        count(&stats, selected, descriptor.hits, (result, near, found.decided_by));
                        stats.add(verdict(selected, result), 1);
                    }
                    DescriptorOutcome::Fallback(results) => {
                        count(&stats, selected, descriptor.hits, (&results[at], near, DecidedBy::Store));
                        stats.add(LimitStat::Local, 1);
                    }
                    DescriptorOutcome::Failed(policy) => {
                        if let Hits::Charge(hits) = descriptor.hits {
                            stats.add(LimitStat::TotalHits, hits);
                        }
                        stats.add(by_policy(*policy), 1);
                    }
                }
            }
        }
    }

    /// Counts which keys came, which were refused, and remembers those whose counters began here.
    fn note_keys(
        &self,
        now: Time,
        request: &Request<'_>,
        place: usize,
        selection: &Selection<'_>,
        outcome: &DescriptorOutcome,
    ) {
        let descriptor = &request.descriptors[place];
        let (results, began_here) = match outcome {
            DescriptorOutcome::Charged(found) => (&found.results, !self.store.can_scan()),
            DescriptorOutcome::Fallback(results) => (results, false),
            DescriptorOutcome::Unlimited | DescriptorOutcome::Failed(_) => return,
        };
        let Hits::Charge(hits) = descriptor.hits else { return };
        let key = selection.key;
        for (at, (selected, result)) in selection.limits.iter().zip(results).enumerate() {
            // A limit that came with the request is told of with others of its kind.
            let Some(stats) = selected.stats.or_else(|| selection.domain.map(|domain| &*domain.others)) else {
                continue;
            };
            // The upper half; the lower one chooses the shard of what is refused.
            let hash = u64::try_from(key >> 64).unwrap_or(u64::MAX);
            if at == 0 {
                stats.keys.add(hash);
                if began_here && result.before == 0 && result.admitted {
                    record_recent_key(&self.metrics.recent_keys, stats, &descriptor.entries);
                }
            }
            if !result.admitted {
                stats.rejected_keys.add(hash);
                let id = key ^ u128::from(stats.id()).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
                self.metrics.top_keys.record(id, stats, hits, now, || key_text(&selection.path(request, place)));
            }
        }
    }

    /// Where a limit is counted: with its rule, or under a name that the request makes.
    fn counted<'r>(
        &self,
        context: DecisionContext<'r>,
        selection: &Selection<'r>,
        selected: &SelectedLimit<'r>,
        entries: &[Entry<'_>],
    ) -> Option<Counted<'r>> {
        let domain = selection.domain?;
        match (selected.stats, selection.rule) {
            (Some(stats), Some(compiled)) if compiled.named_by_request => {
                let mut parts = context.rules?.name_by_request(domain, compiled, entries);
                parts.extend(compiled.rule.limit_suffix(selected.place));
                Some(self.of_request(domain, &parts).map_or(Counted::Rule(stats), Counted::Request))
            }
            (Some(stats), _) => Some(Counted::Rule(stats)),
            (None, _) => {
                let parts: SmallVec<[String; 4]> = entries.iter().map(composite).collect();
                Some(self.of_request(domain, &parts).map_or(Counted::Rule(&domain.others), Counted::Request))
            }
        }
    }

    fn of_request(&self, domain: &DomainRules, parts: &[String]) -> Option<Arc<LimitStats>> {
        let names: SmallVec<[&str; 6]> =
            std::iter::once(&*domain.name).chain(parts.iter().map(String::as_str)).collect();
        self.metrics.limits.of_request(&names)
    }
}

fn record_recent_key(recent_keys: &RecentKeys, stats: &LimitStats, entries: &[Entry<'_>]) {
    recent_keys.record(stats, entries.iter().flat_map(|entry| [entry.key, entry.value]));
}

/// `key=value,key=value`, cut where it is too long; where values share a counter, the pattern stands for them.
fn key_text(path: &Path<'_>) -> Arc<str> {
    let mut text = String::new();
    for (place, entry) in path.entries.iter().enumerate() {
        let shared = path.shared.iter().find(|(shared, _)| *shared == place).map(|(_, pattern)| *pattern);
        // What would be cut need not be looked at.
        let value = shared.unwrap_or(entry.value);
        let part = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_KEY_BYTES)]).into_owned();
        let comma = if text.is_empty() { "" } else { "," };
        text += &format!("{comma}{}={}", part(entry.key), part(value));
        if text.len() > MAX_KEY_BYTES {
            let end = (0..=MAX_KEY_BYTES).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
            text.truncate(end);
            text += "...";
            break;
        }
    }
    text.into()
}

/// `key_value`, or `key` if there is no value.
fn composite(entry: &Entry<'_>) -> String {
    let (key, value) = (String::from_utf8_lossy(entry.key), String::from_utf8_lossy(entry.value));
    if value.is_empty() { key.into_owned() } else { format!("{key}_{value}") }
}

/// Counts the hits of one charge on one limit.
fn count(
    stats: &LimitStats,
    selected: &SelectedLimit<'_>,
    hits: Hits,
    (result, near, decided_by): (&ChargeResult, u64, DecidedBy),
) {
    let hits = match hits {
        Hits::Charge(hits) => hits,
        Hits::Peek => return,
        Hits::Refund(hits) => return stats.add(LimitStat::TotalNegativeHits, hits),
    };
    let most = u64::from(selected.limit.capacity());
    stats.add(LimitStat::TotalHits, hits);
    if result.admitted {
        // What another refusal of the request has spared this limit counts as peers count it: as if it had been taken.
        let before = if result.after == result.before { result.before.wrapping_sub(hits) } else { result.before };
        let after = before.wrapping_add(hits);
        if after > near {
            stats.add(LimitStat::NearLimit, if before >= near { hits } else { after - near });
        }
        stats.add(LimitStat::WithinLimit, hits);
        if decided_by == DecidedBy::Share {
            stats.add(LimitStat::Uncharged, hits);
        }
        return;
    }
    let is_counted = selected.limit.count_rejected() && decided_by != DecidedBy::KnownOver;
    let over = if is_counted && result.before < most { (result.before + hits).saturating_sub(most) } else { hits };
    stats.add(LimitStat::OverLimit, over);
    stats.add(LimitStat::NearLimit, if is_counted { most.saturating_sub(result.before.max(near)) } else { 0 });
    if decided_by == DecidedBy::KnownOver {
        stats.add(LimitStat::OverLimitWithLocalCache, hits);
    }
    if selected.shadow {
        stats.add(LimitStat::ShadowMode, over);
    }
}

/// From how many hits on a limit counts as nearly used up.
fn near_hits(selected: &SelectedLimit<'_>, ratio: f32) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "in single precision and floored, as envoyproxy/ratelimit has it; never negative"
    )]
    {
        (selected.limit.capacity() as f32 * ratio).floor() as u64
    }
}

const fn verdict(selected: &SelectedLimit<'_>, result: &ChargeResult) -> LimitStat {
    match (result.admitted, selected.shadow) {
        (true, _) => LimitStat::Ok,
        (false, true) => LimitStat::Shadow,
        (false, false) => LimitStat::Over,
    }
}

const fn by_policy(policy: StorePolicy) -> LimitStat {
    match policy {
        StorePolicy::Local => LimitStat::Local,
        StorePolicy::Allow => LimitStat::Allow,
        StorePolicy::Deny => LimitStat::Deny,
        StorePolicy::Error => LimitStat::Error,
    }
}
