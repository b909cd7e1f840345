//! Holds: hits of a limit that a pool may admit without asking, which every decision on the counter leaves out.
//!
//! A pool (a replica that answers quota streams, or a region) asks for hits for a time. Until then the limit of all other
//! decisions is lower by them, and only what the pool reports as used is counted. Hits that were not reported by the
//! end count as used at the end, so that a pool that dies costs its hits once. A reset empties the count, and what is
//! held stays held. While Redis fails, what was held counts as used in the fallback counters.
//!
//! What a hold takes depends on the algorithm ([`HeldAmount`]). In windows it takes hits of each window, and ends with
//! the window of its last moment, in a sliding_window_counter with the window after that: hits used just before its end
//! count until then. In a bucket it takes capacity, and refill if the pool has a rate of its own; at its end the
//! capacity is charged.
//!
//! Everything here is pure. `store::memory` keeps [`CounterHolds`] beside a counter; in Redis `lua/hold.lua` does the
//! same arithmetic, and [`TotalHold`] follows the state of the counter.
//!
//! Decides: which hits may be held; hits of a pool that dies.
//! Decides: which limits cannot be divided among proxies (`reason_against_holds`).
//! Decides: how many pools may hold hits of a counter (`MAX_POOLS`).
//! Decides: the life of a hold without renewal (`MAX_HOLD_US`).

use smallvec::SmallVec;

use super::Limit;
use super::algorithm::leaky_level::RememberedSize;
use super::algorithm::state::State;
use super::algorithm::stored_state::{MAX_LUA_INTEGER, MalformedReply, ReplyReader};
use super::algorithm::{Algorithm, CountingMethod, fixed_window, token_bucket};
use super::charge::{ChargeRequest, ChargeResult, MAX_HELD_HITS, clamp_to_u32, effective_time};
use super::overflow::ChainPosition;
use super::request::Hits;
use crate::base::clock::Time;
use crate::base::random::random_id;

/// Longest time for which hits can be held without a renewal, in microseconds: an hour.
pub const MAX_HOLD_US: u64 = 3_600_000_000;

/// Maximum number of pools of a counter; a further one is granted nothing.
pub const MAX_POOLS: usize = 128;

/// Time for which a pool is known after the end of its hold, in microseconds: a request that is late or repeated is then
/// recognized by its number, and the other pools of a new window see what this one needs before it asks.
pub const ROW_KEPT_US: u64 = 10_000_000;

/// Identity of a pool, who may have hits of a counter: the division of a replica, or the pool of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub [u8; 16]);

impl PoolId {
    /// Creates an identity that no other process has.
    pub fn random() -> Self {
        Self(random_id())
    }

    /// Identity of another pool of the same process, by the hash of what it is for.
    #[must_use]
    pub fn with_purpose(self, hash: u128) -> Self {
        Self((u128::from_be_bytes(self.0) ^ hash).to_be_bytes())
    }
}

/// Hits that a hold takes from a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldAmount {
    /// Hits taken from each window; of a token_bucket, hits per period taken from its refill, which only a pool with
    /// a rate of its own needs.
    pub hits: u64,
    /// Hits taken from the capacity of a token_bucket: those that can pass at once. Always 0 for windows.
    pub capacity: u64,
}

/// What a pool asks of one counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldRequest {
    /// Hits admitted since the last call: they are charged, and what is held falls by them. Hits beyond what is held
    /// are charged as debt, up to the limit and the capacity. Hits used before the end of a hold are reported after it
    /// too: in windows the rest of the hold lasts longer, and would be granted again.
    ///
    /// A pool that shrinks its hold and cannot prove that the rest is unused, counts the rest as used here.
    pub used: u64,
    /// Number of the request, above those of all requests before it; 0: it has none. A request that arrives after one
    /// with a higher number is late, and changes nothing.
    pub number: u64,
    /// Number of the request that told these used hits first, and whose answer was lost; 0: this one tells them first.
    /// They are not charged again. A request with the number of the last one repeats it too.
    pub first_number: u64,
    /// What to hold from now on. What is still held, up to this, is always granted; the rest if it fits.
    pub wanted: HeldAmount,
    /// Time from the store's now for which to hold it, in microseconds, at most [`MAX_HOLD_US`]. A call renews the
    /// whole hold.
    pub lasts_us: u64,
    /// Hits in a period that the pool could use, for the other pools to see.
    pub demand: u64,
}

/// Answer to a [`HoldRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HoldAnswer {
    /// What is held now.
    pub granted: HeldAmount,
    /// Time of the store. The times below are by the same clock.
    pub now: Time,
    /// Time at which the hold ends, unless it is renewed: at least `now` plus what was asked for.
    pub until: Time,
    /// What would still fit beside all holds.
    pub room: HeldAmount,
    /// The other pools, at most [`MAX_POOLS`].
    pub others: Vec<OtherPool>,
    /// End of the current window; `None` for a bucket.
    pub window_end: Option<Time>,
}

impl HoldAnswer {
    /// Answer of a store that holds nothing.
    pub fn nothing_granted(now: Time) -> Self {
        Self { now, until: now, ..Self::default() }
    }

    /// The same answer with times by a clock that shows `now` when the store's shows [`Self::now`].
    pub fn with_times_by_clock_at(mut self, now: Time) -> Self {
        let by_clock = |at: Time| now.plus_us(at.since_us(self.now));
        self.until = by_clock(self.until);
        self.window_end = self.window_end.map(by_clock);
        self.others.iter_mut().for_each(|other| other.until = by_clock(other.until));
        Self { now, ..self }
    }
}

/// Another pool of the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherPool {
    /// Its identity.
    pub pool: PoolId,
    /// What it holds; nothing if there was no room for it.
    pub held: HeldAmount,
    /// Time of the store at which its hold ends, or ended: a pool is known for ten seconds longer.
    pub until: Time,
    /// Hits in a period that it could use.
    pub demand: u64,
}

impl Limit {
    /// Reason why hits of the limit cannot be held, for people; `None` if they can.
    pub fn reason_against_holds(&self) -> Option<&'static str> {
        if self.global_scope().is_some() {
            return Some("`scope: global`: a region admits only hits that the global Redis granted to it");
        }
        if self.ban().is_some() {
            return Some("`ban`: a proxy that admits hits by itself does not know of the ban");
        }
        if self.reservations().is_some() {
            return Some("`reservations`: a proxy that admits hits by itself reserves nothing");
        }
        if self.chain_position() != ChainPosition::NotInChain {
            return Some("`overflow_to`: a proxy that admits hits by itself does not know which limit takes them");
        }
        match self.algorithm() {
            Algorithm::LeakyBucket => Some("leaky_bucket: a queue needs one order of arrival for all proxies"),
            Algorithm::SlidingWindowLog => Some("sliding_window_log: only a proxy knows the time of each of its hits"),
            Algorithm::Concurrent => Some("`concurrent`: it counts streams at once, which a proxy does not report"),
            Algorithm::TokenBucket | Algorithm::FixedWindow | Algorithm::SlidingWindowCounter => None,
        }
    }

    /// True if holds take capacity of a bucket, false if they take hits of windows.
    pub const fn holds_take_capacity(&self) -> bool {
        matches!(self.counting, CountingMethod::TokenBucket)
    }

    /// Returns the limit lowered by what holds take: `hits` of its number, and of a token bucket `capacity` of its
    /// size.
    const fn lowered_by(&self, hits: u32, capacity: u32) -> Self {
        let capacity = if self.holds_take_capacity() { capacity } else { hits };
        Self {
            requests_per_unit: self.requests_per_unit.saturating_sub(hits as u64),
            capacity: self.capacity.saturating_sub(capacity as u64),
            ..*self
        }
    }

    /// Returns the limit under which used hits are charged, whatever its room: the refill of a bucket stays.
    const fn counting_all_hits(&self) -> Self {
        let requests_per_unit = if self.holds_take_capacity() { self.requests_per_unit } else { MAX_HELD_HITS };
        Self { requests_per_unit, capacity: MAX_HELD_HITS, count_rejected: true, ..*self }
    }
}

/// Returns true if hits counted by this method can be held.
pub const fn supports_holds(counting: CountingMethod) -> bool {
    match counting {
        CountingMethod::TokenBucket
        | CountingMethod::FixedWindow
        | CountingMethod::CalendarWindow
        | CountingMethod::SlidingWindowCounter => true,
        CountingMethod::LeakyBucket | CountingMethod::SlidingWindowLog | CountingMethod::Slots => false,
    }
}

/// Sum of all holds on a counter, as decisions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TotalHold {
    /// Hits taken from each window, or from the refill of a bucket.
    pub hits: u32,
    /// Hits taken from the capacity of a bucket.
    pub capacity: u32,
    /// `requests_per_unit` of the limit when the hold was made, which a bucket was refilled by until its end.
    pub requests_per_unit: u32,
    /// Time of the counter at which the last hold ends.
    pub until: Time,
}

/// Letters in the second four bytes of a hold behind the state of a counter. No number of a state has them there: all
/// are at most 2^53.
const HOLD_MARK: &[u8] = b"hold";

impl TotalHold {
    /// Decodes the hold that follows the state of a counter in a script's reply, as `lua/hold.lua` documents it; `None`
    /// if nothing is held. The mark of a bucket, which has the form of a hold, is added to the state.
    ///
    /// # Errors
    /// The script cannot have returned these numbers.
    pub fn read_from_reply(reply: &mut ReplyReader<'_>, state: &mut State) -> Result<Option<Self>, MalformedReply> {
        let Some(first) = Self::read_record(reply)? else { return Ok(None) };
        // A held bucket has the mark of its size too.
        let second = if first.until == Time::default() { None } else { Self::read_record(reply)? };
        let [hold, mark] = if first.until == Time::default() { [None, Some(first)] } else { [Some(first), second] };
        if let (State::TokenBucket(bucket), Some(Self { hits, requests_per_unit, .. })) = (state, mark) {
            bucket.mark = Some(RememberedSize { size: requests_per_unit, was_resized: hits > 0 });
        }
        Ok(hold)
    }

    /// Reads a hold, or what has its form.
    fn read_record(reply: &mut ReplyReader<'_>) -> Result<Option<Self>, MalformedReply> {
        let Some(bytes) = reply.read_bytes_if(|bytes: &[u8; 24]| &bytes[4..8] == HOLD_MARK) else { return Ok(None) };
        let mut numbers =
            bytes.chunks_exact(4).map(|bytes| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte)));
        let mut next = || numbers.next().ok_or(MalformedReply);
        let (hits, _mark, capacity, requests_per_unit) = (next()?, next()?, next()?, next()?);
        let until = Time::from_micros(u64::from(next()?) | u64::from(next()?) << 32);
        if until.as_micros() > MAX_LUA_INTEGER {
            return Err(MalformedReply);
        }
        Ok(Some(Self { hits, capacity, requests_per_unit, until }))
    }

    /// Returns the hold if it lasts at `now`. If it has ended, the capacity that it took is charged to the bucket.
    #[must_use]
    pub fn keep_or_settle(self, limit: &Limit, state: &mut State, now: Time) -> Option<Self> {
        let at = state.effective_charge_time(limit, now);
        if self.until.since_us(at) > longest_hold_us(limit) {
            // The clock was set back.
            return None;
        }
        if at < self.until {
            return Some(self);
        }
        if let State::TokenBucket(bucket) = state {
            if effective_time(now, bucket.last, limit.period_us()).is_none() {
                *bucket = token_bucket::State { last: now, ..Default::default() };
            }
            let requests_per_unit = u64::from(self.requests_per_unit.saturating_sub(self.hits));
            let refill = Limit { requests_per_unit, never_cuts_level: true, ..*limit };
            let token_bucket::State { used, part, .. } = bucket.refilled(&refill, self.until);
            let used = used.saturating_add(u64::from(self.capacity));
            // More than the size is debt, if the limit is still the same. A level that was fitted to a size stays so.
            let size = limit.size_without_holds();
            let is_debt = self.is_under(limit) && (used, part) > (size, 0);
            let debt = is_debt.then_some(RememberedSize { size: clamp_to_u32(size), was_resized: false });
            let mark = bucket.mark.filter(|mark| mark.was_resized).or(debt);
            *bucket = token_bucket::State { used, part, mark, last: bucket.last.max(self.until) };
        }
        None
    }

    /// Returns the limit without what is held.
    pub const fn lower_limit(&self, limit: &Limit) -> Limit {
        Limit { never_cuts_level: self.is_under(limit), ..limit.lowered_by(self.hits, self.capacity) }
    }

    /// True if the hold was made or renewed under this limit. What is used is then debt, however much it is.
    const fn is_under(&self, limit: &Limit) -> bool {
        self.requests_per_unit as u64 == limit.requests_per_unit
    }

    /// Upper bound on the time after the end of the hold in which a bucket is full again, in microseconds; 0 for
    /// windows.
    pub fn max_refill_time_us(&self, limit: &Limit) -> u64 {
        match limit.holds_take_capacity() {
            true => (2 * limit.period_us()).saturating_mul(limit.capacity / limit.requests_per_unit.max(1) + 1),
            false => 0,
        }
    }

    /// Counts what is held as used, for an estimate that knows no holds.
    pub fn count_as_used(&self, limit: &Limit, state: &mut State) {
        let last = state.last_charge_at();
        let hits = if limit.holds_take_capacity() { self.capacity } else { self.hits };
        // At the time of the last charge, so that nothing else changes.
        let _result =
            state.charge(&limit.counting_all_hits(), last, ChargeRequest::new(Hits::Charge(u64::from(hits)), 0));
    }

    /// Mends the result of a charge on the lowered limit: hits that fit only the whole limit may pass when the hold
    /// ends.
    pub fn add_wait_for_hold_end(&self, result: &mut ChargeResult, limit: &Limit, request: ChargeRequest, now: Time) {
        let fits_the_limit =
            limit.requests_per_unit > 0 && matches!(request.hits, Hits::Charge(hits) if hits <= limit.capacity);
        if !result.admitted && result.retry_after_us.is_none() && fits_the_limit {
            result.retry_after_us = Some(self.until.since_us(now));
        }
    }
}

/// Longest time for which a hold can last, in microseconds: until the end of the window after its own.
const fn longest_hold_us(limit: &Limit) -> u64 {
    MAX_HOLD_US + 2 * limit.period_us()
}

/// State of a counter, and its limit.
#[derive(Debug)]
pub struct StateWithLimit<'s> {
    /// The limit, without regard to holds.
    pub limit: &'s Limit,
    /// The state.
    pub state: &'s mut State,
}

/// All holds on a counter in memory.
#[derive(Clone, Debug, Default)]
pub struct CounterHolds {
    pools: SmallVec<[HoldRow; 1]>,
    /// Sum of what is held; `None` once that has ended.
    total: Option<TotalHold>,
    /// Time from which on the hold changes nothing, even if nobody settles it: a bucket is full again by then.
    refilled: Time,
}

/// One pool of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HoldRow {
    id: PoolId,
    held: HeldAmount,
    until: Time,
    demand: u64,
    number: u64,
}

impl CounterHolds {
    /// Sum of what is held. It may have ended: see [`TotalHold::keep_or_settle`].
    pub const fn total_hold(&self) -> Option<TotalHold> {
        self.total
    }

    /// Forgets the sum of what was held, after it was settled into the state of the counter.
    pub const fn clear_total(&mut self) {
        self.total = None;
    }

    /// Returns true if no pool is known any more at `now`, and no hold would change a state.
    pub fn is_over(&self, now: Time) -> bool {
        let is_forgotten = |pool: &HoldRow| pool.until.plus_us(ROW_KEPT_US) <= now;
        (self.total.is_none() || self.refilled <= now) && self.pools.iter().all(is_forgotten)
    }

    /// Charges what a pool used, and grants what it wants as far as that fits.
    ///
    /// In order: holds that have ended are charged; what is held falls by what was used, then to what is wanted; the
    /// rest of what is wanted is granted up to the room that the limit has beside all holds. The limit must be one that
    /// can be held.
    pub fn charge_used_and_grant(
        &mut self,
        counter: StateWithLimit<'_>,
        pool: PoolId,
        request: HoldRequest,
        now: Time,
    ) -> HoldAnswer {
        let StateWithLimit { limit, state } = counter;
        let lasting = self.total.and_then(|hold| hold.keep_or_settle(limit, state, now));
        let at = state.effective_charge_time(limit, now);
        let RemovedHolds { last, ended_capacity } = self.remove_own_and_ended(limit, pool, at);
        // Without a hold that lasts, what has ended was settled with it.
        let ended = if lasting.is_some() { ended_capacity } else { 0 };
        let late = last.filter(|last| request.number > 0 && request.number < last.number);
        let mut own = last.map_or(HeldAmount::default(), |last| last.held);
        let request = late.map_or(request, |last| HoldRequest {
            used: 0,
            number: last.number,
            wanted: last.held,
            demand: last.demand,
            ..request
        });
        let first = if request.first_number > 0 { request.first_number } else { request.number };
        let is_repeated = first > 0 && last.is_some_and(|last| last.number >= first);
        let used = own.subtract_used_hits(limit, if is_repeated { 0 } else { request.used });
        // The bucket was refilled by what the holds left of the refill until now.
        let held_refill = if limit.holds_take_capacity() { lasting.map_or(0, |hold| hold.hits) } else { 0 };
        let never_cuts_level = lasting.is_some_and(|hold| hold.is_under(limit));
        let refill = Limit { never_cuts_level, ..limit.lowered_by(held_refill, 0) };
        let _result = state.charge(&refill.counting_all_hits(), now, ChargeRequest::new(Hits::Charge(ended + used), 0));

        let has_place = self.pools.len() < MAX_POOLS;
        let wanted = if has_place { request.wanted.clamp_to_grantable(limit) } else { HeldAmount::default() };
        let others = self.pools.iter().fold(HeldAmount::default(), |sum, pool| sum.plus(pool.held));
        let kept = own.min(wanted);
        let fitting = find_grantable_amount(limit, state, others.plus(kept), now);
        let added = wanted.minus(kept).min(fitting);
        let granted = kept.plus(added).without_excess_refill(wanted);
        let until = late.map_or_else(|| end_of_hold(limit, at, request.lasts_us.min(MAX_HOLD_US)), |last| last.until);
        let answer = HoldAnswer {
            granted,
            now,
            until,
            room: fitting.minus(granted.minus(kept)),
            others: self.pools.iter().copied().map(HoldRow::to_other_pool).collect(),
            window_end: window_end(limit, now),
        };
        // A pool without room is kept too, so that the others learn of its demand; one that leaves, so that its last
        // call can be repeated.
        let is_known = granted != HeldAmount::default() || request.demand > 0 || request.used > 0 || late.is_some();
        if has_place && is_known {
            let HoldRequest { demand, number, .. } = request;
            self.pools.push(HoldRow { id: pool, held: granted, until, demand, number });
        }
        self.total = sum_holds(limit, &self.pools);
        self.refilled = self.total.map_or(now, |hold| hold.until.plus_us(hold.max_refill_time_us(limit)));
        answer
    }

    /// Takes out the pool, and those whose hold has ended; returns what the pool held, and the sum of what ended.
    fn remove_own_and_ended(&mut self, limit: &Limit, id: PoolId, at: Time) -> RemovedHolds {
        let mut removed = RemovedHolds { last: None, ended_capacity: 0 };
        self.pools.retain(|pool| {
            if pool.until <= at {
                removed.ended_capacity += pool.held.capacity;
                pool.held = HeldAmount::default();
            }
            // A hold beyond the longest was made before the clock was set back.
            let lasts = pool.until.since_us(at) <= longest_hold_us(limit) && pool.until.plus_us(ROW_KEPT_US) > at;
            if lasts && pool.id == id {
                removed.last = Some(*pool);
            }
            lasts && pool.id != id
        });
        removed
    }
}

/// What a call takes out of the holds on a counter: that of its own pool, and those that have ended.
struct RemovedHolds {
    /// What the last request of the pool left.
    last: Option<HoldRow>,
    /// Capacity of holds that have ended and were not charged.
    ended_capacity: u64,
}

impl HoldRow {
    fn to_other_pool(self) -> OtherPool {
        let Self { id, held, until, demand, .. } = self;
        OtherPool { pool: id, held, until, demand }
    }
}

impl HeldAmount {
    fn plus(self, other: Self) -> Self {
        Self { hits: self.hits + other.hits, capacity: self.capacity + other.capacity }
    }

    fn minus(self, other: Self) -> Self {
        Self { hits: self.hits.saturating_sub(other.hits), capacity: self.capacity.saturating_sub(other.capacity) }
    }

    fn min(self, other: Self) -> Self {
        Self { hits: self.hits.min(other.hits), capacity: self.capacity.min(other.capacity) }
    }

    /// Returns the amount with no more of the refill of a bucket than goes with its capacity, as wanted.
    ///
    /// A hold of the refill without capacity would keep an empty bucket from ever being refilled.
    fn without_excess_refill(self, wanted: Self) -> Self {
        if wanted.capacity == 0 {
            return self;
        }
        let fitting = u128::from(wanted.hits) * u128::from(self.capacity) / u128::from(wanted.capacity);
        Self { hits: self.hits.min(u64::try_from(fitting).unwrap_or(u64::MAX)), ..self }
    }

    /// Returns what of the amount a limit can give: at most 2^32 - 1, and no capacity of a window.
    fn clamp_to_grantable(self, limit: &Limit) -> Self {
        let most = Self { hits: u64::from(u32::MAX), capacity: u64::from(u32::MAX) };
        let clamped = self.min(most);
        if limit.holds_take_capacity() { clamped } else { Self { capacity: 0, ..clamped } }
    }

    /// Lowers the amount by used hits; returns how many of them to charge.
    fn subtract_used_hits(&mut self, limit: &Limit, used: u64) -> u64 {
        let held = if limit.holds_take_capacity() { &mut self.capacity } else { &mut self.hits };
        let most_debt = limit.requests_per_unit + limit.capacity;
        let charged = used.min(*held + most_debt);
        *held = held.saturating_sub(used);
        charged
    }
}

/// Returns what still fits into the limit beside these holds. The state is one of now.
fn find_grantable_amount(limit: &Limit, state: &State, held: HeldAmount, now: Time) -> HeldAmount {
    let narrow = |hits: u64| u32::try_from(hits).unwrap_or(u32::MAX);
    if limit.holds_take_capacity() {
        HeldAmount {
            hits: limit.requests_per_unit.saturating_sub(held.hits),
            capacity: find_largest_charge(&limit.lowered_by(0, narrow(held.capacity)), state, now),
        }
    } else {
        HeldAmount { hits: find_largest_charge(&limit.lowered_by(narrow(held.hits), 0), state, now), capacity: 0 }
    }
}

/// Returns the largest charge that the limit admits at once.
fn find_largest_charge(limit: &Limit, state: &State, now: Time) -> u64 {
    let (mut fits, mut too_many) = (0, limit.capacity + 1);
    while too_many - fits > 1 {
        let middle = u64::midpoint(fits, too_many);
        if state.admits(limit, now, ChargeRequest::new(Hits::Charge(middle), 0)) {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    fits
}

/// Returns the time of the counter at which a hold ends that must last for `lasts_us`.
fn end_of_hold(limit: &Limit, at: Time, lasts_us: u64) -> Time {
    let last = at.plus_us(lasts_us);
    match windows_until_hold_end(limit) {
        0 => last,
        windows => fixed_window::window_bounds(limit, last).1.plus_us((windows - 1) * limit.period_us()),
    }
}

/// Number of ends of windows after which a hold ends; 0: at its own time.
pub const fn windows_until_hold_end(limit: &Limit) -> u64 {
    match limit.counting {
        CountingMethod::FixedWindow | CountingMethod::CalendarWindow => 1,
        // The window is weighed in the next one too.
        CountingMethod::SlidingWindowCounter => 2,
        CountingMethod::TokenBucket
        | CountingMethod::LeakyBucket
        | CountingMethod::SlidingWindowLog
        | CountingMethod::Slots => 0,
    }
}

/// Returns the end of the window at a time; `None` for a bucket.
pub fn window_end(limit: &Limit, at: Time) -> Option<Time> {
    (!limit.holds_take_capacity()).then(|| fixed_window::window_bounds(limit, at).1)
}

/// Returns the sum of what is held; `None` if nothing is.
fn sum_holds(limit: &Limit, pools: &[HoldRow]) -> Option<TotalHold> {
    let holding = pools.iter().filter(|pool| pool.held != HeldAmount::default());
    let until = holding.clone().map(|pool| pool.until).max()?;
    let sum = holding.fold(HeldAmount::default(), |sum, pool| sum.plus(pool.held));
    Some(TotalHold {
        hits: clamp_to_u32(sum.hits),
        capacity: clamp_to_u32(sum.capacity),
        requests_per_unit: clamp_to_u32(limit.requests_per_unit),
        until,
    })
}
