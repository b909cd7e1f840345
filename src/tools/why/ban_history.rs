//! Rejections that began bans: which they were, and until when each ban lasts.
//!
//! A record says how long a ban still lasts, and its limit how long it lasts in all; so the time of its beginning is
//! known, and the rejections up to then began it. Rejections during a ban begin nothing and are not kept.

use std::collections::HashMap;

use serde::Serialize;

use super::rejection::is_rejected_by_earlier_ban;
use super::time_range::format_time;
use crate::decide::log::record::{DecisionRecord, DescriptorRecord};
use crate::limit::ban::Ban;

/// Maximum number of rejections that are kept, of all limits together; the first ones are kept.
const MAX_KEPT_REJECTIONS: usize = 100_000;
/// Maximum number of rejections that a ban names; the last ones are named.
const MAX_NAMED_REJECTIONS: usize = 20;
/// Tolerance of times that two records imply, in microseconds: algorithms round to it.
const RECORD_TIME_TOLERANCE_US: u64 = 1000;

/// A ban, and the rejections that began it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BanFacts {
    /// Beginning.
    pub since: String,
    /// End, if no further try prolongs it.
    pub until: String,
    /// `ban` as in a rule file.
    pub ban: String,
    /// Number of rejections that begin it.
    pub after: u64,
    /// Number of those that the logs have.
    pub found: usize,
    /// Their times, the last 20 of them.
    pub rejections: Vec<String>,
}

/// Limit of a rule: path of the rule, and index of the limit.
pub(super) type LimitId = (String, usize);

/// Rejections by limits with a ban, apart from those during one.
#[derive(Debug, Default)]
pub(super) struct BanHistory {
    rejections: HashMap<LimitId, Vec<KeptRejection>>,
    kept: usize,
}

/// A rejection, by the clock of its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct KeptRejection {
    at_us: u64,
    /// It began a ban.
    begins_ban: bool,
}

pub(super) fn limit_id(descriptor: &DescriptorRecord<'_>, at: usize) -> LimitId {
    (descriptor.rule.as_ref().map(|rule| rule.path.to_string()).unwrap_or_default(), at)
}

/// Time of a charge by the clock of its counter.
pub(super) fn charge_time_us(decision: &DecisionRecord<'_>, descriptor: &DescriptorRecord<'_>) -> u64 {
    descriptor.now_us.unwrap_or(decision.time_us)
}

impl BanHistory {
    /// Keeps the rejections of a descriptor by limits with a ban.
    pub(super) fn add_descriptor(&mut self, decision: &DecisionRecord<'_>, descriptor: &DescriptorRecord<'_>) {
        for (at, limit) in descriptor.limits.iter().enumerate().filter(|(_, limit)| limit.ban.is_some()) {
            let Some(result) = limit.result.filter(|result| !result.admitted && descriptor.hits > 0) else { continue };
            if is_rejected_by_earlier_ban(limit) || self.kept == MAX_KEPT_REJECTIONS {
                continue;
            }
            let kept = KeptRejection { at_us: charge_time_us(decision, descriptor), begins_ban: result.banned_us > 0 };
            self.rejections.entry(limit_id(descriptor, at)).or_default().push(kept);
            self.kept += 1;
        }
    }

    /// Explains the ban that the limit at `at` of a descriptor began or that rejected its hits; `None` without one.
    pub(super) fn explain_ban(
        &self,
        decision: &DecisionRecord<'_>,
        descriptor: &DescriptorRecord<'_>,
        at: usize,
    ) -> Option<BanFacts> {
        let limit = descriptor.limits.get(at)?;
        let result = limit.result.filter(|result| result.banned_us > 0)?;
        let text = limit.ban.as_ref()?;
        let ban = Ban::from_text(text)?;
        let until_us = charge_time_us(decision, descriptor).saturating_add(result.banned_us);
        let since_us = until_us.saturating_sub(ban.length_us());
        let of_limit = self.rejections.get(&limit_id(descriptor, at)).map_or(&[][..], Vec::as_slice);
        let mut before: Vec<_> = of_limit
            .iter()
            .copied()
            .filter(|kept| kept.at_us <= since_us.saturating_add(RECORD_TIME_TOLERANCE_US))
            .collect();
        before.sort_unstable();
        // An earlier ban used up the rejections before its own beginning.
        let is_earlier =
            |kept: &KeptRejection| kept.begins_ban && kept.at_us.saturating_add(RECORD_TIME_TOLERANCE_US) < since_us;
        let first = before.iter().rposition(is_earlier).map_or(0, |earlier| earlier + 1);
        let after = usize::try_from(ban.rejections_before_ban()).unwrap_or(usize::MAX);
        let own = &before[first.max(before.len().saturating_sub(after))..];
        let named = &own[own.len().saturating_sub(MAX_NAMED_REJECTIONS)..];
        Some(BanFacts {
            since: format_time(since_us),
            until: format_time(until_us),
            ban: text.to_string(),
            after: ban.rejections_before_ban(),
            found: own.len(),
            rejections: named.iter().map(|kept| format_time(kept.at_us)).collect(),
        })
    }
}
