//! Slots of one concurrent limit's counter: who holds how many seats, and until when.
//!
//! A slot ends when it is released, when it is older than `max_duration`, or when its holder is dead; the last two are
//! looked for when seats are lacking, because it takes a walk over all slots: at most once a second, and more rarely
//! with more than half a million slots. They are also looked for once in a `max_duration`, so that slots that nothing
//! releases are counted. So a limit with room costs a look-up. `lua/slots.lua` does the same in Redis.
//!
//! A table never kills a slot because the limit was lowered: no new one is admitted until enough were freed.
//!
//! Decides: when a slot is over (`max_duration`, dead holder), and when that is noticed; how many tombstones are kept.
//! Decides: bytes of a slot (`ENTRY_BYTES`); the summary of slots in `/explain`.

use std::collections::BTreeMap;

use crate::base::clock::Time;
use crate::base::sharded::PrehashedMap;
use crate::limit::algorithm::slots::{OwnSlot, State};
use crate::limit::slot::{HolderId, SlotId, SlotToken, SlotUse, TOMBSTONE_US};

/// Shortest time between two walks over all slots of a table, in microseconds.
pub const SWEEP_INTERVAL_US: u64 = 1_000_000;
/// Time without a walk for each slot of a large table, in microseconds: fifty times what the walk takes for it, so that
/// walks over a full table with a million slots leave the CPU to others.
const SWEEP_INTERVAL_US_PER_SLOT: u64 = 2;

/// Maximum number of tombstones of a table: later releases leave none, and a slot that is taken after its release then
/// stays until it expires.
pub const MAX_TOMBSTONES: u32 = 100_000;

/// A slot, or the mark of a release that came first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    token: SlotToken,
    holder: HolderId,
    /// End of its life.
    expires: Time,
    /// Seats that it takes; 0 marks a release that came first.
    seats: u32,
}

/// Slots of one counter.
#[derive(Clone, Debug, Default)]
pub struct SlotTable {
    slots: PrehashedMap<Slot>,
    used: u64,
    tombstones: u32,
    swept: Time,
    /// Life of the slot that was taken last, in microseconds.
    life_us: u64,
    /// Tag of the counter (see [`Counter::tag`](crate::limit::charge::Counter::tag)).
    counter_tag: u128,
}

/// What a request asks a table.
#[derive(Clone, Copy)]
pub struct SlotQuery<'q> {
    /// Slot of the request.
    pub slot: &'q SlotUse,
    /// Time of the request.
    pub now: Time,
    /// Seats that the request needs; 0 for a release.
    pub seats: u64,
    /// Seats that the limit has.
    pub limit: u64,
    /// Life of a slot (`max_duration`) in microseconds.
    pub life_us: u64,
    /// Tells whether a slot that a holder took at a time is free because the holder is dead.
    pub is_freed_by_death: &'q dyn Fn(HolderId, Time) -> bool,
}

/// Seats, slots and tombstones of a table of slots or reservations, in all and by holder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotSummary {
    /// Seats in use.
    pub seats: u64,
    /// Slots in use.
    pub slots: u64,
    /// Releases that came before their requests.
    pub tombstones: u64,
    /// Earliest time at which a slot expires; `None` without slots.
    pub expires: Option<Time>,
    /// Slots of each holder.
    pub holders: Vec<(HolderId, u64)>,
    /// There are more slots than were looked at.
    pub is_partial: bool,
    /// They are open reservations, and their seats are hits.
    pub is_of_reservations: bool,
}

/// A slot as [`SlotSummary`] counts it.
#[derive(Clone, Copy, Debug)]
pub struct SummarizedSlot {
    /// Envoy that holds it.
    pub holder: HolderId,
    /// End of its life.
    pub expires: Time,
    /// Seats or reserved hits; 0 marks a release that came first.
    pub seats: u64,
}

impl SlotSummary {
    /// Marks the sums as those of reservations.
    #[must_use]
    pub fn marked_as_reservations(self) -> Self {
        Self { is_of_reservations: true, ..self }
    }

    /// Sums slots, without those that are over at `now`.
    pub fn new(slots: impl Iterator<Item = SummarizedSlot>, now: Time, is_dead: &dyn Fn(HolderId) -> bool) -> Self {
        let (mut sum, mut holders) = (Self::default(), BTreeMap::new());
        for slot in slots.filter(|slot| slot.expires > now) {
            if slot.seats == 0 {
                sum.tombstones += 1;
            } else if !is_dead(slot.holder) {
                sum.slots += 1;
                sum.seats = sum.seats.saturating_add(slot.seats);
                sum.expires = Some(sum.expires.map_or(slot.expires, |first| first.min(slot.expires)));
                *holders.entry(slot.holder).or_insert(0) += 1;
            }
        }
        sum.holders = holders.into_iter().collect();
        sum
    }
}

impl SlotTable {
    /// Size of an entry in memory, in bytes: the key, the slot and the control byte of the hash table.
    const ENTRY_BYTES: usize = size_of::<(u128, Slot)>() + 1;

    /// Creates an empty table for a counter with this tag.
    pub fn with_counter_tag(counter_tag: u128) -> Self {
        Self { counter_tag, ..Self::default() }
    }

    /// Tag of the counter.
    pub const fn counter_tag(&self) -> u128 {
        self.counter_tag
    }

    /// Returns what a request sees. Removes its own slot if that is over, and all that are over if seats are lacking or
    /// nothing looked for them during the life of a slot.
    pub fn prune_and_view(&mut self, query: SlotQuery<'_>) -> State {
        let SlotQuery { slot, now, seats, limit, life_us, .. } = query;
        let mut expired = 0;
        if self.slots.get(&slot.id.0).is_some_and(|own| own.expires <= now) {
            expired += self.remove(slot.id);
        }
        let own = self.slots.get(&slot.id.0).copied();
        let lacks_seats = seats > 0 && self.used.saturating_add(seats) > limit;
        let was_swept_long_ago = now.since_us(self.swept) >= life_us;
        if own.is_none() && (lacks_seats || was_swept_long_ago) || self.tombstones >= MAX_TOMBSTONES {
            expired += self.sweep_if_due(now, query.is_freed_by_death);
        }
        let own = match own {
            None => OwnSlot::Absent,
            Some(Slot { seats: 0, .. }) => OwnSlot::Tombstone,
            Some(Slot { token, seats, .. }) => OwnSlot::Held { token, seats },
        };
        let expired = u32::try_from(expired).unwrap_or(u32::MAX);
        State { last: now, used: self.used, own, expired, ..State::default() }.with_slot_use(slot)
    }

    /// Writes what the algorithm made at `now` of a request's view (see [`Self::prune_and_view`]); a slot lives for
    /// `life_us`.
    pub fn write_back(&mut self, slot: &SlotUse, state: &State, now: Time, life_us: u64) {
        let SlotUse { id, holder, .. } = *slot;
        self.life_us = life_us;
        let old = self.slots.get(&id.0).copied();
        match state.own {
            OwnSlot::Absent => {
                self.remove(id);
            }
            OwnSlot::Held { token, seats } if old.is_none_or(|old| old.token != token) => {
                self.remove(id);
                self.insert(id, Slot { token, holder, expires: now.plus_us(life_us), seats });
            }
            OwnSlot::Tombstone if old.is_none_or(|old| old.seats > 0) => {
                self.remove(id);
                if self.tombstones < MAX_TOMBSTONES {
                    let expires = now.plus_us(TOMBSTONE_US);
                    self.insert(id, Slot { token: SlotToken::default(), holder, expires, seats: 0 });
                }
            }
            OwnSlot::Held { .. } | OwnSlot::Tombstone => {}
        }
    }

    /// Removes all slots that are over; returns their seats. `is_freed_by_death` is that of a [`SlotQuery`].
    pub fn sweep(&mut self, now: Time, is_freed_by_death: &dyn Fn(HolderId, Time) -> bool) -> u64 {
        let before = self.used;
        let Self { slots, used, tombstones, swept, life_us, counter_tag: _ } = self;
        *swept = now;
        slots.retain(|_, slot| {
            let taken = Time::from_micros(slot.expires.as_micros().saturating_sub(*life_us));
            let is_over = slot.expires <= now || slot.seats > 0 && is_freed_by_death(slot.holder, taken);
            if is_over {
                *used -= u64::from(slot.seats);
                *tombstones -= u32::from(slot.seats == 0);
            }
            !is_over
        });
        if slots.capacity() > 4 * slots.len().max(16) {
            slots.shrink_to(2 * slots.len());
        }
        before - self.used
    }

    /// Returns true if nothing is in the table.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Seats in use, those of slots that are over included until they are looked for.
    pub const fn used_seats(&self) -> u64 {
        self.used
    }

    /// Memory of the table in bytes.
    pub fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.slots.capacity() * Self::ENTRY_BYTES) as u64
    }

    /// Upper bound on the bytes that one more slot adds.
    pub fn max_bytes_of_next_slot(&self) -> u64 {
        if self.slots.len() < self.slots.capacity() {
            return 0;
        }
        (self.slots.capacity().max(4) * Self::ENTRY_BYTES) as u64
    }

    /// Sums of the slots that are not over at `now`.
    pub fn summarize(&self, now: Time, is_dead: &dyn Fn(HolderId) -> bool) -> SlotSummary {
        let slot =
            |slot: &Slot| SummarizedSlot { holder: slot.holder, expires: slot.expires, seats: slot.seats.into() };
        SlotSummary::new(self.slots.values().map(slot), now, is_dead)
    }

    fn sweep_if_due(&mut self, now: Time, is_freed_by_death: &dyn Fn(HolderId, Time) -> bool) -> u64 {
        let interval_us = SWEEP_INTERVAL_US.max(SWEEP_INTERVAL_US_PER_SLOT * self.slots.len() as u64);
        let is_due = now.since_us(self.swept) >= interval_us || now < self.swept;
        if is_due { self.sweep(now, is_freed_by_death) } else { 0 }
    }

    fn insert(&mut self, id: SlotId, slot: Slot) {
        self.used += u64::from(slot.seats);
        self.tombstones += u32::from(slot.seats == 0);
        self.slots.insert(id.0, slot);
    }

    /// Removes a slot; returns its seats.
    fn remove(&mut self, id: SlotId) -> u64 {
        let Some(slot) = self.slots.remove(&id.0) else { return 0 };
        self.used -= u64::from(slot.seats);
        self.tombstones -= u32::from(slot.seats == 0);
        u64::from(slot.seats)
    }
}
