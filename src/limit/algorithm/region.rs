//! Life cycle of a region's counter of a global limit: demand, grant request, grant, return.
//!
//! A region counts a global limit in its own Redis, from what the global Redis granted it: windows by
//! [`region_window`](super::region_window), token buckets by [`region_bucket`](super::region_bucket). Both have an
//! arithmetic of their own, a `RegionCounter`. The amounts, such as the reserve, are in `limit::region_parts`. This
//! file has what both share:
//!
//! - A charge is admitted from grants and the region's own part. While global time is unknown, or the region is cut
//!   off, the *cut-off allowance* admits what these do not, in tumbling periods of the region's time. A call whose
//!   time is impossible gets none of it: the region's clock has jumped, and the counter may have expired.
//! - A charge that leaves little, or is rejected, opens a *grant request*: the caller that made it asks the global
//!   Redis. At most one is opened each second, whatever the number of callers. Rejected hits count as demand.
//! - A grant answers the request that the counter has open, once. An answer that is repeated, or that comes after the
//!   next request was opened, changes nothing: its hits are wasted, never doubled.
//!
//! Decides: when a region's counter asks for a grant, and again after no answer (`GRANT_ANSWER_TIMEOUT_US`).
//! Decides: use of the cut-off allowance (`on_region_loss`); remaining hits of a global limit.

use std::ops::AddAssign;

use super::stored_state::{MalformedReply, ReplyReader, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, clamp_to_u32, effective_time};
use crate::limit::request::Hits;

/// Shortest time between two grant requests, in microseconds.
pub const MIN_GRANT_REQUEST_INTERVAL_US: u64 = 1_000_000;

/// Time after which a grant request without an answer counts as lost, and the next one may be opened, in microseconds.
pub const GRANT_ANSWER_TIMEOUT_US: u64 = 3_000_000;

/// View of the global Redis that a call on a region's Redis has: its clock, and what the region may do.
///
/// A process measures both clocks and cannot know either exactly, so the difference is an interval. It holds while the
/// region's clock runs within the bounds that the process expects. A call that runs at another time (a clock jumped, or
/// another server answers) knows nothing about global time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalTimeAndStanding {
    /// Time of the region's Redis from which the offset holds.
    pub valid_from: Time,
    /// Time of the region's Redis until which the offset holds, exclusive; 0: the clock is unknown.
    pub valid_until: Time,
    /// Lower bound on global time minus the time of the region's Redis, in microseconds.
    pub offset_lo: i64,
    /// Upper bound on it, in microseconds.
    pub offset_hi: i64,
    /// The process reaches the global Redis, so the call may open a grant request.
    pub can_request: bool,
    /// The region is cut off from the global Redis: the cut-off allowance applies.
    pub cut_off: bool,
    /// The reserve and the cut-off allowance of the region must not be used: regions disagree about their parts.
    pub parts_unusable: bool,
}

/// Interval that contains global time, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GlobalTimeInterval {
    pub(super) lo: u64,
    pub(super) hi: u64,
}

impl GlobalTimeAndStanding {
    /// View of a process that has measured nothing.
    pub const UNKNOWN: Self = Self {
        valid_from: Time::from_micros(0),
        valid_until: Time::from_micros(0),
        offset_lo: 0,
        offset_hi: 0,
        can_request: false,
        cut_off: false,
        parts_unusable: false,
    };

    /// Returns true if the region's clock shows a time at which the call cannot run: it has jumped, or another server
    /// answers. What the counter lacks then, it may have used and lost.
    pub(super) fn is_outside_validity(&self, now: Time) -> bool {
        self.valid_until > Time::default() && (now < self.valid_from || now >= self.valid_until)
    }

    /// Returns global time at `now` of the region's Redis; `None` if it is unknown.
    pub(super) fn global_time_at(&self, now: Time) -> Option<GlobalTimeInterval> {
        if now < self.valid_from || now >= self.valid_until {
            return None;
        }
        let lo = now.as_micros().checked_add_signed(self.offset_lo)?;
        let hi = now.as_micros().checked_add_signed(self.offset_hi)?;
        (lo <= hi).then_some(GlobalTimeInterval { lo, hi })
    }
}

impl Default for GlobalTimeAndStanding {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

/// Hits used of the cut-off allowance in the tumbling period that began last.
///
/// A period here is longer than that of the limit by a thousandth. Clocks drift by 500 ppm each, so a span of one
/// period by any clock meets two of these periods at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CutOffAllowanceUse {
    /// Start of the period, by the region's Redis.
    pub start: Time,
    /// Hits used in it.
    pub used: u64,
}

impl CutOffAllowanceUse {
    /// Returns the use in the tumbling period at `now`. It is empty in a new period: if this one is over, or lies more
    /// than a period ahead.
    fn at_region_time(self, now: Time, period_us: u64) -> Self {
        let is_over = now >= self.start.plus_us(tumbling_period_us(period_us));
        let is_ahead = self.start > now.plus_us(period_us);
        if is_over || is_ahead { Self { start: now, used: 0 } } else { self }
    }
}

/// Returns the length of a tumbling period: a thousandth longer than the period, which is in whole milliseconds.
const fn tumbling_period_us(period_us: u64) -> u64 {
    period_us + period_us / 1000
}

/// Number of hits that a region's counter admitted, by what they were admitted from.
///
/// The difference of a counter's use before and after a call, at the time of the call, is what the call admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionHitsByAllotment {
    /// Granted hits; of a token bucket all hits while the last grant lasts.
    pub grant: u64,
    /// Hits of the part that the region always has.
    pub reserve: u64,
    /// Hits of the cut-off allowance.
    pub cut_off_allowance: u64,
}

impl RegionHitsByAllotment {
    /// Returns the hits that were admitted since `before`; refunded hits do not count.
    #[must_use]
    pub const fn minus_hits_before(self, before: Self) -> Self {
        Self {
            grant: self.grant.saturating_sub(before.grant),
            reserve: self.reserve.saturating_sub(before.reserve),
            cut_off_allowance: self.cut_off_allowance.saturating_sub(before.cut_off_allowance),
        }
    }
}

impl AddAssign for RegionHitsByAllotment {
    fn add_assign(&mut self, other: Self) {
        self.grant += other.grant;
        self.reserve += other.reserve;
        self.cut_off_allowance += other.cut_off_allowance;
    }
}

/// State of a region's counter, with the view of the call that charges it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionState<C> {
    /// Time of the last charge; 0: the counter is new.
    pub last: Time,
    /// Counts of the windows or of the bucket, and the grant cycle.
    pub counts: Box<C>,
    /// View of the call; not stored.
    pub view: Box<GlobalTimeAndStanding>,
}

/// Counts that the region's Redis stores after the time of the last charge.
pub(crate) trait StoredRegionCounts: Copy + Default {
    /// Decodes the counts in a script's reply.
    ///
    /// # Errors
    /// The script cannot have returned these numbers.
    fn read_from_reply(reply: &mut ReplyReader<'_>) -> Result<Self, MalformedReply>;
}

impl<C: StoredRegionCounts> StoredState for RegionState<C> {
    /// The memory store never counts in a region.
    fn to_packed_words(&self) -> [u64; 2] {
        [0, 0]
    }

    fn from_packed_words(_words: [u64; 2], last: Time) -> Self {
        Self { last, ..Self::default() }
    }

    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply> {
        Ok(Self { last, counts: Box::new(C::read_from_reply(reply)?), view: Box::default() })
    }

    /// The fallback counters never hold what a region was granted.
    fn scaled_to_fallback_share(&self, _ratio: ShareRatio, _limit: &Limit, _now: Time) -> Self {
        self.clone()
    }
}

impl<C> RegionState<C> {
    /// Writes the counts of a charge, or of a grant, at `now`.
    pub(super) fn set_counts(&mut self, counts: C, now: Time, period_us: u64) {
        self.last = effective_time(now, self.last, period_us).map_or(now, |time| time.at);
        *self.counts = counts;
    }
}

/// Grant request, last reset and cut-off use of a counter: the last six stored numbers of windows and of buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantCycle {
    /// True if the global Redis has nothing left for this window, or had less than a bucket wanted.
    pub exhausted: bool,
    /// Identity of the open grant request: the time at which it was opened; 0: none is open.
    pub open_request: u64,
    /// Time of the region's Redis from which the next request may be opened.
    pub next_request_at: Time,
    /// Last reset of the limit that this counter follows, in global time; at first, its own creation.
    pub epoch: u64,
    /// Use of the cut-off allowance.
    pub cut_off: CutOffAllowanceUse,
}

impl GrantCycle {
    pub(super) fn read_from_reply(reply: &mut ReplyReader<'_>) -> Result<Self, MalformedReply> {
        Ok(Self {
            exhausted: reply.read_number()? != 0,
            open_request: reply.read_number()?,
            next_request_at: reply.read_time()?,
            epoch: reply.read_number()?,
            cut_off: CutOffAllowanceUse { start: reply.read_time()?, used: reply.read_number()? },
        })
    }

    /// Sets the epoch of a counter that has none: an older reset of the limit does not concern it.
    pub(super) const fn set_epoch_if_none(&mut self, global: GlobalTimeInterval) {
        if self.epoch == 0 {
            self.epoch = global.hi;
        }
    }

    /// Opens a grant request if the next one is due, or its time comes from a clock that was wrong.
    fn open_request_if_due(&mut self, now: Time, period_us: u64) {
        let next = self.next_request_at;
        if next <= now || next > now.plus_us(period_us.max(GRANT_ANSWER_TIMEOUT_US)) {
            self.open_request = now.as_micros();
            self.next_request_at = now.plus_us(GRANT_ANSWER_TIMEOUT_US);
        }
    }

    /// Returns true if a grant on this request is the answer that the counter waits for.
    pub(super) const fn is_open_request(&self, request: u64) -> bool {
        request != 0 && request == self.open_request
    }

    /// Closes the open request. The next one is not opened before `next_request_at`.
    pub(super) const fn close_request(&mut self, exhausted: bool, next_request_at: Time) {
        (self.exhausted, self.open_request, self.next_request_at) = (exhausted, 0, next_request_at);
    }
}

/// A call on a region's counter: its time, its view, and the cut-off allowance at that time.
#[derive(Clone, Copy)]
pub(super) struct RegionCall {
    pub(super) now: Time,
    pub(super) period_us: u64,
    pub(super) view: GlobalTimeAndStanding,
    /// Global time; `None` if it is unknown, or lies where the counts cannot use it.
    pub(super) global: Option<GlobalTimeInterval>,
    /// Cut-off allowance in hits per tumbling period.
    pub(super) allowance: u64,
    /// Use of the allowance in the tumbling period of `now`.
    pub(super) cut_off: CutOffAllowanceUse,
}

impl RegionCall {
    pub(super) fn new(limit: &Limit, view: GlobalTimeAndStanding, stored: CutOffAllowanceUse, now: Time) -> Self {
        let period_us = limit.period_us();
        let is_unusable =
            (view.parts_unusable && limit.is_cut_off_allowance_part_of_limit()) || view.is_outside_validity(now);
        let allowance = if is_unusable { 0 } else { limit.cut_off_allowance() };
        Self {
            now,
            period_us,
            view,
            global: view.global_time_at(now),
            allowance,
            cut_off: stored.at_region_time(now, period_us),
        }
    }

    /// Returns a part of the limit that the region has of its own, or 0 if it must not be used.
    pub(super) const fn usable_own_part(&self, part: u32) -> u64 {
        if self.view.parts_unusable { 0 } else { part as u64 }
    }

    pub(super) const fn cut_off_allowance_applies(&self) -> bool {
        self.global.is_none() || self.view.cut_off
    }

    /// Hits of the allowance that are left; 0 while it does not apply.
    const fn allowance_left(&self) -> u64 {
        if self.cut_off_allowance_applies() { self.allowance.saturating_sub(self.cut_off.used) } else { 0 }
    }

    /// Returns true if the allowance admits the hits of a request.
    const fn allowance_admits(&self, request: ChargeRequest) -> bool {
        let used = self.cut_off.used.saturating_add(request.required_hits());
        self.cut_off_allowance_applies() && used <= self.allowance
    }

    /// Microseconds until the tumbling period of the allowance ends; 0 if nothing of it is used.
    pub(super) fn until_allowance_ends_us(&self) -> u64 {
        match self.cut_off {
            CutOffAllowanceUse { used: 0, .. } => 0,
            CutOffAllowanceUse { start, .. } => start.plus_us(tumbling_period_us(self.period_us)).since_us(self.now),
        }
    }
}

/// Hits that a charge is admitted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HitSource {
    /// Grants and the part that the region always has.
    Counter,
    /// The cut-off allowance.
    Allowance,
}

/// Arithmetic of a region's counter at the time of a request.
pub(super) trait RegionCounter: Sized {
    type Counts: StoredRegionCounts;

    /// Creates the counter of a state, with its counts moved to `now`.
    fn at_request_time(limit: &Limit, state: &RegionState<Self::Counts>, now: Time) -> Self;

    /// The call that is being decided.
    fn region_call(&self) -> &RegionCall;

    /// What the state keeps of the counter.
    fn stored_counts(&self) -> Self::Counts;

    /// The call and the grant cycle, to change both.
    fn call_and_grant_cycle_mut(&mut self) -> (&mut RegionCall, &mut GrantCycle);

    /// Hits that grants and the region's own part admit at once; `None` if no charge may use them.
    fn usable_hits(&self) -> Option<u64>;

    /// Hits used of grants and of the region's own part.
    fn used(&self) -> u64;

    /// Adds hits that callers asked for, admitted or not.
    fn count_demand(&mut self, hits: u64);

    /// Spends hits that fit in the room.
    fn spend(&mut self, hits: u64);

    /// Gives back hits that were used, but leaves those charged that replicas may still admit.
    fn refund(&mut self, hits: u64, lent: u64);

    /// True if so little is left that a grant is to be requested.
    fn needs_grant(&self) -> bool;

    /// Microseconds until the counter admits as much as it ever does, without a grant.
    fn until_replenished_us(&self) -> u64;

    /// Microseconds until a rejected request may pass; `None` if it never will.
    fn retry_after_us(&self, limit: &Limit, request: ChargeRequest) -> Option<u64>;
}

/// Applies a request to a counter.
pub(super) fn charge<C: RegionCounter>(
    limit: &Limit,
    state: &mut RegionState<C::Counts>,
    now: Time,
    request: ChargeRequest,
) -> ChargeResult {
    let mut counter = C::at_request_time(limit, state, now);
    let before = counter.used() + counter.region_call().cut_off.used;
    let source = find_hit_source(&counter, request);
    match request.hits {
        Hits::Peek => {}
        Hits::Refund(hits) => counter.refund(hits, request.lent),
        Hits::Charge(_) if source.is_some() && request.rejected_elsewhere => {}
        Hits::Charge(hits) => spend_and_request_grant(&mut counter, hits, source),
    }
    if request.hits != Hits::Peek {
        state.set_counts(counter.stored_counts(), now, limit.period_us());
    }
    let region_call = counter.region_call();
    ChargeResult {
        admitted: source.is_some(),
        before,
        after: counter.used() + region_call.cut_off.used,
        remaining: clamp_to_u32(counter.usable_hits().unwrap_or(0).max(region_call.allowance_left()))
            .min(limit.capacity()),
        reset_us: counter.until_replenished_us().max(region_call.until_allowance_ends_us()),
        retry_after_us: if source.is_some() { None } else { counter.retry_after_us(limit, request) },
        delay_us: 0,
        ..ChargeResult::default()
    }
}

/// Returns true if [`charge`] would admit the hits.
pub(super) fn admits<C: RegionCounter>(
    limit: &Limit,
    state: &RegionState<C::Counts>,
    now: Time,
    request: ChargeRequest,
) -> bool {
    find_hit_source(&C::at_request_time(limit, state, now), request).is_some()
}

/// Returns the hits that a request is admitted from; `None` if it is rejected. A refund always passes.
fn find_hit_source<C: RegionCounter>(counter: &C, request: ChargeRequest) -> Option<HitSource> {
    let fits = counter.usable_hits().is_some_and(|room| request.required_hits() <= room);
    if fits || matches!(request.hits, Hits::Refund(_)) {
        Some(HitSource::Counter)
    } else if counter.region_call().allowance_admits(request) {
        Some(HitSource::Allowance)
    } else {
        None
    }
}

/// Counts the demand of a charge, spends its hits, and opens a grant request if one is due.
fn spend_and_request_grant<C: RegionCounter>(counter: &mut C, hits: u64, source: Option<HitSource>) {
    counter.count_demand(hits);
    match source {
        Some(HitSource::Counter) => counter.spend(hits),
        Some(HitSource::Allowance) => {
            let (call, cycle) = counter.call_and_grant_cycle_mut();
            call.cut_off.used += hits;
            cycle.cut_off = call.cut_off;
        }
        None => {}
    }
    let needs_grant = source != Some(HitSource::Counter) || counter.needs_grant();
    let (call, cycle) = counter.call_and_grant_cycle_mut();
    if call.view.can_request && call.global.is_some() && needs_grant {
        cycle.open_request_if_due(call.now, call.period_us);
    }
}
