//! What a holder is told: a new assignment, the same one again, or nothing.
//!
//! Nothing is sent for changes below a tenth, unless the assignment ends soon. A bucket is renewed as it is only while
//! it is surely in force: after that, the same bucket would be a full one. A proxy that has not reported lately is told
//! nothing.
//!
//! Decides: what a proxy gets over RLQS, and when it gets more; fewer hits than proxies; a change too small to tell.
//! Decides: a rate as tokens and fill interval; when a proxy is denied all (`Strategy::Deny`).
//! Decides: what a client that keeps its ratio of tokens is told.

use smallvec::SmallVec;

use super::assignment::{Assignment, ProxyTokenBucket, Retirement, Strategy};
use super::divided_limit::AssignmentForm;
use super::holder::{MARGIN_US, Part, Sent, ShareHolder, TokenChange};
use super::ledger::{DividedPool, Division, LENT_TTL_S, RATE_TTL_S, renew_before_us};
use crate::base::clock::Time;
use crate::limit::charge::clamp_to_u32;

/// Divisor of a bucket: with less than the quotient left, a new bucket is sent instead of a raise, and loses little.
const MIN_RATIO_OF_RAISE: u64 = 16;
/// Largest bucket that is assigned.
const MAX_TOKENS: u64 = 1 << 31;

/// What a holder could have.
#[derive(Clone, Copy, Debug)]
struct AttainableShare {
    /// Its fair part.
    target: u64,
    /// Least for which a proxy gives up an assignment that this ledger does not know.
    enough: u64,
    /// What is free beside what it has.
    free: u64,
    /// Another holder has less than it wants.
    is_short: bool,
    /// End of the hold.
    held_until: Time,
}

/// What a holder of rates should be told.
struct NextRate {
    strategy: Strategy,
    /// Its parts of the pools.
    shares: SmallVec<[Part; 2]>,
    /// Maximum number of lent hits that it admits.
    most: u64,
    ttl_s: u32,
}

/// Terms of a new assignment.
struct Terms {
    strategy: Strategy,
    /// Maximum number of lent hits that it admits.
    most: u64,
    change: TokenChange,
}

/// A bucket that a holder's shares of rates make.
#[derive(Clone, Copy, Debug)]
struct RateBucket {
    tokens: u64,
    fill: u64,
    period_s: u64,
}

impl<K> Division<K> {
    /// Returns what to tell the holder at `index`; `None`: nothing. It must be sent before anything else happens to the
    /// division.
    pub fn assign(&mut self, index: usize, now: Time) -> Option<Assignment> {
        if !self.holders.get(index)?.is_alive(now) {
            return None;
        }
        self.update_levels(now);
        match self.pools.iter().any(|pool| pool.limit.form == AssignmentForm::Rate) {
            true => self.assign_rates(index, now),
            false => self.assign_lent(index, now),
        }
    }

    /// Returns an assignment of everything or nothing, for a time without the store; `None` if the holder has it.
    pub fn assign_blanket(&mut self, index: usize, strategy: Strategy, ttl_s: u32, now: Time) -> Option<Assignment> {
        let holder = self.holders.get_mut(index)?;
        if holder.is_surely_in_force(now) && holder.sent.is_some_and(|sent| sent.strategy == strategy) {
            return holder.renew(ttl_s, now);
        }
        let old_end = holder.sent.map_or(now, |sent| sent.latest_end());
        let terms = Terms { strategy, most: 0, change: TokenChange::Fresh { before: u64::MAX } };
        let assignment = holder.send(terms, ttl_s, now);
        holder.rates.iter_mut().for_each(|rate| rate.change_to(Part::default(), Some(now), old_end));
        Some(assignment)
    }

    /// Takes back what an idle holder has: lent hits, until at most one is left, so that little is lost when the proxy
    /// forgets the bucket with what it did not report.
    pub fn retire(&mut self, index: usize, now: Time) -> Retirement {
        let Some(holder) = self.holders.get_mut(index) else { return Retirement::Done };
        let has_lent = self.pools.iter().any(|pool| pool.limit.form == AssignmentForm::Lent);
        if !has_lent || holder.outstanding <= 1 {
            return Retirement::Done;
        }
        let last = holder.sent.filter(|_| holder.is_surely_in_force(now));
        match last {
            Some(sent) if sent.most_left() <= 1 || !holder.can_be_changed() => Retirement::Wait,
            Some(Sent { strategy: Strategy::Tokens(tokens), .. }) if holder.keeps_ratio && tokens.fill == 0 => {
                // No longer than what it had: it needs no more of the hold.
                let ttl_s = left_s(holder.sent, now);
                Retirement::Assign(holder.change_lent_hits(LentChange::Shrink(1), ttl_s, now))
            }
            _ => Retirement::Assign(holder.change_lent_hits(LentChange::Deny, LENT_TTL_S, now)),
        }
    }

    fn attainable_share(&self, index: usize, pool: usize, now: Time) -> AttainableShare {
        let holders = self.holders.len();
        let free = self.free_share(pool);
        let pool = &self.pools[pool];
        let holder = &self.holders[index];
        let level =
            if holder.may_have_foreign_assignment(now) { pool.levels.level_of_all_holders } else { pool.levels.level };
        let want = pool.want(holder, holders, now);
        let enough = want.min(pool.limit.total() / (holders as u64).max(1)).div_ceil(4) * 3;
        let target = level.share(want);
        AttainableShare {
            target,
            enough,
            free,
            is_short: pool.levels.is_starved || pool.levels.level.is_short(),
            held_until: pool.hits.until,
        }
    }

    /// The least that all pools of one form allow.
    fn attainable_in_all_pools(&self, index: usize, form: AssignmentForm, now: Time) -> Option<AttainableShare> {
        let pools = self.pools.iter().enumerate().filter(|(_, pool)| pool.limit.form == form);
        pools.map(|(pool, _)| self.attainable_share(index, pool, now)).reduce(|one, other| AttainableShare {
            target: one.target.min(other.target),
            enough: one.enough.min(other.enough),
            free: one.free.min(other.free),
            is_short: one.is_short || other.is_short,
            held_until: one.held_until.min(other.held_until),
        })
    }

    fn assign_lent(&mut self, index: usize, now: Time) -> Option<Assignment> {
        let possible = self.attainable_in_all_pools(index, AssignmentForm::Lent, now)?;
        let ttl_s = bound_ttl(LENT_TTL_S, possible.held_until, now);
        if ttl_s == 0 {
            // The store has not answered.
            return None;
        }
        let holder = &mut self.holders[index];
        let current = holder.current_lent_hits(now);
        let AttainableShare { target, enough, free, is_short, .. } = possible;
        match next_strategy(current, holder.most_left(), LentTarget { hits: target, enough, free, is_short }) {
            Step::Wait => None,
            Step::Renew if current == LentHits::Denied => holder.renew(LENT_TTL_S, now),
            Step::Renew => holder.renew(ttl_s, now),
            Step::Change(change) => Some(holder.change_lent_hits(change, ttl_s, now)),
        }
    }

    fn assign_rates(&mut self, index: usize, now: Time) -> Option<Assignment> {
        let is_in_force = self.holders[index].is_surely_in_force(now);
        if !is_in_force {
            // What it had is out of use at its end, also if nothing was given back since.
            self.expire(now);
        }
        let NextRate { strategy, shares, most, ttl_s } = self.next_rate(index, is_in_force, now)?;
        let holder = &mut self.holders[index];
        let assignment = if is_in_force && holder.sent.is_some_and(|sent| sent.strategy == strategy) {
            holder.renew(ttl_s, now)?
        } else {
            let old_end = holder.sent.map_or(now, |sent| sent.latest_end());
            let terms = Terms { strategy, most, change: TokenChange::Fresh { before: u64::MAX } };
            let assignment = holder.send(terms, ttl_s, now);
            self.change_shares(index, &shares, now, old_end);
            Assignment { starts_full: assignment.starts_full && !is_in_force, ..assignment }
        };
        let holder = &mut self.holders[index];
        holder.outstanding = holder.outstanding.max(most);
        Some(assignment)
    }

    /// What a holder of rates should be told; `None`: nothing.
    fn next_rate(&self, index: usize, is_in_force: bool, now: Time) -> Option<NextRate> {
        let held_until = self.pools.iter().map(|pool| pool.hits.until).min().unwrap_or(now);
        let ttl_s = bound_ttl(RATE_TTL_S, held_until, now);
        if ttl_s == 0 {
            // The store has not answered.
            return None;
        }
        let holder = &self.holders[index];
        let mut shares: SmallVec<[Part; 2]> =
            (0..self.pools.len()).map(|pool| self.new_part(index, pool, is_in_force, now)).collect();
        if holder.may_have_foreign_assignment(now) && !self.is_enough_to_replace_foreign(index, &shares, now) {
            return None;
        }
        let (mut bucket, mut most) = self.bucket_within_lent_hits(index, &shares, ttl_s, now);
        for (share, pool) in shares.iter_mut().zip(&self.pools) {
            bucket.iter().for_each(|bucket| bucket.lower_part_to_bucket(share, pool));
        }
        let changes = shares.iter().zip(&holder.rates).any(|(share, rate)| *share != rate.now);
        let has_tokens = matches!(holder.sent, Some(Sent { strategy: Strategy::Tokens(_), .. }));
        // The old bucket of a proxy that begins with a full one must end before.
        if changes && is_in_force && has_tokens && !holder.keeps_ratio {
            (bucket, most) = (None, 0);
        }
        let strategy = holder.lower_if_only_interval_differs(bucket.map_or(Strategy::Deny, RateBucket::strategy), now);
        if strategy == Strategy::Deny {
            shares.fill(Part::default());
            return Some(NextRate { strategy, shares, most, ttl_s: RATE_TTL_S });
        }
        Some(NextRate { strategy, shares, most, ttl_s })
    }

    /// The bucket that these shares make, so that it admits no more than the limits allow that are lent; and the most
    /// that it admits of them.
    fn bucket_within_lent_hits(
        &self,
        index: usize,
        shares: &[Part],
        ttl_s: u32,
        now: Time,
    ) -> (Option<RateBucket>, u64) {
        let bucket = self.rate_bucket(shares);
        let lent = self.attainable_in_all_pools(index, AssignmentForm::Lent, now);
        let (Some(rate), Some(lent)) = (bucket, lent) else { return (bucket, 0) };
        let allowed = lent.target.min(lent.free.saturating_add(self.holders[index].outstanding));
        let bucket = rate.bounded_by(allowed, ttl_s + REPORT_LAG_S);
        (bucket, bucket.map_or(0, |bucket| bucket.most_admitted(ttl_s + REPORT_LAG_S)))
    }

    /// Records the new shares of a holder, whose old ones are in use until `old_end`.
    fn change_shares(&mut self, index: usize, shares: &[Part], now: Time, old_end: Time) {
        for (rate, share) in self.holders[index].rates.iter_mut().zip(shares) {
            rate.change_to(*share, Some(now), old_end);
            rate.note_releases(&mut self.next_release);
        }
        self.lower_unowned_refill();
    }

    /// True if these shares are most of what a patient proxy wants.
    fn is_enough_to_replace_foreign(&self, index: usize, shares: &[Part], now: Time) -> bool {
        let rates = self.pools.iter().enumerate().zip(shares);
        let mut rates = rates.filter(|((_, pool), _)| pool.limit.form == AssignmentForm::Rate);
        let is_enough = rates.all(|((index_of_pool, pool), share)| {
            let enough = self.attainable_share(index, index_of_pool, now).enough;
            let even = if pool.levels.buckets.even == 0 { enough } else { pool.levels.buckets.even };
            share.refill >= enough && share.bucket >= enough.min(even)
        });
        is_enough && self.rate_bucket(shares).is_some()
    }

    /// Share of a holder in a pool that is divided as a rate: what it has, unless it should have clearly more or less.
    fn new_share(&self, index: usize, pool: usize, is_in_force: bool, now: Time) -> u64 {
        if self.pools[pool].limit.form != AssignmentForm::Rate {
            return 0;
        }
        let AttainableShare { target, free, is_short, .. } = self.attainable_share(index, pool, now);
        let has = self.holders[index].rates.get(pool).map_or(0, |rate| rate.now.refill);
        let free = self.pools[pool].free_refill(free, self.free_buckets(pool), has);
        // After a limit became smaller, parts that are rounded up would be more than it.
        let excess = self.assigned(pool).saturating_sub(self.pools[pool].hits.held.min(self.pools[pool].limit.total()));
        let target = target.min(has.saturating_add(free));
        let rounding = u64::from(excess > 0 && target > 0);
        let target = target.min(has.saturating_sub(excess).max(target - rounding));
        let step = (has / 10).max(1);
        let is_less = target.saturating_add(self.pools[pool].step(has)) <= has && (is_short || target < has / 2)
            || target < has && excess > 0;
        if !is_in_force || target >= has.saturating_add(step) || is_less { target } else { has }
    }

    /// Part of a holder in a pool that is divided as a rate.
    ///
    /// The refill follows the demand. The bucket stays near an even part of all if that is large enough: it can only
    /// move once it is full again, and its holder needs it for the moment in which its demand grows.
    fn new_part(&self, index: usize, pool_index: usize, is_in_force: bool, now: Time) -> Part {
        let refill = self.new_share(index, pool_index, is_in_force, now);
        let pool = &self.pools[pool_index];
        let Some(has) = self.holders[index].rates.get(pool_index).map(|rate| rate.now) else { return Part::default() };
        if !pool.limit.divides_buckets_apart() || refill == 0 {
            return Part { refill, bucket: refill.min(has.bucket.saturating_add(self.free_buckets(pool_index))) };
        }
        let most = if pool.levels.buckets.even == 0 { refill } else { pool.levels.buckets.even };
        let wanted = if is_in_force { most.max(refill.min(has.bucket)) } else { most };
        let (step, lost) = ((has.bucket / 10).max(1), has.bucket.saturating_sub(wanted));
        if wanted >= has.bucket.saturating_add(step) {
            return Part { refill, bucket: wanted.min(has.bucket.saturating_add(self.free_buckets(pool_index))) };
        }
        let is_too_much = pool.levels.buckets.are_starved && has.bucket >= most.saturating_add(pool.step(has.bucket));
        match is_too_much {
            true => Part { refill, bucket: most },
            false if lost >= step && refill < has.refill => Part { refill, bucket: wanted },
            false => Part { refill, bucket: has.bucket },
        }
    }

    /// The bucket that shares of rates make: the slowest, with the fewest tokens. `None` if a share is too small.
    fn rate_bucket(&self, shares: &[Part]) -> Option<RateBucket> {
        let rates = self.pools.iter().zip(shares).filter(|(pool, _)| pool.limit.form == AssignmentForm::Rate);
        let buckets = rates.map(|(pool, share)| RateBucket {
            tokens: pool.limit.bucket_size_of_share(share.bucket),
            fill: pool.limit.fill_of_share(share.refill),
            period_s: pool.limit.period_s,
        });
        let least = |one: RateBucket, other: RateBucket| {
            let is_slower = one.fill.saturating_mul(other.period_s) <= other.fill.saturating_mul(one.period_s);
            let slower = if is_slower { one } else { other };
            RateBucket { tokens: one.tokens.min(other.tokens), ..slower }
        };
        buckets.reduce(least).filter(|bucket| bucket.tokens > 0 && bucket.fill > 0)
    }
}

impl RateBucket {
    fn strategy(self) -> Strategy {
        let Self { tokens, fill, period_s } = self;
        Strategy::Tokens(ProxyTokenBucket {
            max: clamp_to_u32(tokens),
            fill: clamp_to_u32(fill),
            interval_s: clamp_to_u32(period_s),
        })
    }

    /// Lowers a holder's part of a pool to what the bucket uses of it: another pool may allow less.
    ///
    /// The bucket could not be raised later without tokens that the pool never had, if the pool did not see it shrink.
    fn lower_part_to_bucket(self, part: &mut Part, pool: &DividedPool) {
        let limit = &pool.limit;
        if limit.form != AssignmentForm::Rate {
            return;
        }
        if limit.bucket_size_of_share(part.bucket) > self.tokens {
            part.bucket = part.bucket.min(limit.share_of_tokens(self.tokens));
        }
        let filled = u128::from(self.fill) * u128::from(limit.period_s);
        let refill = u64::try_from(filled.div_ceil(u128::from(self.period_s.max(1)))).unwrap_or(u64::MAX);
        if limit.fill_of_share(part.refill) > refill {
            part.refill = part.refill.min(limit.share_of_fill(refill));
        }
    }

    /// Maximum number of hits that the bucket admits in its time to live and the margins.
    fn most_admitted(self, ttl_s: u32) -> u64 {
        let filled = u128::from(self.fill) * u128::from(ttl_s + 2);
        let filled = u64::try_from(filled.div_ceil(u128::from(self.period_s))).unwrap_or(u64::MAX);
        self.tokens.saturating_add(filled)
    }

    /// The bucket, scaled down so that it admits at most `allowed` hits.
    fn bounded_by(self, allowed: u64, ttl_s: u32) -> Option<Self> {
        let most = self.most_admitted(ttl_s);
        if most <= allowed {
            return Some(self);
        }
        // One less, because what is filled is rounded up.
        let allowed = allowed.saturating_sub(1);
        let (tokens, fill) = (scale(self.tokens, allowed, most), scale(self.fill, allowed, most));
        (tokens > 0 && fill > 0).then_some(Self { tokens, fill, ..self })
    }
}

/// Time before a renewal of which a proxy has not reported yet what it admitted, in seconds: Envoy reports every 5 s.
const REPORT_LAG_S: u32 = 5;

/// What a holder of lent hits was told last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LentHits {
    /// Nothing that is surely in force.
    Nothing,
    /// The same, but it may have an assignment of another stream, which is better than less.
    Foreign,
    /// Something that must not change before it is confirmed.
    Unconfirmed,
    /// Everything passes.
    Allowed,
    /// Nothing passes.
    Denied,
    /// A bucket that begins anew with each change.
    Bucket,
    /// A bucket of a proxy that keeps its ratio of tokens.
    Ratio {
        /// Tokens of the full bucket.
        max: u32,
        /// It has as many tokens as the ledger knows: a raise in proportion raises no others.
        can_grow: bool,
    },
}

/// What a holder of lent hits could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentTarget {
    /// Its fair part, in hits.
    pub hits: u64,
    /// Least for which a proxy gives up an assignment that this ledger does not know, in hits.
    pub enough: u64,
    /// What is free beside what it has, in hits.
    pub free: u64,
    /// Another holder has less than it wants.
    pub is_short: bool,
}

/// What to do about a holder of lent hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send nothing.
    Wait,
    /// Renew what it has, if that ends soon.
    Renew,
    /// Tell it something else.
    Change(LentChange),
}

/// Another assignment of lent hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LentChange {
    /// Nothing passes.
    Deny,
    /// A new bucket of so many hits.
    Replace(u64),
    /// More tokens by the ratio, so that so many hits are left.
    Raise(u64),
    /// Fewer tokens by the ratio, so that so many hits are left.
    Shrink(u64),
}

/// The next step for a holder that was told `current`, and has `left` hits of it.
pub fn next_strategy(current: LentHits, left: u64, target: LentTarget) -> Step {
    let LentTarget { hits, enough, free, is_short } = target;
    let (new, raised) = (hits.min(free).min(MAX_TOKENS), hits.min(left.saturating_add(free)));
    let replace = if new > 0 { LentChange::Replace(new) } else { LentChange::Deny };
    let is_more = |hits: u64| hits > left + left / 10;
    let is_less = is_short && hits < left - left / 10;
    match current {
        LentHits::Foreign if new < enough => Step::Wait,
        LentHits::Nothing | LentHits::Foreign => Step::Change(replace),
        LentHits::Unconfirmed => Step::Renew,
        LentHits::Allowed => Step::Change(LentChange::Deny),
        LentHits::Ratio { max, can_grow: true }
            if left > 0
                && is_more(raised)
                && left.saturating_mul(MIN_RATIO_OF_RAISE) >= max.into()
                && (u64::from(max) + 1..=MAX_TOKENS).contains(&scale(max.into(), raised, left)) =>
        {
            Step::Change(LentChange::Raise(raised))
        }
        LentHits::Ratio { max, .. } if is_less && scale(max.into(), hits, left) < max.into() => {
            Step::Change(LentChange::Shrink(hits))
        }
        LentHits::Bucket if is_less => Step::Change(replace),
        _ if is_more(new) => Step::Change(LentChange::Replace(new)),
        // Used up, and the hold ends with it. If it lapsed, the proxy would do what it does without assignment.
        LentHits::Bucket | LentHits::Ratio { .. } if left == 0 => Step::Change(LentChange::Deny),
        LentHits::Denied | LentHits::Bucket | LentHits::Ratio { .. } => Step::Renew,
    }
}

impl<K> ShareHolder<K> {
    /// What it was told last of lent hits.
    fn current_lent_hits(&self, now: Time) -> LentHits {
        match self.sent.filter(|_| self.is_surely_in_force(now)).map(|sent| sent.strategy) {
            None if self.may_have_foreign_assignment(now) => LentHits::Foreign,
            None => LentHits::Nothing,
            Some(_) if !self.can_be_changed() => LentHits::Unconfirmed,
            Some(Strategy::Allow) => LentHits::Allowed,
            Some(Strategy::Deny) => LentHits::Denied,
            Some(Strategy::Tokens(_)) if !self.keeps_ratio => LentHits::Bucket,
            Some(Strategy::Tokens(tokens)) => {
                // A proxy that denies has less than it may have. What passed since the last report is not raised.
                let passed = self.demand.in_span(now.since_us(self.reported));
                let can_grow = !self.was_denied
                    && !self.may_have_more_left
                    && passed.saturating_add(self.uncertain_hits()) <= self.most_left() / 8;
                LentHits::Ratio { max: tokens.max, can_grow }
            }
        }
    }

    /// Records another assignment of lent hits; a denial lasts for its own time to live.
    fn change_lent_hits(&mut self, change: LentChange, ttl_s: u32, now: Time) -> Assignment {
        let left = self.most_left();
        let fresh = TokenChange::Fresh { before: if self.has_unknown_assignment { u64::MAX } else { left } };
        let max = match self.sent.map(|sent| sent.strategy) {
            Some(Strategy::Tokens(tokens)) => tokens.max,
            Some(Strategy::Allow | Strategy::Deny) | None => 0,
        };
        let (terms, ttl_s) = match change {
            LentChange::Deny => (Terms { strategy: Strategy::Deny, most: 0, change: fresh }, LENT_TTL_S),
            LentChange::Replace(hits) => (Terms { strategy: lent_bucket(hits), most: hits, change: fresh }, ttl_s),
            LentChange::Raise(hits) => {
                let strategy = lent_bucket(scale(max.into(), hits, left));
                (Terms { strategy, most: hits, change: TokenChange::Raise }, ttl_s)
            }
            LentChange::Shrink(hits) => {
                let to = scale(max.into(), hits, left);
                let (strategy, most) = if to == 0 { (Strategy::Deny, 0) } else { (lent_bucket(to), hits) };
                (Terms { strategy, most, change: TokenChange::Shrink { to: clamp_to_u32(to), from: max } }, ttl_s)
            }
        };
        self.outstanding = match change {
            LentChange::Replace(hits) => self.outstanding.saturating_add(hits),
            LentChange::Raise(hits) => self.outstanding.saturating_add(hits - left),
            LentChange::Deny | LentChange::Shrink(_) => self.outstanding,
        };
        self.send(terms, ttl_s, now)
    }

    /// The strategy, with a token less if the proxy would take it for what it has: Envoy compares the numbers of tokens
    /// only, and ignores another interval. A bucket without refill is sent as one token in a very long interval.
    fn lower_if_only_interval_differs(&self, strategy: Strategy, now: Time) -> Strategy {
        let sent = self.sent.filter(|_| self.is_surely_in_force(now)).map(|sent| sent.strategy);
        let (Strategy::Tokens(new), Some(Strategy::Tokens(old))) = (strategy, sent) else { return strategy };
        match new {
            _ if (new.max, new.fill.max(1)) != (old.max, old.fill.max(1)) || new == old => strategy,
            ProxyTokenBucket { fill: 2.., .. } => Strategy::Tokens(ProxyTokenBucket { fill: new.fill - 1, ..new }),
            ProxyTokenBucket { max: 2.., .. } => Strategy::Tokens(ProxyTokenBucket { max: new.max - 1, ..new }),
            ProxyTokenBucket { .. } => Strategy::Deny,
        }
    }

    /// Records a new assignment.
    fn send(&mut self, Terms { strategy, most, change }: Terms, ttl_s: u32, now: Time) -> Assignment {
        let ends = now.plus_us(u64::from(ttl_s) * 1_000_000);
        let is_fresh = matches!(change, TokenChange::Fresh { .. }) && matches!(strategy, Strategy::Tokens(_));
        // A proxy may have the same tokens from elsewhere, with another interval.
        let starts_full = is_fresh && (self.sent.is_some() || self.has_unknown_assignment);
        let filled_at = match (change, self.sent) {
            (TokenChange::Shrink { .. }, Some(sent)) => sent.filled_at,
            (TokenChange::Shrink { .. } | TokenChange::Raise | TokenChange::Fresh { .. }, _) => now,
        };
        self.sent = Some(Sent {
            strategy,
            at: now,
            filled_at,
            ends,
            last_sent: now,
            received_by: None,
            most,
            change,
            passed: 0,
        });
        Assignment { strategy, starts_full, ttl_s }
    }

    /// Renews the last assignment as it is, if it ends soon. It must be in force, or deny everything.
    fn renew(&mut self, ttl_s: u32, now: Time) -> Option<Assignment> {
        let sent = self.sent?;
        let ends = now.plus_us(u64::from(ttl_s) * 1_000_000);
        let is_due = sent.ends.since_us(now) <= renew_before_us(ttl_s) && ends > sent.ends.plus_us(MARGIN_US);
        if !is_due {
            return None;
        }
        let sent = self.sent.as_mut()?;
        (sent.ends, sent.last_sent, sent.received_by) = (ends, now, None);
        Some(Assignment { strategy: sent.strategy, starts_full: false, ttl_s })
    }
}

/// Time to live that ends, with the margin, before the hold does.
fn bound_ttl(ttl_s: u32, held_until: Time, now: Time) -> u32 {
    let left_s = held_until.since_us(now).saturating_sub(MARGIN_US) / 1_000_000;
    ttl_s.min(u32::try_from(left_s).unwrap_or(u32::MAX))
}

/// Whole seconds until an assignment ends, at least 1.
fn left_s(sent: Option<Sent>, now: Time) -> u32 {
    let left_us = sent.map_or(0, |sent| sent.ends.since_us(now));
    u32::try_from(left_us / 1_000_000).unwrap_or(u32::MAX).max(1)
}

/// Strategy of a bucket that begins with `tokens` lent hits and is never refilled.
fn lent_bucket(tokens: u64) -> Strategy {
    Strategy::Tokens(ProxyTokenBucket { max: clamp_to_u32(tokens), fill: 0, interval_s: 1 })
}

/// `amount` x `to` / `from`, rounded down.
fn scale(amount: u64, to: u64, from: u64) -> u64 {
    u64::try_from(u128::from(amount) * u128::from(to) / u128::from(from.max(1))).unwrap_or(u64::MAX)
}
