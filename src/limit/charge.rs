//! A charge: the counters of a matched descriptor, the request to them, what it changes, and its result.
//!
//! A counter is identified by its path (`limit::counter_path`) and by its limit's algorithm, period and epoch. The
//! number of hits that a limit allows is not part of the key, so a counter survives a change of it.
//!
//! Hits are charged, peeked at (no hits: `limit::request`) or refunded. `ChargeRequest::state_change` alone says
//! what that changes in a state; each algorithm applies it in its own `charge` (`limit::algorithm`).
//!
//! A counter's time never runs backwards: an algorithm works at the later of `now` and the last charge. A last charge
//! more than a period ahead of `now` means that a clock was wrong, and the state is discarded.
//!
//! Decides: what a peek, a refund and a rejected hit change (`state_change`).
//! Decides: the longest delay (`max_wait`, the caller's deadline).
//! Decides: a clock that runs backwards or jumps (`effective_time`); remaining hits at most 2^32 - 1.

use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::ban::Ban;
use crate::limit::counter_path::CounterPath;
use crate::limit::request::Hits;
use crate::limit::slot::{SlotChange, SlotUse};

/// Charge on all counters of one descriptor, which are decided together.
#[derive(Clone, Debug)]
pub struct Charge<'a> {
    /// Path of the counters.
    pub path: CounterPath<'a>,
    /// Result of [`CounterPath::hash_for_process`] for the path.
    pub path_hash: u128,
    /// Counters, at least one, with distinct tags.
    pub counters: SmallVec<[Counter<'a>; 1]>,
    /// Hits and maximum delay.
    pub request: ChargeRequest,
    /// Slot that the request takes, asks for or frees; `None` if no counter has slots.
    pub slot: Option<&'a SlotUse>,
}

impl<'a> Charge<'a> {
    /// Creates a charge on counters of a path: at least one, with distinct tags.
    pub fn new(path: CounterPath<'a>, counters: SmallVec<[Counter<'a>; 1]>, request: ChargeRequest) -> Self {
        Self { path_hash: path.hash_for_process(), path, counters, request, slot: None }
    }

    /// Returns true if the charge releases a slot or settles a reservation.
    pub fn is_release(&self) -> bool {
        self.slot.is_some_and(|slot| slot.action.is_release())
    }
}

/// One counter of a path.
#[derive(Clone, Copy, Debug)]
pub struct Counter<'a> {
    /// Limit of the counter.
    pub limit: &'a Limit,
    /// The limit is in shadow mode: it never rejects the descriptor.
    pub shadow: bool,
    /// The limit is a quota: its rejection does not keep the other counters from being charged.
    pub quota: bool,
    /// Hash that identifies the counter within its path: see `rules::rule::set::hash_limit_identity`.
    pub tag: u128,
    /// Epoch of the rule, which is part of the tag; raising it resets the counter.
    pub epoch: u64,
}

impl<'a> Counter<'a> {
    /// The limit of the counter, as [`charge_together`](crate::limit::algorithm::joint_charge::charge_together) takes it.
    pub const fn as_joint_limit(&self) -> JointLimit<'a> {
        JointLimit { limit: self.limit, rejects_others: !self.shadow && !self.quota }
    }
}

/// Maximum count of a counter: above it, a double in a Lua script would not be exact.
pub const MAX_COUNT: u64 = 1 << 53;

/// One request to a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargeRequest {
    /// Hits to charge, peek at or refund.
    pub hits: Hits,
    /// Maximum delay that the caller accepts, in microseconds; the limit's own `max_wait` applies too.
    pub max_delay_us: u64,
    /// Another limit of the descriptor rejects these hits: count them only where rejected hits count.
    pub rejected_elsewhere: bool,
    /// Hits that replicas may still admit from leases; a refund leaves at least these charged.
    pub leased: u64,
    /// The refund gives back reserved hits: a log drops its oldest hits in place of its newest.
    pub gives_back: bool,
    /// A client asks: if this is a peek, its rejection may begin a ban.
    pub is_sent_by_client: bool,
}

impl ChargeRequest {
    /// Creates a request that no other limit has rejected.
    pub const fn new(hits: Hits, max_delay_us: u64) -> Self {
        Self { hits, max_delay_us, rejected_elsewhere: false, leased: 0, gives_back: false, is_sent_by_client: false }
    }

    /// Creates the request of a client.
    pub const fn sent_by_client(hits: Hits, max_delay_us: u64) -> Self {
        Self { is_sent_by_client: true, ..Self::new(hits, max_delay_us) }
    }

    /// True if a rejection of the request by `limit` counts towards a ban.
    pub fn counts_for_ban(self, limit: &Limit) -> bool {
        match self.hits {
            Hits::Charge(count) => count > 0,
            Hits::Peek => self.is_sent_by_client && limit.ban().is_some_and(Ban::counts_peeks),
            Hits::Refund(_) => false,
        }
    }

    /// Maximum delay of the answer under `limit`, in microseconds.
    pub const fn longest_delay_us(self, limit: &Limit) -> u64 {
        if self.max_delay_us < limit.max_wait_us() { self.max_delay_us } else { limit.max_wait_us() }
    }

    /// Hits that must fit for the request to pass: one more for a peek, none for a refund.
    pub const fn required_hits(self) -> u64 {
        match self.hits {
            Hits::Peek => 1,
            Hits::Charge(count) => count,
            Hits::Refund(_) => 0,
        }
    }

    /// Change that the request makes to the state, given whether its hits fit.
    pub(crate) const fn state_change(self, fits: bool, limit: &Limit) -> StateChange {
        match self.hits {
            Hits::Charge(count) if fits && !self.rejected_elsewhere => StateChange::Charge(count),
            Hits::Charge(count) if limit.counts_rejected_hits() => StateChange::ChargeRejected(count),
            Hits::Refund(count) => StateChange::Refund(count),
            Hits::Charge(_) | Hits::Peek => StateChange::None,
        }
    }
}

/// Change that a request makes to a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateChange {
    /// No change: a peek, or rejected hits that do not count.
    None,
    /// Adds admitted hits.
    Charge(u64),
    /// Adds rejected hits, up to the bound of the algorithm.
    ChargeRejected(u64),
    /// Removes hits.
    Refund(u64),
}

/// Result of a request for one limit. Durations count from the `now` of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChargeResult {
    /// The limit admits the hits.
    pub admitted: bool,
    /// Hits counted before the request, rounded as the algorithm rounds.
    pub before: u64,
    /// Hits counted after the request; includes rejected hits only if they count.
    pub after: u64,
    /// Hits that would pass at once; 0 for a limit of 0.
    ///
    /// Hits that a leaky_bucket would delay, or for which a token_bucket would take tokens in advance, are excluded.
    pub remaining: u64,
    /// Microseconds until nothing is counted (fixed_window: until the window ends); 0 if nothing is, or if that never
    /// happens.
    pub reset_us: u64,
    /// Microseconds until the same request could pass. `None` if it passed or never will.
    pub retry_after_us: Option<u64>,
    /// Delay of the response, in microseconds; 0 if the hits are rejected.
    pub delay_us: u64,
    /// Microseconds until the ban of the client ends; 0: it is not banned. A ban rejects all hits until then.
    pub ban_left_us: u64,
    /// The request began the ban.
    pub ban_begun: bool,
    /// What became of the request's slot; [`SlotChange::None`] of a limit without slots.
    pub slot: SlotChange,
    /// Seats that the request found expired, or held by a dead holder, and freed; of a limit with reservations, the
    /// number of reservations that it found expired.
    pub expired_seats: u32,
    /// Hits by which the settlement of a reservation exceeds its estimate.
    pub above_estimate: u64,
}

/// One of the limits that are charged together.
#[derive(Clone, Copy, Debug)]
pub struct JointLimit<'r> {
    /// The limit.
    pub limit: &'r Limit,
    /// Exceeding the limit keeps the other limits from being charged; `false` for quotas and in shadow mode.
    pub rejects_others: bool,
}

/// Time that an algorithm works at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EffectiveTime {
    /// The later of `now` and the last charge.
    pub(crate) at: Time,
    /// Microseconds by which `at` lies ahead of `now`.
    pub(crate) ahead_us: u64,
}

/// Returns the time that an algorithm works at; `None` if the last charge lies more than a period ahead of `now`, so
/// that the state is discarded.
pub(crate) fn effective_time(now: Time, last: Time, period_us: u64) -> Option<EffectiveTime> {
    let ahead_us = last.since_us(now);
    (ahead_us <= period_us).then(|| EffectiveTime { at: now.max(last), ahead_us })
}

/// Maximum number of hits that holds take from a counter, 2^32 - 1: a record has 32 bits for them.
pub(crate) const MAX_HELD_HITS: u64 = u32::MAX as u64;

/// Clamps a count to 32 bits.
pub fn clamp_to_u32(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
