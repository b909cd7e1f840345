//! What came of a request, counted by limit.
//!
//! The sums are those of envoyproxy/ratelimit, by hits: all that were asked for, within the limit, near it and over it,
//! where a charge that crosses a line counts on both sides of it. Where refused hits do not count there is no crossing: a
//! refused charge is over as a whole. Beside them stands the verdict, once for each decision. Counting changes nothing
//! and waits for nothing.

use std::sync::Arc;

use smallvec::SmallVec;

use super::selection::{Selected, Selection};
use super::{Decider, DecisionContext, Outcome};
use crate::algorithm::ChargeResult;
use crate::clock::Time;
use crate::counter::Path;
use crate::limit::StorePolicy;
use crate::request::{Entry, Hits, Request};
use crate::rule::set::DomainRules;
use crate::store::{DecidedBy, Store};
use crate::telemetry::begun::Begun;
use crate::telemetry::metrics::limit_stats::{Count, LimitStats};
use crate::telemetry::top::LONGEST_KEY_BYTES;

/// Where a limit is counted.
enum Counted<'r> {
    Rule(&'r LimitStats),
    Request(Arc<LimitStats>),
}

impl std::ops::Deref for Counted<'_> {
    type Target = LimitStats;

    fn deref(&self) -> &LimitStats {
        match self {
            Self::Rule(meter) => meter,
            Self::Request(meter) => meter,
        }
    }
}

impl Decider {
    /// Counts what came of each descriptor of a request.
    pub(super) fn account<'r>(
        &self,
        context: DecisionContext<'r>,
        (request, selections): (&Request<'_>, &[Selection<'r>]),
        outcomes: &[Outcome],
    ) {
        for (place, (selection, outcome)) in selections.iter().zip(outcomes).enumerate() {
            let descriptor = &request.descriptors[place];
            if selection.domain.is_none() {
                self.metrics.meters.note_unknown_domain(request.domain);
            }
            self.note_keys(context.now, (request, place), selection, outcome);
            for (at, selected) in selection.limits.iter().enumerate() {
                let Some(meter) = self.counted(context, selection, selected, &descriptor.entries) else { continue };
                if let (Counted::Request(_), Some(rule)) = (&meter, selected.meter) {
                    rule.note_elsewhere(outcome.refuses(at));
                }
                let near = near_hits(selected, self.behaviour.near_limit_ratio);
                match outcome {
                    Outcome::Free => {}
                    Outcome::Charged(found) => {
                        let level = &found.levels[at];
                        count(&meter, selected, descriptor.hits, (level, near, found.decided_by));
                        meter.add(verdict(selected, level), 1);
                    }
                    Outcome::Fallback(levels) => {
                        count(&meter, selected, descriptor.hits, (&levels[at], near, DecidedBy::Store));
                        meter.add(Count::Local, 1);
                    }
                    Outcome::Failed(policy) => {
                        if let Hits::Charge(hits) = descriptor.hits {
                            meter.add(Count::TotalHits, hits);
                        }
                        meter.add(by_policy(*policy), 1);
                    }
                }
            }
        }
    }

    /// Counts which keys came, which were refused, and remembers those whose counters began here.
    fn note_keys(&self, now: Time, question: (&Request<'_>, usize), selection: &Selection<'_>, outcome: &Outcome) {
        let descriptor = &question.0.descriptors[question.1];
        let (levels, began_here) = match outcome {
            Outcome::Charged(found) => (&found.levels, matches!(self.store, Store::Memory(_))),
            Outcome::Fallback(levels) => (levels, false),
            Outcome::Free | Outcome::Failed(_) => return,
        };
        let Hits::Charge(hits) = descriptor.hits else { return };
        let key = selection.key;
        for (at, (selected, level)) in selection.limits.iter().zip(levels).enumerate() {
            // A limit that came with the request is told of with others of its kind.
            let Some(meter) = selected.meter.or_else(|| selection.domain.map(|domain| &*domain.others)) else {
                continue;
            };
            // The upper half; the lower one chooses the shard of what is refused.
            let hash = u64::try_from(key >> 64).unwrap_or(u64::MAX);
            if at == 0 {
                meter.keys.note(hash);
                if began_here && level.before == 0 && level.admitted {
                    meter_begun(&self.metrics.begun, meter, &descriptor.entries);
                }
            }
            if !level.admitted {
                meter.refused_keys.note(hash);
                let id = key ^ u128::from(meter.serial()).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
                self.metrics.top.note(id, (meter, hits), now, || key_text(&selection.path(question)));
            }
        }
    }

    /// Where a limit is counted: with its rule, or under a name that the request makes.
    fn counted<'r>(
        &self,
        context: DecisionContext<'r>,
        selection: &Selection<'r>,
        selected: &Selected<'r>,
        entries: &[Entry<'_>],
    ) -> Option<Counted<'r>> {
        let domain = selection.domain?;
        match (selected.meter, selection.rule) {
            (Some(meter), Some(compiled)) if compiled.named_by_request => {
                let mut parts = context.rules?.name_by_request(domain, compiled, entries);
                parts.extend(compiled.rule.limit_suffix(selected.place));
                Some(self.of_request(domain, &parts).map_or(Counted::Rule(meter), Counted::Request))
            }
            (Some(meter), _) => Some(Counted::Rule(meter)),
            (None, _) => {
                let parts: SmallVec<[String; 4]> = entries.iter().map(composite).collect();
                Some(self.of_request(domain, &parts).map_or(Counted::Rule(&domain.others), Counted::Request))
            }
        }
    }

    fn of_request(&self, domain: &DomainRules, parts: &[String]) -> Option<Arc<LimitStats>> {
        let names: SmallVec<[&str; 6]> =
            std::iter::once(&*domain.name).chain(parts.iter().map(String::as_str)).collect();
        self.metrics.meters.of_request(&names)
    }
}

fn meter_begun(begun: &Begun, meter: &LimitStats, entries: &[Entry<'_>]) {
    begun.note(meter, entries.iter().flat_map(|entry| [entry.key, entry.value]));
}

/// `key=value,key=value`, cut where it is too long; where values share a counter, the pattern stands for them.
fn key_text(path: &Path<'_>) -> Arc<str> {
    let mut text = String::new();
    for (place, entry) in path.entries.iter().enumerate() {
        let shared = path.shared.iter().find(|(shared, _)| *shared == place).map(|(_, pattern)| *pattern);
        // What would be cut need not be looked at.
        let value = shared.unwrap_or(entry.value);
        let part = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(LONGEST_KEY_BYTES)]).into_owned();
        let comma = if text.is_empty() { "" } else { "," };
        text += &format!("{comma}{}={}", part(entry.key), part(value));
        if text.len() > LONGEST_KEY_BYTES {
            let end = (0..=LONGEST_KEY_BYTES).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
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
    meter: &LimitStats,
    selected: &Selected<'_>,
    hits: Hits,
    (level, near, decided_by): (&ChargeResult, u64, DecidedBy),
) {
    let hits = match hits {
        Hits::Charge(hits) => hits,
        Hits::Peek => return,
        Hits::Refund(hits) => return meter.add(Count::TotalNegativeHits, hits),
    };
    let most = u64::from(selected.limit.capacity());
    meter.add(Count::TotalHits, hits);
    if level.admitted {
        // What another refusal of the request has spared this limit counts as peers count it: as if it had been taken.
        let before = if level.after == level.before { level.before.wrapping_sub(hits) } else { level.before };
        let after = before.wrapping_add(hits);
        if after > near {
            meter.add(Count::NearLimit, if before >= near { hits } else { after - near });
        }
        meter.add(Count::WithinLimit, hits);
        if decided_by == DecidedBy::Share {
            meter.add(Count::Uncharged, hits);
        }
        return;
    }
    let is_counted = selected.limit.count_rejected() && decided_by != DecidedBy::KnownOver;
    let over = if is_counted && level.before < most { (level.before + hits).saturating_sub(most) } else { hits };
    meter.add(Count::OverLimit, over);
    meter.add(Count::NearLimit, if is_counted { most.saturating_sub(level.before.max(near)) } else { 0 });
    if decided_by == DecidedBy::KnownOver {
        meter.add(Count::OverLimitWithLocalCache, hits);
    }
    if selected.shadow {
        meter.add(Count::ShadowMode, over);
    }
}

/// From how many hits on a limit counts as nearly used up.
fn near_hits(selected: &Selected<'_>, ratio: f32) -> u64 {
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

const fn verdict(selected: &Selected<'_>, level: &ChargeResult) -> Count {
    match (level.admitted, selected.shadow) {
        (true, _) => Count::Ok,
        (false, true) => Count::Shadow,
        (false, false) => Count::Over,
    }
}

const fn by_policy(policy: StorePolicy) -> Count {
    match policy {
        StorePolicy::Local => Count::Local,
        StorePolicy::Allow => Count::Allow,
        StorePolicy::Deny => Count::Deny,
        StorePolicy::Error => Count::Error,
    }
}
