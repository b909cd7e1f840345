//! Pool: what the replica that has a hold may hand out without asking, by its own clock.
//!
//! It is what the counter granted ([`HoldAnswer`]), less what was used since. Used hits are told with the next request.
//! A request whose answer was lost is repeated alone, and says which one it repeats, so that its hits are charged once.
//!
//! Decides: which used hits a request tells, and which of them again.

use super::hold::{HeldAmount, HoldAnswer, HoldRequest, OtherPool};
use crate::base::clock::Time;

/// Hits that were used, with the numbers of the request that tells the counter: see [`HoldRequest`].
#[derive(Clone, Copy, Debug)]
pub struct NumberedHits {
    /// The hits.
    pub used: u64,
    /// Number of the request.
    pub number: u64,
    /// Number of the request that told them first; 0: this one does.
    pub first_number: u64,
}

/// Hits of one counter that this process may hand out until its hold ends; hits per period if it holds a rate.
#[derive(Debug)]
pub struct Pool {
    /// What is held, without what was used.
    pub held: u64,
    /// End of the hold.
    pub until: Time,
    /// Hits that were used, and that no request has told yet.
    pub used: u64,
    /// What could be held beside that.
    pub room: u64,
    /// The other pools that hold or want something, with times by this process's clock.
    pub others: Vec<OtherPool>,
    /// End of the current window; `None` if there are no windows.
    pub window_end: Option<Time>,
    /// Time of the last request.
    pub asked: Option<Time>,
    /// Hits of a request that was not answered: the counter may have charged them.
    unanswered: Option<NumberedHits>,
    /// Number of the last request.
    number: u64,
}

impl Pool {
    /// An empty pool beside which `room` could be held. The numbers of its requests follow the time `now`, so that they
    /// are above those of a pool of the same counter before it, which the counter may remember.
    pub fn new(room: u64, now: Time) -> Self {
        Self {
            held: 0,
            until: Time::default(),
            used: 0,
            room,
            others: Vec::new(),
            window_end: None,
            asked: None,
            unanswered: None,
            number: now.as_micros(),
        }
    }

    /// Counts hits as used, and lowers what is held by as many.
    pub fn record_used_hits(&mut self, hits: u64) {
        self.used = self.used.saturating_add(hits);
        self.held = self.held.saturating_sub(hits);
    }

    /// True if the counter may not know of hits that were used.
    pub fn has_untold_hits(&self) -> bool {
        self.used > 0 || self.unanswered.is_some_and(|hits| hits.used > 0)
    }

    /// True if the next request tells hits, or repeats one.
    pub const fn has_something_to_tell(&self) -> bool {
        self.used > 0 || self.unanswered.is_some()
    }

    /// Takes the used hits of the next request: those of one that was not answered go first, alone.
    pub fn take_used(&mut self) -> NumberedHits {
        self.number += 1;
        let number = self.number;
        match self.unanswered.take() {
            Some(NumberedHits { used, first_number, .. }) => NumberedHits { used, number, first_number },
            None => NumberedHits { used: std::mem::take(&mut self.used), number, first_number: 0 },
        }
    }

    /// Records that a request was not answered.
    pub fn record_unanswered(&mut self, request: &HoldRequest) {
        let first_number = if request.first_number > 0 { request.first_number } else { request.number };
        self.unanswered = Some(NumberedHits { used: request.used, number: request.number, first_number });
    }

    /// Records an answer, with times by this process's clock: `held` and `room` are what it grants of a limit, until
    /// `until`.
    pub fn accept(&mut self, answer: HoldAnswer, held: u64, room: u64, until: Time) {
        (self.held, self.room, self.until, self.window_end) = (held, room, until, answer.window_end);
        // One that has left is remembered for its last request.
        self.others = answer.others;
        self.others.retain(|other| other.demand > 0 || other.held != HeldAmount::default());
    }

    /// The other pools whose holds have not ended at `now`.
    pub fn others_at(&self, now: Time) -> impl Iterator<Item = &OtherPool> {
        self.others.iter().filter(move |other| other.until > now)
    }
}
