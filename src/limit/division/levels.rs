//! Levels: what each holder of a key should have, among the others, and who must be told.
//!
//! They are computed from the demands of all holders, so they are kept for a while if there are many. Nothing is
//! assigned here.
//!
//! Decides: how often fair parts are computed (`level_life_us`); how calls over RLS count in a division.

use super::divided_limit::AssignmentForm;
use super::fair_share::{BucketLevels, FillLevel, Levels};
use super::holder::{MARGIN_US, Part, ShareHolder, note_earliest};
use super::ledger::{DividedPool, Division, renew_before_us};
use crate::base::clock::Time;

/// Longest time for which levels are kept, in microseconds.
const LEVEL_LIFE_US: u64 = 500_000;
/// Time for which levels are kept for each holder, in microseconds: much longer than it takes to compute its part.
const LEVEL_LIFE_PER_HOLDER_US: u64 = 1000;
/// Smallest even part of a limit's bucket, in tokens, that loses nothing of a demand at random times.
const MIN_EVEN_BUCKET: u64 = 8;

impl<K> Division<K> {
    /// Returns the holders to look at beside those that reported: those whose assignments can be renewed after their
    /// hold was, and those that have more than their part while another has less than it wants. Each change is
    /// returned once.
    pub fn find_holders_to_tell(&mut self, now: Time) -> Vec<usize> {
        self.update_levels(now);
        let has_renewals = std::mem::take(&mut self.has_renewals);
        let has_starved =
            std::mem::take(&mut self.has_new_levels) && self.pools.iter().any(|pool| pool.levels.is_starved);
        if !has_renewals && !has_starved {
            return Vec::new();
        }
        let holders = self.holders.iter().enumerate();
        let told = holders.filter(|(_, holder)| {
            has_renewals && self.is_due_for_renewal(holder, now) || has_starved && self.has_too_much(holder, now)
        });
        told.map(|(index, _)| index).collect()
    }

    fn is_due_for_renewal(&self, holder: &ShareHolder<K>, now: Time) -> bool {
        let ttl_s = self.pools.iter().map(DividedPool::ttl_s).min().unwrap_or(0);
        holder.is_alive(now) && holder.sent.is_some_and(|sent| sent.ends.since_us(now) <= renew_before_us(ttl_s))
    }

    fn has_too_much(&self, holder: &ShareHolder<K>, now: Time) -> bool {
        self.pools.iter().enumerate().any(|(index, pool)| {
            let has = pool.assigned_to(index, holder);
            let bucket = holder.rates.get(index).map_or(0, |rate| rate.now.bucket);
            let even = if pool.levels.buckets.even == 0 { has } else { pool.levels.buckets.even };
            if pool.levels.buckets.are_starved && bucket >= even.saturating_add(pool.step(bucket)) {
                return true;
            }
            let target = pool.levels.level.share(pool.want(holder, self.holders.len(), now));
            pool.levels.is_starved && target.saturating_add(pool.step(has)) <= has
        })
    }

    pub(super) fn level_life_us(&self) -> u64 {
        LEVEL_LIFE_US.min(self.holders.len() as u64 * LEVEL_LIFE_PER_HOLDER_US)
    }

    pub(super) fn update_levels(&mut self, now: Time) {
        if self.levelled.is_some_and(|at| now.since_us(at) < self.level_life_us()) {
            return;
        }
        for index in 0..self.pools.len() {
            self.pools[index].levels = self.compute_levels(index, now);
        }
        self.levelled = Some(now);
        (self.has_new_demand, self.has_new_levels) = (false, true);
    }

    /// What each holder should have of a pool.
    fn compute_levels(&self, index: usize, now: Time) -> Levels {
        let (pool, free) = (&self.pools[index], self.free_share(index));
        let want = |holder: &ShareHolder<K>| pool.want(holder, self.holders.len(), now);
        let mut all: Vec<u64> = self.holders.iter().map(want).collect();
        // What a patient proxy lacks it may have from elsewhere, so nobody gives it up.
        let known = self.holders.iter().filter(|holder| !holder.may_have_foreign_assignment(now));
        let mut wants: Vec<u64> = known.map(want).collect();
        let demand = all.iter().copied().fold(0, u64::saturating_add).min(pool.limit.total());
        // More is held than a limit that became smaller allows, until it is taken back.
        let target = pool.target_among_replicas(demand, now);
        let is_too_much = pool.hits.held > target.saturating_add(target / 10);
        // Those who ask over RLS count as as many proxies as there are: who they are is not known.
        let decisions = self.decision_demand.in_span(pool.horizon_us()).min(pool.limit.total());
        let parties = wants.len().max(1) as u64;
        let unheld = if decisions > 0 { pool.unheld_share(now) } else { 0 };
        let amount = pool.divisible().min(target).saturating_add(unheld).min(pool.limit.total());
        if decisions > 0 {
            wants.extend((0..parties).map(|_| decisions / parties));
            all.extend((0..parties).map(|_| decisions / parties));
        }
        let buckets = pool.compute_bucket_levels(index, amount, &self.holders, now);
        let all_held = pool.hits.held.saturating_add(unheld).min(pool.limit.total());
        let amount = amount.min(all_held.saturating_sub(buckets.refill_kept));
        let level = FillLevel::fill(amount, &mut wants, 8);
        let for_decisions = if decisions > 0 { level.share(decisions / parties).saturating_mul(parties) } else { 0 };
        let share_of_decisions = for_decisions.min(amount);
        let are_decisions_short = share_of_decisions - share_of_decisions / 10 > pool.unheld_share(now);
        let is_rate = pool.limit.form == AssignmentForm::Rate;
        let are_starved = buckets.are_starved || is_rate && (is_too_much || are_decisions_short);
        let lacks_share = |holder: &ShareHolder<K>| {
            let (has, want) = (pool.reserved_by(index, holder), want(holder));
            let target = level.share(want);
            // What is spread beyond demand is worth no change of others' lent hits.
            let target = if is_rate { target } else { target.min(want) };
            target > has.saturating_add(has / 10).saturating_add(free)
        };
        Levels {
            level,
            level_of_all_holders: FillLevel::fill(amount, &mut all, 8),
            share_of_decisions,
            is_starved: is_too_much
                || are_decisions_short
                || are_starved
                || buckets.refill_kept > free
                || self.holders.iter().any(lacks_share),
            buckets: BucketLevels { are_starved, ..buckets },
        }
    }

    /// Begins to fill empty buckets with what belongs to nobody now.
    pub(super) fn restart_filling(&mut self, now: Time) {
        for index in 0..self.pools.len() {
            let idle = self.free_share(index);
            let pool = &mut self.pools[index];
            pool.empty_buckets.set_unowned_refill(idle);
            if let Some(full) = pool.empty_buckets.full_at(pool.limit.refill_us()) {
                // Who has nothing gets a part of them before all is full.
                let soon = now.plus_us(MARGIN_US.max(pool.limit.refill_us() / 8));
                let at = if pool.levels.buckets.without_part > 0 { full.min(soon) } else { full };
                note_earliest(&mut self.next_release, at.max(now.plus_us(MARGIN_US / 8)));
            }
        }
    }

    /// Records for each rate what refill belongs to nobody, after that may have become less.
    pub(super) fn lower_unowned_refill(&mut self) {
        for index in 0..self.pools.len() {
            let idle = self.free_share(index);
            self.pools[index].empty_buckets.lower_unowned_refill_to(idle);
        }
    }
}

impl DividedPool {
    /// What a holder that has `has` can get of `free` refill, if `free_buckets` are full.
    pub(super) fn free_refill(&self, free: u64, free_buckets: u64, has: u64) -> u64 {
        // If buckets follow the refill, it is left to fill them.
        let is_apart = self.limit.divides_buckets_apart() && self.levels.buckets.even > 0;
        match is_apart {
            _ if !self.limit.divides_buckets_apart() || !is_apart && self.empty_buckets.share > 0 => {
                // Those with nothing come first, and each gets some of it.
                match (self.levels.buckets.without_part, has) {
                    (0, _) => free.min(free_buckets),
                    (_, 1..) => 0,
                    (without_part, 0) => free.min(free_buckets.div_ceil(without_part)),
                }
            }
            _ if has == 0 => free,
            _ => free.saturating_sub(self.levels.buckets.refill_kept),
        }
    }

    /// Smallest difference that a holder of `has` is told.
    pub(super) const fn step(&self, has: u64) -> u64 {
        if self.levels.buckets.tells_small_differences || has < 20 { 1 } else { has / 10 }
    }

    /// Computes what holders should have of the buckets of rates, of `amount` that they can have.
    fn compute_bucket_levels<K>(
        &self,
        index: usize,
        amount: u64,
        holders: &[ShareHolder<K>],
        now: Time,
    ) -> BucketLevels {
        let mut levels = BucketLevels::default();
        if self.limit.form != AssignmentForm::Rate {
            return levels;
        }
        let count = (holders.len() as u64).max(1);
        let is_waiting = |holder: &&ShareHolder<K>| !holder.is_silent(now) && !holder.may_have_foreign_assignment(now);
        let parts =
            || holders.iter().filter(is_waiting).filter_map(|holder| holder.rates.get(index)).map(|rate| rate.now);
        let assigned = holders.iter().filter_map(|holder| holder.rates.get(index)).map(|rate| rate.now.bucket);
        levels.tells_small_differences =
            parts().any(|part| part == Part::default()) || assigned.fold(0, u64::saturating_add) > self.divisible();
        let fair = self.divisible() / count;
        if self.limit.bucket_size_of_share(fair) > 0 && self.limit.fill_of_share(fair) > 0 {
            levels.without_part = parts().filter(|part| *part == Part::default()).count() as u64;
        }
        if !self.limit.divides_buckets_apart() {
            return levels;
        }
        let even = amount.saturating_sub(self.levels.share_of_decisions).min(self.hits.held) / count;
        levels.even = if self.limit.bucket_size_of_share(even) >= MIN_EVEN_BUCKET { even } else { 0 };
        let wanted = |part: &Part| if levels.even == 0 { part.bucket.max(1) } else { levels.even };
        let lacks = |part: &Part| part.bucket < wanted(part) - wanted(part) / 4;
        let lacked: u64 = parts().filter(lacks).map(|part| wanted(&part) - part.bucket).sum();
        let reserved = self.reserved_buckets(index, holders);
        let (free, empty) = (self.divisible().saturating_sub(reserved), self.empty_buckets.share);
        levels.are_starved = reserved.saturating_sub(empty) > self.divisible() || free.saturating_add(empty) < lacked;
        levels.refill_kept = empty.min(lacked.saturating_sub(free));
        levels
    }
}
