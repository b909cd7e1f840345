//! A counter in the table, or the ban beside one: 48 bytes for every algorithm.
//!
//! A state is packed into three words. The records of a log are stored outside the entries, and the entry has their
//! index. The remaining bytes are the inputs of expiry and eviction, so that neither needs the limit.

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::ban_state::BanState;
use crate::limit::algorithm::sliding_window_log;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::{CountingMethod, HitExpiry};
use crate::limit::charge::ChargeResult;

/// One counter.
#[derive(Clone, Copy, Debug)]
pub(super) struct CounterEntry {
    /// Key of the path, mixed with the tag of the limit; two words, because a `u128` would be padded.
    key: [u64; 2],
    /// Packed state; the first word is the time of the last charge in microseconds.
    words: [u64; 3],
    /// Time from which on the state equals an empty one, in seconds since the Unix epoch, rounded up.
    expires_s: u32,
    /// Time after the last charge for which the counter is over its limit, in seconds, rounded up; `u16::MAX`: until it
    /// expires.
    over_s: u16,
    /// Used share of the limit, 0 to [`FULLY_USED`].
    used: u8,
    kind: EntryKind,
}

/// What an entry holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryKind {
    Counter(CountingMethod),
    /// The ban beside a counter.
    Ban,
}

/// `used` of a counter without remaining hits.
const FULLY_USED: u8 = u8::MAX;

impl CounterEntry {
    /// Creates a counter without charges.
    pub(super) fn new(key: u128, counting: CountingMethod) -> Self {
        Self::of_kind(key, EntryKind::Counter(counting))
    }

    /// Creates a ban.
    pub(super) fn new_ban(key: u128) -> Self {
        Self::of_kind(key, EntryKind::Ban)
    }

    fn of_kind(key: u128, kind: EntryKind) -> Self {
        Self { key: split_key(key), words: [0; 3], expires_s: 0, over_s: 0, used: 0, kind }
    }

    pub(super) fn has_key(&self, key: u128) -> bool {
        self.key == split_key(key)
    }

    /// Lower half of the key, which the index hashes by.
    pub(super) const fn hash(&self) -> u64 {
        self.key[0]
    }

    /// True if the state equals an empty one at `now_s`, which is rounded down, so never too early.
    pub(super) const fn is_expired(&self, now_s: u32) -> bool {
        // The seconds overflow in 2106; from then on counters are only evicted.
        self.expires_s <= now_s && now_s != u32::MAX
    }

    /// Used share of the limit, 0 to 255; `None` if the counter is over its limit at `now_s`, which is rounded down.
    pub(super) fn used_share(&self, now_s: u32) -> Option<u8> {
        let last_s = seconds_rounded_up(Time::from_micros(self.words[0]));
        let over_until_s = match self.over_s {
            0 => 0,
            u16::MAX => self.expires_s,
            over_s => last_s.saturating_add(u32::from(over_s)),
        };
        (now_s >= over_until_s).then_some(self.used)
    }

    /// Index of the counter's log, if it has one.
    pub(super) fn log_index(&self) -> Option<usize> {
        (self.kind == EntryKind::Counter(CountingMethod::SlidingWindowLog))
            .then(|| usize::try_from(self.words[2]).unwrap_or(usize::MAX))
    }

    /// Sets the index of the counter's log.
    pub(super) fn set_log_index(&mut self, index: usize) {
        self.words[2] = index as u64;
    }

    /// Unpacks the state; `log` has the records of a log.
    pub(super) fn state(&self, log: sliding_window_log::State) -> State {
        match self.kind {
            EntryKind::Counter(CountingMethod::SlidingWindowLog) => State::SlidingWindowLog(log),
            EntryKind::Counter(counting) => State::from_packed_words(counting, self.words),
            // The key of a ban is that of no counter.
            EntryKind::Ban => State::empty(CountingMethod::FixedWindow),
        }
    }

    /// Unpacks the state of a ban.
    pub(super) const fn ban_state(&self) -> BanState {
        BanState::from_packed_words(self.words)
    }

    /// Packs the state of a ban, with the inputs of expiry and eviction.
    pub(super) fn set_ban(&mut self, ban: BanState, limit: &Limit) {
        self.words = ban.to_packed_words();
        self.expires_s = seconds_rounded_up(ban.expires_at(limit));
        self.used = FULLY_USED;
        let over_s = ban.until.since_us(ban.last).div_ceil(1_000_000);
        self.over_s = u16::try_from(over_s).unwrap_or(u16::MAX);
    }

    /// Packs a state; returns the records of a log, to be stored at [`CounterEntry::log_index`].
    pub(super) fn set_state(&mut self, state: State) -> Option<sliding_window_log::State> {
        match state {
            // The last word stays the index of the log.
            State::SlidingWindowLog(log) => {
                (self.words[0], self.words[1]) = (log.last.as_micros(), log.held);
                Some(log)
            }
            state => {
                self.words = state.to_packed_words();
                None
            }
        }
    }

    /// Updates the inputs of expiry and eviction after a charge at `now`.
    pub(super) fn update_expiry_and_usage(&mut self, limit: &Limit, result: &ChargeResult, now: Time) {
        let last = Time::from_micros(self.words[0]);
        // A draining level is empty sooner if the limit is higher. It is kept for one more period, so that it still
        // counts if a reload lowers the limit. Windows end at times that do not depend on the limit.
        let drains = limit.algorithm().properties().hit_expiry == HitExpiry::Continuous && result.reset_us > 0;
        let beyond_us = if drains { limit.period_us() } else { 0 };
        // Kept at least until its own time is past, because a counter's time never runs backwards.
        self.expires_s = seconds_rounded_up(now.plus_us(result.reset_us).plus_us(beyond_us).max(last));
        let capacity = u64::from(limit.capacity()).max(1);
        let left = u64::from(result.remaining).min(capacity);
        self.used = u8::try_from((capacity - left) * u64::from(FULLY_USED) / capacity).unwrap_or(FULLY_USED);
        let over_us = match result.retry_after_us {
            _ if result.remaining > 0 => 0,
            Some(retry_after_us) => retry_after_us,
            None => result.reset_us,
        };
        let over_s = now.plus_us(over_us).since_us(last).div_ceil(1_000_000);
        self.over_s = if over_us == 0 { 0 } else { u16::try_from(over_s).unwrap_or(u16::MAX) };
    }
}

/// Seconds since the Unix epoch, rounded up; `u32::MAX` from the year 2106 on.
fn seconds_rounded_up(time: Time) -> u32 {
    u32::try_from(time.as_micros().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

/// Seconds since the Unix epoch, rounded down, so that no later time counts as reached.
pub(super) fn seconds_rounded_down(time: Time) -> u32 {
    u32::try_from(time.as_micros() / 1_000_000).unwrap_or(u32::MAX)
}

#[expect(clippy::cast_possible_truncation, reason = "each half is meant")]
const fn split_key(key: u128) -> [u64; 2] {
    [key as u64, (key >> 64) as u64]
}
