//! The rule, limit or policy that rejected a descriptor, and changes that would have let its hits pass.
//!
//! Changes are computed from the record of the decision. A number is only given if the record proves it: the state of a
//! counter holds the hits that were used, so `before` decides under any other limit too. It holds for a change at that
//! moment; an earlier change would have admitted other hits before, which only a simulation tells.
//!
//! Decides: what `why` advises so that a request would have passed (`list_remedies`).
//! Decides: who decided: a counter, share, lease, policy, block or proxy (`format_decider`).

use std::time::Duration;

use serde::Serialize;

use super::time_range::format_time;
use crate::base::text::format_milli_percent;
use crate::decide::log::record::{
    BlockRecord, DecisionRecord, DecisionSource, DescriptorRecord, GlobalScopeRecord, LimitRecord, OverrideRecord,
    RecordedVerdict, RuleRecord,
};
use crate::limit::algorithm::{Algorithm, HitExpiry};
use crate::limit::ban::Ban;
use crate::limit::period::period_in_words;
use crate::limit::reservation::ReservationPolicy;
use crate::limit::slot::SlotChange;
use crate::limit::{MAX_REQUESTS_PER_UNIT, StoreFailurePolicy};

/// Formats a limit: `10 per minute token_bucket, bucket_size 20 (burst)`.
pub fn format_limit(limit: &LimitRecord<'_>) -> String {
    let period = period_in_words(limit.unit.name(), limit.unit_multiplier.unwrap_or(1));
    let mut text = match limit.algorithm {
        Algorithm::Concurrent => format!("{} at once, max_duration {period}", limit.requests_per_unit),
        algorithm => format!("{} per {period} {algorithm}", limit.requests_per_unit),
    };
    if let Some(capacity) = limit.capacity {
        let key = limit.algorithm.properties().capacity.rule_file_key().unwrap_or("capacity");
        text += &format!(", {key} {capacity}");
    }
    if let Some(max_wait_us) = limit.max_wait_us {
        text += &format!(", max_wait {:?}", Duration::from_micros(max_wait_us));
    }
    let keys = [
        ("window", &limit.window),
        ("ban", &limit.ban),
        ("reservations", &limit.reservations),
        ("active", &limit.active),
    ];
    for (key, value) in keys {
        text += &value.as_ref().map_or_else(String::new, |value| format!(", {key} {}", &**value));
    }
    if let Some(GlobalScopeRecord { reserve_milli_percent, max_overshoot, on_region_loss }) = limit.global {
        let reserve = format_milli_percent(reserve_milli_percent);
        let policy = on_region_loss.name();
        text += &format!(", scope global, reserve {reserve}, max_overshoot {max_overshoot}, on_region_loss {policy}");
    }
    if !limit.name.is_empty() {
        text += &format!(" ({})", &*limit.name);
    }
    text
}

/// Formats a rule: `shop.login (rules.yaml:7)`.
pub fn format_rule(rule: &RuleRecord<'_>) -> String {
    let path = &*rule.path;
    match (&rule.file, rule.line, &rule.resource) {
        (Some(file), Some(line), _) => format!("{path} ({}:{line})", &**file),
        (_, _, Some(resource)) => format!("{path} (resource {})", &**resource),
        (_, _, None) => path.to_owned(),
    }
}

/// Formats the origin of the limits of a descriptor.
pub fn format_limit_origin(descriptor: &DescriptorRecord<'_>) -> String {
    if let Some(BlockRecord { key, until_us, reason }) = &descriptor.block {
        return format!("the block of {} until {}: {}", &**key, format_time(*until_us), &**reason);
    }
    match (&descriptor.rule, &descriptor.limit_override) {
        (Some(rule), _) => format_rule(rule),
        (None, Some(OverrideRecord { requests_per_unit, unit, multiplier })) => {
            let period = period_in_words(unit, (*multiplier).max(1));
            format!("the limit that came with the request: {requests_per_unit} per {period}")
        }
        (None, None) => "no limit".to_owned(),
    }
}

/// Formats the part of the service that decided.
pub fn format_decider(descriptor: &DescriptorRecord<'_>) -> Option<String> {
    Some(match descriptor.decided_by? {
        DecisionSource::Counter => "counter".to_owned(),
        DecisionSource::OverLimitCache => "over-limit cache of the process".to_owned(),
        DecisionSource::Share => "share of an eventual limit in the process".to_owned(),
        DecisionSource::Lease => "lease of an eventual limit in the process".to_owned(),
        DecisionSource::Rlqs => "a proxy, by its assignment over RLQS".to_owned(),
        DecisionSource::Policy => format_policy(descriptor),
        DecisionSource::Block => "a blocked value".to_owned(),
    })
}

fn format_policy(descriptor: &DescriptorRecord<'_>) -> String {
    let policy = descriptor.policy.map_or("unknown", StoreFailurePolicy::name);
    let reason = descriptor.reason.as_ref().map_or("unknown", |reason| &**reason);
    format!("on_store_error: {policy}, as the store failed ({reason})")
}

/// Causes of the rejection of a descriptor, each with its rule; empty if it is not rejected.
pub fn list_causes(descriptor: &DescriptorRecord<'_>) -> Vec<String> {
    if descriptor.verdict != RecordedVerdict::OverLimit {
        return Vec::new();
    }
    let origin = format_limit_origin(descriptor);
    let by_policy = descriptor.decided_by == Some(DecisionSource::Policy);
    let suffix = if by_policy { format!(", {}", format_policy(descriptor)) } else { String::new() };
    let rejecting = descriptor.limits.iter().filter(|limit| limit_rejected_hits(limit));
    let during_ban = |limit: &LimitRecord<'_>| if is_rejected_by_earlier_ban(limit) { ", during its ban" } else { "" };
    let cause = |limit: &LimitRecord<'_>| format!("{origin}, {}{}{suffix}", format_limit(limit), during_ban(limit));
    let mut causes: Vec<String> = rejecting.map(cause).collect();
    if causes.is_empty() {
        causes.push(format!("{origin}{suffix}"));
    }
    causes
}

/// Returns the changes that would have let hits pass that no limit rejected: a block or a failure policy did.
pub fn list_remedies_for_block_or_policy(
    decision: &DecisionRecord<'_>,
    descriptor: &DescriptorRecord<'_>,
) -> Vec<Remedy> {
    match (&descriptor.block, descriptor.decided_by) {
        (Some(block), _) => {
            let wait_us = block.until_us.saturating_sub(decision.time_us);
            vec![Remedy::Wait { until: format_time(block.until_us), wait_us }, Remedy::Unblock]
        }
        (None, Some(DecisionSource::Policy)) => vec![Remedy::WorkingStore, Remedy::ShadowMode],
        (None, _) => Vec::new(),
    }
}

/// Change that would have let rejected hits pass a limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Remedy {
    /// The same hits later.
    Wait {
        /// Earliest time, if nothing else is counted until then.
        until: String,
        /// Microseconds from the decision.
        wait_us: u64,
    },
    /// No wait: the hits never pass.
    NeverByWaiting {
        /// Reason.
        reason: NeverPassesReason,
    },
    /// A larger limit, with the counter as it was.
    Limit {
        /// Key of the rule.
        key: &'static str,
        /// Smallest value that passes the hits without a delay that they did not accept.
        value: u64,
        /// Hits counted before.
        counted: u64,
        /// Delay that the request must accept besides, in microseconds.
        #[serde(skip_serializing_if = "Option::is_none")]
        delay_us: Option<u64>,
        /// `max_wait` that the rule needs besides, in microseconds, because its own is less than the delay.
        #[serde(skip_serializing_if = "Option::is_none")]
        max_wait_us: Option<u64>,
    },
    /// A longer delay: there was room, but the wait was not accepted.
    LongerDelay {
        /// Delay in microseconds.
        delay_us: u64,
        /// `max_wait` that the rule needs, in microseconds, because its own is less than the delay.
        #[serde(skip_serializing_if = "Option::is_none")]
        max_wait_us: Option<u64>,
    },
    /// Fewer hits in the request.
    FewerHits {
        /// Maximum number of hits.
        hits: u64,
    },
    /// `shadow_mode` for the limit.
    ShadowMode,
    /// A store that answers, or another failure policy.
    WorkingStore,
    /// `tollkeeper unblock`.
    Unblock,
}

/// Reason why hits never pass a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NeverPassesReason {
    /// The limit is 0.
    LimitIsZero,
    /// There are more hits than the limit admits at once.
    MoreHitsThanLimit,
}

/// A ban that was in force, or that the rejection began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BanFacts {
    /// Beginning.
    pub since: String,
    /// End, if no further try prolongs it.
    pub until: String,
    /// `ban` as in a rule file.
    pub ban: String,
}

/// A limit that rejected the hits of its descriptor.
#[derive(Clone, Copy, Debug)]
pub struct RejectingLimit<'r, 't> {
    /// The decision.
    pub decision: &'r DecisionRecord<'t>,
    /// The descriptor.
    pub descriptor: &'r DescriptorRecord<'t>,
    /// The limit.
    pub limit: &'r LimitRecord<'t>,
}

/// True if a ban that began before rejected the hits.
///
/// The rejection that begins a ban has the whole length of it left.
pub fn is_rejected_by_earlier_ban(limit: &LimitRecord<'_>) -> bool {
    let Some(result) = limit.result.filter(|result| result.banned_us > 0) else { return false };
    limit.ban.as_ref().and_then(|ban| Ban::from_text(ban)).is_none_or(|ban| result.banned_us < ban.length_us())
}

/// True if the limit rejected the hits, and does not only record.
pub fn limit_rejected_hits(limit: &LimitRecord<'_>) -> bool {
    !limit.shadow && !limit.candidate && limit.result.is_some_and(|result| !result.admitted)
}

impl RejectingLimit<'_, '_> {
    /// Estimate that the rule charges for each request, whatever its hits are.
    fn estimate(&self) -> Option<u64> {
        let policy = ReservationPolicy::from_logged_text(self.limit.reservations.as_ref()?)?;
        policy.fixed_estimate().map(|hits| u64::from(hits.get()))
    }

    /// Hits of the request that have to fit: one for a peek.
    fn hits_of_request(&self) -> u64 {
        self.estimate().unwrap_or_else(|| self.descriptor.hits.unsigned_abs().max(1))
    }

    /// Hits that have to fit into this limit, if the others of its overflow take what they have room for; at least one.
    fn hits_to_fit(&self) -> u64 {
        self.hits_of_request().saturating_sub(self.room_of_overflow()).max(1)
    }

    /// Hits that the other limits have room for which overflow into this one, or take its overflow.
    fn room_of_overflow(&self) -> u64 {
        let limits = &self.descriptor.limits;
        let Some(at) = limits.iter().position(|limit| std::ptr::eq(limit, self.limit)) else { return 0 };
        let start = (0..=at).rev().find(|index| !limits[*index].takes_overflow).unwrap_or(at);
        let following = limits[start + 1..].iter().take_while(|limit| limit.takes_overflow);
        let chain = limits[start..=start].iter().chain(following);
        let room = |limit: &LimitRecord<'_>| limit.result.map_or(0, |result| result.remaining);
        chain.filter(|limit| !std::ptr::eq(*limit, self.limit)).map(room).sum()
    }

    /// Hits that the limit admits at once.
    fn capacity(&self) -> u64 {
        self.limit.capacity.unwrap_or(self.limit.requests_per_unit)
    }

    /// Time of the charge by the clock of its counter, in microseconds since the Unix epoch.
    fn charge_time_us(&self) -> u64 {
        self.descriptor.now_us.unwrap_or(self.decision.time_us)
    }

    /// Returns the ban that the rejection began, or that rejected the hits.
    pub fn find_ban(&self) -> Option<BanFacts> {
        let result = self.limit.result.filter(|result| result.banned_us > 0)?;
        let text = self.limit.ban.as_ref()?;
        let until_us = self.charge_time_us().saturating_add(result.banned_us);
        let since_us = until_us.saturating_sub(Ban::from_text(text)?.length_us());
        Some(BanFacts { since: format_time(since_us), until: format_time(until_us), ban: text.to_string() })
    }

    /// Returns the changes, the simplest first.
    pub fn list_remedies(&self) -> Vec<Remedy> {
        let mut remedies: Vec<Remedy> = self.find_wait_remedy().into_iter().collect();
        // Other parts of the service do not know the counter, or count a share of the limit.
        let is_by_counter = self.descriptor.decided_by == Some(DecisionSource::Counter);
        if is_by_counter && self.limit.requests_per_unit > 0 && !is_rejected_by_earlier_ban(self.limit) {
            remedies.extend(self.find_fewer_hits_remedy());
            remedies.extend(self.find_larger_limit_remedy());
        }
        if self.descriptor.decided_by == Some(DecisionSource::Policy) {
            remedies.push(Remedy::WorkingStore);
        }
        remedies.push(Remedy::ShadowMode);
        remedies
    }

    /// Finds the earliest time at which the hits pass: for a full concurrent limit nobody knows it.
    fn find_wait_remedy(&self) -> Option<Remedy> {
        let is_late = self.limit.result?.slot == SlotChange::Late;
        if self.limit.algorithm == Algorithm::Concurrent && self.limit.requests_per_unit > 0 && !is_late {
            return None;
        }
        let reason = match self.limit.result?.retry_after_us {
            Some(wait_us) => {
                let until = format_time(self.charge_time_us().saturating_add(wait_us));
                return Some(Remedy::Wait { until, wait_us });
            }
            None if self.limit.requests_per_unit == 0 && self.room_of_overflow() == 0 => NeverPassesReason::LimitIsZero,
            None if self.hits_to_fit() > self.capacity() => NeverPassesReason::MoreHitsThanLimit,
            None => return None,
        };
        Some(Remedy::NeverByWaiting { reason })
    }

    fn find_fewer_hits_remedy(&self) -> Option<Remedy> {
        let result = self.limit.result?;
        // A request behind others in a queue may be delayed for longer than it accepts, however few hits it has.
        let is_delayed = self.limit.algorithm == Algorithm::LeakyBucket && result.reset_us > 0;
        let hits = self.capacity().saturating_sub(result.before) + self.room_of_overflow();
        (!is_delayed && self.estimate().is_none() && 0 < hits && hits < self.hits_of_request())
            .then_some(Remedy::FewerHits { hits })
    }

    fn find_larger_limit_remedy(&self) -> Option<Remedy> {
        let result = self.limit.result.filter(|result| result.slot != SlotChange::Late)?;
        let counted = result.before;
        let is_bucket = self.limit.algorithm.properties().hit_expiry == HitExpiry::Continuous;
        if is_bucket && counted > self.capacity() {
            // Debt of rejected hits stays when the size changes.
            return None;
        }
        let most = if self.limit.algorithm == Algorithm::FixedWindow { MAX_REQUESTS_PER_UNIT } else { u32::MAX.into() };
        let value = counted.checked_add(self.hits_to_fit()).filter(|value| *value <= most)?;
        let key = match self.limit.algorithm {
            Algorithm::Concurrent => "concurrent",
            algorithm => algorithm.properties().capacity.rule_file_key().unwrap_or("requests_per_unit"),
        };
        // A request leaves a queue when everything before it has left.
        let is_queue = self.limit.algorithm == Algorithm::LeakyBucket;
        let delay_us = Some(result.reset_us).filter(|delay_us| is_queue && *delay_us > 0);
        let max_wait_us = delay_us.filter(|delay_us| self.limit.max_wait_us.is_some_and(|own_us| own_us < *delay_us));
        match delay_us {
            Some(delay_us) if value <= self.capacity() => Some(Remedy::LongerDelay { delay_us, max_wait_us }),
            // A peek at a window that counts rejected hits passes a full one.
            _ if value <= self.capacity() => None,
            _ => Some(Remedy::Limit { key, value, counted, delay_us, max_wait_us }),
        }
    }
}
