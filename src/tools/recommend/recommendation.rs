//! Recommendation from the demand on a limit: peak use of the keys, and the smallest limits of the rule's algorithm.
//!
//! The peak use of a key is the most hits of a counter in any span of one period, less refunds. For each period, a
//! bisection replays the demand through the algorithm. It begins at the peak use, which is enough for a window and for
//! a token bucket of its size. A bucket or queue holds as many hits as the limit.
//!
//! Bisection is exact. If a limit admits all charges of a counter, a larger one does too: until the first rejection,
//! the window algorithms hold the same state under both; a bucket or queue drains at least as fast under the larger
//! limit, so its level is never higher, refunds included, and its capacity is never smaller. `count_rejected` plays
//! no part, because nothing is rejected. So the share of keys with a rejection never grows with the limit.
//!
//! Decides: which limit `recommend` chooses, of which periods (`CANDIDATE_UNITS`).
//! Decides: what use per key is (`find_peak_use`).

use super::demand::{ChargeSequence, ExistingLimit, LimitDemand, RecordedCharge};
use super::results::{PeakUseResults, UntriedPeriod};
use crate::base::clock::Time;
use crate::limit::algorithm::CapacityRuleKey;
use crate::limit::algorithm::state::State;
use crate::limit::charge::ChargeRequest;
use crate::limit::period::{Period, Unit};
use crate::limit::request::Hits;
use crate::limit::window::CalendarWindows;
use crate::limit::{Limit, LimitSpec};
use crate::tools::simulate::results::build_timeline;
use crate::tools::simulate::tally::Timeline;
use crate::tools::simulate::tally::TimelineResults;

/// Units of the candidate periods.
const CANDIDATE_UNITS: [Unit; 4] = [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day];

/// Goal of a recommendation: how many keys may be rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectedKeysGoal {
    /// Number of keys.
    Keys(u64),
    /// Share of the keys, in billionths.
    Billionths(u64),
}

impl RejectedKeysGoal {
    /// Number of billionths in a whole, which is all keys.
    pub const BILLIONTHS_IN_WHOLE: u64 = 1_000_000_000;

    /// Number of keys that may be rejected, of `keys`; rounded down.
    pub fn max_rejected_keys(self, keys: u64) -> u64 {
        match self {
            Self::Keys(allowed) => allowed,
            Self::Billionths(share) => {
                let allowed = u128::from(keys) * u128::from(share) / u128::from(Self::BILLIONTHS_IN_WHOLE);
                u64::try_from(allowed).unwrap_or(keys)
            }
        }
    }
}

/// Recommendation from the demand on a limit.
#[derive(Clone, Debug)]
pub struct Recommendation {
    /// Number of keys that may be rejected.
    pub allowed: u64,
    /// Keys that the limit of the rules rejects.
    pub rejected_now: u64,
    /// Peak use, by period.
    pub uses: Vec<PeakUseResults>,
    /// Periods that the traffic does not cover.
    pub left_out_periods: Vec<UntriedPeriod>,
    /// Smallest limit of each period that has one, the recommended one first.
    pub limits: Vec<SmallestLimit>,
    /// The traffic is shorter than two periods of the rule, so it may have no whole window.
    pub is_short: bool,
}

/// Smallest limit of a period that keeps the goal.
#[derive(Clone, Copy, Debug)]
pub struct SmallestLimit {
    /// The limit.
    pub limit: Limit,
    /// Keys that it rejects.
    pub rejected_keys: u64,
}

/// Finds the smallest limits of the period of the rule, and of others that the traffic covers.
pub fn recommend_limits(demand: &LimitDemand, asked: &ExistingLimit, goal: RejectedKeysGoal) -> Recommendation {
    let allowed = goal.max_rejected_keys(demand.keys as u64);
    let span_us = demand.span.map_or(0, |span| span.last.since_us(span.first));
    let present = asked.limit.period();
    let others =
        CANDIDATE_UNITS.into_iter().filter_map(|unit| Period::new(unit, 1)).filter(|period| *period != present);
    let (covered, left_out): (Vec<Period>, Vec<Period>) = others.partition(|period| period.micros() <= span_us);
    let (mut uses, mut limits) = (Vec::new(), Vec::new());
    for period in [present].into_iter().chain(covered) {
        let peaks = find_peak_use_by_key(demand, period.micros());
        let kept = peaks.len().saturating_sub(usize::try_from(allowed).unwrap_or(usize::MAX));
        let first = kept.checked_sub(1).map_or(0, |last| peaks[last]);
        limits.extend(find_smallest_limit(demand, asked, period, LimitGoal { allowed, first }));
        uses.push(summarize_peak_use(period, &peaks));
    }
    let untried =
        |period: Period| UntriedPeriod { period: period.to_string(), reason: "longer than the traffic".into() };
    Recommendation {
        allowed,
        rejected_now: count_rejected_keys(demand, &asked.limit),
        uses,
        left_out_periods: left_out.into_iter().map(untried).collect(),
        limits,
        is_short: span_us < 2 * present.micros(),
    }
}

/// What a limit must keep, and the number to try first.
#[derive(Clone, Copy)]
struct LimitGoal {
    /// Number of keys that it may reject.
    allowed: u64,
    /// First number to try: the highest peak use among the keys that it must not reject.
    first: u64,
}

/// Finds the smallest limit of a period that rejects so few keys; `None` if there is none.
fn find_smallest_limit(
    demand: &LimitDemand,
    asked: &ExistingLimit,
    period: Period,
    goal: LimitGoal,
) -> Option<SmallestLimit> {
    let keeps_log = asked.limit.algorithm().properties().keeps_hit_log();
    let max = if keeps_log { asked.log_max } else { u32::MAX };
    let try_number = |number: u32| {
        let limit = build_limit(asked, period, number)?;
        let rejected_keys = count_rejected_keys(demand, &limit);
        (rejected_keys <= goal.allowed).then_some(SmallestLimit { limit, rejected_keys })
    };
    let (mut low, mut high) = (0, u32::try_from(goal.first).unwrap_or(u32::MAX).min(max));
    let mut smallest = loop {
        match try_number(high) {
            Some(found) => break found,
            None if high == max => return None,
            // An estimated window or a queue may need more than the peak use.
            None => (low, high) = (high + 1, high.saturating_mul(2).clamp(1, max)),
        }
    };
    while low < high {
        let middle = low + (high - low) / 2;
        match try_number(middle) {
            Some(found) => (smallest, high) = (found, middle),
            None => low = middle + 1,
        }
    }
    Some(smallest)
}

/// Builds the limit of the rules with another number and period; a bucket or queue holds as much as the limit.
///
/// `None` if a limit cannot be so large.
pub fn build_limit(asked: &ExistingLimit, period: Period, requests_per_unit: u32) -> Option<Limit> {
    let limit = &asked.limit;
    let properties = limit.algorithm().properties();
    let capacity = |key| (properties.capacity == key).then_some(requests_per_unit.max(1));
    let window = limit.calendar_windows().map(CalendarWindows::spec);
    let spec = LimitSpec {
        bucket_size: capacity(CapacityRuleKey::BucketSize),
        queue_size: capacity(CapacityRuleKey::QueueSize),
        max_wait_us: limit.non_default_max_wait_us(),
        calendar_months: limit.follows_calendar_months(),
        window: window.filter(|window| properties.follows_calendar && window.applies_to(period)),
        ban: limit.ban(),
        log_max: asked.log_max,
        ..LimitSpec::new(limit.algorithm(), requests_per_unit.into(), period)
    };
    Limit::new(&spec).ok()
}

/// Counts the keys that a limit rejects at least once.
fn count_rejected_keys(demand: &LimitDemand, limit: &Limit) -> u64 {
    let mut rejected = vec![false; demand.keys];
    for sequence in demand.sequences.iter().filter(|sequence| !admits_all(limit, sequence)) {
        rejected[sequence.key] = true;
    }
    rejected.iter().filter(|rejected| **rejected).count() as u64
}

/// Returns true if the limit admits every charge of the sequence.
pub fn admits_all(limit: &Limit, sequence: &ChargeSequence) -> bool {
    replay_sequence(limit, sequence).all(|(_, admitted)| admitted)
}

/// Replays a sequence under a limit: each charge or refund, and whether it is admitted.
fn replay_sequence<'s>(
    limit: &Limit,
    sequence: &'s ChargeSequence,
) -> impl Iterator<Item = (&'s RecordedCharge, bool)> {
    let mut state = State::empty(limit.algorithm());
    sequence.charges.iter().map(move |charge| {
        let request = ChargeRequest::sent_by_client(charge.hits, charge.max_delay_us);
        (charge, state.charge(limit, charge.at, request).admitted)
    })
}

/// Charges over time under a limit.
pub fn build_limit_timeline(demand: &LimitDemand, limit: &Limit) -> TimelineResults {
    let mut timeline = Timeline::new(demand.span.map_or_else(Time::default, |span| span.first));
    for sequence in &demand.sequences {
        let charges = replay_sequence(limit, sequence).filter(|(charge, _)| matches!(charge.hits, Hits::Charge(_)));
        charges.for_each(|(charge, admitted)| timeline.add_request(charge.at, !admitted));
    }
    build_timeline(Some(&timeline), None)
}

fn summarize_peak_use(period: Period, peaks: &[u64]) -> PeakUseResults {
    let at = |share: f64| value_at_quantile(peaks, share);
    PeakUseResults { period: period.to_string(), p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
}

/// Finds the peak use of each key, the highest of its counters; ascending.
fn find_peak_use_by_key(demand: &LimitDemand, period_us: u64) -> Vec<u64> {
    let mut by_key = vec![0; demand.keys];
    for sequence in &demand.sequences {
        by_key[sequence.key] = find_peak_use(sequence, period_us).max(by_key[sequence.key]);
    }
    by_key.sort_unstable();
    by_key
}

/// Value at a quantile, by nearest rank; 0 without values.
fn value_at_quantile(ascending: &[u64], quantile: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the length")]
    let rank = (quantile * ascending.len() as f64).ceil() as usize;
    ascending.get(rank.max(1) - 1).copied().unwrap_or(0)
}

fn find_peak_use(sequence: &ChargeSequence, period_us: u64) -> u64 {
    let signed = |hits: Hits| match hits {
        Hits::Charge(hits) => i128::from(hits),
        Hits::Refund(hits) => -i128::from(hits),
        Hits::Peek => 0,
    };
    let charges = &sequence.charges;
    let (mut oldest, mut sum, mut peak, mut now) = (0, 0, 0, Time::default());
    for (newest, charge) in charges.iter().enumerate() {
        sum += signed(charge.hits);
        // As in the algorithms, time never runs backwards.
        now = now.max(charge.at);
        while oldest < newest && charges[oldest].at.plus_us(period_us) <= now {
            sum -= signed(charges[oldest].hits);
            oldest += 1;
        }
        peak = peak.max(sum);
    }
    u64::try_from(peak).unwrap_or(u64::MAX)
}
