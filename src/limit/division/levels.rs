//! Levels: what each holder of a key should have, among the others, and who must be told.
//!
//! They are computed from the demands of all holders, so they are kept for a while if there are many. Nothing is
//! assigned here.

use smallvec::SmallVec;

use super::divided_limit::AssignmentForm;
use super::fair_share::FillLevel;
use super::holder::ShareHolder;
use super::ledger::{Division, Pool, renew_before_us};
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
        let has_starved = std::mem::take(&mut self.has_new_levels) && self.pools.iter().any(|pool| pool.is_starved);
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
        let ttl_s = self.pools.iter().map(Pool::ttl_s).min().unwrap_or(0);
        holder.is_alive(now) && holder.sent.is_some_and(|sent| sent.ends.since_us(now) <= renew_before_us(ttl_s))
    }

    fn has_too_much(&self, holder: &ShareHolder<K>, now: Time) -> bool {
        self.pools.iter().enumerate().any(|(index, pool)| {
            let has = pool.assigned_to(index, holder);
            let bucket = holder.rates.get(index).map_or(0, |rate| rate.now.bucket);
            let even = if pool.even_bucket == 0 { has } else { pool.even_bucket };
            if pool.are_buckets_starved && bucket - bucket / 10 > even {
                return true;
            }
            pool.is_starved && pool.level.share(pool.want(holder, self.holders.len(), now)) < has - has / 10
        })
    }

    pub(super) fn level_life_us(&self) -> u64 {
        LEVEL_LIFE_US.min(self.holders.len() as u64 * LEVEL_LIFE_PER_HOLDER_US)
    }

    pub(super) fn update_levels(&mut self, now: Time) {
        if self.levelled.is_some_and(|at| now.since_us(at) < self.level_life_us()) {
            return;
        }
        let holders = self.holders.len();
        let free: SmallVec<[u64; 2]> = (0..self.pools.len()).map(|index| self.free_share(index)).collect();
        for (index, pool) in self.pools.iter_mut().enumerate() {
            let mut all: Vec<u64> = self.holders.iter().map(|holder| pool.want(holder, holders, now)).collect();
            let demand = all.iter().copied().fold(0, u64::saturating_add).min(pool.limit.total());
            // What a patient proxy lacks it may have from elsewhere, so nobody gives it up.
            let is_known = |holder: &&ShareHolder<K>| !holder.may_have_foreign_assignment(now);
            let known = self.holders.iter().filter(is_known);
            let mut wants: Vec<u64> = known.map(|holder| pool.want(holder, holders, now)).collect();
            // More is held than a limit that became smaller allows, until it is taken back.
            let target = pool.target_among_replicas(demand, now);
            let is_too_much = pool.held > target.saturating_add(target / 10);
            let mut amount = pool.held.min(pool.limit.total()).min(target);
            // Those who ask over RLS count as as many proxies as there are: who they are is not known.
            let decisions = self.decision_demand.in_span(pool.horizon_us()).min(pool.limit.total());
            let parties = wants.len().max(1) as u64;
            if decisions > 0 {
                amount = amount.saturating_add(pool.unheld_share(now)).min(pool.limit.total());
                wants.extend((0..parties).map(|_| decisions / parties));
                all.extend((0..parties).map(|_| decisions / parties));
            }
            pool.level = FillLevel::fill(amount, &mut wants, 8);
            pool.level_of_all_holders = FillLevel::fill(amount, &mut all, 8);
            let for_decisions =
                if decisions > 0 { pool.level.share(decisions / parties).saturating_mul(parties) } else { 0 };
            pool.share_of_decisions = for_decisions.min(amount);
            let are_decisions_short = pool.share_of_decisions - pool.share_of_decisions / 10 > pool.unheld_share(now);
            pool.level_buckets(index, amount, &self.holders);
            pool.are_buckets_starved |= pool.limit.form == AssignmentForm::Rate && (is_too_much || are_decisions_short);
            pool.is_starved = is_too_much
                || are_decisions_short
                || pool.are_buckets_starved
                || self.holders.iter().any(|holder| {
                    let has = pool.reserved_by(index, holder);
                    let want = pool.want(holder, holders, now);
                    let target = pool.level.share(want);
                    // What is spread beyond demand is worth no change of others' lent hits.
                    let target = if pool.limit.form == AssignmentForm::Lent { target.min(want) } else { target };
                    target > has.saturating_add(has / 10).saturating_add(free[index])
                });
        }
        self.levelled = Some(now);
        (self.has_new_demand, self.has_new_levels) = (false, true);
    }
}

impl Pool {
    /// Computes the even part of the buckets of rates, of `amount` that holders can have.
    fn level_buckets<K>(&mut self, index: usize, amount: u64, holders: &[ShareHolder<K>]) {
        let rest = amount.saturating_sub(self.share_of_decisions).min(self.held);
        let even = rest / (holders.len() as u64).max(1);
        let is_enough = self.limit.bucket_size_of_share(even) >= MIN_EVEN_BUCKET && self.limit.divides_buckets_apart();
        self.even_bucket = if is_enough { even } else { 0 };
        let reserved = self.reserved_buckets(index, holders);
        let free = self.held.saturating_sub(reserved);
        let lacks = holders
            .iter()
            .filter_map(|holder| holder.rates.get(index))
            .any(|rate| rate.now.bucket == 0 || rate.now.bucket < self.even_bucket / 2);
        self.are_buckets_starved = self.limit.form == AssignmentForm::Rate
            && self.limit.divides_buckets_apart()
            && (reserved > self.held || lacks && free < (self.even_bucket / 2).max(1));
    }
}
