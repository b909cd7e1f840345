//! What one request sees of the reservations of a counter, and when hits that were charged still count.
//!
//! A counter can have many reservations, so no state has them all: a [`ReservationView`] has that of the request.
//! The store that keeps the reservations makes one, the charge changes it, and the store writes what changed. The same
//! arithmetic serves both stores.
//!
//! What is given back must still count, or the counter would admit more than its limit. A [`ReservationMark`] tells
//! that later: the window of the charge, or for a bucket its level. The level at the charge, less what can have been
//! refilled or given back since, is a lower bound on the level at any time since; tokens below that bound were never
//! refilled, so they can be given back. A log drops its oldest hits, which leave it first.

use crate::base::clock::Time;
use crate::limit::slot::{SlotToken, SlotUse};

/// Reservation of a request among those of the counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnReservation {
    /// It is not there.
    #[default]
    Absent,
    /// It waits for its settlement.
    Open {
        /// Token of the newest answer.
        token: SlotToken,
        /// Hits that it charged.
        hits: u64,
        /// Maximum number of hits that can be given back now.
        refundable: u64,
    },
    /// It was there and is over: its settlement comes too late.
    Over,
    /// Its settlement came first.
    Tombstone,
}

/// What one request sees of the reservations of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationView {
    /// Reservation of the request.
    pub own: OwnReservation,
    /// Hits of unsettled reservations that are given back to the counter before the request is decided.
    pub returned: u64,
    /// Reservations that were found unsettled after their time, or of a dead holder, and are gone.
    pub unsettled: u32,
    /// There is no room for one more reservation.
    pub is_full: bool,
    /// Hits that the request gives back.
    pub given_back: u64,
    /// What the request brings.
    pub slot: SlotUse,
}

impl ReservationView {
    /// What a request sees of a counter without reservations.
    pub const fn empty_for(slot: &SlotUse) -> Self {
        let own = OwnReservation::Absent;
        Self { own, returned: 0, unsettled: 0, is_full: false, given_back: 0, slot: *slot }
    }

    /// Returns true if there is something to record.
    pub const fn needs_record(&self) -> bool {
        matches!(self.own, OwnReservation::Open { .. } | OwnReservation::Tombstone)
    }
}

/// Mark of the charge of a reservation: tells later how many of its hits still count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservationMark {
    /// Time of the charge, by the counter.
    pub at: Time,
    /// Window of the charge; for a bucket its level after the charge plus all hits that were given back before.
    pub base: u64,
}

/// A reservation, as far as its counter tells how many of its hits still count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReservedHits {
    /// Hits that it charged.
    pub(crate) hits: u64,
    /// Mark of the charge.
    pub(crate) mark: ReservationMark,
    /// Hits that were given back to the counter so far.
    pub(crate) given_back: u64,
    /// Highest number of hits per period of the limit since the charge.
    pub(crate) highest_rate: u32,
}
