//! Counts of each limit, and of all requests, by minute for the last hour.
//!
//! Once a minute the totals that are counted anyway are read, and their differences go into rings; a decision does
//! nothing for it. A limit without a decision has no ring. Rings are of this process, start empty with it, and lose a
//! limit that a reload removes. A limit for which there is no room has no counts, and none of before once there is. A
//! clock that goes back clears them.
//!
//! Decides: what a limit's last hour has; of how many limits an hour is kept.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use super::metrics::histogram::{BUCKET_BOUNDS_US, HistogramSnapshot, quantile_bound_us};
use super::metrics::limit_stats::{DecisionsByResult, LimitStats};
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;

/// Number of minutes that are kept.
pub const KEPT_HISTORY_MINUTES: usize = 60;
/// Maximum number of limits with a ring.
pub const MAX_LIMITS_WITH_HISTORY: usize = 20_000;
/// Number of failure policies of limits.
pub const FAILURE_POLICY_COUNT: usize = 4;
const US_PER_MINUTE: u64 = 60_000_000;

/// Counts by minute of each limit and of all requests.
#[derive(Debug, Default)]
pub struct DecisionHistory(Mutex<Rings>);

/// Decisions of limits in one minute; a count stops at 2^32 - 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MinuteCounts {
    /// Decisions.
    pub matched: u32,
    /// Decisions that admitted, in shadow mode too.
    pub passed: u32,
    /// Decisions that rejected.
    pub rejected: u32,
    /// Decisions that exceeded the limit in shadow mode, which are also among `passed`.
    pub exceeded_in_shadow: u32,
}

/// Requests of one minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestMinute {
    /// Decided requests.
    pub requests: u64,
    /// Rejected requests.
    pub rejected: u64,
    /// Charges.
    pub charges: u64,
    /// Charges that failed in the store, by the failure policy that decided.
    pub failed_by_policy: [u64; FAILURE_POLICY_COUNT],
    /// Upper bound of the 99th percentile of latency in microseconds; `None`: no request, or above the last bound.
    pub p99_at_most_us: Option<u64>,
}

/// Totals of all requests since the start of the process.
#[derive(Clone, Debug, Default)]
pub struct RequestTotals {
    /// Duration of decisions.
    pub decisions: HistogramSnapshot,
    /// Rejected requests.
    pub rejected: u64,
    /// Charges.
    pub charges: u64,
    /// Charges that failed in the store, by the failure policy that decided.
    pub failed_by_policy: [u64; FAILURE_POLICY_COUNT],
}

/// Number of limits and memory of a decision history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistorySize {
    /// Number of limits with a ring.
    pub limits: usize,
    /// Number of limits with decisions for which there was no room in the last minute.
    pub left_out: usize,
    /// Memory of the rings in bytes, without that of the allocator.
    pub bytes: usize,
}

#[derive(Debug, Default)]
struct Rings {
    /// Minutes since the Unix epoch in the order of their positions; at most [`KEPT_HISTORY_MINUTES`].
    minutes: Vec<u64>,
    /// Position that is written next.
    next: usize,
    requests: Vec<RequestMinute>,
    last_requests: RequestTotals,
    by_limit: HashMap<u64, LimitRing>,
    /// Limits with decisions for which there was no room in the last minute.
    left_out: HashSet<u64>,
}

#[derive(Debug)]
struct LimitRing {
    last: DecisionsByResult,
    counts: Box<[MinuteCounts; KEPT_HISTORY_MINUTES]>,
}

impl DecisionHistory {
    /// Records the minutes that ended before `now`, as one. Does nothing in a minute that began with a record.
    pub fn record_minute(&self, now: Time, limits: &[Arc<LimitStats>], requests: RequestTotals) {
        let Some(ended) = minute_of(now).checked_sub(1) else { return };
        let mut rings = self.lock();
        match rings.newest_minute() {
            Some(last) if ended == last => return,
            Some(last) if ended < last => rings.clear_minutes(),
            _ => {}
        }
        let position = rings.begin_minute(ended);
        rings.requests[position] = RequestMinute::between(&rings.last_requests, &requests);
        rings.last_requests = requests;
        rings.record_limits(position, limits);
    }

    /// Sums the counts of these limits by minute, the oldest first, and last the minute of `now`, which runs.
    pub fn sum_limits_by_minute(&self, now: Time, limits: &[&LimitStats]) -> Vec<(u64, MinuteCounts)> {
        let rings = self.lock();
        let of_limits: Vec<_> = limits.iter().filter_map(|limit| rings.by_limit.get(&limit.id())).collect();
        let mut minutes: Vec<(u64, MinuteCounts)> = rings
            .filled_positions()
            .map(|position| {
                (rings.minutes[position], of_limits.iter().map(|ring| ring.counts[position]).sum_minute_counts())
            })
            .collect();
        // Of a limit that was left out it is not known what it had before this minute.
        let running = limits.iter().filter(|limit| !rings.left_out.contains(&limit.id())).map(|limit| {
            let last = rings.by_limit.get(&limit.id()).map_or(DecisionsByResult::default(), |ring| ring.last);
            MinuteCounts::between(last, limit.decisions_by_result())
        });
        minutes.push((minute_of(now), running.sum_minute_counts()));
        minutes
    }

    /// Returns the counts of a limit in the last `minutes`, the one of `now` included, for each of `limits`.
    pub fn sum_last_minutes<'l>(
        &self,
        now: Time,
        minutes: u64,
        limits: impl Iterator<Item = &'l LimitStats>,
    ) -> Vec<MinuteCounts> {
        let rings = self.lock();
        let first = (minute_of(now) + 1).saturating_sub(minutes);
        let positions: Vec<usize> =
            rings.filled_positions().filter(|position| rings.minutes[*position] >= first).collect();
        limits
            .map(|limit| {
                let ring = rings.by_limit.get(&limit.id());
                let ended = ring.into_iter().flat_map(|ring| positions.iter().map(|position| ring.counts[*position]));
                // Of a limit that was left out it is not known what it had before this minute.
                let running = (!rings.left_out.contains(&limit.id())).then(|| {
                    let last = ring.map_or(DecisionsByResult::default(), |ring| ring.last);
                    MinuteCounts::between(last, limit.decisions_by_result())
                });
                ended.chain(running).sum_minute_counts()
            })
            .collect()
    }

    /// Returns the requests by minute, the oldest first, and last those of the minute of `now`, which runs.
    pub fn requests_by_minute(&self, now: Time, requests: &RequestTotals) -> Vec<(u64, RequestMinute)> {
        let rings = self.lock();
        let mut minutes: Vec<_> =
            rings.filled_positions().map(|position| (rings.minutes[position], rings.requests[position])).collect();
        minutes.push((minute_of(now), RequestMinute::between(&rings.last_requests, requests)));
        minutes
    }

    /// Returns the size of the rings.
    pub fn size(&self) -> HistorySize {
        let rings = self.lock();
        let of_limit = size_of::<(u64, LimitRing)>() + size_of::<[MinuteCounts; KEPT_HISTORY_MINUTES]>();
        let of_requests = rings.requests.capacity() * size_of::<RequestMinute>();
        HistorySize {
            limits: rings.by_limit.len(),
            left_out: rings.left_out.len(),
            bytes: rings.by_limit.len() * of_limit + of_requests + size_of::<Rings>(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Rings> {
        lock_ignoring_poison(&self.0)
    }
}

impl Rings {
    fn newest_minute(&self) -> Option<u64> {
        self.filled_positions().last().map(|position| self.minutes[position])
    }

    /// Positions with a minute, the oldest first.
    fn filled_positions(&self) -> impl Iterator<Item = usize> {
        let (count, next) = (self.minutes.len(), self.next);
        let oldest = if count < KEPT_HISTORY_MINUTES { 0 } else { next };
        (0..count).map(move |at| (oldest + at) % KEPT_HISTORY_MINUTES)
    }

    /// Forgets all minutes; the totals stay.
    fn clear_minutes(&mut self) {
        (self.next, self.minutes, self.requests) = (0, Vec::new(), Vec::new());
        self.by_limit.values_mut().for_each(|ring| ring.counts.fill(MinuteCounts::default()));
    }

    /// Returns the position of the next minute.
    fn begin_minute(&mut self, minute: u64) -> usize {
        let position = self.next;
        self.next = (position + 1) % KEPT_HISTORY_MINUTES;
        match self.minutes.get_mut(position) {
            Some(oldest) => *oldest = minute,
            None => {
                self.minutes.push(minute);
                self.requests.push(RequestMinute::default());
            }
        }
        position
    }

    fn record_limits(&mut self, position: usize, limits: &[Arc<LimitStats>]) {
        let mut kept = HashMap::with_capacity(self.by_limit.len());
        let mut left_out = HashSet::new();
        for limit in limits {
            let totals = limit.decisions_by_result();
            let mut ring = match self.by_limit.remove(&limit.id()) {
                Some(ring) => ring,
                None if totals.matched == 0 => continue,
                None if kept.len() + self.by_limit.len() >= MAX_LIMITS_WITH_HISTORY => {
                    left_out.insert(limit.id());
                    continue;
                }
                None if self.left_out.contains(&limit.id()) => LimitRing::beginning_with(totals),
                None => LimitRing::beginning_with(DecisionsByResult::default()),
            };
            ring.counts[position] = MinuteCounts::between(ring.last, totals);
            ring.last = totals;
            kept.insert(limit.id(), ring);
        }
        (self.by_limit, self.left_out) = (kept, left_out);
    }
}

impl LimitRing {
    /// Ring without counts of a limit that had these totals before.
    fn beginning_with(last: DecisionsByResult) -> Self {
        Self { last, counts: Box::new([MinuteCounts::default(); KEPT_HISTORY_MINUTES]) }
    }
}

impl MinuteCounts {
    /// Difference of two totals.
    fn between(before: DecisionsByResult, now: DecisionsByResult) -> Self {
        let count = |before: u64, now: u64| u32::try_from(now.saturating_sub(before)).unwrap_or(u32::MAX);
        Self {
            matched: count(before.matched, now.matched),
            passed: count(before.passed, now.passed),
            rejected: count(before.rejected, now.rejected),
            exceeded_in_shadow: count(before.exceeded_in_shadow, now.exceeded_in_shadow),
        }
    }
}

/// Sum of an iterator of counts.
trait SumMinuteCounts {
    fn sum_minute_counts(self) -> MinuteCounts;
}

impl<I: Iterator<Item = MinuteCounts>> SumMinuteCounts for I {
    fn sum_minute_counts(self) -> MinuteCounts {
        self.fold(MinuteCounts::default(), |sum, one| MinuteCounts {
            matched: sum.matched.saturating_add(one.matched),
            passed: sum.passed.saturating_add(one.passed),
            rejected: sum.rejected.saturating_add(one.rejected),
            exceeded_in_shadow: sum.exceeded_in_shadow.saturating_add(one.exceeded_in_shadow),
        })
    }
}

impl RequestTotals {
    /// Charges that failed in the store.
    pub fn failed_charges(&self) -> u64 {
        self.failed_by_policy.iter().sum()
    }
}

impl RequestMinute {
    /// Charges that failed in the store.
    pub fn failed_charges(&self) -> u64 {
        self.failed_by_policy.iter().sum()
    }

    fn between(before: &RequestTotals, now: &RequestTotals) -> Self {
        let mut durations = HistogramSnapshot::default();
        for (at, count) in durations.counts.iter_mut().enumerate() {
            *count = now.decisions.counts[at].saturating_sub(before.decisions.counts[at]);
        }
        let requests = durations.observation_count();
        Self {
            requests,
            rejected: now.rejected.saturating_sub(before.rejected),
            charges: now.charges.saturating_sub(before.charges),
            failed_by_policy: std::array::from_fn(|at| {
                now.failed_by_policy[at].saturating_sub(before.failed_by_policy[at])
            }),
            p99_at_most_us: quantile_bound_us(&durations.counts, 990)
                .filter(|bound| requests > 0 && *bound <= BUCKET_BOUNDS_US[BUCKET_BOUNDS_US.len() - 1]),
        }
    }
}

const fn minute_of(time: Time) -> u64 {
    time.as_micros() / US_PER_MINUTE
}
