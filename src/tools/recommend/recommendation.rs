//! Recommendation from the demand on a limit: use of the keys, smallest limits, and the one to paste.
//!
//! A search finds the smallest limit of a template: limits of one algorithm and period that differ in one number. It
//! begins at the peak use, the most hits of a counter in any span of one period, less refunds, and replays the demand
//! through the algorithm.
//!
//! Bisection is exact. If a limit admits all charges of a counter, a larger one does too: until the first rejection,
//! the window algorithms hold the same state under both; a bucket or queue drains at least as fast under the larger
//! limit, so its level is never higher, refunds included, and its capacity is never smaller. `count_rejected` plays
//! no part, because nothing is rejected. So the share of keys with a rejection never grows with the limit.
//!
//! Decides: which limit `recommend` chooses.
//! Decides: which periods (`CANDIDATE_UNITS`) and bucket sizes (`TRIED_CAPACITY_FACTORS`) it tries.
//! Decides: what use per key is (`find_peak_use`); points of its curve (`MAX_CURVE_POINTS`).

use std::num::NonZero;
use std::thread;

use super::demand::{ChargeSequence, ExistingLimit, LimitDemand};
use super::results::{CurvePoint, PeakUseResults, SmallestLimit, UntriedPeriod};
use crate::base::clock::Time;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::{Algorithm, CapacityRuleKey};
use crate::limit::ban::Ban;
use crate::limit::charge::ChargeRequest;
use crate::limit::period::{Period, Unit};
use crate::limit::request::Hits;
use crate::limit::window::{CalendarWindows, WindowSpec};
use crate::limit::{Limit, LimitSpec};

/// Units of the candidate periods.
const CANDIDATE_UNITS: [Unit; 4] = [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day];
/// Capacities of buckets and queues that are tried, in multiples of `requests_per_unit`.
const TRIED_CAPACITY_FACTORS: [u32; 3] = [1, 5, 20];
/// Maximum number of points of a curve.
const MAX_CURVE_POINTS: usize = 200;

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
    /// Smallest limits, the recommended one first.
    pub candidates: Vec<SmallestLimitOfTemplate>,
    /// Rejected keys by `requests_per_unit`, for the first template with a limit, at its largest capacity.
    pub curve: Vec<CurvePoint>,
    /// The traffic is shorter than the period of the rule.
    pub is_short: bool,
}

/// Smallest limit of a template that keeps the goal.
#[derive(Clone, Copy, Debug)]
pub struct SmallestLimitOfTemplate {
    /// Family that was searched.
    pub template: LimitTemplate,
    /// The limit; `None`: none rejects so few keys.
    pub limit: Option<Limit>,
    /// Keys that it rejects.
    pub rejected_keys: u64,
}

/// Input of the searches over one period: the demand, the goal and the first numbers to try.
struct PeriodSearch<'d> {
    demand: &'d LimitDemand,
    allowed: u64,
    /// Peak use of each sequence, where a search begins.
    first: Vec<u32>,
}

/// Finds the smallest limits. `progress` is called after each of a number of equal parts of the work.
pub fn recommend_limits(
    demand: &LimitDemand,
    asked: &ExistingLimit,
    goal: RejectedKeysGoal,
    mut progress: impl FnMut(SearchProgress),
) -> Recommendation {
    let allowed = goal.max_rejected_keys(demand.keys as u64);
    let span_us = demand.span.map_or(0, |span| span.last.since_us(span.first));
    let present = asked.limit.period();
    let others =
        CANDIDATE_UNITS.into_iter().filter_map(|unit| Period::new(unit, 1)).filter(|period| *period != present);
    let (covered, left_out): (Vec<Period>, Vec<Period>) = others.partition(|period| period.micros() <= span_us);
    let periods: Vec<Period> = [present].into_iter().chain(covered).collect();
    let (mut uses, mut candidates, mut curve) = (Vec::new(), Vec::new(), Vec::new());
    let templates: Vec<Vec<LimitTemplate>> =
        periods.iter().map(|period| list_limit_templates(asked, *period)).collect();
    let of = templates.iter().map(Vec::len).sum();
    for (period, templates) in periods.iter().zip(templates) {
        let peaks = find_peak_use_by_sequence(demand, period.micros());
        uses.push(summarize_peak_use(*period, &find_peak_use_by_key(demand, &peaks)));
        let first = peaks.iter().map(|peak| u32::try_from(*peak).unwrap_or(u32::MAX)).collect();
        let search = PeriodSearch { demand, allowed, first };
        for template in templates {
            let by_key = search.find_smallest_limit_admitting_each_key(&template);
            let found = search.find_smallest_limit(template, &by_key);
            if curve.is_empty() && found.limit.is_some() {
                curve = build_rejection_curve(&by_key);
            }
            candidates.push(found);
            progress(SearchProgress { done: candidates.len(), of });
        }
    }
    deduplicate_and_order_candidates(&mut candidates);
    let left_out = left_out
        .into_iter()
        .map(|period| UntriedPeriod { period: period.to_string(), reason: "longer than the traffic".to_owned() });
    Recommendation {
        allowed,
        rejected_now: count_rejected_keys(demand, &asked.limit),
        uses,
        left_out_periods: left_out.collect(),
        candidates,
        curve,
        is_short: span_us < present.micros(),
    }
}

/// Progress of a search.
#[derive(Clone, Copy, Debug)]
pub struct SearchProgress {
    /// Parts that are done.
    pub done: usize,
    /// All parts.
    pub of: usize,
}

/// Counts the keys that a limit rejects at least once.
fn count_rejected_keys(demand: &LimitDemand, limit: &Limit) -> u64 {
    let mut rejected = vec![false; demand.keys];
    for sequence in demand.sequences.iter().filter(|sequence| !admits_all(limit, sequence)) {
        rejected[sequence.key] = true;
    }
    rejected.iter().filter(|rejected| **rejected).count() as u64
}

/// Lists the templates of limits to search for one period, those of the rule's own algorithm first.
fn list_limit_templates(asked: &ExistingLimit, period: Period) -> Vec<LimitTemplate> {
    let limit = &asked.limit;
    let own = limit.algorithm();
    let mut algorithms: Vec<Algorithm> = vec![own];
    algorithms.extend(Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != own));
    let own_factor = limit.capacity().div_ceil(limit.requests_per_unit().max(1)).max(1);
    let template = |algorithm: Algorithm, capacity_factor: u32| LimitTemplate {
        algorithm,
        period,
        capacity_factor,
        fixed_keys: FixedLimitFields {
            max_wait_us: limit.non_default_max_wait_us().filter(|_| algorithm == own),
            calendar_months: limit.follows_calendar_months(),
            window: limit
                .calendar_windows()
                .map(CalendarWindows::spec)
                .filter(|window| algorithm.properties().follows_calendar && window.applies_to(period)),
            ban: limit.ban(),
            log_max: asked.log_max,
        },
    };
    let with_factors = |algorithm: Algorithm| {
        let factors: Vec<u32> = match algorithm.properties().capacity {
            CapacityRuleKey::RequestsPerUnit => vec![1],
            _ if algorithm != own => TRIED_CAPACITY_FACTORS.to_vec(),
            // The bound of the rule's own bucket first.
            _ => [own_factor]
                .into_iter()
                .chain(TRIED_CAPACITY_FACTORS.into_iter().filter(|one| *one != own_factor))
                .collect(),
        };
        factors.into_iter().map(move |factor| template(algorithm, factor)).collect::<Vec<_>>()
    };
    algorithms.into_iter().flat_map(with_factors).collect()
}

impl PeriodSearch<'_> {
    /// Finds the smallest `requests_per_unit` of each key, at the largest capacity of the template.
    fn find_smallest_limit_admitting_each_key(&self, template: &LimitTemplate) -> SmallestLimitByKey {
        let limit_of = |number| template.build_limit(number, None);
        find_smallest_limit_admitting_each_key(self.demand, &self.first, template.max_requests_per_unit(), limit_of)
    }

    fn find_smallest_limit(&self, template: LimitTemplate, by_key: &SmallestLimitByKey) -> SmallestLimitOfTemplate {
        let rejects_all =
            SmallestLimitOfTemplate { template, limit: None, rejected_keys: by_key.count_rejected_keys(u32::MAX) };
        let Some(requests) = by_key.find_smallest_rejecting_at_most_keys(self.allowed) else { return rejects_all };
        if !template.has_capacity_key() {
            let limit = template.build_limit(requests, None);
            return SmallestLimitOfTemplate { template, limit, rejected_keys: by_key.count_rejected_keys(requests) };
        }
        let largest = requests.saturating_mul(template.capacity_factor).max(1);
        let limit_of = |capacity| template.build_limit(requests, Some(capacity));
        let by_key = find_smallest_limit_admitting_each_key(self.demand, &self.first, largest, limit_of);
        // A capacity below 1 does not exist; 0 means that no key needs one.
        let Some(capacity) = by_key.find_smallest_rejecting_at_most_keys(self.allowed).map(|capacity| capacity.max(1))
        else {
            return rejects_all;
        };
        let limit = template.build_limit(requests, Some(capacity));
        SmallestLimitOfTemplate { template, limit, rejected_keys: by_key.count_rejected_keys(capacity) }
    }
}

/// Keeps the first of equal limits with a capacity, then moves the first candidate that has a limit to the front.
fn deduplicate_and_order_candidates(candidates: &mut Vec<SmallestLimitOfTemplate>) {
    let mut seen: Vec<Limit> = Vec::new();
    candidates.retain(|candidate| {
        let Some(limit) = candidate.limit.filter(|_| candidate.template.has_capacity_key()) else { return true };
        let is_new = !seen.contains(&limit);
        seen.push(limit);
        is_new
    });
    // If no limit of the rule's own algorithm and period exists, the first one that does is recommended.
    if let Some(first) = candidates.iter().position(|candidate| candidate.limit.is_some()) {
        candidates[..=first].rotate_right(1);
    }
}

fn summarize_peak_use(period: Period, peaks: &[u64]) -> PeakUseResults {
    let at = |share: f64| value_at_quantile(peaks, share);
    PeakUseResults { period: period.to_string(), p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
}

/// Builds the curve of rejected keys: a point for each `requests_per_unit` at which their number changes.
fn build_rejection_curve(by_key: &SmallestLimitByKey) -> Vec<CurvePoint> {
    let mut smallest_numbers: Vec<u32> = by_key.smallest_numbers().collect();
    smallest_numbers.dedup();
    let point = |number: u32| {
        let keys = by_key.count_rejected_keys(number);
        CurvePoint { number: u64::from(number), keys, share: keys as f64 / by_key.len() as f64 }
    };
    thin_out_points(smallest_numbers.into_iter().map(point).collect())
}

/// Keeps a bounded number of points, the last one among them.
fn thin_out_points(points: Vec<CurvePoint>) -> Vec<CurvePoint> {
    let step = points.len().div_ceil(MAX_CURVE_POINTS).max(1);
    let last = points.len().saturating_sub(1);
    points
        .into_iter()
        .enumerate()
        .filter(|(index, _)| (last - index).is_multiple_of(step))
        .map(|(_, point)| point)
        .collect()
}

impl From<&SmallestLimitOfTemplate> for SmallestLimit {
    fn from(candidate: &SmallestLimitOfTemplate) -> Self {
        let SmallestLimitOfTemplate { template, limit, rejected_keys } = candidate;
        let capacity = |kind: CapacityRuleKey| {
            limit.filter(|limit| limit.algorithm().properties().capacity == kind).map(|limit| limit.capacity())
        };
        Self {
            algorithm: template.algorithm.name(),
            period: template.period.to_string(),
            requests_per_unit: limit.map(|limit| limit.requests_per_unit()),
            bucket_size: capacity(CapacityRuleKey::BucketSize),
            queue_size: capacity(CapacityRuleKey::QueueSize),
            capacity_factor: template.has_capacity_key().then_some(template.capacity_factor),
            rejected_keys: *rejected_keys,
            rejected_keys_share: 0.0,
            verified: None,
            recommended: false,
        }
    }
}

/// Limits of one algorithm, period and capacity factor, which differ in `requests_per_unit` and capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitTemplate {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Period.
    pub period: Period,
    /// token_bucket and leaky_bucket: bound of the bucket, or queue, in multiples of `requests_per_unit`.
    pub capacity_factor: u32,
    /// Keys of the limit that a search does not change.
    pub fixed_keys: FixedLimitFields,
}

/// Keys of a limit that a search does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedLimitFields {
    /// `max_wait` in microseconds.
    pub max_wait_us: Option<u64>,
    /// Fixed windows of months follow the calendar.
    pub calendar_months: bool,
    /// Calendar that fixed windows follow.
    pub window: Option<WindowSpec>,
    /// Ban of a client that exceeds the limit.
    pub ban: Option<Ban>,
    /// Maximum `requests_per_unit` of a sliding_window_log.
    pub log_max: u32,
}

impl LimitTemplate {
    /// Builds the limit of `requests_per_unit`; `capacity` of a bucket or queue replaces the largest of the template.
    ///
    /// `None` if a limit cannot be so large.
    pub fn build_limit(&self, requests_per_unit: u32, capacity: Option<u32>) -> Option<Limit> {
        let properties = self.algorithm.properties();
        let largest = requests_per_unit.saturating_mul(self.capacity_factor);
        let capacity = capacity.unwrap_or(largest).max(1);
        let FixedLimitFields { max_wait_us, calendar_months, window, ban, log_max } = self.fixed_keys;
        let spec = LimitSpec {
            bucket_size: (properties.capacity == CapacityRuleKey::BucketSize).then_some(capacity),
            queue_size: (properties.capacity == CapacityRuleKey::QueueSize).then_some(capacity),
            max_wait_us,
            calendar_months,
            window,
            ban,
            log_max,
            ..LimitSpec::new(self.algorithm, requests_per_unit, self.period)
        };
        Limit::new(&spec).ok()
    }

    /// True if the limit has a bucket or a queue of its own size.
    pub const fn has_capacity_key(&self) -> bool {
        self.algorithm.properties().capacity.rule_file_key().is_some()
    }

    /// Largest `requests_per_unit` of the template.
    pub fn max_requests_per_unit(&self) -> u32 {
        if self.algorithm.properties().keeps_hit_log() { self.fixed_keys.log_max } else { u32::MAX }
    }
}

/// Finds the peak use of each sequence, in their order.
fn find_peak_use_by_sequence(demand: &LimitDemand, period_us: u64) -> Vec<u64> {
    demand.sequences.iter().map(|sequence| find_peak_use(sequence, period_us)).collect()
}

/// Combines the peaks of sequences into the peak use of each key, the highest of its counters; ascending.
fn find_peak_use_by_key(demand: &LimitDemand, peaks: &[u64]) -> Vec<u64> {
    let mut by_key = vec![0; demand.keys];
    for (sequence, peak) in demand.sequences.iter().zip(peaks) {
        by_key[sequence.key] = by_key[sequence.key].max(*peak);
    }
    by_key.sort_unstable();
    by_key
}

/// Value at a quantile, by nearest rank; 0 without values.
pub(super) fn value_at_quantile(ascending: &[u64], quantile: f64) -> u64 {
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

/// Smallest limit (`requests_per_unit` or capacity) of each key that rejects nothing of it, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SmallestLimitByKey(Vec<u64>);

/// Number of a key that every limit rejects.
const ADMITTED_BY_NO_LIMIT: u64 = u64::MAX;

/// Range of a search, and the first number to try.
#[derive(Clone, Copy, Debug)]
pub struct SearchRange {
    /// Number that is tried first.
    pub first: u32,
    /// Largest number.
    pub max: u32,
}

/// Returns true if the limit admits every charge of the sequence.
pub fn admits_all(limit: &Limit, sequence: &ChargeSequence) -> bool {
    let mut state = State::empty(limit.algorithm());
    let mut requests = sequence
        .charges
        .iter()
        .map(|charge| (charge.at, ChargeRequest::sent_by_client(charge.hits, charge.max_delay_us)));
    requests.all(|(at, request)| state.charge(limit, at, request).admitted)
}

/// Returns the smallest number whose limit admits every charge of the sequence; `None` if there is none.
///
/// `limit_of` returns the limit of a number, and `None` for numbers that are too large.
pub fn find_smallest_admitting_all(
    sequence: &ChargeSequence,
    range: SearchRange,
    limit_of: impl Fn(u32) -> Option<Limit>,
) -> Option<u32> {
    let admits = |number: u32| limit_of(number).is_some_and(|limit| admits_all(&limit, sequence));
    if admits(0) {
        return Some(0);
    }
    let (mut low, mut high) = (0, range.first.min(range.max).max(1));
    let mut below = 1;
    if admits(high) {
        // The first number is often the smallest: look right below it, then twice as far.
        while high - low > 1 {
            let next = high.saturating_sub(below).max(low + 1);
            if !admits(next) {
                low = next;
                break;
            }
            high = next;
            below = u32::saturating_mul(below, 2);
        }
    } else {
        while !admits(high) {
            if high >= range.max {
                return None;
            }
            (low, high) = (high, high.saturating_mul(2).min(range.max));
        }
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if admits(middle) { high = middle } else { low = middle }
    }
    Some(high)
}

/// Finds the smallest number for each key, on all processors.
///
/// `first` are the numbers to try first, one for each sequence.
fn find_smallest_limit_admitting_each_key(
    demand: &LimitDemand,
    first: &[u32],
    max: u32,
    limit_of: impl Fn(u32) -> Option<Limit> + Sync,
) -> SmallestLimitByKey {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let part = demand.sequences.len().div_ceil(threads).max(1);
    let limit_of = &limit_of;
    let search = move |sequences: &[ChargeSequence], first: &[u32]| -> Vec<u64> {
        let one = |(sequence, first): (&ChargeSequence, &u32)| {
            find_smallest_admitting_all(sequence, SearchRange { first: *first, max }, limit_of)
                .map_or(ADMITTED_BY_NO_LIMIT, u64::from)
        };
        sequences.iter().zip(first).map(one).collect()
    };
    let found: Vec<u64> = thread::scope(|scope| {
        let parts = demand.sequences.chunks(part).zip(first.chunks(part));
        let handles: Vec<_> = parts.map(|(sequences, first)| scope.spawn(move || search(sequences, first))).collect();
        // A thread that panicked has printed why; its keys then count as never admitted.
        let results = handles.into_iter().zip(demand.sequences.chunks(part));
        results
            .flat_map(|(handle, part)| handle.join().unwrap_or_else(|_| vec![ADMITTED_BY_NO_LIMIT; part.len()]))
            .collect()
    });
    let mut by_key = vec![0; demand.keys];
    for (sequence, number) in demand.sequences.iter().zip(found) {
        by_key[sequence.key] = number.max(by_key[sequence.key]);
    }
    by_key.sort_unstable();
    SmallestLimitByKey(by_key)
}

impl SmallestLimitByKey {
    /// Number of keys that a limit of `number` rejects at least once.
    fn count_rejected_keys(&self, number: u32) -> u64 {
        (self.0.len() - self.0.partition_point(|smallest| *smallest <= u64::from(number))) as u64
    }

    /// Returns the smallest number that rejects at most `allowed` keys; `None` if there is none.
    fn find_smallest_rejecting_at_most_keys(&self, allowed: u64) -> Option<u32> {
        let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
        match self.0.len().checked_sub(allowed).filter(|kept| *kept > 0) {
            Some(kept) => u32::try_from(self.0[kept - 1]).ok(),
            None => Some(0),
        }
    }

    /// The numbers of all keys that have one, ascending.
    fn smallest_numbers(&self) -> impl DoubleEndedIterator<Item = u32> {
        self.0.iter().filter_map(|number| u32::try_from(*number).ok())
    }

    /// Number of keys.
    fn len(&self) -> usize {
        self.0.len()
    }
}
