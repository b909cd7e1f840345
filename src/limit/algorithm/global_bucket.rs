//! Division of a token bucket over regions: each is granted a rate and a part of the capacity for a term.
//!
//! A region runs a bucket of its own with what it holds. At every moment of the global Redis's time the rates that all
//! regions hold add up to the rate of the pool at most, and the capacities to its capacity:
//!
//! - A region uses one of its grants at a time, but the server cannot know which, as a reply may have been lost. So it
//!   holds the largest rate and the largest capacity of its grants that have not ended.
//! - A grant is at most what the others leave of the pool, and it ends by the clock that checks this.
//!
//! Regions that want more than the pool together get parts in proportion to what they want, once the grants made before
//! have ended.

use std::collections::BTreeMap;

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::to_u32;

/// Upper bound on the grants of one region that have not ended; it gets nothing more until one ends.
pub const MAX_GRANTS_PER_REGION: usize = 4;

/// Grant to one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermGrant {
    /// Number of the region, which stays when the list of regions changes.
    pub region: u32,
    /// Tokens per period, beside the region's reserve.
    pub rate: u32,
    /// Tokens that the region's bucket holds, beside those of its reserve.
    pub capacity: u32,
    /// Tokens per period that the region wanted.
    pub wanted: u32,
    /// Time of the global Redis at which the grant ends.
    pub end: Time,
}

/// Grants of one token bucket to all regions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Time of the last reset; 0: none is known.
    pub epoch: Time,
    /// Grants in their order.
    pub grants: Vec<TermGrant>,
}

/// Part of a token bucket that is granted: all but the reserves of the regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPool {
    /// Tokens per period.
    pub rate: u32,
    /// Tokens that the bucket holds.
    pub capacity: u32,
}

impl TokenPool {
    /// Returns the tokens of a limit that regions may be granted: all but their own.
    pub const fn of(limit: &Limit) -> Self {
        Self { rate: limit.max_granted(), capacity: limit.max_granted_capacity() }
    }
}

/// Request of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermRequest {
    /// Number of the region, which stays when the list of regions changes.
    pub region: u32,
    /// Tokens per period that the region wants, beside its reserve.
    pub wanted: u32,
    /// Duration of the grant in microseconds.
    pub term_us: u64,
    /// The pool, as the region's rules have it.
    pub pool: TokenPool,
}

/// Rate and capacity that a region holds.
#[derive(Clone, Copy, Debug, Default)]
struct HeldPart {
    rate: u32,
    capacity: u32,
    /// As its last request had it.
    wanted: u32,
}

impl State {
    /// Grants what the other regions leave, at most what is wanted; `None` if the region has too many grants.
    pub fn grant(&mut self, now: Time, request: TermRequest) -> Option<TermGrant> {
        let TermRequest { region, wanted, term_us, pool } = request;
        self.grants.retain(|grant| grant.end > now);
        let mut held: BTreeMap<u32, HeldPart> = BTreeMap::new();
        for grant in &self.grants {
            let part = held.entry(grant.region).or_default();
            part.rate = part.rate.max(grant.rate);
            part.capacity = part.capacity.max(grant.capacity);
            part.wanted = grant.wanted;
        }
        held.remove(&region);
        if self.grants.iter().filter(|grant| grant.region == region).count() >= MAX_GRANTS_PER_REGION {
            return None;
        }
        let sum = |of: fn(&HeldPart) -> u32| held.values().map(|part| u64::from(of(part))).sum::<u64>();
        let free = |whole: u32, taken: u64| u64::from(whole).saturating_sub(taken);
        let wanted_by_all = sum(|part| part.wanted) + u64::from(wanted);
        let fair = match wanted_by_all > u64::from(pool.rate) {
            true => part_of(pool.rate, wanted, wanted_by_all),
            false => u64::from(wanted),
        };
        let rate = fair.min(free(pool.rate, sum(|part| part.rate)));
        let capacity = part_of(pool.capacity, to_u32(rate), u64::from(pool.rate.max(1)))
            .min(free(pool.capacity, sum(|part| part.capacity)));
        let grant =
            TermGrant { region, rate: to_u32(rate), capacity: to_u32(capacity), wanted, end: now.plus_us(term_us) };
        self.grants.push(grant);
        Some(grant)
    }

    /// Starts a new epoch: each region fills its bucket when it learns of it. Grants stay.
    pub fn reset(&mut self, now: Time) {
        self.grants.retain(|grant| grant.end > now);
        self.epoch = self.epoch.max(now);
    }
}

/// Computes floor(whole x part / all).
fn part_of(whole: u32, part: u32, all: u64) -> u64 {
    u64::from(whole) * u64::from(part) / all.max(1)
}
