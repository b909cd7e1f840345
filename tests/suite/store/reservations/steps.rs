//! Random histories of requests with reservations: estimates, settlements by token, by `?`, twice, late or never, with
//! repeated requests, dead holders and changing limits.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::calendar::Zone;
use tollkeeper::limit::charge::{Charge, ChargeRequest, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::reservation::{ReservationPolicy, UnsettledPolicy};
use tollkeeper::limit::slot::{HolderId, SlotAction, SlotId, SlotToken, SlotUse};
use tollkeeper::limit::window::WindowSpec;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;

use kit::seeded_random::Chance;

/// `settle_within` of the limits here, in seconds.
pub(super) const SETTLE_WITHIN_S: u32 = 20;

/// A kind of limit whose hits can be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Fixed,
    Calendar,
    Months,
    SlidingCounter,
    Log,
    Bucket,
}

impl Kind {
    pub(super) const ALL: [Self; 6] =
        [Self::Fixed, Self::Calendar, Self::Months, Self::SlidingCounter, Self::Log, Self::Bucket];
}

/// A limit of that kind with a period of ten seconds, or of a month.
pub(super) fn reserving_limit(kind: Kind, requests: u32, unsettled: UnsettledPolicy, estimate: Option<u32>) -> Limit {
    let algorithm = match kind {
        Kind::Fixed | Kind::Calendar | Kind::Months => Algorithm::FixedWindow,
        Kind::SlidingCounter => Algorithm::SlidingWindowCounter,
        Kind::Log => Algorithm::SlidingWindowLog,
        Kind::Bucket => Algorithm::TokenBucket,
    };
    let period = if kind == Kind::Months { Period::new(Unit::Month, 1) } else { Period::new(Unit::Second, 10) };
    let reservations = ReservationPolicy::new(SETTLE_WITHIN_S, unsettled, estimate.and_then(NonZeroU32::new));
    let spec = LimitSpec {
        reservations,
        calendar_months: kind == Kind::Months,
        window: (kind == Kind::Calendar).then(|| WindowSpec::in_zone(Zone::utc())),
        ..LimitSpec::new(algorithm, requests.into(), period.unwrap())
    };
    Limit::new(&spec).unwrap()
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) slot: SlotUse,
    pub(super) hits: Hits,
    pub(super) limit: u32,
    pub(super) now: Time,
}

/// Random steps on few streams and holders.
pub(super) struct Steps {
    pub(super) chance: Chance,
    pub(super) now: Time,
    pub(super) limit: u32,
    /// Tokens that were handed out, newest last, by stream.
    tokens: BTreeMap<u128, Vec<SlotToken>>,
    pub(super) dead: BTreeSet<HolderId>,
    next_token: u64,
    next_stream: u128,
}

impl Steps {
    pub(super) fn new(seed: u64, kind: Kind) -> Self {
        // A minute before a month ends.
        let start = if kind == Kind::Months { 1_830_297_540 } else { 1_800_000_000 };
        let (chance, tokens, dead) = (Chance::new(seed), BTreeMap::new(), BTreeSet::new());
        let now = Time::from_secs(start);
        Self { chance, now, limit: 40, tokens, dead, next_token: 1, next_stream: 1 }
    }

    pub(super) fn next_step(&mut self) -> Step {
        let chance = &mut self.chance;
        self.now = self.now.plus_us(match chance.below(20) {
            0 => chance.below(u64::from(SETTLE_WITHIN_S) * 1_300_000),
            1..6 => chance.below(4_000_000),
            _ => chance.below(300_000),
        });
        if chance.one_in(40) {
            self.limit = 20 + u32::try_from(chance.below(40)).unwrap();
        }
        let holder = HolderId(chance.below(3));
        if chance.one_in(60) {
            let dead = HolderId(chance.below(3));
            if !self.dead.remove(&dead) {
                self.dead.insert(dead);
            }
        }
        let known: Vec<u128> = self.tokens.keys().copied().collect();
        let stream = match chance.below(10) {
            0 => 1 + u128::from(chance.below(6)),
            1..6 if !known.is_empty() => known[usize::try_from(chance.below(known.len() as u64)).unwrap()],
            _ => {
                self.next_stream += 1;
                self.next_stream
            }
        };
        let tokens = self.tokens.entry(stream).or_default();
        let cost = chance.below(5) * chance.below(6);
        let (action, token, hits) = match (tokens.is_empty(), chance.below(20)) {
            (true, 0..16) | (false, 0..2) => {
                // A holder that calls lives.
                self.dead.remove(&holder);
                let token = SlotToken(self.next_token);
                self.next_token += 1;
                tokens.push(token);
                (SlotAction::Acquire, token, Hits::Charge(1 + chance.below(12)))
            }
            (_, 16) | (false, 2) => (SlotAction::Acquire, SlotToken(u64::MAX), Hits::Peek),
            // A refund beside a reservation, which has nothing to do with it.
            (_, 17) => (SlotAction::Acquire, SlotToken(u64::MAX), Hits::Refund(cost)),
            (false, 3..12) => (SlotAction::Release, *tokens.last().unwrap(), Hits::Refund(cost)),
            (false, 12) => (SlotAction::Release, chance.pick(tokens), Hits::Refund(cost)),
            _ => (SlotAction::ReleaseUnanswered, SlotToken(0), Hits::Refund(cost)),
        };
        if self.tokens.len() > 12 {
            self.tokens.pop_first();
        }
        let slot = SlotUse { id: SlotId(stream), token, holder, action };
        Step { slot, hits, limit: self.limit, now: self.now }
    }
}

/// The charge of a step on counters of these limits.
pub(super) fn charge_of<'a>(step: &'a Step, limits: &'a [Limit], entries: &'a [Entry<'a>]) -> Charge<'a> {
    let counter = |limit: &'a Limit| {
        let tag = hash_limit_identity(limit, 0);
        Counter { limit, shadow: false, quota: false, tag, epoch: 0 }
    };
    let path = CounterPath { domain: "reservations", entries, shared: &[], candidate: None };
    let counters: SmallVec<[Counter<'a>; 1]> = limits.iter().map(counter).collect();
    Charge { slot: Some(&step.slot), ..Charge::new(path, counters, ChargeRequest::new(step.hits, 0)) }
}
