//! Admissions of a run, by the true time of the global Redis, and the bounds on them.

use std::collections::BTreeMap;

use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::Algorithm;

use super::world::{PERIOD_US, Plan, World};

/// Hits that a region admitted, or took back if they are negative.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) region: usize,
    /// Time of the global Redis when the region's Redis decided.
    pub(super) global_us: i64,
    pub(super) hits: i64,
    /// Those of them that were granted.
    pub(super) grant: GrantUse,
    /// Prepaid hits among them that had ended.
    pub(super) ended: u64,
    /// The hits are of the loss allowance.
    pub(super) from_loss: bool,
}

/// Granted hits that were spent, or taken back if they are negative.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GrantUse {
    /// Window that they were granted for.
    pub(super) window: i64,
    pub(super) hits: i64,
}

/// Checks all bounds.
pub(super) fn check(plan: &Plan, world: &World) -> Result<(), String> {
    let granted = world.uses.iter().filter(|it| !it.from_loss);
    match plan.limit.algorithm() {
        Algorithm::TokenBucket => check_bucket(plan, world, granted)?,
        _ => check_windows(plan, world, granted)?,
    }
    (0..plan.regions).try_for_each(|region| check_loss(plan, world, region))
}

/// In each window of global time, at most the limit is admitted: from grants what the algorithm admits, and from each
/// reserve its hits. A region's Redis that lost its data may use its reserve again.
fn check_windows<'u>(plan: &Plan, world: &World, uses: impl Iterator<Item = &'u Use>) -> Result<(), String> {
    let is_sliding = plan.limit.algorithm() == Algorithm::SlidingWindowCounter;
    let reserve = i64::from(plan.largest(|limit| limit.region_reserve()));
    let max_granted = i64::from(plan.largest(|limit| limit.max_granted_hits()));
    let mut granted: BTreeMap<i64, i64> = BTreeMap::new();
    let mut reserves: BTreeMap<(i64, usize), i64> = BTreeMap::new();
    let mut all: BTreeMap<i64, i64> = BTreeMap::new();
    let lost = reserve * world.losses.iter().sum::<i64>();
    let limit = i64::from(plan.largest(|limit| limit.requests_per_unit())) + lost;
    let reset_window = world.reset_us.map(|at| at.div_euclid(PERIOD_US));
    for it in uses {
        let (window, elapsed) = (it.global_us.div_euclid(PERIOD_US), it.global_us.rem_euclid(PERIOD_US));
        // After a reset the limit counts from zero, and what was granted before it may still be used.
        let times = 1 + i64::from(reset_window.is_some_and(|reset| (reset..=reset + 1).contains(&window)));
        let (limit, max_granted) = (times * limit, times * max_granted);
        let hits = all.entry(window).or_default();
        *hits += it.hits;
        if *hits > limit {
            return Err(format!("{hits} hits of {limit} in window {window}"));
        }
        // A hit that may be of the next window is of that window's reserve too.
        let of_grant = if it.grant.window == window { it.grant.hits } else { 0 };
        let before = granted.get(&(window - 1)).copied().unwrap_or(0);
        let weighted = if is_sliding { before * (PERIOD_US - elapsed) / PERIOD_US } else { 0 };
        let of_grants = granted.entry(window).or_default();
        *of_grants += of_grant;
        if of_grant > 0 && *of_grants + weighted > max_granted {
            return Err(format!("{of_grants} + {weighted} hits of {max_granted} granted in window {window}"));
        }
        let of_reserve = reserves.entry((window, it.region)).or_default();
        *of_reserve += it.hits - of_grant;
        let bound = (times + world.losses[it.region]) * reserve;
        if *of_reserve > bound {
            return Err(format!("{of_reserve} hits of {bound} of the reserve in window {window} of {}", it.region));
        }
    }
    Ok(())
}

/// A bucket of the whole limit admits all of it, with half of the overshoot for the uncertainty of clocks. A region's
/// Redis that lost its data may use its own capacity again.
fn check_bucket<'u>(plan: &Plan, world: &World, uses: impl Iterator<Item = &'u Use>) -> Result<(), String> {
    let rate = i128::from(plan.largest(|limit| limit.requests_per_unit()));
    let lost = i128::from(plan.largest(|limit| limit.region_capacity())) * i128::from(world.losses.iter().sum::<i64>());
    let capacity = i128::from(plan.largest(|limit| limit.capacity())) + lost;
    let period = i128::from(PERIOD_US);
    let slack = i128::from(plan.limit.clock_slack_us().max(plan.changed.clock_slack_us())) * rate;
    let slack = slack + i128::from(plan.largest(Limit::max_overshoot_by_prepaid_hits)) * period;
    let (mut level, mut last) = (0_i128, i64::MIN);
    for it in uses {
        if it.ended > 0 {
            return Err(format!("{} prepaid hits at {}, after their end", it.ended, it.global_us));
        }
        let elapsed = i128::from(it.global_us.saturating_sub(last).min(1 << 50));
        level = (level - elapsed * rate).max(0) + i128::from(it.hits) * period;
        last = it.global_us;
        let is_reset = world.reset_us.is_some_and(|reset| it.global_us >= reset);
        let capacity = if is_reset { 2 * capacity } else { capacity };
        if level > capacity * period + slack {
            return Err(format!("{} tokens of {capacity} and {} at {last}", level / period, slack / period));
        }
    }
    Ok(())
}

/// In any period of global time a region admits at most twice its loss allowance.
fn check_loss(plan: &Plan, world: &World, region: usize) -> Result<(), String> {
    let allowance =
        i64::try_from(plan.limit.cut_off_allowance().max(plan.changed.cut_off_allowance())).expect("it is small");
    // A clock that jumped, or lost data, starts another tumbling period.
    let bound = (2 + world.losses[region] + world.jumps[region]) * allowance;
    let lost: Vec<&Use> = world.uses.iter().filter(|it| it.from_loss && it.region == region).collect();
    for it in &lost {
        let span = it.global_us - PERIOD_US + 1..=it.global_us;
        let hits: i64 = lost.iter().filter(|other| span.contains(&other.global_us)).map(|other| other.hits).sum();
        if hits > bound {
            return Err(format!("{hits} hits of {bound} of the loss allowance in region {region}"));
        }
    }
    Ok(())
}
