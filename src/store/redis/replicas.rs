//! This process among those that share the limits: whether it has a slot, and how many they are.
//!
//! A share of an eventual rule may be spent by whoever has one of R slots. Redis gives them out, for 30 s from each
//! renewal on, by its own clock; no process's wall clock plays a part. What follows holds for each slot and any period:
//! **in a span of one period at most one process spends a share by it**, so all together spend R at most.
//!
//! - A process spends until 30 s after it *sent* its last renewal that was answered. Redis ran that later, so the claim
//!   in Redis ends no sooner, and nobody else gets the slot before it has ended.
//! - The next owner spends a rule's share only when, by Redis, a period of the rule has passed since the claim before
//!   its own ended. At the local instant t Redis's time is at least what the reply said plus t less the instant at
//!   which the reply was *received*, because Redis had said it before.
//! - What gets lost errs to the same side: an answer that does not come ends the spending sooner, a renewal that Redis
//!   runs late keeps others from the slot for longer.
//!
//! It takes for granted that clocks run at one rate, that the clock of Redis does not jump ahead, and that Redis does
//! not lose a claim. Nothing is spent here: who does asks [`Replicas::usable`]. The number of live processes tunes and
//! never protects.

pub mod claim;
pub(super) mod heartbeat;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use self::claim::Reply;
use crate::clock::{Time, micros};

/// How long a claim lasts after it was sent; `lua/replicas.lua` has the same number.
pub const CLAIM: Duration = Duration::from_secs(30);

/// How long the last answer tells how many are alive.
const COUNTED: Duration = Duration::from_secs(60);

/// What is known of this process's slot and of the others. Reading takes no lock.
#[derive(Debug)]
pub struct Replicas {
    slots: NonZeroU32,
    heard: ArcSwapOption<LastReply>,
}

/// What the last answer said.
#[derive(Clone, Copy, Debug)]
struct LastReply {
    slot: Option<Slot>,
    live: Option<NonZeroU32>,
    /// Redis's time in the answer.
    now: Time,
    received: Instant,
}

/// A slot that Redis gave this process.
#[derive(Clone, Copy, Debug)]
struct Slot {
    number: u32,
    previous_end: Time,
    /// When the answer came that first told of this claim.
    received: Instant,
    /// How long it was free by then; for ever if nobody had it before.
    free_us: u64,
    /// Not to be used from then on.
    until: Instant,
}

impl Replicas {
    /// Of `TOLLKEEPER_MAX_REPLICAS` slots; none is held yet.
    pub const fn new(slots: NonZeroU32) -> Self {
        Self { slots, heard: ArcSwapOption::const_empty() }
    }

    /// Whether a share of a rule of this period may be spent at `at`.
    pub fn usable(&self, period_us: u64, at: Instant) -> bool {
        let heard = self.heard.load();
        let Some(slot) = heard.as_ref().and_then(|heard| heard.slot.as_ref()) else { return false };
        // Redis may have given the slot after an instant that lies before the answer.
        let held = slot.received <= at && at < slot.until;
        held && slot.free_us.saturating_add(micros(at - slot.received)) >= period_us
    }

    /// How many processes are alive, this one included; `None` if no answer of the last minute says so.
    pub fn live(&self) -> Option<NonZeroU32> {
        self.heard.load().as_ref().filter(|heard| heard.received.elapsed() <= COUNTED)?.live
    }

    /// R, the number of slots, as this process has it: 1 to 1000. A slot is only given where all agree on it.
    pub const fn slots(&self) -> NonZeroU32 {
        self.slots
    }

    /// The slot that Redis last gave this process, below R; it may have lapsed since.
    pub fn slot(&self) -> Option<u32> {
        self.heard.load().as_ref()?.slot.map(|slot| slot.number)
    }

    /// The time of Redis at `at` by the last answer, however old; late by as long as that was on its way.
    pub fn redis_time(&self, at: Instant) -> Option<Time> {
        let heard = self.heard.load();
        let heard = heard.as_ref()?;
        let before_us = micros(heard.received.saturating_duration_since(at));
        let after_us = micros(at.saturating_duration_since(heard.received));
        Some(Time::from_micros(heard.now.plus_us(after_us).as_micros().saturating_sub(before_us)))
    }

    /// Takes note of an answer, by when it was asked for and when it was there. Answers come in the order of their
    /// questions, and one that is given up is none.
    pub fn heard(&self, reply: &Reply, sent: Instant, received: Instant) {
        let known = self.heard.load().as_ref().and_then(|heard| heard.slot);
        let slot = reply.slot.map(|number| {
            let until = sent + CLAIM;
            match known {
                // Renewed: what was known of it when it began still holds.
                Some(slot) if (slot.number, slot.previous_end) == (number, reply.previous_end) => {
                    Slot { until, ..slot }
                }
                _ => {
                    let had_owner = reply.previous_end > Time::default();
                    let free_us = if had_owner { reply.now.since_us(reply.previous_end) } else { u64::MAX };
                    Slot { number, previous_end: reply.previous_end, received, free_us, until }
                }
            }
        });
        let heard = LastReply { slot, live: NonZeroU32::new(reply.live), now: reply.now, received };
        self.heard.store(Some(heard.into()));
    }

    /// Spends nothing any more.
    pub fn let_go(&self) {
        let heard = self.heard.load();
        if let Some(heard) = &*heard {
            self.heard.store(Some(LastReply { slot: None, ..**heard }.into()));
        }
    }
}
