//! Slots and number of the replicas that share the limits.
//!
//! A replica that holds one of R slots may use a share of eventual limits. Redis assigns slots by its own clock, for
//! 30 s from each renewal; no replica's wall clock matters. Claim: **in any span of one period, at most one replica
//! uses a share by a given slot**, so all replicas use at most R shares. Proof:
//!
//! 1. A replica uses its slot until 30 s after it *sent* the last renewal that was answered. Redis ran the renewal
//!    later, so the claim in Redis ends no sooner, and no other replica gets the slot before.
//! 2. The next holder uses its share of a limit only when, by Redis, a period of that limit has passed since the end of
//!    the claim before its own. At the local instant t, the time of Redis is at least the time in its last reply plus t
//!    minus the instant at which that reply was *received*, because Redis wrote it before.
//! 3. Losses err on the safe side: a lost reply ends the use of the slot sooner; a renewal that Redis runs late keeps
//!    others from the slot longer.
//!
//! Assumptions: clocks run at one rate, the clock of Redis does not jump ahead, and Redis does not lose a claim. The
//! number of live replicas tunes the size of leases; no promise depends on it.

pub mod claim_call;
pub(super) mod heartbeat;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use self::claim_call::ClaimReply;
use crate::base::clock::{Time, to_micros};

/// Duration of a claim after it was sent; `lua/replicas.lua` has the same.
pub const CLAIM_DURATION: Duration = Duration::from_secs(30);

/// Time for which the last reply tells the number of live replicas.
const LIVE_COUNT_VALIDITY: Duration = Duration::from_secs(60);

/// Slot of this replica and number of live replicas, by the last reply of Redis. Reading takes no lock.
#[derive(Debug)]
pub struct ReplicaMembership {
    slots: NonZeroU32,
    last_reply: ArcSwapOption<LastReply>,
}

#[derive(Clone, Copy, Debug)]
struct LastReply {
    slot: Option<HeldSlot>,
    live: Option<NonZeroU32>,
    /// Time of Redis in the reply.
    now: Time,
    received: Instant,
}

/// Slot that Redis assigned to this replica.
#[derive(Clone, Copy, Debug)]
struct HeldSlot {
    number: u32,
    previous_end: Time,
    /// Arrival of the first reply about this claim.
    received: Instant,
    /// Time for which the slot had been free then; `u64::MAX` if it never had a holder.
    free_us: u64,
    /// End of its use.
    until: Instant,
}

impl ReplicaMembership {
    /// Creates the state of a replica without a slot; `slots` is `TOLLKEEPER_MAX_REPLICAS`.
    pub const fn new(slots: NonZeroU32) -> Self {
        Self { slots, last_reply: ArcSwapOption::const_empty() }
    }

    /// Returns true if a share of a limit with this period may be used at `at`.
    pub fn may_use_share(&self, period_us: u64, at: Instant) -> bool {
        let last_reply = self.last_reply.load();
        let Some(slot) = last_reply.as_ref().and_then(|reply| reply.slot.as_ref()) else { return false };
        // An instant before the reply proves nothing: the slot may have been assigned after it.
        let is_held = slot.received <= at && at < slot.until;
        is_held && slot.free_us.saturating_add(to_micros(at - slot.received)) >= period_us
    }

    /// Returns the number of live replicas, this one included; `None` if the last reply is older than a minute.
    pub fn live_replicas(&self) -> Option<NonZeroU32> {
        self.last_reply.load().as_ref().filter(|reply| reply.received.elapsed() <= LIVE_COUNT_VALIDITY)?.live
    }

    /// Returns R, the number of slots that this replica is configured with: 1 to 1000.
    pub const fn slot_count(&self) -> NonZeroU32 {
        self.slots
    }

    /// Returns the slot that Redis last assigned, below R; the claim may have ended since.
    pub fn slot(&self) -> Option<u32> {
        self.last_reply.load().as_ref()?.slot.map(|slot| slot.number)
    }

    /// Returns the time of Redis at `at` by the last reply, however old; it is late by the reply's time on the network.
    pub fn redis_time(&self, at: Instant) -> Option<Time> {
        let last_reply = self.last_reply.load();
        let reply = last_reply.as_ref()?;
        let before_us = to_micros(reply.received.saturating_duration_since(at));
        let after_us = to_micros(at.saturating_duration_since(reply.received));
        Some(Time::from_micros(reply.now.plus_us(after_us).as_micros().saturating_sub(before_us)))
    }

    /// Records a reply, with the times at which its request was sent and it was received. Replies must be recorded in
    /// the order of their requests.
    pub fn record_reply(&self, reply: &ClaimReply, sent: Instant, received: Instant) {
        let known = self.last_reply.load().as_ref().and_then(|last| last.slot);
        let slot = reply.slot.map(|number| {
            let until = sent + CLAIM_DURATION;
            match known {
                // A renewal: the start of the claim stays.
                Some(slot) if (slot.number, slot.previous_end) == (number, reply.previous_end) => {
                    HeldSlot { until, ..slot }
                }
                Some(_) | None => {
                    let had_holder = reply.previous_end > Time::default();
                    let free_us = if had_holder { reply.now.since_us(reply.previous_end) } else { u64::MAX };
                    HeldSlot { number, previous_end: reply.previous_end, received, free_us, until }
                }
            }
        });
        let last_reply = LastReply { slot, live: NonZeroU32::new(reply.live), now: reply.now, received };
        self.last_reply.store(Some(last_reply.into()));
    }

    /// Ends the use of the slot.
    pub fn end_slot_use(&self) {
        let last_reply = self.last_reply.load();
        if let Some(reply) = &*last_reply {
            self.last_reply.store(Some(LastReply { slot: None, ..**reply }.into()));
        }
    }
}
