//! Reference model of the algorithms: slow, simple, and in exact fractions.
//!
//! Nothing is solved in closed form. The model states whether a charge passes at a point in time; the time at which
//! the limit is full again, a rejected charge could pass, or a delayed response departs is *searched*: the first
//! microsecond at which the condition is true. The result of a bucket is a fraction of hits, a log is a list with one
//! time per hit, and windows are a map from start to count.

use std::collections::BTreeMap;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT};
use tollkeeper::limit::period::Unit;
use tollkeeper::limit::request::Hits;

use super::fraction::Ratio;

/// State of a counter.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    /// Buckets: used hits at `last`.
    used: Ratio,
    /// leaky_bucket: used hits at `last`, before the request that was admitted last.
    promised: Ratio,
    /// Buckets: size of the bucket that `used` is of, and whether another size had a say in it; `None` while `used` is
    /// within the size.
    size: Option<(i128, bool)>,
    /// Windows: the hits of each, by its start.
    windows: BTreeMap<i128, i128>,
    /// The log: one time for each hit, oldest first.
    log: Vec<i128>,
    /// Time of the last counted hits.
    last: i128,
}

static BLANK: Model =
    Model { used: Ratio::ZERO, promised: Ratio::ZERO, size: None, windows: BTreeMap::new(), log: Vec::new(), last: 0 };

impl Model {
    pub(crate) fn new() -> Self {
        BLANK.clone()
    }

    pub(crate) fn charge(&mut self, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
        let now = i128::from(now.as_micros());
        let before = self.shown(limit, now);
        let admitted = self.passes(limit, now, request);
        let mut delay = 0;
        let mut after = before;
        match request.hits {
            Hits::Charge(hits) if admitted && !request.rejected_elsewhere => {
                delay = self.delay(limit, now, hits);
                after = self.count(limit, now, |model, at| model.count_hits(limit, at, i128::from(hits)));
            }
            Hits::Charge(hits) if limit.counts_rejected_hits() => {
                after = self.count(limit, now, |model, at| model.charge_rejected(limit, at, i128::from(hits)));
            }
            Hits::Refund(hits) => {
                after = self.count(limit, now, |model, at| {
                    model.refund(limit, at, i128::from(hits), i128::from(request.leased));
                });
            }
            Hits::Charge(_) | Hits::Peek => {}
        }
        let left = if limit.requests_per_unit() == 0 { 0 } else { i128::from(limit.capacity()) - after };
        ChargeResult {
            admitted,
            before: to_u64(before),
            after: to_u64(after),
            remaining: to_u64(left.max(0)),
            reset_us: to_u64(self.reset(limit, now)),
            retry_after_us: (!admitted && can_ever_pass(limit, request))
                .then(|| to_u64(first_time(|wait| self.passes(limit, now + wait, request)))),
            delay_us: to_u64(delay),
            ..ChargeResult::default()
        }
    }

    /// State at `now`, and the effective time.
    ///
    /// The effective time is never before the last charge. If the last charge is more than a period ahead, the state is
    /// discarded.
    fn live_state(&self, limit: &Limit, now: i128) -> (&Self, i128) {
        if self.last - now > period(limit) { (&BLANK, now) } else { (self, now.max(self.last)) }
    }

    /// Returns `true` if the charge passes at `now`, with the delay that it accepts.
    fn passes(&self, limit: &Limit, now: i128, request: ChargeRequest) -> bool {
        let capacity = i128::from(limit.capacity());
        let hits = match request.hits {
            Hits::Refund(_) => return true,
            Hits::Peek if limit.algorithm() == Algorithm::FixedWindow && limit.counts_rejected_hits() => {
                return self.shown(limit, now) <= capacity;
            }
            Hits::Peek => 1,
            Hits::Charge(hits) => i128::from(hits),
        };
        if hits > capacity || limit.requests_per_unit() == 0 {
            return false;
        }
        let (live_state, at) = self.live_state(limit, now);
        let room = Ratio::whole(capacity - hits);
        let latest = at.max(now + i128::from(request.max_delay_us.min(limit.max_wait_us())));
        match limit.algorithm() {
            Algorithm::TokenBucket => live_state.used_at(limit, latest) <= room,
            Algorithm::LeakyBucket => {
                live_state.used_at(limit, at) <= room && live_state.used_at(limit, latest) == Ratio::ZERO
            }
            _ => self.shown(limit, now) + hits <= capacity,
        }
    }

    /// Delay of an admitted charge: until its tokens are refilled, or until everything before it has left.
    fn delay(&self, limit: &Limit, now: i128, hits: u64) -> i128 {
        let (live_state, at) = self.live_state(limit, now);
        let room = match limit.algorithm() {
            Algorithm::TokenBucket => Ratio::whole(i128::from(limit.capacity()) - i128::from(hits)),
            Algorithm::LeakyBucket => Ratio::ZERO,
            _ => return 0,
        };
        if live_state.used_at(limit, at) <= room {
            return 0;
        }
        first_time(|wait| now + wait >= at && live_state.used_at(limit, now + wait) <= room)
    }

    /// Time until nothing is counted, in microseconds; fixed_window: until the window ends.
    fn reset(&self, limit: &Limit, now: i128) -> i128 {
        match limit.algorithm() {
            Algorithm::FixedWindow => window(limit, self.live_state(limit, now).1).1 - now,
            // Such a bucket never drains.
            Algorithm::TokenBucket | Algorithm::LeakyBucket if limit.requests_per_unit() == 0 => 0,
            _ => first_time(|wait| self.shown(limit, now + wait) == 0),
        }
    }

    /// Number of hits that count at `now`, in whole hits.
    fn shown(&self, limit: &Limit, now: i128) -> i128 {
        let (live_state, at) = self.live_state(limit, now);
        match limit.algorithm() {
            Algorithm::Concurrent => unreachable!("slots have a model of their own"),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => live_state.used_at(limit, at).ceil(),
            Algorithm::FixedWindow => live_state.in_window(window(limit, at).0),
            Algorithm::SlidingWindowLog => {
                let out = live_state.log.partition_point(|&hit| hit <= at - period(limit));
                i128::try_from(live_state.log.len() - out).expect("a small number")
            }
            Algorithm::SlidingWindowCounter => {
                let (start, end) = window(limit, at);
                let most = match i128::from(limit.capacity()) {
                    0 => i128::MAX,
                    most => most * if limit.counts_rejected_hits() { 2 } else { 1 },
                };
                let previous = live_state.in_window(start - period(limit)).min(most);
                let share = Ratio::new(previous * (end - at), period(limit));
                Ratio::whole(live_state.in_window(start).min(most)).plus(share).floor()
            }
        }
    }

    fn used_at(&self, limit: &Limit, at: i128) -> Ratio {
        drained(self.fitted(limit).0, limit, at - self.last)
    }

    /// What is used of the limit's bucket at `last`: no more than its size if that was smaller than now; what is left if
    /// the size was another one before. Then its size.
    fn fitted(&self, limit: &Limit) -> (Ratio, Option<(i128, bool)>) {
        let (size, full) = (i128::from(limit.capacity()), Ratio::whole(limit.capacity().into()));
        let most = full.plus(Ratio::whole(limit.requests_per_unit().into()));
        match self.size {
            _ if size == 0 => (self.used, self.size),
            None if self.used <= full => (self.used, None),
            None => (full, Some((size, true))),
            Some((of, _)) if of == size && limit.max_wait_us() >= (1 << 50) - 1 => (self.used, self.size),
            Some((of, _)) if of == size && limit.max_wait_us() > 0 => {
                let wait = i128::from(limit.max_wait_us());
                let in_advance = Ratio::new(wait * i128::from(limit.requests_per_unit()), limit.period_us().into());
                (self.used.min(most.max(full.plus(in_advance))), self.size)
            }
            Some((of, _)) if of == size => (self.used.min(most), self.size),
            // Debt, in a larger bucket than before.
            Some((of, false)) if of < size => (self.used.min(most), self.size),
            Some((of, _)) => {
                (self.used.plus(full).minus(Ratio::whole(of)).max(Ratio::ZERO).min(most), Some((size, true)))
            }
        }
    }

    fn in_window(&self, start: i128) -> i128 {
        self.windows.get(&start).copied().unwrap_or(0)
    }

    /// Advances the state to the time of a charge, applies `change`, and returns the hits that count then.
    fn count(&mut self, limit: &Limit, now: i128, change: impl FnOnce(&mut Self, i128)) -> i128 {
        let (live_state, at) = self.live_state(limit, now);
        let mut next = live_state.clone();
        next.used = live_state.used_at(limit, at);
        next.size = live_state.fitted(limit).1;
        next.promised = match next.size {
            // What is cut comes from the end.
            Some(_) => next.used,
            None => drained(live_state.promised, limit, at - live_state.last),
        };
        next.log.retain(|&hit| hit > at - period(limit));
        next.last = at;
        change(&mut next, at);
        let (size, full) = (i128::from(limit.capacity()), Ratio::whole(limit.capacity().into()));
        if size > 0 && next.size.is_none_or(|(_, was_changed)| !was_changed) {
            next.size = (next.used > full).then_some((size, false));
        }
        // Of one request, a refund returns fewer than 2^31 places; none if the queue was cut. Such a queue is smaller.
        let is_queue = limit.algorithm() == Algorithm::LeakyBucket;
        if is_queue && size >= 1 << 31 {
            next.size = None;
        }
        let kept = if next.size.is_some() { 0 } else { (1 << 31) - 1 };
        next.promised = next.promised.max(next.used.minus(Ratio::whole(kept)));
        *self = next;
        self.shown(limit, at)
    }

    fn count_hits(&mut self, limit: &Limit, at: i128, hits: i128) {
        match limit.algorithm() {
            Algorithm::Concurrent => unreachable!("slots have a model of their own"),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                self.promised = self.used;
                self.used = self.used.plus(Ratio::whole(hits));
            }
            Algorithm::FixedWindow => {
                let count = self.windows.entry(window(limit, at).0).or_default();
                *count = (*count + hits).min(i128::from(MAX_COUNT));
            }
            Algorithm::SlidingWindowLog => self.log.extend((0..hits).map(|_| at)),
            Algorithm::SlidingWindowCounter => *self.windows.entry(window(limit, at).0).or_default() += hits,
        }
    }

    /// Adds rejected hits.
    fn charge_rejected(&mut self, limit: &Limit, at: i128, hits: i128) {
        let max_used = i128::from(limit.capacity()) + i128::from(limit.requests_per_unit());
        match limit.algorithm() {
            Algorithm::Concurrent => unreachable!("slots have a model of their own"),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                self.used = self.used.max(Ratio::whole(max_used).min(self.used.plus(Ratio::whole(hits))));
            }
            Algorithm::FixedWindow => self.count_hits(limit, at, hits),
            Algorithm::SlidingWindowLog => {
                let keep = self.log.len().max(usize::try_from(limit.requests_per_unit()).expect("fits"));
                self.count_hits(limit, at, hits.min(i128::try_from(keep).expect("fits")));
                self.log.drain(..self.log.len().saturating_sub(keep));
            }
            Algorithm::SlidingWindowCounter => {
                let count = self.windows.entry(window(limit, at).0).or_default();
                *count = (*count).max(max_used.min(*count + hits));
            }
        }
    }

    fn refund(&mut self, limit: &Limit, at: i128, hits: i128, leased: i128) {
        match limit.algorithm() {
            Algorithm::Concurrent => unreachable!("slots have a model of their own"),
            Algorithm::TokenBucket => {
                self.used = self.used.min(Ratio::whole(leased)).max(self.used.minus(Ratio::whole(hits)));
            }
            Algorithm::LeakyBucket => self.used = self.promised.max(self.used.minus(Ratio::whole(hits))),
            Algorithm::SlidingWindowLog => {
                let held = i128::try_from(self.log.len()).expect("fits");
                let kept = usize::try_from((held - hits).max(leased.min(held))).expect("fits");
                match leased {
                    0 => self.log.truncate(kept),
                    _ => drop(self.log.drain(..self.log.len() - kept)),
                }
            }
            Algorithm::FixedWindow | Algorithm::SlidingWindowCounter => {
                let start = window(limit, at).0;
                let current = self.in_window(start);
                self.windows.insert(start, (current - hits).max(leased.min(current)));
                if limit.algorithm() == Algorithm::SlidingWindowCounter {
                    let previous = start - period(limit);
                    let rest = (hits - current).max(0);
                    self.windows.insert(previous, (self.in_window(previous) - rest).max(0));
                }
            }
        }
    }
}

/// True if the charge can pass at some time: false for more hits than fit at once, and for a limit of 0.
pub(crate) fn can_ever_pass(limit: &Limit, request: ChargeRequest) -> bool {
    match request.hits {
        Hits::Refund(_) => true,
        Hits::Peek if limit.algorithm() == Algorithm::FixedWindow && limit.counts_rejected_hits() => true,
        Hits::Peek => limit.requests_per_unit() > 0,
        Hits::Charge(hits) => limit.requests_per_unit() > 0 && hits <= limit.capacity(),
    }
}

/// Window around `at`, computed independently of the code under test: its start, and its end (exclusive).
pub(crate) fn window(limit: &Limit, at: i128) -> (i128, i128) {
    if !limit.follows_calendar_months() {
        let start = at.div_euclid(period(limit)) * period(limit);
        return (start, start + period(limit));
    }
    assert_eq!(limit.period().unit(), Unit::Month);
    let months = i128::from(limit.period().multiplier());
    // Month by month from January 1970; months are numbered from the year 0.
    let (mut month, mut start) = (1970 * 12, 0);
    while start + month_us(month) <= at {
        start += month_us(month);
        month += 1;
    }
    while month % months != 0 {
        month -= 1;
        start -= month_us(month);
    }
    let end = start + (month..month + months).map(month_us).sum::<i128>();
    // A window that began before the epoch starts at the epoch.
    (start.max(0), end)
}

/// Length of a month in microseconds; months are numbered from January of the year 0.
fn month_us(month: i128) -> i128 {
    let year = month / 12;
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month % 12 {
        1 if leap => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    };
    days * 86_400_000_000
}

fn drained(used: Ratio, limit: &Limit, elapsed: i128) -> Ratio {
    let gone = Ratio::new(elapsed * i128::from(limit.requests_per_unit()), period(limit));
    Ratio::ZERO.max(used.minus(gone))
}

fn period(limit: &Limit) -> i128 {
    i128::from(limit.period_us())
}

/// First microsecond from 0 at which a monotonic condition is true.
fn first_time(condition: impl Fn(i128) -> bool) -> i128 {
    if condition(0) {
        return 0;
    }
    let (mut not_yet, mut by) = (0, 1);
    while !condition(by) {
        (not_yet, by) = (by, by * 2);
        assert!(by < 1 << 92, "never");
    }
    while by - not_yet > 1 {
        let middle = not_yet + (by - not_yet) / 2;
        if condition(middle) { by = middle } else { not_yet = middle }
    }
    by
}

fn to_u64(number: i128) -> u64 {
    u64::try_from(number.max(0)).unwrap_or(u64::MAX)
}
