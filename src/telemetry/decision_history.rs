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
    /// Charges that failed in the store.
    pub failed_charges: u64,
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
    /// Charges that failed in the store.
    pub failed_charges: u64,
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
    /// Minutes since the Unix epoch in the order of their slots; at most [`KEPT_HISTORY_MINUTES`].
    minutes: Vec<u64>,
    /// Slot that is written next.
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
        let slot = rings.begin_minute(ended);
        rings.requests[slot] = RequestMinute::between(&rings.last_requests, &requests);
        rings.last_requests = requests;
        rings.record_limits(slot, limits);
    }

    /// Sums the counts of these limits by minute, the oldest first, and last the minute of `now`, which runs.
    pub fn sum_limits_by_minute(&self, now: Time, limits: &[&LimitStats]) -> Vec<(u64, MinuteCounts)> {
        let rings = self.lock();
        let of_limits: Vec<_> = limits.iter().filter_map(|limit| rings.by_limit.get(&limit.id())).collect();
        let mut minutes: Vec<(u64, MinuteCounts)> = rings
            .filled_slots()
            .map(|slot| (rings.minutes[slot], of_limits.iter().map(|ring| ring.counts[slot]).sum_minute_counts()))
            .collect();
        // Of a limit that was left out it is not known what it had before this minute.
        let running = limits.iter().filter(|limit| !rings.left_out.contains(&limit.id())).map(|limit| {
            let last = rings.by_limit.get(&limit.id()).map_or(DecisionsByResult::default(), |ring| ring.last);
            MinuteCounts::between(last, limit.decisions_by_result())
        });
        minutes.push((minute_of(now), running.sum_minute_counts()));
        minutes
    }

    /// Returns the requests by minute, the oldest first, and last those of the minute of `now`, which runs.
    pub fn requests_by_minute(&self, now: Time, requests: &RequestTotals) -> Vec<(u64, RequestMinute)> {
        let rings = self.lock();
        let mut minutes: Vec<_> =
            rings.filled_slots().map(|slot| (rings.minutes[slot], rings.requests[slot])).collect();
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
        self.filled_slots().last().map(|slot| self.minutes[slot])
    }

    /// Slots with a minute, the oldest first.
    fn filled_slots(&self) -> impl Iterator<Item = usize> {
        let (count, next) = (self.minutes.len(), self.next);
        let oldest = if count < KEPT_HISTORY_MINUTES { 0 } else { next };
        (0..count).map(move |at| (oldest + at) % KEPT_HISTORY_MINUTES)
    }

    /// Forgets all minutes; the totals stay.
    fn clear_minutes(&mut self) {
        (self.next, self.minutes, self.requests) = (0, Vec::new(), Vec::new());
        self.by_limit.values_mut().for_each(|ring| ring.counts.fill(MinuteCounts::default()));
    }

    /// Returns the slot of the next minute.
    fn begin_minute(&mut self, minute: u64) -> usize {
        let slot = self.next;
        self.next = (slot + 1) % KEPT_HISTORY_MINUTES;
        match self.minutes.get_mut(slot) {
            Some(oldest) => *oldest = minute,
            None => {
                self.minutes.push(minute);
                self.requests.push(RequestMinute::default());
            }
        }
        slot
    }

    fn record_limits(&mut self, slot: usize, limits: &[Arc<LimitStats>]) {
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
            ring.counts[slot] = MinuteCounts::between(ring.last, totals);
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

impl RequestMinute {
    fn between(before: &RequestTotals, now: &RequestTotals) -> Self {
        let mut durations = HistogramSnapshot::default();
        for (at, count) in durations.counts.iter_mut().enumerate() {
            *count = now.decisions.counts[at].saturating_sub(before.decisions.counts[at]);
        }
        let requests = durations.observation_count();
        Self {
            requests,
            rejected: now.rejected.saturating_sub(before.rejected),
            failed_charges: now.failed_charges.saturating_sub(before.failed_charges),
            p99_at_most_us: quantile_bound_us(&durations.counts, 990)
                .filter(|bound| requests > 0 && *bound <= BUCKET_BOUNDS_US[BUCKET_BOUNDS_US.len() - 1]),
        }
    }
}

const fn minute_of(time: Time) -> u64 {
    time.as_micros() / US_PER_MINUTE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::limit_stats::{LimitName, LimitStat};

    fn limit(name: &str) -> Arc<LimitStats> {
        Arc::new(LimitStats::new(LimitName::new(["shop", name])))
    }

    fn at(minute: u64, second: u64) -> Time {
        Time::from_micros((minute * 60 + second) * 1_000_000)
    }

    fn matched(history: &DecisionHistory, now: Time, limit: &LimitStats) -> Vec<(u64, u32)> {
        history
            .sum_limits_by_minute(now, &[limit])
            .into_iter()
            .map(|(minute, counts)| (minute, counts.matched))
            .collect()
    }

    #[test]
    fn minute_has_the_difference_of_totals_and_the_last_minute_runs() {
        let (history, login) = (DecisionHistory::default(), limit("login"));
        login.add_to_counter(LimitStat::Ok, 5);
        login.add_to_counter(LimitStat::Over, 2);
        login.add_to_counter(LimitStat::Shadow, 3);
        login.add_to_counter(LimitStat::Local, 7);
        login.add_to_counter(LimitStat::LocalRejected, 4);
        history.record_minute(at(100, 0), std::slice::from_ref(&login), RequestTotals::default());
        login.add_to_counter(LimitStat::Ok, 1);
        let minutes = history.sum_limits_by_minute(at(100, 30), &[&login]);
        let first = MinuteCounts { matched: 17, passed: 5 + 3 + 3, rejected: 2 + 4, exceeded_in_shadow: 3 };
        let running = MinuteCounts { matched: 1, passed: 1, ..MinuteCounts::default() };
        assert_eq!(minutes, [(99, first), (100, running)]);
    }

    #[test]
    fn sixty_minutes_are_kept() {
        let (history, login) = (DecisionHistory::default(), limit("login"));
        for minute in 1..=100 {
            login.add_to_counter(LimitStat::Ok, minute);
            history.record_minute(at(minute + 1, 0), std::slice::from_ref(&login), RequestTotals::default());
        }
        let minutes = matched(&history, at(101, 1), &login);
        let mut expected: Vec<(u64, u32)> = (41..=100).map(|minute| (minute, u32::try_from(minute).unwrap())).collect();
        expected.push((101, 0));
        assert_eq!(minutes, expected);
    }

    #[test]
    fn second_record_of_a_minute_is_ignored_and_a_clock_that_goes_back_clears() {
        let (history, login) = (DecisionHistory::default(), limit("login"));
        let record = |now: Time| {
            login.add_to_counter(LimitStat::Ok, 1);
            history.record_minute(now, std::slice::from_ref(&login), RequestTotals::default());
        };
        record(at(10, 0));
        record(at(10, 59));
        assert_eq!(matched(&history, at(10, 59), &login), [(9, 1), (10, 1)]);
        record(at(11, 0));
        assert_eq!(matched(&history, at(11, 0), &login), [(9, 1), (10, 2), (11, 0)]);
        record(at(5, 0));
        assert_eq!(matched(&history, at(5, 0), &login), [(4, 1), (5, 0)]);
    }

    #[test]
    fn memory_is_bounded_and_only_of_limits_with_decisions() {
        let history = DecisionHistory::default();
        let limits: Vec<_> = (0..MAX_LIMITS_WITH_HISTORY + 10).map(|at| limit(&at.to_string())).collect();
        limits.iter().skip(5).for_each(|limit| limit.add_to_counter(LimitStat::Ok, 1));
        history.record_minute(at(10, 0), &limits, RequestTotals::default());
        let size = history.size();
        assert_eq!((size.limits, size.left_out), (MAX_LIMITS_WITH_HISTORY, 5));
        assert!(size.bytes < MAX_LIMITS_WITH_HISTORY * 1100, "{size:?}");
        // What the running minute had before is not known of a limit that was left out.
        let (last, left_out) = (&limits[MAX_LIMITS_WITH_HISTORY - 1], &limits[MAX_LIMITS_WITH_HISTORY + 9]);
        left_out.add_to_counter(LimitStat::Ok, 7);
        assert_eq!(matched(&history, at(10, 30), left_out), [(9, 0), (10, 0)]);
        // With room for it, its ring begins with what it has by then: the room of limits that are gone is free a
        // minute later.
        history.record_minute(at(11, 0), &limits[10..], RequestTotals::default());
        assert_eq!(history.size().left_out, 5);
        history.record_minute(at(12, 0), &limits[10..], RequestTotals::default());
        assert_eq!((history.size().left_out, matched(&history, at(12, 0), left_out).pop()), (0, Some((12, 0))));
        left_out.add_to_counter(LimitStat::Ok, 3);
        assert_eq!(matched(&history, at(12, 30), left_out), [(9, 0), (10, 0), (11, 0), (12, 3)]);
        assert_eq!(matched(&history, at(12, 30), last), [(9, 1), (10, 0), (11, 0), (12, 0)]);
        // A limit that is gone loses its ring.
        history.record_minute(at(13, 0), &limits[10..20], RequestTotals::default());
        assert_eq!(history.size().limits, 10);
    }
}
