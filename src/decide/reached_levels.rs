//! Levels of `notify` that keys reached, on their way from the decisions to `serve::reached_level_notifier`.
//!
//! Decides: how many reached levels wait (`MAX_WAITING`), and how many are remembered (`MAX_REMEMBERED`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::mpsc;

use crate::base::clock::Time;
use crate::base::named_enum::named_enum;

/// Maximum number of reached levels that wait to be told; more are dropped, and counted.
const MAX_WAITING: usize = 1_000;
/// Maximum number of reached levels that are remembered. Beyond it, Redis alone knows what was told.
const MAX_REMEMBERED: usize = 100_000;

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

/// Reached levels on their way from the decisions to the task that tells them.
#[derive(Debug)]
pub struct ReachedLevels {
    sender: mpsc::Sender<ReachedLevel>,
    /// Ends of periods, by the identity of what this process has reached in them.
    remembered: Mutex<HashMap<String, Time>>,
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

impl ReachedLevels {
    /// Creates the way, and its end.
    pub fn new() -> (Self, mpsc::Receiver<ReachedLevel>) {
        let (sender, receiver) = mpsc::channel(MAX_WAITING);
        (Self { sender, remembered: Mutex::default(), counts: Default::default() }, receiver)
    }

    /// Counts what became of a reached level.
    pub fn count(&self, outcome: LevelOutcome) {
        self.counts[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Number of reached levels since the start, by what became of them.
    pub fn counts_by_outcome(&self) -> impl Iterator<Item = (LevelOutcome, u64)> {
        LevelOutcome::ALL.into_iter().zip(&self.counts).map(|(outcome, count)| (outcome, count.load(Ordering::Relaxed)))
    }

    /// Passes a reached level on, unless this process did so in the same period.
    pub(super) fn send(&self, id: String, until: Time, now: Time, build: impl FnOnce(String) -> ReachedLevel) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered.get(&id).is_some_and(|until| now < *until) {
            return;
        }
        if remembered.len() >= MAX_REMEMBERED {
            remembered.retain(|_, until| now < *until);
        }
        match self.sender.try_reserve() {
            Ok(permit) => {
                if remembered.len() < MAX_REMEMBERED {
                    remembered.insert(id.clone(), until);
                }
                drop(remembered);
                permit.send(build(id));
            }
            Err(_) => self.count(LevelOutcome::Dropped),
        }
    }
}
