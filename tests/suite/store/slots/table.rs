//! The table of slots against a model that looks at the clock at once, over random histories: acquires, repeated
//! acquires, releases by token, by `?` and by `-`, in any order, with expiry, dead holders and changing limits.

use std::collections::{BTreeMap, BTreeSet};

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::slots::{self, OwnSlot};
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::slot::{HolderId, SlotAction, SlotChange, SlotId, SlotToken, SlotUse, TOMBSTONE_US};
use tollkeeper::limit::slot_table::{SWEEP_INTERVAL_US, SlotQuery, SlotTable};
use tollkeeper::limit::{Limit, LimitSpec};

use kit::seeded_random::Chance;

/// `max_duration` of the limits here, in seconds.
pub(super) const MAX_DURATION_S: u32 = 60;
/// Age from which slots of dead holders are free here.
pub(super) const LEAST_AGE_US: u64 = 2_000_000;

pub(super) fn concurrent_limit(concurrent: u32) -> Limit {
    let period = Period::new(Unit::Second, MAX_DURATION_S).unwrap();
    Limit::new(&LimitSpec::new(Algorithm::Concurrent, concurrent.into(), period)).unwrap()
}

/// One request to a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) slot: SlotUse,
    pub(super) hits: Hits,
    pub(super) limit: u32,
    pub(super) now: Time,
}

/// Makes a step on a table, as the memory store does.
pub(super) fn take_step(table: &mut SlotTable, step: Step, dead: &BTreeSet<HolderId>) -> ChargeResult {
    let limit = concurrent_limit(step.limit);
    let request = ChargeRequest::new(step.hits, 0);
    let seats = match step.hits {
        Hits::Charge(seats) => seats,
        Hits::Peek => 1,
        Hits::Refund(_) => 0,
    };
    let is_freed_by_death =
        |holder: HolderId, taken: Time| dead.contains(&holder) && step.now.since_us(taken) >= LEAST_AGE_US;
    let (life_us, most) = (limit.period_us(), u64::from(step.limit));
    let query = SlotQuery {
        slot: &step.slot,
        now: step.now,
        seats,
        limit: most,
        life_us,
        is_freed_by_death: &is_freed_by_death,
    };
    let mut state = table.prune_and_view(query);
    let result = slots::charge(&limit, &mut state, step.now, request);
    table.write_back(&step.slot, &state, step.now, limit.period_us());
    result
}

/// Random steps on few slots and holders.
pub(super) struct Steps {
    pub(super) chance: Chance,
    pub(super) now: Time,
    pub(super) limit: u32,
    /// Tokens that were handed out, newest last, by slot.
    tokens: BTreeMap<u128, Vec<SlotToken>>,
    pub(super) dead: BTreeSet<HolderId>,
    next_token: u64,
}

impl Steps {
    pub(super) fn new(seed: u64) -> Self {
        let start = Time::from_secs(1_800_000_000);
        let (chance, tokens, dead) = (Chance::new(seed), BTreeMap::new(), BTreeSet::new());
        Self { chance, now: start, limit: 5, tokens, dead, next_token: 1 }
    }

    pub(super) fn next_step(&mut self) -> Step {
        let chance = &mut self.chance;
        self.now = self.now.plus_us(match chance.below(20) {
            0 => chance.below(u64::from(MAX_DURATION_S) * 1_000_000),
            1..4 => chance.below(3_000_000),
            _ => chance.below(100_000),
        });
        if chance.one_in(20) {
            self.limit = u32::try_from(chance.below(8)).unwrap();
        }
        let id = u128::from(chance.below(12));
        let holder = HolderId(chance.below(3));
        if chance.one_in(30) {
            let dead = HolderId(chance.below(3));
            if !self.dead.remove(&dead) {
                self.dead.insert(dead);
            }
        }
        let known = self.tokens.entry(id).or_default();
        let (action, token, hits) = match chance.below(10) {
            0..5 => {
                // A holder that calls lives.
                self.dead.remove(&holder);
                let token = SlotToken(self.next_token);
                self.next_token += 1;
                known.push(token);
                (SlotAction::Acquire, token, Hits::Charge(1 + chance.below(2) * chance.below(3)))
            }
            5 => (SlotAction::Acquire, SlotToken(u64::MAX), Hits::Peek),
            6 | 7 => (SlotAction::Release, known.last().copied().unwrap_or(SlotToken(0)), Hits::Refund(1)),
            8 if !known.is_empty() => (SlotAction::Release, chance.pick(known), Hits::Refund(1)),
            _ => (SlotAction::ReleaseUnanswered, SlotToken(0), Hits::Refund(1)),
        };
        let slot = SlotUse { id: SlotId(id), token, holder, action };
        Step { slot, hits, limit: self.limit, now: self.now }
    }
}

/// What a table should have: slots and tombstones, by id.
#[derive(Default)]
struct Model {
    slots: BTreeMap<u128, (SlotToken, HolderId, Time, u64)>,
    tombstones: BTreeMap<u128, Time>,
}

impl Model {
    fn forget_ended(&mut self, now: Time) {
        self.slots.retain(|_, (_, _, ends, _)| *ends > now);
        self.tombstones.retain(|_, ends| *ends > now);
    }

    /// Seats of holders that live.
    fn living_seats(&self, dead: &BTreeSet<HolderId>) -> u64 {
        self.slots.values().filter(|(_, holder, ..)| !dead.contains(holder)).map(|(.., seats)| seats).sum()
    }

    /// Seats that are not free at `now`: those of the living, and those of dead holders that were just taken.
    fn seats(&self, dead: &BTreeSet<HolderId>, now: Time) -> u64 {
        let is_taken = |(_, holder, ends, _): &&(_, HolderId, Time, _)| !dead.contains(holder) || is_young(*ends, now);
        self.slots.values().filter(is_taken).map(|(.., seats)| seats).sum()
    }
}

/// Returns true if a slot that ends at `ends` is not free at `now` though its holder is dead.
fn is_young(ends: Time, now: Time) -> bool {
    ends.since_us(now) + LEAST_AGE_US > u64::from(MAX_DURATION_S) * 1_000_000
}

/// Compares the sums of the table with the model, after a step.
fn check_counts(table: &SlotTable, model: &mut Model, now: Time, dead: &BTreeSet<HolderId>, at: &str) {
    // A walk over all slots removes the old ones of dead holders, also if these come back.
    let there = table.summarize(now, &|_| false).holders;
    let count = |holder: HolderId| model.slots.values().filter(|(_, of, ..)| *of == holder).count() as u64;
    let is_complete = |holder: HolderId| there.contains(&(holder, count(holder)));
    let walked: Vec<HolderId> = dead.iter().copied().filter(|holder| !is_complete(*holder)).collect();
    model.slots.retain(|_, (_, holder, ends, _)| !walked.contains(holder) || is_young(*ends, now));
    let counted: u64 = model.slots.values().map(|(.., seats)| seats).sum();
    assert!(table.used_seats() >= model.seats(dead, now), "a slot is not counted: {at}");
    let summary = table.summarize(now, &|holder| dead.contains(&holder));
    assert_eq!(summary.seats, model.living_seats(dead), "{at}");
    assert_eq!(summary.tombstones, model.tombstones.len() as u64, "{at}");
    assert!(table.used_seats() >= summary.seats && counted >= summary.seats, "{at}");
}

/// Compares the numbers of a result with the seats of the table before and after the step.
fn check_numbers(result: &ChargeResult, before: &SlotTable, after: &SlotTable, limit: u32, at: &str) {
    let left = before.used_seats() - u64::from(result.expired_seats);
    assert_eq!((result.before, result.after), (left, after.used_seats()), "{at}");
    assert_eq!(result.remaining, u64::from(limit).saturating_sub(after.used_seats()), "{at}");
    assert_eq!(result.reset_us > 0, after.used_seats() > 0, "{at}");
}

#[test]
fn table_follows_the_protocol_over_random_histories() {
    let (mut taken, mut late, mut expired, mut delayed) = (0, 0, 0, 0);
    for seed in 0..kit::histories(75) {
        let (mut steps, mut table, mut model) = (Steps::new(seed), SlotTable::default(), Model::default());
        for turn in 0..400 {
            let step = steps.next_step();
            let at = format!("seed {seed}, turn {turn}: {step:?}");
            model.forget_ended(step.now);
            let (id, taken_seats) = (step.slot.id.0, model.seats(&steps.dead, step.now));
            let own = model.slots.get(&id).copied();
            let before = table.clone();
            let result = take_step(&mut table, step, &steps.dead);
            check_numbers(&result, &before, &table, step.limit, &at);
            expired += result.expired_seats;
            match step.hits {
                Hits::Charge(seats) => match (model.tombstones.contains_key(&id), own) {
                    (true, _) => {
                        assert!(!result.admitted && result.slot == SlotChange::Late, "{at}");
                        let can_ever_pass = seats <= u64::from(step.limit);
                        assert_eq!(result.retry_after_us, can_ever_pass.then_some(TOMBSTONE_US), "{at}");
                        late += 1;
                    }
                    (false, Some((.., seats))) if result.slot == SlotChange::Renewed => {
                        let ends = step.now.plus_us(u64::from(MAX_DURATION_S) * 1_000_000);
                        model.slots.insert(id, (step.slot.token, step.slot.holder, ends, seats));
                    }
                    (false, own) => {
                        // The slot of a holder that was dead may be gone.
                        assert!(own.is_none_or(|(_, holder, ..)| holder != step.slot.holder) || own.is_none(), "{at}");
                        let fits = taken_seats + seats <= u64::from(step.limit);
                        assert!(fits || !result.admitted, "more than the limit: {at}");
                        if result.admitted {
                            assert_eq!(result.slot, SlotChange::Taken, "{at}");
                            let ends = step.now.plus_us(u64::from(MAX_DURATION_S) * 1_000_000);
                            model.slots.insert(id, (step.slot.token, step.slot.holder, ends, seats));
                            taken += 1;
                        } else if fits {
                            // Slots that are over are looked for once a second.
                            let later = Step { now: step.now.plus_us(SWEEP_INTERVAL_US), ..step };
                            let again = take_step(&mut before.clone(), later, &steps.dead);
                            assert!(again.admitted, "still rejected a second later: {at}");
                            delayed += 1;
                        }
                    }
                },
                Hits::Peek => {
                    assert!(result.slot == SlotChange::None && table.used_seats() <= before.used_seats(), "{at}");
                }
                Hits::Refund(_) => {
                    assert!(result.admitted, "{at}");
                    let unanswered = step.slot.action == SlotAction::ReleaseUnanswered;
                    match own {
                        Some((token, ..)) if unanswered || token == step.slot.token => {
                            assert_eq!(result.slot, SlotChange::Freed, "{at}");
                            model.slots.remove(&id);
                            if unanswered {
                                model.tombstones.insert(id, step.now.plus_us(TOMBSTONE_US));
                            }
                        }
                        None if unanswered && !model.tombstones.contains_key(&id) => {
                            assert_eq!(result.slot, SlotChange::ReleasedEarly, "{at}");
                            model.tombstones.insert(id, step.now.plus_us(TOMBSTONE_US));
                        }
                        Some(_) | None => assert_eq!(result.slot, SlotChange::None, "{at}"),
                    }
                }
            }
            check_counts(&table, &mut model, step.now, &steps.dead, &at);
        }
    }
    // The histories meet every case.
    assert!(taken > 1_250 && late > 125 && expired > 125 && delayed > 4, "{taken} {late} {expired} {delayed}");
}

#[test]
fn request_that_another_limit_rejects_changes_nothing() {
    let now = Time::from_secs(1_800_000_000);
    let request = ChargeRequest { rejected_elsewhere: true, ..ChargeRequest::new(Hits::Charge(1), 0) };
    for own in [OwnSlot::Absent, OwnSlot::Held { token: SlotToken(1), seats: 3 }] {
        let slot = SlotUse { id: SlotId(1), token: SlotToken(2), holder: HolderId(1), action: SlotAction::Acquire };
        let seen = slots::State { last: now, used: 3, own, ..slots::State::default() }.with_slot_use(&slot);
        let mut state = seen;
        let result = slots::charge(&concurrent_limit(5), &mut state, now, request);
        assert_eq!((result.slot, result.before, result.after), (SlotChange::None, 3, 3), "{own:?}");
        assert_eq!(state, seen);
    }
}

#[test]
fn tombstones_are_bounded() {
    let mut table = SlotTable::default();
    let now = Time::from_secs(1_800_000_000);
    for id in 0..110_000 {
        let slot =
            SlotUse { id: SlotId(id), token: SlotToken(0), holder: HolderId(1), action: SlotAction::ReleaseUnanswered };
        take_step(&mut table, Step { slot, hits: Hits::Refund(1), limit: 1, now }, &BTreeSet::new());
    }
    assert_eq!(table.summarize(now, &|_| false).tombstones, 100_000);
    assert_eq!(table.used_seats(), 0);
}

/// A walk over so many slots takes long.
#[test]
fn walks_over_a_large_table_are_rarer() {
    const SLOTS: u32 = 550_000;
    let (mut table, none_dead) = (SlotTable::default(), BTreeSet::new());
    let mut now = Time::from_secs(1_800_000_000);
    let mut acquire = |id: u32, now: Time| {
        let id = SlotId(u128::from(id).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835));
        let slot = SlotUse { id, token: SlotToken(1), holder: HolderId(1), action: SlotAction::Acquire };
        take_step(&mut table, Step { slot, hits: Hits::Charge(1), limit: SLOTS, now }, &none_dead).admitted
    };
    for id in 0..SLOTS {
        assert!(acquire(id, now));
    }
    // Half of a second before all slots are over, nothing is found.
    now = now.plus_us(u64::from(MAX_DURATION_S) * 1_000_000 - 500_000);
    assert!(!acquire(SLOTS, now));
    assert!(!acquire(SLOTS, now.plus_us(1_050_000)), "the walk before was 1.1 s ago at the most");
    assert!(acquire(SLOTS, now.plus_us(1_150_000)));
}

#[test]
fn table_without_slots_is_empty() {
    let (mut table, mut steps) = (SlotTable::default(), Steps::new(1));
    let step = steps.next_step();
    let acquire = Step { slot: SlotUse { action: SlotAction::Acquire, ..step.slot }, hits: Hits::Charge(1), ..step };
    take_step(&mut table, acquire, &BTreeSet::new());
    assert!(!table.is_empty());
    let release = Step { slot: SlotUse { action: SlotAction::Release, ..acquire.slot }, hits: Hits::Refund(1), ..step };
    take_step(&mut table, release, &BTreeSet::new());
    assert!(table.is_empty());
    assert_eq!(OwnSlot::default(), OwnSlot::Absent);
}
