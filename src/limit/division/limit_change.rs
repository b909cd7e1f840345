//! Limits of a key that change while proxies hold parts of them.
//!
//! A proxy keeps its tokens until it is told otherwise. They are another part of the new limit, and are booked as that:
//! what was too small a part would be handed out to others too.
//!
//! Decides: what a changed rule does to the parts that proxies have of a limit.

use super::divided_limit::DividedLimit;
use super::ledger::Division;

impl<K> Division<K> {
    /// Replaces the limits of the pools by others of the same counters: more is handed out as usual, and what a smaller
    /// limit does not allow is taken back first.
    pub fn change_limits(&mut self, limits: impl IntoIterator<Item = DividedLimit>) {
        for (index, limit) in limits.into_iter().enumerate().take(self.pools.len()) {
            let pool = &mut self.pools[index];
            let old = std::mem::replace(&mut pool.limit, limit);
            if old == limit {
                continue;
            }
            pool.hits.asked = None;
            pool.hits.held = limit.share_of_amount(old.held_amount(pool.hits.held)).min(limit.total());
            // Proxies keep their tokens, which are another part of the bucket now.
            let convert = |bucket: &mut u64| *bucket = limit.share_of_tokens(old.bucket_size_of_share(*bucket));
            pool.shares_of_gone_holders.iter_mut().for_each(|gone| convert(&mut gone.bucket));
            convert(&mut pool.empty_buckets.share);
            for rate in self.holders.iter_mut().filter_map(|holder| holder.rates.get_mut(index)) {
                convert(&mut rate.now.bucket);
                rate.released_shares.iter_mut().for_each(|loss| convert(&mut loss.bucket));
            }
        }
        self.drop_surplus_of_empty_buckets();
        self.lower_unowned_refill();
        self.levelled = None;
    }

    /// Forgets empty parts of buckets beyond what is held: they would not be handed out if they were full.
    pub(super) fn drop_surplus_of_empty_buckets(&mut self) {
        for (index, pool) in self.pools.iter_mut().enumerate() {
            let in_use = pool.reserved_buckets(index, &self.holders).saturating_sub(pool.empty_buckets.share);
            let most = pool.divisible().saturating_sub(in_use);
            pool.empty_buckets.share = pool.empty_buckets.share.min(most);
        }
    }
}
