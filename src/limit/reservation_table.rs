//! Open reservations of one counter: who reserved how many hits, and until when they can be settled.
//!
//! A reservation ends when it is settled, when it is older than `settle_within`, or when its holder is dead. The last
//! two are looked for when hits are lacking, if the rule then gives them back, or when the table is full, at most once
//! a second: it takes a walk over all. [`MAX_RESERVATIONS`] bounds the table. `lua/reservations.lua` does the same in
//! Redis.
//!
//! Decides: when an estimate that was never settled is given back (`unsettled: return`).
//! Decides: bytes of a reservation (`ENTRY_BYTES`).

use super::reservation::{
    MAX_RESERVATIONS, OwnReservation, ReservationMark, ReservationPolicy, ReservationView, ReservedHits,
    UnsettledPolicy,
};
use crate::base::clock::Time;
use crate::base::sharded::PrehashedMap;
use crate::limit::Limit;
use crate::limit::algorithm::state::State;
use crate::limit::charge::clamp_to_u32;
use crate::limit::slot::{HolderId, SlotId, SlotToken, SlotUse, TOMBSTONE_US};
use crate::limit::slot_table::{SWEEP_INTERVAL_US, SlotSummary, SummarizedSlot};

/// A reservation, or the mark of a settlement that came first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reservation {
    token: SlotToken,
    holder: HolderId,
    /// Time from which it can no more be settled.
    expires: Time,
    /// Hits that it charged; 0 marks a settlement that came first.
    hits: u64,
    mark: ReservationMark,
}

/// Open reservations of a counter.
#[derive(Clone, Debug, Default)]
pub struct ReservationTable {
    open: PrehashedMap<Reservation>,
    /// Hits that settlements have given back to the counter so far.
    given_back: u64,
    swept: Time,
    /// Highest number of hits per period of the limit since anything was open: what a bucket refilled at most since
    /// then.
    highest_rate: u32,
    /// Time for which a reservation that is over stays, in microseconds: its hits may be given back until then.
    kept_us: u64,
}

/// What a request asks a table, and the state of the counter.
#[derive(Clone, Copy)]
pub struct ReservationQuery<'q> {
    /// Reservation of the request.
    pub slot: &'q SlotUse,
    /// Limit of the counter.
    pub limit: &'q Limit,
    /// State of the counter, without reservations.
    pub counter: &'q State,
    /// The request only asks, so nothing is removed.
    pub is_peek: bool,
    /// The request cannot pass unless hits are given back.
    pub lacks_hits: bool,
    /// Time of the request.
    pub now: Time,
    /// Tells whether a reservation that a holder made at a time is over because the holder is dead.
    pub is_freed_by_death: &'q dyn Fn(HolderId, Time) -> bool,
}

impl ReservationTable {
    /// Size of an entry in memory, in bytes: the key, the reservation and the control byte of the hash table.
    const ENTRY_BYTES: usize = size_of::<(u128, Reservation)>() + 1;

    /// Returns what a request sees. Removes its own reservation if that is over, and all that are over if hits are
    /// lacking or the table is full. A peek removes nothing.
    pub fn prune_and_view(&mut self, query: ReservationQuery<'_>) -> ReservationView {
        let Some(policy) = query.limit.reservations().filter(|_| !query.is_peek) else {
            return self.view_for_peek(query);
        };
        let mut view = ReservationView::empty_for(query.slot);
        self.highest_rate = self.highest_rate.max(clamp_to_u32(query.limit.requests_per_unit()));
        let found = self.open.get(&query.slot.id.0).copied();
        let over = found.filter(|own| own.expires <= query.now);
        if let Some(over) = over {
            self.open.remove(&query.slot.id.0);
            self.end_unsettled(over, policy, query, &mut view);
        }
        let is_own_open = found.is_some() && over.is_none();
        let wants_hits = query.lacks_hits && policy.unsettled_policy() == UnsettledPolicy::Return;
        if !is_own_open && (wants_hits || self.is_full()) {
            self.sweep_if_due(policy, query, &mut view);
        }
        let ReservationView { own, is_full, .. } = self.view_for_peek(query);
        let is_over = over.is_some_and(|over| over.hits > 0);
        ReservationView { own: if is_over { OwnReservation::Over } else { own }, is_full, ..view }
    }

    /// Returns what a request sees that only asks: removes nothing, and gives nothing back.
    pub fn view_for_peek(&self, query: ReservationQuery<'_>) -> ReservationView {
        let own = match self.open.get(&query.slot.id.0) {
            None => OwnReservation::Absent,
            Some(one) if one.expires <= query.now && one.hits > 0 => OwnReservation::Over,
            Some(one) if one.expires <= query.now => OwnReservation::Absent,
            Some(Reservation { hits: 0, .. }) => OwnReservation::Tombstone,
            Some(&Reservation { token, hits, mark, .. }) => {
                OwnReservation::Open { token, hits, refundable: self.refundable_hits(hits, mark, query) }
            }
        };
        ReservationView { own, is_full: self.is_full(), ..ReservationView::empty_for(query.slot) }
    }

    /// Writes what a charge made of a request's view (see [`Self::prune_and_view`]); `counter` is the state after it.
    pub fn write_back(&mut self, view: &ReservationView, limit: &Limit, counter: &State, now: Time) {
        let Some(reservations) = limit.reservations() else { return };
        let SlotUse { id, holder, .. } = view.slot;
        self.kept_us = reservations.kept_us(limit.period_us());
        self.highest_rate = self.highest_rate.max(clamp_to_u32(limit.requests_per_unit()));
        self.given_back = self.given_back.saturating_add(view.given_back);
        let old = self.open.get(&id.0).copied();
        match (view.own, old) {
            (OwnReservation::Absent | OwnReservation::Over, _) => self.remove(id),
            // A renewed token keeps the charge, and so its mark.
            (OwnReservation::Open { token, .. }, Some(old)) if old.token != token => {
                let expires = now.plus_us(reservations.settle_within_us());
                self.open.insert(id.0, Reservation { token, holder, expires, ..old });
            }
            (OwnReservation::Open { token, hits, .. }, None) => {
                let expires = now.plus_us(reservations.settle_within_us());
                let mark = counter.reservation_mark(limit, now, self.given_back);
                self.open.insert(id.0, Reservation { token, holder, expires, hits, mark });
            }
            (OwnReservation::Tombstone, Some(Reservation { hits: 1.., .. }) | None) => {
                let (token, mark) = (SlotToken::default(), ReservationMark::default());
                let expires = now.plus_us(TOMBSTONE_US);
                self.open.insert(id.0, Reservation { token, holder, expires, hits: 0, mark });
            }
            (OwnReservation::Open { .. } | OwnReservation::Tombstone, Some(_)) => {}
        }
    }

    /// Drops reservations that are over, and whose hits are not to be given back.
    pub fn drop_expired(&mut self, now: Time) {
        let kept_us = self.kept_us;
        self.open.retain(|_, one| one.expires.plus_us(if one.hits > 0 { kept_us } else { 0 }) > now);
        if self.open.capacity() > 4 * self.open.len().max(16) {
            self.open.shrink_to(2 * self.open.len());
        }
    }

    /// Returns true if nothing is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Number of reservations and tombstones.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Memory of the table in bytes.
    pub fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.open.capacity() * Self::ENTRY_BYTES) as u64
    }

    /// Sums of the reservations that are not over at `now`: as slots with their hits as seats.
    pub fn summarize(&self, now: Time, is_dead: &dyn Fn(HolderId) -> bool) -> SlotSummary {
        let one = |one: &Reservation| SummarizedSlot { holder: one.holder, expires: one.expires, seats: one.hits };
        SlotSummary::new(self.open.values().map(one), now, is_dead)
    }

    /// Hits of a reservation of so many hits with this mark that certainly still count.
    fn refundable_hits(&self, hits: u64, mark: ReservationMark, query: ReservationQuery<'_>) -> u64 {
        let ReservationTable { given_back, highest_rate, .. } = *self;
        let reserved = ReservedHits { hits, mark, given_back, highest_rate };
        query.counter.refundable_hits(query.limit, query.now, reserved)
    }

    fn is_full(&self) -> bool {
        self.open.len() >= MAX_RESERVATIONS as usize
    }

    fn remove(&mut self, id: SlotId) {
        self.open.remove(&id.0);
    }

    fn sweep_if_due(&mut self, policy: ReservationPolicy, query: ReservationQuery<'_>, view: &mut ReservationView) {
        let now = query.now;
        if now >= self.swept && now.since_us(self.swept) < SWEEP_INTERVAL_US {
            return;
        }
        self.swept = now;
        let is_over = |one: &Reservation| {
            one.expires <= now || one.hits > 0 && (query.is_freed_by_death)(one.holder, one.mark.at)
        };
        let over: Vec<Reservation> = self.open.values().filter(|one| is_over(one)).copied().collect();
        self.open.retain(|_, one| !is_over(one));
        for one in over {
            self.end_unsettled(one, policy, query, view);
        }
    }

    /// Counts a reservation that is over, and gives its hits back if the rule says so.
    fn end_unsettled(
        &mut self,
        one: Reservation,
        policy: ReservationPolicy,
        query: ReservationQuery<'_>,
        view: &mut ReservationView,
    ) {
        if one.hits == 0 {
            return;
        }
        view.unsettled = view.unsettled.saturating_add(1);
        if policy.unsettled_policy() == UnsettledPolicy::Return {
            let returned = self.refundable_hits(one.hits, one.mark, query);
            view.returned = view.returned.saturating_add(returned);
            self.given_back = self.given_back.saturating_add(returned);
        }
    }
}
