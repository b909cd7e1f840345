//! Charges on a region's counter: its part first, then its pool. `lua/pool.lua` does the same.
//!
//! Decides: from what a region admits a hit (part, then pool); how long its hits can be leased (`lease_time_left_us`).

use super::fixed_window::window_bounds;
use super::region_pool::{RegionPool, TakenHits, less_drift_us};
use super::state::{CounterWithPool, State};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT};
use crate::limit::request::Hits;

/// Hits of a charge, by what they are taken from.
struct Split {
    of_pool: u64,
    /// Request to the part; `None` if the pool has all hits.
    of_part: Option<ChargeRequest>,
    fits: bool,
}

impl CounterWithPool {
    /// A counter without hits.
    pub fn empty(limit: &Limit) -> Self {
        let part = State::empty(limit.counting_method());
        Self { part, pool: RegionPool::default(), taken: TakenHits::default() }
    }

    /// Splits hits: the part has them, or else the pool what is left there and the part the rest.
    fn split(&self, part_limit: &Limit, pool: &RegionPool, now: Time, request: ChargeRequest) -> Split {
        if matches!(request.hits, Hits::Refund(_)) || self.part.admits(part_limit, now, request) {
            return Split { of_pool: 0, of_part: Some(request), fits: true };
        }
        let of_pool = pool.left.min(request.required_hits());
        let rest = request.required_hits() - of_pool;
        if rest == 0 {
            return Split { of_pool, of_part: None, fits: of_pool > 0 };
        }
        let own = ChargeRequest { hits: Hits::Charge(rest), ..request };
        Split { of_pool, of_part: Some(own), fits: of_pool > 0 && self.part.admits(part_limit, now, own) }
    }

    /// Returns `true` if [`Self::charge`] would admit the hits; changes nothing.
    pub fn admits(&self, limit: &Limit, now: Time, request: ChargeRequest) -> bool {
        self.split(&limit.region_part(), &self.pool.at(limit, now), now, request).fits
    }

    /// Applies a request.
    pub fn charge(&mut self, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
        let part_limit = limit.region_part();
        let mut pool = self.pool.at(limit, now);
        let before = pool.used(limit) + self.part.clone().charge(&part_limit, now, PEEK).before;
        let Split { of_pool, of_part, fits } = self.split(&part_limit, &pool, now, request);
        let most = limit.largest_charge_in_region();
        match request.hits {
            Hits::Peek => {}
            Hits::Refund(hits) => {
                let rest = hits - pool.refund_unreported(hits, request.leased);
                if rest > 0 {
                    self.part.charge(&part_limit, now, ChargeRequest { hits: Hits::Refund(rest), ..request });
                }
            }
            Hits::Charge(_) if fits && request.rejected_elsewhere => {}
            Hits::Charge(hits) => {
                // A charge that is too large ever to pass in this region is no demand.
                let asked_of_pool = match fits {
                    true => of_pool,
                    false if hits > most => 0,
                    false => hits,
                };
                pool.demand = pool.demand.saturating_add(asked_of_pool).min(MAX_COUNT);
                if fits {
                    pool.left -= of_pool;
                    pool.unreported = pool.unreported.saturating_add(of_pool).min(MAX_COUNT);
                    self.taken.pool += of_pool;
                    if let Some(own) = of_part {
                        self.taken.part += own.required_hits();
                        self.part.charge(&part_limit, now, own);
                    }
                } else {
                    pool.unmet = pool.unmet.max(asked_of_pool.min(MAX_COUNT));
                }
                if asked_of_pool > 0 && pool.left <= pool.low {
                    pool.start_request_if_due();
                }
            }
        }
        let of_part_now = self.part.clone().charge(&part_limit, now, PEEK);
        let retry_after_us = || {
            let of_part = of_part.and_then(|own| self.part.clone().charge(&part_limit, now, own).retry_after_us);
            let of_pool = (request.required_hits() <= most).then(|| pool.retry_after_us(limit));
            [of_part, of_pool].into_iter().flatten().min()
        };
        let retry_after_us = if fits { None } else { retry_after_us() };
        if request.hits != Hits::Peek {
            self.pool = pool;
        }
        let until_window_end_us = pool.answer.window_end.since_us(pool.last);
        ChargeResult {
            admitted: fits,
            before,
            after: pool.used(limit) + of_part_now.before,
            remaining: (pool.left + of_part_now.remaining).min(limit.capacity()),
            reset_us: of_part_now.reset_us.max(until_window_end_us),
            retry_after_us,
            ..ChargeResult::default()
        }
    }
}

impl RegionPool {
    /// Refunds hits that were used and not reported yet, but those that are leased; returns how many.
    fn refund_unreported(&mut self, hits: u64, leased: u64) -> u64 {
        let back = hits.min(self.unreported.saturating_sub(leased));
        self.unreported -= back;
        if self.last < self.until {
            self.left += back;
        }
        back
    }
}

impl CounterWithPool {
    /// Microseconds after `now` until which hits charged then are surely reported in the window, or used within the hold, in
    /// which they were charged: a lease of them ends before. `u64::MAX`: they were taken from the part of a bucket.
    pub fn lease_time_left_us(&self, limit: &Limit, now: Time) -> u64 {
        let pool = self.pool.at(limit, now);
        let of_part = match limit.holds_take_capacity() {
            true => u64::MAX,
            false => window_bounds(limit, self.part.effective_charge_time(limit, now)).1.since_us(now),
        };
        // A charge that opens a request counts among the reported hits at once.
        if pool.unreported + pool.reported == 0 {
            return of_part;
        }
        let period_us = less_drift_us(limit.period_us());
        let window_end = match pool.answer.window_end {
            end if end == Time::default() => pool.until,
            end if end > pool.last => end,
            end => end.plus_us(period_us),
        };
        of_part.min(window_end.min(pool.until).since_us(now))
    }
}

/// Request that changes nothing.
const PEEK: ChargeRequest = ChargeRequest::new(Hits::Peek, 0);
