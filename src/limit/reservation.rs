//! `reservations` of a limit: a request charges an estimate, and the end of its stream settles with the true cost.
//!
//! A request *reserves* its `hits_addend`, or the rule's `estimate`: they are charged like any hits, so requests that
//! run at once cannot overspend together. The end of its stream, an entry `release` with the token of the answer (see
//! [`slot`](crate::limit::slot)), *settles*: its `hits_addend` is the true cost.
//!
//! | case | effect on the counter |
//! |---|---|
//! | request, room | charges the estimate, hands out a new token |
//! | request, no room, or another limit rejects | none: all limits of the descriptor or none |
//! | request again with the same id | none; a new token, admitted also at the limit |
//! | settled below the estimate | gives the difference back, as far as it still counts: not into a later window |
//! | settled above | charges the difference, also beyond the limit, as rejected hits that count are |
//! | settled by another token, twice, or `-` | none |
//! | settled by `?`: Envoy saw no answer | settles by the id; if that is unknown, or forgotten, charges the cost |
//! | the same, whether it is known or not | leaves a *tombstone*, so that it counts once |
//! | request that finds a tombstone | none; rejected for 15 s, because its stream is gone |
//! | not settled in time, or its Envoy dead | `unsettled: keep`: none. `return`: gives it back if room lacks next |
//! | settled after that | none; by `?` it leaves a tombstone too |
//!
//! A counter has at most [`MAX_RESERVATIONS`] open ones. Of more, the estimate is charged and stays.
//!
//! A counter can have many reservations, so no state has them all: a [`ReservationView`] has what one request sees of
//! them. The store that keeps the reservations makes one, the charge changes it, and the store writes what changed. The
//! same arithmetic serves both stores.
//!
//! What is given back must still count, or the counter would admit more than its limit. A [`ReservationMark`] tells
//! that later: the window of the charge, or for a bucket its level. The level at the charge, less what can have been
//! refilled or given back since, is a lower bound on the level at any time since; tokens below that bound were never
//! refilled, so they can be given back. A log drops its oldest hits, which leave it first.
//!
//! A slot of a concurrent limit is no reservation that costs nothing, though it could be one: a pair of calls would take
//! Redis 1.3 to 1.5 times as long (150 to 170 us of CPU for slots, 190 to 235 for reservations).
//!
//! Decides: what a request reserves.
//! Decides: what its end settles: above the estimate, twice, too late, by another token, by `?`.
//! Decides: how many open reservations a counter may have.

use std::fmt;
use std::num::{NonZeroU32, NonZeroU64};

use super::ban::DurationText;
use super::period::MAX_PERIOD_US;
use super::slot::{SlotToken, SlotUse};
use crate::base::clock::{Time, to_micros};
use crate::base::go_syntax::parse_unsigned_duration;
use crate::base::named_enum::named_enum;

/// Maximum number of open reservations of one counter, tombstones included.
pub const MAX_RESERVATIONS: u32 = 100_000;

/// Default of `settle_within`, in seconds: 10 minutes.
pub const DEFAULT_SETTLE_WITHIN_S: u32 = 600;

named_enum! {
    /// What becomes of an estimate that is not settled in time.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum UnsettledPolicy {
        /// It stays charged.
        #[default]
        Keep = "keep",
        /// It is given back, as if the request had cost nothing.
        Return = "return",
    }
}

/// `reservations` of a limit, in one word: limits are copied in every decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationPolicy(NonZeroU64);

/// Bits of the estimate.
const ESTIMATE_BITS: u32 = 32;
/// Bit that is set for [`UnsettledPolicy::Return`].
const RETURN_BIT: u64 = 1 << 63;

impl ReservationPolicy {
    /// Creates the key: `settle_within_s` seconds, from 1 to 366 days, and the estimate of each request; `None`: its
    /// hits. Returns `None` if the time is out of range.
    pub fn new(settle_within_s: u32, unsettled: UnsettledPolicy, estimate: Option<NonZeroU32>) -> Option<Self> {
        if u64::from(settle_within_s) * 1_000_000 > MAX_PERIOD_US || settle_within_s == 0 {
            return None;
        }
        let policy = if unsettled == UnsettledPolicy::Return { RETURN_BIT } else { 0 };
        let estimate = u64::from(estimate.map_or(0, NonZeroU32::get));
        NonZeroU64::new(policy | u64::from(settle_within_s) << ESTIMATE_BITS | estimate).map(Self)
    }

    /// Reads what `Display` writes, as in the decision log.
    pub fn from_logged_text(text: &str) -> Option<Self> {
        let Some(keys) = text.strip_prefix("{settle_within: ").and_then(|keys| keys.strip_suffix('}')) else {
            return Self::new(parse_seconds(text)?, UnsettledPolicy::Keep, None);
        };
        let mut keys = keys.split(", ");
        let settle_within_s = parse_seconds(keys.next()?)?;
        let (mut unsettled, mut estimate) = (UnsettledPolicy::Keep, None);
        for key in keys {
            match key.split_once(": ")? {
                ("unsettled", word) => unsettled = UnsettledPolicy::from_name(word)?,
                ("estimate", number) => estimate = Some(number.parse().ok()?),
                _ => return None,
            }
        }
        Self::new(settle_within_s, unsettled, estimate)
    }

    /// Time after which a reservation is over, in microseconds, from 1 s to 366 days.
    pub const fn settle_within_us(self) -> u64 {
        ((self.0.get() & !RETURN_BIT) >> ESTIMATE_BITS) * 1_000_000
    }

    /// What becomes of a reservation that is over.
    pub const fn unsettled_policy(self) -> UnsettledPolicy {
        if self.0.get() & RETURN_BIT == 0 { UnsettledPolicy::Keep } else { UnsettledPolicy::Return }
    }

    /// Time for which a reservation that is over is kept, in microseconds, under a limit of that period. Its hits may
    /// be given back until then.
    pub const fn kept_us(self, period_us: u64) -> u64 {
        match self.unsettled_policy() {
            UnsettledPolicy::Keep => 0,
            UnsettledPolicy::Return => period_us,
        }
    }

    /// Estimate of each request, whatever its hits are; `None`: its hits are the estimate.
    pub fn fixed_estimate(self) -> Option<NonZeroU32> {
        u32::try_from(self.0.get() & ((1 << ESTIMATE_BITS) - 1)).ok().and_then(NonZeroU32::new)
    }
}

fn parse_seconds(text: &str) -> Option<u32> {
    u32::try_from(to_micros(parse_unsigned_duration(text).ok()?) / 1_000_000).ok()
}

/// Writes the value of `reservations` in a rule file: `10m`, or
/// `{settle_within: 10m, unsettled: return, estimate: 4000}`.
impl fmt::Display for ReservationPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = DurationText(self.settle_within_us());
        if self.unsettled_policy() == UnsettledPolicy::Keep && self.fixed_estimate().is_none() {
            return write!(f, "{length}");
        }
        write!(f, "{{settle_within: {length}, unsettled: {}", self.unsettled_policy().name())?;
        if let Some(estimate) = self.fixed_estimate() {
            write!(f, ", estimate: {estimate}")?;
        }
        f.write_str("}")
    }
}

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
