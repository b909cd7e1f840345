//! The ledger of one key: what is held of its limits, what holders have of that, and what is free.

use smallvec::SmallVec;

use super::assignment::Strategy;
use super::divided_limit::{AssignmentForm, DividedLimit};
use super::fair_share::FillLevel;
use super::holder::{CONFIRMED_AFTER_US, MARGIN_US, RateShare, ReleasedShare, ShareHolder, Usage};
use crate::base::clock::Time;
use crate::limit::hold::HeldAmount;

/// Part of a demand that is added to it, so that a holder can want more.
const HEADROOM_PART: u64 = 12;
/// Time that lent hits should last: two reports and some, in microseconds.
const LENT_HORIZON_US: u64 = 12_000_000;
/// Time that a hold lasts beyond what its renewal needs, in microseconds.
const RENEWAL_SLACK_US: u64 = 100_000;
/// Longest time for which levels are kept, in microseconds.
const LEVEL_LIFE_US: u64 = 500_000;
/// Parts of eight of what nobody asks for that are handed out; the rest is for newcomers, and for other replicas.
const SPREAD_EIGHTHS: u64 = 7;
/// Time for which a proxy that comes with a bucket is left alone, if there is less for it than it wants, in
/// microseconds: what is left of its assignment lasts at least as long, unless the new stream took long.
const LENT_PATIENCE_US: u64 = 15_000_000;
/// The same for rates, in microseconds.
const RATE_PATIENCE_US: u64 = 2_000_000;
/// Time to live of an assignment of a rate, in seconds.
pub const RATE_TTL_S: u32 = 15;
/// Time to live of an assignment of lent hits, in seconds.
pub const LENT_TTL_S: u32 = 60;

/// Another replica that holds a part of the same counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OtherReplica {
    /// Hits per period that it could use.
    pub demand: u64,
    /// What it holds.
    pub held: HeldAmount,
    /// End of its hold.
    pub until: Time,
}

/// What a pool asks of its counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolRequest {
    /// Hits that were used since the last request.
    pub used: u64,
    /// What it wants to hold after that.
    pub wanted: HeldAmount,
    /// Time for which it wants it, from now on, in microseconds.
    pub for_us: u64,
    /// Hits per period that it could use.
    pub demand: u64,
}

/// What a counter gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolGrant {
    /// What is held now.
    pub held: HeldAmount,
    /// What could be held beside that.
    pub room: u64,
    /// Other replicas.
    pub others: SmallVec<[OtherReplica; 2]>,
    /// End of the current window, by the caller's clock; `None` if there are no windows.
    pub window_ends: Option<Time>,
}

/// A pool: what this replica holds of one limit.
#[derive(Debug)]
pub struct Pool {
    /// The limit.
    pub limit: DividedLimit,
    /// Share that is held.
    pub held: u64,
    /// End of the hold.
    pub held_until: Time,
    /// Hits that were used and not yet charged.
    pub used: u64,
    /// End of the current window.
    pub window_ends: Option<Time>,
    room: u64,
    others: SmallVec<[OtherReplica; 2]>,
    pub(super) level: FillLevel,
    /// A holder should have more than is free.
    pub(super) is_starved: bool,
    /// Shares of rates whose holders are gone, with the time until which they may be in use.
    shares_of_gone_holders: SmallVec<[ReleasedShare; 1]>,
    /// Time of the last request.
    asked: Option<Time>,
}

/// The limits of one key, and the proxies that hold them.
#[derive(Debug)]
pub struct Division<K> {
    /// One for each limit, at least one.
    pub pools: SmallVec<[Pool; 1]>,
    /// The proxies.
    pub holders: Vec<ShareHolder<K>>,
    /// Time at which levels were computed; `None`: they must be.
    levelled: Option<Time>,
}

impl Pool {
    /// Time after an assignment's end in which its share may still count in a window, in microseconds: the hold in the
    /// store lasts longer by it.
    fn rest_us(&self) -> u64 {
        match (self.limit.form, self.limit.is_token_bucket()) {
            (AssignmentForm::Rate, false) => self.limit.refill_us().saturating_sub(MARGIN_US),
            (AssignmentForm::Rate, true) | (AssignmentForm::Lent, _) => 0,
        }
    }

    fn new(limit: DividedLimit) -> Self {
        Self {
            limit,
            held: 0,
            held_until: Time::default(),
            used: 0,
            window_ends: None,
            room: limit.total(),
            others: SmallVec::new(),
            level: FillLevel::default(),
            is_starved: false,
            shares_of_gone_holders: SmallVec::new(),
            asked: None,
        }
    }

    /// What is in use of a holder.
    pub(super) fn reserved_by<K>(&self, index: usize, holder: &ShareHolder<K>) -> u64 {
        match self.limit.form {
            AssignmentForm::Lent => holder.outstanding,
            AssignmentForm::Rate => holder.rates.get(index).map_or(0, RateShare::reserved),
        }
    }

    /// What a holder wants of this pool.
    pub(super) fn want<K>(&self, holder: &ShareHolder<K>, holders: usize, now: Time) -> u64 {
        if holder.is_silent(now) {
            return 0;
        }
        let span_us = match self.limit.form {
            AssignmentForm::Rate => self.limit.period_s * 1_000_000,
            AssignmentForm::Lent => LENT_HORIZON_US,
        };
        let demand = holder.demand_in(span_us);
        let demand = demand.saturating_add((demand / HEADROOM_PART).max(1));
        // The first report says nothing of the demand.
        let fair = (self.limit.total() - self.limit.total() / 8) / (holders as u64).max(1);
        let floor = if holder.reports < 2 { fair } else { 0 };
        demand.max(floor).min(self.limit.total())
    }

    /// What this replica should hold, among the others.
    fn target_among_replicas(&self, own_demand: u64) -> u64 {
        if self.others.is_empty() {
            return u64::MAX;
        }
        let held = |other: &OtherReplica| self.limit.share_of_amount(other.held);
        let total = self.others.iter().map(held).fold(self.held.saturating_add(self.room), u64::saturating_add);
        let mut wants: Vec<u64> = self.others.iter().map(|other| other.demand).chain([own_demand]).collect();
        FillLevel::fill(total, &mut wants, SPREAD_EIGHTHS).share(own_demand)
    }
}

impl<K> Division<K> {
    /// A division of these limits, without holders.
    pub fn new(limits: impl IntoIterator<Item = DividedLimit>) -> Self {
        let pools = limits.into_iter().map(Pool::new).collect();
        Self { pools, holders: Vec::new(), levelled: None }
    }

    /// Adds a holder; returns its index, which changes when others leave.
    pub fn join(&mut self, key: K, keeps_ratio: bool, now: Time) -> usize {
        self.levelled = None;
        self.pools.iter_mut().for_each(|pool| pool.asked = None);
        self.holders.push(ShareHolder::new(key, keeps_ratio, self.pools.len(), now));
        self.holders.len() - 1
    }

    /// Removes a holder whose proxy, stream or bucket is gone: what it may still admit counts as used, and its rates
    /// stay in use until its assignment ends.
    pub fn lose(&mut self, index: usize, now: Time) {
        self.levelled = None;
        let holder = self.holders.swap_remove(index);
        let ends = holder.sent.map_or(now, |sent| sent.ends).plus_us(MARGIN_US);
        let lent = holder.outstanding;
        for (at, pool) in self.pools.iter_mut().enumerate() {
            match pool.limit.form {
                AssignmentForm::Lent => pool.charge(lent),
                AssignmentForm::Rate => {
                    let share = holder.rates.get(at).map_or(0, RateShare::reserved);
                    let until = ends.plus_us(pool.limit.refill_us());
                    pool.add_orphan(share, until);
                }
            }
        }
    }

    /// Records a report; returns the hits beyond what was assigned, of a key whose hits are all lent. The report must
    /// come from the stream that all assignments of the holder were sent on.
    pub fn report(&mut self, index: usize, usage: Usage, now: Time) -> u64 {
        let all_lent = self.pools.iter().all(|pool| pool.limit.form == AssignmentForm::Lent);
        let Some(holder) = self.holders.get_mut(index) else { return 0 };
        if holder.reports < 2 {
            self.levelled = None;
        }
        let is_first_request = usage.allowed.saturating_add(usage.denied) == 1 && usage.elapsed_us == 0;
        if holder.reports == 0 && !is_first_request {
            holder.patient_until = now.plus_us(if all_lent { LENT_PATIENCE_US } else { RATE_PATIENCE_US });
        }
        let was_in_force = holder.is_confirmed_by_report(holder.received);
        holder.record_demand(usage, now);
        let debt = if all_lent { usage.allowed.saturating_sub(holder.outstanding) } else { 0 };
        holder.outstanding = holder.outstanding.saturating_sub(usage.allowed);
        if let Some(sent) = &mut holder.sent {
            sent.passed = sent.passed.saturating_add(usage.allowed);
        }
        if holder.is_over(usage.received) {
            holder.outstanding = 0;
        } else if holder.is_confirmed_by_report(usage.received)
            && let Some(sent) = holder.sent
        {
            // A request that was denied found the bucket empty, and nothing refills it.
            let is_empty = was_in_force && usage.denied > 0 && sent.never_refills();
            let most_left = if is_empty { 0 } else { sent.most_left() };
            holder.outstanding = holder.outstanding.min(most_left);
        }
        for (at, pool) in self.pools.iter_mut().enumerate() {
            match pool.limit.form {
                AssignmentForm::Lent => pool.charge(usage.allowed),
                AssignmentForm::Rate => {
                    let refill_us = pool.limit.refill_us();
                    if let Some(rate) = holder.rates.get_mut(at) {
                        let received_us = usage.received.as_micros();
                        let sent_before = Time::from_micros(received_us.saturating_sub(CONFIRMED_AFTER_US));
                        rate.confirm(sent_before, None, refill_us);
                    }
                }
            }
        }
        debt
    }

    /// Records that the proxy acknowledged, at `now`, a PING that followed all that was sent before `sent_before`.
    pub fn acknowledge(&mut self, index: usize, sent_before: Time, now: Time) {
        let Some(holder) = self.holders.get_mut(index) else { return };
        for (rate, pool) in holder.rates.iter_mut().zip(&self.pools) {
            rate.confirm(sent_before, Some(now.plus_us(MARGIN_US)), pool.limit.refill_us());
        }
    }

    /// Records the passing of time: gives back what is out of use.
    pub fn expire(&mut self, now: Time) {
        let mut used = 0_u64;
        for holder in &mut self.holders {
            holder.rates.iter_mut().for_each(|rate| rate.release(now));
            let Some(sent) = holder.sent else { continue };
            if !holder.is_surely_in_force(now) {
                // A new assignment may begin with a full bucket, so what was used of this one must rest before.
                for (rate, pool) in holder.rates.iter_mut().zip(&self.pools) {
                    rate.shrink_to(0, sent.ends, sent.ends.plus_us(MARGIN_US + pool.limit.refill_us()));
                }
            }
            if holder.is_over(now) {
                // What was used of it and not reported must not be given again.
                used = used.saturating_add(std::mem::take(&mut holder.outstanding));
                holder.sent = None;
            }
        }
        for pool in &mut self.pools {
            pool.shares_of_gone_holders.retain(|orphan| orphan.until > now);
            if pool.limit.form == AssignmentForm::Lent {
                pool.charge(used);
            }
        }
    }

    /// What is held of a pool and not in use.
    pub fn free(&self, index: usize) -> u64 {
        self.pools[index].held.saturating_sub(self.reserved(index))
    }

    /// What is in use of a pool.
    pub fn reserved(&self, index: usize) -> u64 {
        let pool = &self.pools[index];
        let shares_of_gone_holders =
            pool.shares_of_gone_holders.iter().fold(0_u64, |sum, orphan| sum.saturating_add(orphan.share));
        let holders = self.holders.iter().map(|holder| pool.reserved_by(index, holder));
        holders.fold(shares_of_gone_holders, u64::saturating_add)
    }

    /// Returns what a pool asks of its counter; `None` if it has no need to ask. Call after [`Self::expire`].
    pub fn request(&mut self, index: usize, now: Time) -> Option<PoolRequest> {
        let reserved = self.reserved(index);
        let holders = self.holders.len();
        let pool = &self.pools[index];
        let demand = self.holders.iter().map(|holder| pool.want(holder, holders, now));
        let demand = demand.fold(0, u64::saturating_add).min(pool.limit.total());
        // A holder keeps what it has until it is told otherwise, so what others lack comes on top.
        let needed = self.holders.iter().map(|holder| {
            let has = pool.reserved_by(index, holder);
            pool.want(holder, holders, now).max(has)
        });
        let needed = needed.fold(0, u64::saturating_add).min(pool.limit.total());
        let is_new_window = pool.window_ends.is_some_and(|ends| ends <= now);
        let all = match pool.limit.form {
            AssignmentForm::Lent if !is_new_window => pool.held.saturating_add(pool.room).min(pool.limit.total()),
            AssignmentForm::Lent | AssignmentForm::Rate => pool.limit.total(),
        };
        let spread = all - all / 8;
        let wanted = if holders == 0 { 0 } else { needed.max(spread) };
        let target = if is_new_window { u64::MAX } else { pool.target_among_replicas(demand) };
        let wanted = wanted.min(target).max(reserved);
        let ttl_s = pool.ttl_s();
        // An assignment that is sent now ends before the hold does, and a third of its life later the hold is renewed.
        let ttl_us = u64::from(ttl_s) * 1_000_000;
        let needed_us = ttl_us + 2 * MARGIN_US;
        let for_us = needed_us + ttl_us / 3 + RENEWAL_SLACK_US + pool.rest_us();
        let ends_soon = pool.held_until.since_us(now) < needed_us;
        let differs = wanted.abs_diff(pool.held) > pool.held / 10;
        // Without room, asking again each time would find none.
        let asked_us = pool.asked.map_or(u64::MAX, |asked| now.since_us(asked));
        let is_due = pool.used > 0 || is_new_window || (ends_soon && wanted > 0) || (differs && asked_us > MARGIN_US);
        if !is_due && asked_us != u64::MAX {
            return None;
        }
        let pool = &mut self.pools[index];
        pool.asked = Some(now);
        // What is given back is not handed out any more, whether or not the answer comes.
        pool.held = pool.held.min(wanted);
        let used = std::mem::take(&mut pool.used);
        Some(PoolRequest { used, wanted: pool.limit.held_amount(wanted), for_us, demand })
    }

    /// Records what a counter gave for a request that was sent at `asked`.
    pub fn grant(&mut self, index: usize, request: &PoolRequest, grant: PoolGrant, asked: Time) {
        let pool = &mut self.pools[index];
        pool.held = pool.limit.share_of_amount(grant.held);
        pool.held_until = asked.plus_us(request.for_us.saturating_sub(pool.rest_us()));
        pool.room = grant.room;
        pool.others = grant.others;
        pool.window_ends = grant.window_ends;
        // Hits that were used while the store was asked.
        if pool.limit.form == AssignmentForm::Lent {
            pool.held = pool.held.saturating_sub(pool.used);
        }
        self.levelled = None;
    }

    /// Records that the store did not answer a request.
    pub fn refuse(&mut self, index: usize, request: &PoolRequest) {
        let pool = &mut self.pools[index];
        pool.used = pool.used.saturating_add(request.used);
    }

    /// Replaces the limits of the pools by others of the same counters: more is handed out as usual, and what a smaller
    /// limit does not allow is taken back first.
    pub fn change_limits(&mut self, limits: impl IntoIterator<Item = DividedLimit>) {
        for (pool, limit) in self.pools.iter_mut().zip(limits) {
            if pool.limit != limit {
                pool.limit = limit;
                pool.asked = None;
                pool.held = pool.held.min(limit.total());
            }
        }
        self.levelled = None;
    }

    /// What a holder has.
    pub fn report_holder(&self, holder: &ShareHolder<K>) -> HolderReport {
        HolderReport {
            strategy: holder.sent.map(|sent| sent.strategy),
            reserved: self.pools.first().map_or(0, |pool| pool.reserved_by(0, holder)),
            ends: holder.sent.map_or(Time::default(), |sent| sent.ends),
        }
    }

    /// True if there is nothing left to remember.
    pub fn is_empty(&self) -> bool {
        let is_empty = |pool: &Pool| pool.held == 0 && pool.used == 0 && pool.shares_of_gone_holders.is_empty();
        self.holders.is_empty() && self.pools.iter().all(is_empty)
    }

    /// Time of the next event for which [`Self::expire`] and assignments are due, beside reports.
    pub fn next_event(&self, now: Time) -> Option<Time> {
        let released_shares =
            self.holders.iter().flat_map(|holder| &holder.rates).flat_map(|rate| &rate.released_shares);
        let shares_of_gone_holders = self.pools.iter().flat_map(|pool| &pool.shares_of_gone_holders);
        let releases = released_shares.chain(shares_of_gone_holders).map(|loss| loss.until);
        // A new window concerns those who had too little in the last one.
        let has_denied = || self.holders.iter().any(|holder| holder.was_denied || holder.is_denied());
        let windows =
            self.pools.iter().filter_map(|pool| pool.window_ends.filter(|_| pool.limit.form == AssignmentForm::Lent));
        let windows = windows.filter(|ends| *ends > now && has_denied());
        // What another replica holds may be free then, as after its death.
        let starved = self.pools.iter().filter(|pool| pool.is_starved);
        let holds = starved.flat_map(|pool| pool.others.iter().map(|other| other.until));
        releases.chain(windows).chain(holds).filter(|at| *at > now).min()
    }

    pub(super) fn update_levels(&mut self, now: Time) {
        if self.levelled.is_some_and(|at| now.since_us(at) < LEVEL_LIFE_US) {
            return;
        }
        let holders = self.holders.len();
        let free: SmallVec<[u64; 2]> = (0..self.pools.len()).map(|index| self.free(index)).collect();
        for (index, pool) in self.pools.iter_mut().enumerate() {
            let mut wants: Vec<u64> = self.holders.iter().map(|holder| pool.want(holder, holders, now)).collect();
            let demand = wants.iter().copied().fold(0, u64::saturating_add).min(pool.limit.total());
            // More is held than a limit that became smaller allows, until it is taken back.
            let amount = pool.held.min(pool.limit.total()).min(pool.target_among_replicas(demand));
            pool.level = FillLevel::fill(amount, &mut wants, 8);
            pool.is_starved = self.holders.iter().any(|holder| {
                let has = pool.reserved_by(index, holder);
                let target = pool.level.share(pool.want(holder, holders, now));
                target > has.saturating_add(has / 10).saturating_add(free[index])
            });
        }
        self.levelled = Some(now);
    }
}

impl Pool {
    /// Counts hits as used, which the hold falls by.
    fn charge(&mut self, hits: u64) {
        self.used = self.used.saturating_add(hits);
        self.held = self.held.saturating_sub(hits);
    }

    fn add_orphan(&mut self, share: u64, until: Time) {
        const MAX_ORPHANS: usize = 16;
        if share == 0 {
            return;
        }
        let is_full = self.shares_of_gone_holders.len() >= MAX_ORPHANS;
        match self.shares_of_gone_holders.last_mut() {
            Some(last) if is_full => {
                (last.share, last.until) = (last.share.saturating_add(share), last.until.max(until));
            }
            _ => self.shares_of_gone_holders.push(ReleasedShare { share, sent: None, until }),
        }
    }

    /// Time to live of assignments, in seconds.
    const fn ttl_s(&self) -> u32 {
        match self.limit.form {
            AssignmentForm::Rate => RATE_TTL_S,
            AssignmentForm::Lent => LENT_TTL_S,
        }
    }
}

/// What a holder has, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HolderReport {
    /// What it was told last.
    pub strategy: Option<Strategy>,
    /// What is in use of the first limit.
    pub reserved: u64,
    /// End of its assignment.
    pub ends: Time,
}
