//! Levels of `notify` that keys reached, on their way from the decisions to `serve::reached_level_notifier`.
//!
//! Decides: how many reached levels wait (`MAX_WAITING`), and how many are remembered (`MAX_REMEMBERED`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use crate::base::clock::Time;
use crate::base::named_enum::named_enum;
use crate::rules::rule::notify_levels::NotifyLevel;

/// Maximum number of reached levels that wait to be told; more are dropped, and counted.
const MAX_WAITING: usize = 1_000;
/// Maximum number of reached levels that are remembered. Beyond it, Redis alone knows what was told.
const MAX_REMEMBERED: usize = 100_000;
/// Least time between two removals of ended periods, which look at all levels under their lock.
const SWEEP_INTERVAL_US: u64 = 1_000_000;

/// A level that a key reached.
#[derive(Clone, Debug)]
pub struct ReachedLevel {
    /// Identity of key, limit, level and period, the same in all replicas; hexadecimal.
    pub id: String,
    /// End of the period in which the level is told once.
    pub until: Time,
    /// Line of the decision log.
    pub line: Vec<u8>,
    /// What the process's log says.
    pub text: String,
}

/// A level of a counter, known to this process only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CounterLevel {
    /// Hash of the counter's path and of its limit.
    pub(super) counter: u128,
    /// The level.
    pub(super) level: NotifyLevel,
}

/// Levels that this process passed on.
#[derive(Debug, Default)]
struct SentLevels {
    /// Ends of their periods.
    ends: HashMap<CounterLevel, Time>,
    /// Last time that ended periods were removed.
    swept_at: Time,
}

impl SentLevels {
    /// Remembers a level. If there is no room, forgets one: Redis knows what was told.
    fn insert(&mut self, level: CounterLevel, until: Time, now: Time) {
        if self.ends.len() >= MAX_REMEMBERED && self.swept_at.plus_us(SWEEP_INTERVAL_US) <= now {
            self.ends.retain(|_, until| now < *until);
            self.swept_at = now;
        }
        if self.ends.len() >= MAX_REMEMBERED
            && let Some(any) = self.ends.keys().next().copied()
        {
            self.ends.remove(&any);
        }
        self.ends.insert(level, until);
    }
}

/// Reached levels on their way from the decisions to the task that tells them.
#[derive(Debug)]
pub struct ReachedLevelSender {
    sender: mpsc::Sender<ReachedLevel>,
    sent: Mutex<SentLevels>,
    counts: [AtomicU64; LevelOutcome::ALL.len()],
}

named_enum! {
    /// What became of a reached level.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum LevelOutcome {
        /// This process told it.
        Told = "told",
        /// Another process told it, or this one before.
        ToldElsewhere = "told_elsewhere",
        /// This process told it, and Redis did not answer whether another one did.
        Unconfirmed = "unconfirmed",
        /// Too many waited.
        Dropped = "dropped",
    }
}

impl ReachedLevelSender {
    /// Creates the way, and its end.
    pub fn new() -> (Self, mpsc::Receiver<ReachedLevel>) {
        let (sender, receiver) = mpsc::channel(MAX_WAITING);
        (Self { sender, sent: Mutex::default(), counts: Default::default() }, receiver)
    }

    /// Counts what became of a reached level.
    pub fn count(&self, outcome: LevelOutcome) {
        self.counts[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Number of reached levels since the start, by what became of them.
    pub fn counts_by_outcome(&self) -> impl Iterator<Item = (LevelOutcome, u64)> {
        LevelOutcome::ALL.into_iter().zip(&self.counts).map(|(outcome, count)| (outcome, count.load(Ordering::Relaxed)))
    }

    /// True if this process passed the level on in this period.
    pub(super) fn has_sent(&self, level: &CounterLevel, now: Time) -> bool {
        self.lock_sent().ends.get(level).is_some_and(|until| now < *until)
    }

    /// Passes a reached level on. One that is dropped is not remembered, so the next charge passes it on again.
    pub(super) fn send(&self, level: CounterLevel, now: Time, build: impl FnOnce() -> ReachedLevel) {
        let Ok(permit) = self.sender.try_reserve() else { return self.count(LevelOutcome::Dropped) };
        let reached = build();
        self.lock_sent().insert(level, reached.until, now);
        permit.send(reached);
    }

    fn lock_sent(&self) -> MutexGuard<'_, SentLevels> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
