//! Rejections that rise right after rules were loaded: which load, how much, and the limit that rejects more.
//!
//! Shares of the requests are compared, so that more traffic is no rise. The minute of the load is left out, because it
//! has requests of both sets. False alarms are rare by four conditions, which all must hold:
//!
//! - 100 requests and 50 rejections after the load: single callers do not make a rise.
//! - Ten percentage points more than before, and twice the worst of the ten minutes before: what happened without a
//!   load is not blamed on one.
//! - The rise is there in the two minutes after the load: a limit that fills later, or a client that begins later, is
//!   none of its consequences.
//! - It still lasts, and the load was in the last half hour.
//!
//! Decides: when rejections rose after a load of rules (alarm).

use std::sync::Arc;

use crate::base::clock::Time;
use crate::rules::live::LoadRecord;
use crate::telemetry::decision_history::{DecisionHistory, RequestMinute};
use crate::telemetry::metrics::limit_stats::LimitStats;

/// Minutes before a load that are compared.
const MINUTES_BEFORE_LOAD: u64 = 10;
/// Minutes after a load in which a rise must begin.
const MINUTES_RIGHT_AFTER_LOAD: u64 = 2;
/// Last minutes in which a rise must last, with the one that runs.
const LAST_MINUTES: u64 = 3;
/// Minutes after a load for which it is looked at.
const MAX_MINUTES_SINCE_LOAD: u64 = 30;
/// Minimum number of requests on each side of a load.
const MIN_REQUESTS_FOR_REJECTION_ALARM: u64 = 100;
/// Minimum number of rejected requests after a load.
const MIN_REJECTED: u64 = 50;
/// Minimum rise of the share of rejected requests, in percentage points.
const MIN_RISE_PERCENT: u64 = 10;
/// Minimum ratio of the share after the load to that of the worst minute before.
const MIN_RISE_FACTOR: u64 = 2;

/// Rise of the share of rejected requests after a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectionRise {
    /// Time of the load, in seconds since the Unix epoch.
    pub load_s: u64,
    /// Number of the loaded set in this process.
    pub version: u64,
    /// Share of rejected requests in the minutes before, in percent.
    pub percent_before: u64,
    /// Share in the last minutes, in percent.
    pub percent_after: u64,
}

/// Limit whose rejected decisions rose most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RisenLimit {
    /// Name in metrics.
    pub name: String,
    /// Rejected decisions per minute before the load.
    pub per_minute_before: u64,
    /// Rejected decisions per minute in the last minutes.
    pub per_minute_after: u64,
}

/// Sum of some minutes.
#[derive(Clone, Copy, Debug, Default)]
struct RequestSum {
    requests: u64,
    rejected: u64,
}

impl RequestSum {
    fn of_minutes(minutes: &[(u64, RequestMinute)], is_in: impl Fn(u64) -> bool) -> Self {
        minutes.iter().filter(|(minute, _)| is_in(*minute)).fold(Self::default(), |sum, (_, of)| Self {
            requests: sum.requests.saturating_add(of.requests),
            rejected: sum.rejected.saturating_add(of.rejected),
        })
    }

    /// Share of rejected requests in percent, rounded down.
    const fn percent(self) -> u64 {
        match self.rejected.saturating_mul(100).checked_div(self.requests) {
            Some(percent) => percent,
            None => 0,
        }
    }

    /// True if the sum has the requests and rejections of a rise, and their share is at least `percent`.
    const fn has_rise(self, percent: u64) -> bool {
        self.requests >= MIN_REQUESTS_FOR_REJECTION_ALARM && self.rejected >= MIN_REJECTED && self.percent() >= percent
    }
}

/// Finds the last load that changed the rules and after which rejections rose, and still are high. `minutes` are in
/// order, and the last one runs.
pub fn find_rise_after_load(minutes: &[(u64, RequestMinute)], loads: &[LoadRecord]) -> Option<RejectionRise> {
    let (now, _) = minutes.last()?;
    loads.iter().rev().filter(|load| load.changed).find_map(|load| {
        let (at, version) = (load.at_s / 60, load.version?);
        let is_before = |minute: u64| is_shortly_before_load(at, minute);
        let before = RequestSum::of_minutes(minutes, is_before);
        let worst = minutes
            .iter()
            .filter(|(minute, _)| is_before(*minute))
            .map(|(minute, _)| RequestSum::of_minutes(minutes, |other| other == *minute).percent());
        let least = (worst.max()? * MIN_RISE_FACTOR).max(before.percent() + MIN_RISE_PERCENT);
        let right_after =
            RequestSum::of_minutes(minutes, |minute| minute > at && minute <= at + MINUTES_RIGHT_AFTER_LOAD);
        let last = RequestSum::of_minutes(minutes, |minute| is_in_last_minutes(*now, at, minute));
        let is_found = *now <= at + MAX_MINUTES_SINCE_LOAD
            && before.requests >= MIN_REQUESTS_FOR_REJECTION_ALARM
            && right_after.has_rise(least)
            && last.has_rise(least);
        is_found.then(|| RejectionRise {
            load_s: load.at_s,
            version,
            percent_before: before.percent(),
            percent_after: last.percent(),
        })
    })
}

/// Returns the limit whose rejected decisions per minute rose most; `None` if none rose.
pub fn find_most_risen_limit(
    history: &DecisionHistory,
    now: Time,
    limits: &[Arc<LimitStats>],
    rise: &RejectionRise,
) -> Option<RisenLimit> {
    let at = rise.load_s / 60;
    let risen = limits.iter().filter_map(|limit| {
        let minutes = history.sum_limits_by_minute(now, &[limit]);
        let (last, _) = minutes.last()?;
        let per_minute = |is_in: &dyn Fn(u64) -> bool| {
            let rejected = minutes.iter().filter(|(minute, _)| is_in(*minute)).map(|(_, of)| u64::from(of.rejected));
            let (sum, count) = rejected.fold((0, 0), |(sum, count), rejected| (sum + rejected, count + 1));
            u64::checked_div(sum, count).unwrap_or(0)
        };
        Some(RisenLimit {
            name: limit.name().as_str().to_owned(),
            per_minute_before: per_minute(&|minute| is_shortly_before_load(at, minute)),
            per_minute_after: per_minute(&|minute| is_in_last_minutes(*last, at, minute)),
        })
    });
    let rise_of = |limit: &RisenLimit| limit.per_minute_after.saturating_sub(limit.per_minute_before);
    risen.max_by_key(rise_of).filter(|limit| rise_of(limit) > 0)
}

const fn is_shortly_before_load(load: u64, minute: u64) -> bool {
    minute < load && minute + MINUTES_BEFORE_LOAD >= load
}

const fn is_in_last_minutes(now: u64, load: u64, minute: u64) -> bool {
    minute > load && minute + LAST_MINUTES > now
}
