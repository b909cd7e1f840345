//! Ledger of one key: hits held of its limits, those that holders have, and those that are free.
//!
//! `serve::quota::divisions` bounds the number of holders.
//!
//! Decides: hits that are held, lent and free; what a newcomer wants, with how much headroom (`want`).
//! Decides: hits reported above an assignment (charged).
//! Decides: TTL of an assignment near the end of a window (`WINDOW_END_GUARD_US`).
//! Decides: a proxy that loses its stream and opens another: what it had stays in use until its end.
//! Decides: what to ask of the store (`next_pool_request`).

use smallvec::SmallVec;

use super::divided_limit::{AssignmentForm, DividedLimit};
use super::empty_buckets::{EmptyBuckets, RecentlyUsedRefill};
use super::fair_share::{FillLevel, Levels};
use super::holder::{
    Demand, HolderReport, MARGIN_US, MIN_ELAPSED_US, Part, RateShare, ReleasedShare, ShareHolder, Usage, note_earliest,
};
use crate::base::clock::Time;
use crate::limit::hold::{HoldAnswer, HoldRequest, MAX_HOLD_US, OtherPool, ROW_KEPT_US};
use crate::limit::pool::{NumberedHits, Pool};

/// Divisor of a demand: the quotient is added to it, so that a holder can want more.
const HEADROOM_DIVISOR: u64 = 32;
/// Time that lent hits should last: two reports, in microseconds.
const LENT_HORIZON_US: u64 = 10_000_000;
/// Time that a hold lasts beyond what its renewal needs, in microseconds.
const RENEWAL_SLACK_US: u64 = 100_000;
/// Time before the end of a window at which assignments end that do not last beyond it, so that a proxy that stands
/// still for less takes nothing into the next window, in microseconds. Assignments that last beyond it do so for twice
/// this time.
const WINDOW_END_GUARD_US: u64 = 10_000_000;
/// Time after which the store is asked again about hits that it may not know of, in microseconds.
const RETRY_US: u64 = 10_000_000;
/// Parts of eight of what nobody asks for that are handed out; the rest is for newcomers, and for other replicas.
const SPARE_EIGHTHS_HANDED_OUT: u64 = 7;
/// Time to live of an assignment of a rate, in seconds.
pub const RATE_TTL_S: u32 = 15;
/// Time to live of an assignment of lent hits, in seconds.
pub const LENT_TTL_S: u32 = 60;

/// Time before its end in which an assignment is renewed, in microseconds: two reports, or half of its time to live.
pub(super) fn renew_before_us(ttl_s: u32) -> u64 {
    10_100_000.max(u64::from(ttl_s) * 500_000)
}

/// What a pool needs of its counter, in hits.
#[derive(Clone, Copy)]
struct PoolNeed {
    /// Demand of the holders.
    demand: u64,
    /// What should be held.
    wanted: u64,
}

/// How long a hold must last.
#[derive(Clone, Copy)]
struct HoldRenewal {
    /// Time from now on, in microseconds.
    lasts_us: u64,
    /// It ends before assignments could be renewed once more.
    ends_soon: bool,
}

/// The pool of one limit, and how it is divided.
#[derive(Debug)]
pub struct DividedPool {
    /// The limit.
    pub limit: DividedLimit,
    /// What this replica may hand out, as a share of the limit.
    pub hits: Pool,
    /// What holders should have of it.
    pub(super) levels: Levels,
    /// Parts of buckets of rates that are out of use, and not full again.
    pub(super) empty_buckets: EmptyBuckets,
    /// Refill of rates that went out of use less than the time of a full bucket ago.
    recently_used_refill: RecentlyUsedRefill,
    /// Shares of rates whose holders are gone, with the time until which they may be in use.
    pub(super) shares_of_gone_holders: SmallVec<[ReleasedShare; 1]>,
}

/// The limits of one key, and the proxies that hold them.
#[derive(Debug)]
pub struct Division<K> {
    /// One for each limit, at least one.
    pub pools: SmallVec<[DividedPool; 1]>,
    /// The proxies.
    pub holders: Vec<ShareHolder<K>>,
    /// Time at which levels were computed; `None`: they must be.
    pub(super) levelled: Option<Time>,
    /// Demands have changed since then.
    pub(super) has_new_demand: bool,
    /// Holders were not looked at since the levels were computed.
    pub(super) has_new_levels: bool,
    /// Demand of decisions on the same counters, which no holder makes.
    pub(super) decision_demand: Demand,
    /// Hits of these decisions that are not in it yet, and since when.
    decision_hits: u64,
    decision_hits_since: Option<Time>,
    /// A hold was renewed, and its assignments were not.
    pub(super) has_renewals: bool,
    /// Earliest time at which something becomes free.
    pub(super) next_release: Option<Time>,
}

impl DividedPool {
    /// Time after an assignment's end in which its share may still count in a window, in microseconds: the hold in the
    /// store lasts longer by it.
    fn hold_extension_us(&self) -> u64 {
        match (self.limit.form, self.limit.is_token_bucket()) {
            (AssignmentForm::Rate, false) => self.limit.refill_us().saturating_sub(MARGIN_US),
            (AssignmentForm::Rate, true) | (AssignmentForm::Lent, _) => 0,
        }
    }

    /// Time for which a hold is made, without its extension.
    ///
    /// It ends with the window unless that ends soon, so that a dead replica takes nothing from the next one.
    fn new_hold_us(&self, now: Time) -> u64 {
        let full_us = u64::from(self.ttl_s()) * 1_000_000 + MARGIN_US + RENEWAL_SLACK_US;
        let ends = self.hits.window_end.filter(|_| self.limit.form == AssignmentForm::Lent);
        match ends.map(|ends| ends.since_us(now)).filter(|left_us| *left_us > 0) {
            Some(left_us) if left_us > 3 * WINDOW_END_GUARD_US => full_us.min(left_us - WINDOW_END_GUARD_US),
            Some(left_us) => full_us.min(left_us + 2 * WINDOW_END_GUARD_US),
            None => full_us,
        }
    }

    fn new(limit: DividedLimit, now: Time) -> Self {
        Self {
            limit,
            hits: Pool::new(limit.total(), now),
            levels: Levels::default(),
            empty_buckets: EmptyBuckets::default(),
            recently_used_refill: RecentlyUsedRefill::default(),
            shares_of_gone_holders: SmallVec::new(),
        }
    }

    fn is_lent(&self) -> bool {
        self.limit.form == AssignmentForm::Lent
    }

    /// True if lent hits were granted in a window that has ended.
    fn is_window_over(&self, now: Time) -> bool {
        self.is_lent() && self.hits.window_end.is_some_and(|ends| ends <= now)
    }

    /// Microseconds since the counter was asked.
    fn asked_ago_us(&self, now: Time) -> u64 {
        self.hits.asked.map_or(u64::MAX, |asked| now.since_us(asked))
    }

    /// What could be held, as the counter said last.
    fn known_room(&self) -> u64 {
        self.hits.held.saturating_add(self.hits.room).min(self.limit.total())
    }

    /// True if there may be more lent hits than the counter said: a bucket is refilled, and other replicas give back.
    /// Asking again each time would find none.
    fn may_have_more_room(&self, needed: u64, now: Time) -> bool {
        self.is_lent() && needed > self.known_room() && self.asked_ago_us(now) > MARGIN_US
    }

    fn is_request_due(&self, wanted: u64, renewal: HoldRenewal, now: Time) -> bool {
        let differs = wanted.abs_diff(self.hits.held) > self.hits.held / 10;
        let asked_us = self.asked_ago_us(now);
        self.hits.has_something_to_tell()
            || self.is_window_over(now)
            || (renewal.ends_soon && wanted > 0)
            || (differs && asked_us > MARGIN_US)
            || asked_us == u64::MAX
    }

    /// Part of this pool that a holder has, with what it gave up and may still use.
    pub fn reserved_by<K>(&self, index: usize, holder: &ShareHolder<K>) -> u64 {
        match self.limit.form {
            AssignmentForm::Lent => holder.outstanding,
            AssignmentForm::Rate => holder.rates.get(index).map_or(0, |rate| rate.reserved().refill),
        }
    }

    /// What is held of the limit; more is held than it allows if it became smaller.
    pub(super) fn divisible(&self) -> u64 {
        self.hits.held.min(self.limit.total())
    }

    /// Parts of buckets of a pool that is divided as a rate which are in use, or empty.
    pub fn reserved_buckets<K>(&self, index: usize, holders: &[ShareHolder<K>]) -> u64 {
        let gone = self.shares_of_gone_holders.iter().fold(0_u64, |sum, gone| sum.saturating_add(gone.bucket));
        let rates = holders.iter().filter_map(|holder| holder.rates.get(index));
        let empty = gone.saturating_add(self.empty_buckets.share);
        rates.fold(empty, |sum, rate| sum.saturating_add(rate.reserved().bucket))
    }

    /// What may not be given back to the store, of which holders have `reserved`: the parts of buckets that it gets are
    /// full, and nobody has had the refill lately, because it may admit as much at once.
    fn reserved_from_store<K>(&self, reserved: u64, holders: &[ShareHolder<K>], index: usize, now: Time) -> u64 {
        if self.limit.form == AssignmentForm::Lent {
            // Rates of before a change may be in use. What is over needs no rest: the counter begins anew.
            return reserved.max(self.reserved_buckets(index, holders).saturating_sub(self.empty_buckets.share));
        }
        let moved = self.recently_used_refill.share(self.limit.refill_us(), now);
        let recently_used = reserved.saturating_add(moved).min(self.hits.held.min(self.limit.total()));
        reserved.max(recently_used).max(self.reserved_buckets(index, holders))
    }

    /// Records shares of a rate that went out of use, and that nobody had since.
    fn note_unused_shares(&mut self, unused: &[ReleasedShare], now: Time) {
        let refill_us = self.limit.refill_us();
        for ReleasedShare { share: refill, bucket, until, .. } in unused.iter().copied() {
            if refill > 0 {
                self.recently_used_refill.add(refill, refill_us, until);
            }
            self.empty_buckets.add(Part { refill, bucket }, now.since_us(until), refill_us);
        }
    }

    /// What a holder may use of this pool, without what it gave up.
    pub(super) fn assigned_to<K>(&self, index: usize, holder: &ShareHolder<K>) -> u64 {
        match self.limit.form {
            AssignmentForm::Lent => holder.most_left(),
            AssignmentForm::Rate => holder.rates.get(index).map_or(0, |rate| rate.now.refill),
        }
    }

    /// What a holder wants of this pool.
    pub fn want<K>(&self, holder: &ShareHolder<K>, holders: usize, now: Time) -> u64 {
        if holder.is_silent(now) {
            return 0;
        }
        let demand = holder.demand.in_span(self.horizon_us());
        let demand = demand.saturating_add(demand / HEADROOM_DIVISOR).max(1);
        // The first report says nothing of the demand.
        let fair = (self.limit.total() - self.limit.total() / 8) / (holders as u64).max(1);
        let floor = if holder.demand.samples == 0 { fair } else { 0 };
        demand.max(floor).min(self.limit.total())
    }

    /// Time of the demand that a share is for, in microseconds.
    pub(super) const fn horizon_us(&self) -> u64 {
        match self.limit.form {
            AssignmentForm::Rate => self.limit.period_s * 1_000_000,
            AssignmentForm::Lent => LENT_HORIZON_US,
        }
    }

    /// Part of the limit that neither this replica nor others hold.
    pub(super) fn unheld_share(&self, now: Time) -> u64 {
        match self.limit.form {
            AssignmentForm::Lent => self.hits.room,
            AssignmentForm::Rate => {
                let others = self.hits.others_at(now).map(|other| self.limit.share_of_amount(other.held));
                let held = others.fold(self.hits.held, u64::saturating_add);
                self.limit.total().saturating_sub(held)
            }
        }
    }

    /// What this replica should hold, among the others. In a new window these are the ones of the window before, whose
    /// holds have ended.
    pub(super) fn target_among_replicas(&self, own_demand: u64, now: Time) -> u64 {
        let kept_us = if self.is_window_over(now) { ROW_KEPT_US } else { 0 };
        let others = || self.hits.others.iter().filter(|other| other.until.plus_us(kept_us) > now);
        if others().next().is_none() {
            return u64::MAX;
        }
        let held = |other: &OtherPool| self.limit.share_of_amount(other.held);
        let total = match self.is_window_over(now) {
            true => self.limit.total(),
            false => others().map(held).fold(self.hits.held.saturating_add(self.hits.room), u64::saturating_add),
        };
        let mut wants: Vec<u64> = others().map(|other| other.demand).chain([own_demand]).collect();
        FillLevel::fill(total, &mut wants, SPARE_EIGHTHS_HANDED_OUT).share(own_demand)
    }
}

impl<K> Division<K> {
    /// A division of these limits, without holders. The numbers of its requests follow the time `now`, so that they are
    /// above those of a division of the same counters before it, which the store may remember.
    pub fn new(limits: impl IntoIterator<Item = DividedLimit>, now: Time) -> Self {
        let pools = limits.into_iter().map(|limit| DividedPool::new(limit, now)).collect();
        Self {
            pools,
            holders: Vec::new(),
            levelled: None,
            has_new_demand: false,
            has_new_levels: false,
            decision_demand: Demand::default(),
            decision_hits: 0,
            decision_hits_since: None,
            has_renewals: false,
            next_release: None,
        }
    }

    /// Adds a holder; returns its index, which changes when others leave.
    pub fn join(&mut self, key: K, keeps_ratio: bool, now: Time) -> usize {
        self.levelled = None;
        self.pools.iter_mut().for_each(|pool| pool.hits.asked = None);
        self.holders.push(ShareHolder::new(key, keeps_ratio, self.pools.len(), now));
        self.holders.len() - 1
    }

    /// Records hits that others asked for on the same counters, over RLS, since the last call.
    pub fn record_decision_demand(&mut self, hits: u64, now: Time) {
        self.decision_hits = self.decision_hits.saturating_add(hits);
        let since_us = now.since_us(*self.decision_hits_since.get_or_insert(now));
        if since_us >= MIN_ELAPSED_US {
            let former = self.decision_demand;
            self.decision_demand.take_sample(std::mem::take(&mut self.decision_hits), since_us);
            self.decision_hits_since = Some(now);
            self.has_new_demand |= former.mhps != self.decision_demand.mhps;
        }
    }

    /// Removes a holder whose proxy, stream or bucket is gone: what it has stays in use until its assignment ends. Lent
    /// hits count as used then.
    pub fn leave(&mut self, index: usize, now: Time) {
        self.levelled = None;
        let holder = self.holders.swap_remove(index);
        let ends = holder.sent.map_or(now, |sent| sent.latest_end());
        let lent = holder.outstanding;
        for (at, pool) in self.pools.iter_mut().enumerate() {
            // The proxy may use lent hits until then, also in another window than this one.
            let gone = match pool.limit.form {
                AssignmentForm::Lent => ReleasedShare { share: lent, bucket: 0, sent: None, until: ends },
                AssignmentForm::Rate => {
                    let Part { refill, bucket } = holder.rates.get(at).map_or(Part::default(), RateShare::reserved);
                    ReleasedShare { share: refill, bucket, sent: None, until: ends }
                }
            };
            pool.add_share_of_gone_holder(gone);
            note_earliest(&mut self.next_release, gone.until);
        }
    }

    /// Records a report; returns the hits beyond what was assigned, of a key whose hits are all lent. The report must
    /// come from the stream that all assignments of the holder were sent on.
    pub fn record_report(&mut self, index: usize, usage: Usage, now: Time) -> u64 {
        let all_lent = self.pools.iter().all(|pool| pool.limit.form == AssignmentForm::Lent);
        let Some(holder) = self.holders.get_mut(index) else { return 0 };
        let former = holder.demand;
        let is_first_request = usage.allowed.saturating_add(usage.denied) == 1 && usage.elapsed_us == 0;
        if holder.reports == 0 {
            holder.has_unknown_assignment |= !is_first_request;
        }
        if holder.reports == 0 && holder.has_unknown_assignment {
            let ttl_s = if all_lent { LENT_TTL_S } else { RATE_TTL_S };
            holder.foreign_assignment_until = now.plus_us(u64::from(ttl_s) * 1_000_000 + MARGIN_US);
        }
        let was_filled = holder.is_filled_before_report(holder.received);
        holder.record_report(usage, now);
        self.has_new_demand |= former != holder.demand;
        // What an unknown assignment let pass is no part of what was assigned since, as far as reports can tell.
        let lent = if holder.has_unknown_assignment { 0 } else { usage.allowed.min(holder.outstanding) };
        // Before a first assignment, these are hits that another one of this proxy admitted, which are charged with it.
        let is_of_another =
            holder.has_unknown_assignment && holder.sent.is_none() && now < holder.foreign_assignment_until;
        let charged = if is_of_another { 0 } else { usage.allowed };
        let debt = charged - lent;
        holder.may_have_more_left |= holder.sent.is_none() && usage.allowed > 0;
        holder.outstanding -= lent;
        if let Some(sent) = &mut holder.sent {
            sent.passed = sent.passed.saturating_add(usage.allowed);
        }
        if holder.is_assignment_over(usage.received) {
            holder.outstanding = 0;
        } else if holder.is_confirmed_by_report(usage.received)
            && let Some(sent) = &mut holder.sent
        {
            sent.bound_hits_before_change();
            holder.has_unknown_assignment = false;
            // A request that was denied found the bucket empty, and nothing refills it.
            let is_empty = was_filled && usage.denied > 0 && sent.never_refills();
            holder.may_have_more_left &= !is_empty;
            holder.outstanding = if is_empty { 0 } else { holder.most_left() };
        }
        for pool in self.pools.iter_mut().filter(|pool| pool.limit.form == AssignmentForm::Lent) {
            pool.hits.record_used_hits(charged);
        }
        if all_lent { debt } else { 0 }
    }

    /// Records that the proxy acknowledged, at `now`, a PING that followed all that was sent before `sent_before`.
    pub fn record_ping_ack(&mut self, index: usize, sent_before: Time, now: Time) {
        let Some(holder) = self.holders.get_mut(index) else { return };
        if let Some(sent) = &mut holder.sent {
            sent.record_receipt(sent_before, now);
        }
        for rate in &mut holder.rates {
            rate.confirm(sent_before, now.plus_us(MARGIN_US));
            rate.note_releases(&mut self.next_release);
        }
    }

    /// Records the passing of time: gives back what is out of use.
    pub fn expire(&mut self, now: Time) {
        let mut used = 0_u64;
        self.next_release = None;
        self.pools.iter_mut().for_each(|pool| pool.empty_buckets.fill(pool.limit.refill_us(), now));
        for holder in &mut self.holders {
            for (rate, pool) in holder.rates.iter_mut().zip(&mut self.pools) {
                pool.note_unused_shares(&rate.take_unused_releases(now), now);
            }
            let Some(sent) = holder.sent else { continue };
            if !holder.is_surely_in_force(now) {
                // A new assignment may begin with a full bucket, so this one must be out of use and full again.
                holder.rates.iter_mut().for_each(|rate| rate.change_to(Part::default(), None, sent.latest_end()));
            }
            if holder.is_assignment_over(now) {
                // What was used of it and not reported must not be given again.
                used = used.saturating_add(std::mem::take(&mut holder.outstanding));
                holder.sent = None;
            }
            holder.rates.iter().for_each(|rate| rate.note_releases(&mut self.next_release));
        }
        for pool in &mut self.pools {
            let over: SmallVec<[ReleasedShare; 1]> =
                pool.shares_of_gone_holders.iter().filter(|gone| gone.until <= now).copied().collect();
            pool.shares_of_gone_holders.retain(|gone| gone.until > now);
            pool.shares_of_gone_holders.iter().for_each(|gone| note_earliest(&mut self.next_release, gone.until));
            match pool.limit.form {
                AssignmentForm::Lent => {
                    let lost = over.iter().fold(0_u64, |sum, gone| sum.saturating_add(gone.share));
                    pool.hits.record_used_hits(used.saturating_add(lost));
                }
                AssignmentForm::Rate => pool.note_unused_shares(&over, now),
            }
        }
        self.drop_surplus_of_empty_buckets();
        self.restart_filling(now);
    }

    /// What is held of a pool and not in use.
    pub fn free_share(&self, index: usize) -> u64 {
        self.pools[index].divisible().saturating_sub(self.reserved(index))
    }

    /// What holders were assigned last of a pool, without what they gave up.
    pub(super) fn assigned(&self, index: usize) -> u64 {
        let pool = &self.pools[index];
        self.holders.iter().map(|holder| pool.assigned_to(index, holder)).fold(0, u64::saturating_add)
    }

    /// What is in use of a pool.
    pub fn reserved(&self, index: usize) -> u64 {
        let pool = &self.pools[index];
        let shares_of_gone_holders =
            pool.shares_of_gone_holders.iter().fold(0_u64, |sum, gone| sum.saturating_add(gone.share));
        let holders = self.holders.iter().map(|holder| pool.reserved_by(index, holder));
        holders.fold(shares_of_gone_holders, u64::saturating_add)
    }

    /// Parts of the buckets of a pool that are not in use.
    pub fn free_buckets(&self, index: usize) -> u64 {
        let pool = &self.pools[index];
        pool.divisible().saturating_sub(pool.reserved_buckets(index, &self.holders))
    }

    /// What a pool needs of its counter.
    fn pool_need(&self, index: usize, now: Time) -> PoolNeed {
        let (pool, holders) = (&self.pools[index], self.holders.len());
        let reserved = pool.reserved_from_store(self.reserved(index), &self.holders, index, now);
        let demand = self.holders.iter().map(|holder| pool.want(holder, holders, now));
        let demand = demand.fold(0, u64::saturating_add).min(pool.limit.total());
        let needed = self.needed_by_holders(index, reserved, now);
        let may_be_more = pool.may_have_more_room(needed, now);
        let all = if pool.is_lent() && !pool.is_window_over(now) && !may_be_more {
            pool.known_room()
        } else {
            pool.limit.total()
        };
        let spread = if may_be_more { 0 } else { all - all / 8 };
        let wanted = if holders == 0 { 0 } else { needed.max(spread) };
        let wanted = wanted.min(all.saturating_sub(pool.levels.share_of_decisions));
        let target = pool.target_among_replicas(demand, now);
        PoolNeed { demand, wanted: wanted.min(target).max(reserved) }
    }

    /// What the holders need of a pool: one keeps what it has until it is told otherwise, so what others lack comes on top.
    fn needed_by_holders(&self, index: usize, reserved: u64, now: Time) -> u64 {
        let (pool, holders) = (&self.pools[index], self.holders.len());
        // Those who come after a newcomer should find something too.
        let unused = pool.hits.held.saturating_sub(reserved).saturating_add(pool.hits.room);
        let needed = self.holders.iter().map(|holder| {
            let leaves_half = pool.is_lent() && holders > 1 && holder.is_newcomer();
            let most = if leaves_half { unused.div_ceil(2) } else { u64::MAX };
            pool.want(holder, holders, now).min(most).max(pool.reserved_by(index, holder))
        });
        needed.fold(0, u64::saturating_add).min(pool.limit.total())
    }

    /// How long the hold of a pool must last. When it is renewed, so are all assignments: if this replica dies, both end at
    /// once.
    fn hold_renewal(&self, index: usize, now: Time) -> HoldRenewal {
        let pool = &self.pools[index];
        let (left_us, new_us) = (pool.hits.until.since_us(now), pool.new_hold_us(now));
        let ends_soon =
            left_us < renew_before_us(pool.ttl_s()) + MARGIN_US && new_us > left_us.saturating_add(MARGIN_US);
        let lasts_us = if ends_soon || pool.is_window_over(now) { new_us } else { left_us };
        HoldRenewal { lasts_us: (lasts_us + pool.hold_extension_us()).min(MAX_HOLD_US), ends_soon }
    }

    /// Returns what a pool asks of its counter; `None` if it has no need to ask. Call after [`Self::expire`].
    pub fn next_pool_request(&mut self, index: usize, now: Time) -> Option<HoldRequest> {
        self.update_levels(now);
        let PoolNeed { demand, wanted } = self.pool_need(index, now);
        let renewal = self.hold_renewal(index, now);
        let pool = &mut self.pools[index];
        if !pool.is_request_due(wanted, renewal, now) {
            return None;
        }
        pool.hits.asked = Some(now);
        // What is given back is not handed out any more, whether or not the answer comes.
        pool.hits.held = pool.hits.held.min(wanted);
        let NumberedHits { used, number, first_number } = pool.hits.take_used();
        // What is used and not in this request stays held until it is in one.
        let wanted = pool.limit.held_amount(wanted.saturating_add(pool.hits.used));
        self.lower_unowned_refill();
        Some(HoldRequest { used, number, first_number, wanted, lasts_us: renewal.lasts_us, demand })
    }

    /// Records the answer to a request that was sent at `asked`, with times by this process's clock.
    pub fn record_answer(&mut self, index: usize, request: &HoldRequest, answer: HoldAnswer, asked: Time) {
        let pool = &mut self.pools[index];
        let mut held = pool.limit.share_of_amount(answer.granted);
        // Hits that were used while the store was asked.
        if pool.limit.form == AssignmentForm::Lent {
            held = held.saturating_sub(pool.hits.used);
        }
        let room = pool.limit.share_of_amount(answer.room);
        let until = asked.plus_us(request.lasts_us.saturating_sub(pool.hold_extension_us()));
        self.has_renewals |= until > pool.hits.until;
        pool.hits.accept(answer, held, room, until);
        self.lower_unowned_refill();
        self.levelled = None;
    }

    /// Records that the store did not answer a request.
    pub fn record_unanswered_request(&mut self, index: usize, request: &HoldRequest) {
        self.pools[index].hits.record_unanswered(request);
    }

    /// What a holder has.
    pub fn build_holder_report(&self, holder: &ShareHolder<K>) -> HolderReport {
        HolderReport {
            strategy: holder.sent.map(|sent| sent.strategy),
            reserved: self.pools.first().map_or(0, |pool| pool.reserved_by(0, holder)),
            ends: holder.sent.map_or(Time::default(), |sent| sent.ends),
        }
    }

    /// True if there is nothing left to remember.
    pub fn is_empty(&self) -> bool {
        let is_empty = |pool: &DividedPool| {
            pool.hits.held == 0 && !pool.hits.has_untold_hits() && pool.shares_of_gone_holders.is_empty()
        };
        self.holders.is_empty() && self.pools.iter().all(is_empty)
    }

    /// Time of the next event for which [`Self::expire`] and assignments are due, beside reports.
    pub fn next_event(&self, now: Time) -> Option<Time> {
        // A new window concerns those who had too little in the last one.
        let has_denied = || self.holders.iter().any(|holder| holder.was_denied || holder.is_denied());
        let windows = self
            .pools
            .iter()
            .filter_map(|pool| pool.hits.window_end.filter(|_| pool.limit.form == AssignmentForm::Lent));
        let windows = windows.filter(|ends| *ends > now && has_denied());
        // What another replica holds may be free then, as after its death.
        let starved = self.pools.iter().filter(|pool| pool.levels.is_starved);
        let holds = starved.flat_map(|pool| pool.hits.others.iter().map(|other| other.until));
        // A bucket that was used up is refilled meanwhile, and other replicas give back what is too much for them.
        let is_filling = |pool: &&DividedPool| {
            let may_get_more = pool.limit.is_token_bucket() || !pool.hits.others.is_empty();
            pool.levels.is_starved && may_get_more && pool.hits.held < pool.limit.total()
        };
        let fillings =
            self.pools.iter().filter(is_filling).filter_map(|pool| Some(pool.hits.asked?.plus_us(MARGIN_US + 1)));
        // Without holders, no report makes the store be asked again.
        let untold = self
            .pools
            .iter()
            .filter(|pool| pool.hits.has_untold_hits() || self.holders.is_empty() && pool.hits.held > 0);
        let retries = untold.filter_map(|pool| Some(pool.hits.asked?.plus_us(RETRY_US).max(now.plus_us(MARGIN_US))));
        let demands = self.levelled.filter(|_| self.has_new_demand).map(|at| at.plus_us(self.level_life_us() + 1));
        self.next_release
            .into_iter()
            .chain(windows)
            .chain(holds)
            .chain(fillings)
            .chain(demands)
            .chain(retries)
            .filter(|at| *at > now)
            .min()
    }
}

impl DividedPool {
    fn add_share_of_gone_holder(&mut self, gone: ReleasedShare) {
        const MAX_SHARES_OF_GONE_HOLDERS: usize = 16;
        if gone.share == 0 && gone.bucket == 0 {
            return;
        }
        let is_full = self.shares_of_gone_holders.len() >= MAX_SHARES_OF_GONE_HOLDERS;
        match self.shares_of_gone_holders.last_mut() {
            Some(last) if is_full => {
                last.share = last.share.saturating_add(gone.share);
                last.bucket = last.bucket.saturating_add(gone.bucket);
                last.until = last.until.max(gone.until);
            }
            _ => self.shares_of_gone_holders.push(gone),
        }
    }

    /// Time to live of assignments, in seconds.
    pub(super) const fn ttl_s(&self) -> u32 {
        match self.limit.form {
            AssignmentForm::Rate => RATE_TTL_S,
            AssignmentForm::Lent => LENT_TTL_S,
        }
    }
}
