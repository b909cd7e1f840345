//! Rejections by limit and key, exact up to a number of keys.
//!
//! Further keys are not told apart: sketches estimate their number, and their runs of rejections are unknown.

use crate::base::clock::Time;
use crate::base::sharded::HashKeyMap;

/// Rejections by limit and key.
#[derive(Debug)]
pub struct KeyTallies {
    keys: HashKeyMap<KeyTally>,
    max_keys: usize,
    /// Charges of keys beyond the bound.
    pub untracked: u64,
}

/// Rejections of one key by one limit.
#[derive(Clone, Copy, Debug, Default)]
struct KeyTally {
    /// Rejections since the last admission.
    run: u32,
    is_known: bool,
    was_rejected: bool,
    run_start_us: u64,
}

/// Changes that a charge makes to its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyChange {
    /// First charge of the key.
    pub is_new: bool,
    /// First rejection of the key.
    pub is_first_rejection: bool,
    /// Rejections in a row until now.
    pub run: RejectionRun,
}

/// Rejections of one key in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RejectionRun {
    /// Rejected requests.
    pub requests: u32,
    /// Microseconds from the first to the last.
    pub duration_us: u64,
}

/// Identity of a key of a limit.
#[derive(Clone, Copy, Debug)]
pub struct KeyId(u128);

impl KeyId {
    /// Combines the hash of a path with the index of a limit.
    pub const fn new(path: u128, limit: usize) -> Self {
        Self(path ^ (limit as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }
}

impl KeyTallies {
    /// Creates counts of up to `max_keys` keys.
    pub fn new(max_keys: usize) -> Self {
        Self { keys: HashKeyMap::default(), max_keys, untracked: 0 }
    }

    /// Counts a charge; `None` if the key is beyond the bound.
    pub fn add(&mut self, key: KeyId, at: Time, rejected: bool) -> Option<KeyChange> {
        let is_full = self.keys.len() >= self.max_keys;
        let tally = if is_full { self.keys.get_mut(&key.0) } else { Some(self.keys.entry(key.0).or_default()) };
        let Some(tally) = tally else {
            self.untracked += 1;
            return None;
        };
        let is_new = !std::mem::replace(&mut tally.is_known, true);
        if !rejected {
            tally.run = 0;
            return Some(KeyChange { is_new, ..KeyChange::default() });
        }
        if tally.run == 0 {
            tally.run_start_us = at.as_micros();
        }
        tally.run = tally.run.saturating_add(1);
        let is_first_rejection = !std::mem::replace(&mut tally.was_rejected, true);
        let duration_us = at.since_us(Time::from_micros(tally.run_start_us));
        Some(KeyChange { is_new, is_first_rejection, run: RejectionRun { requests: tally.run, duration_us } })
    }
}
