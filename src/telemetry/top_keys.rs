//! The keys that are refused most, over the last minutes.
//!
//! Refusals are counted by a [`SpaceSaving`] sketch for each minute, in shards, so that two threads rarely want the
//! same one. A refusal costs a short lock; what is admitted never comes here. A window of time is a minute of the clock
//! that decisions follow, and the last [`MINUTES`] are kept, however long nobody looks. What is told of a key is how
//! often it was refused at least, and at most.

pub mod space_saving;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use self::space_saving::{Counter, SpaceSaving};
use super::metrics::limit_stats::{LimitName, LimitStats};
use crate::clock::Time;
use crate::sharded::{Sharded, lower_half};

/// How many minutes are kept, the one that is running included.
pub const MINUTES: u64 = 10;
/// Refusals of a key within so many seconds of a minute are a short burst.
pub const BURST_SECONDS: u32 = 5;
/// The longest text of a key, in bytes; the rest is cut.
pub const MAX_KEY_BYTES: usize = 256;

const SHARDS: usize = 8;
const MINUTE_S: u64 = 60;

/// The keys that are refused most.
#[derive(Debug)]
pub struct TopKeys {
    shards: Option<Sharded<VecDeque<MinuteWindow>>>,
    counters_per_shard: usize,
}

#[derive(Debug)]
struct MinuteWindow {
    minute: u64,
    sketch: SpaceSaving<KeyLabel>,
}

/// A key: of which limit, and its text.
#[derive(Clone, Debug)]
struct KeyLabel {
    limit: Arc<LimitName>,
    text: Arc<str>,
}

/// A key that was refused.
#[derive(Clone, Debug)]
pub struct RejectedKey {
    /// The limit that refused it.
    pub limit: Arc<LimitName>,
    /// `key=value,key=value`, perhaps cut.
    pub text: Arc<str>,
    /// Hits that were refused, at least.
    pub at_least: u64,
    /// Hits that were refused, at most.
    pub at_most: u64,
    /// Of those of `at_least`, how many came in short bursts: minutes in which it was refused in [`BURST_SECONDS`]
    /// seconds at most.
    pub in_bursts: u64,
    /// The most hits of one such burst.
    pub largest_burst: u64,
}

/// What a look found.
#[derive(Clone, Debug, Default)]
pub struct TopKeysSnapshot {
    /// All that have a counter, the one that was refused most first.
    pub keys: Vec<RejectedKey>,
    /// The most that a key that is not among them can have been refused.
    pub most_missed: u64,
}

impl TopKeys {
    /// Nothing refused yet; about so many keys are counted at once, 0 for none.
    pub fn new(keys: usize) -> Self {
        let shards = (keys > 0).then(|| Sharded::new(SHARDS, VecDeque::new));
        Self { shards, counters_per_shard: keys.div_ceil(SHARDS) }
    }

    /// Counts `hits` that a limit refused a key. `id` is a hash of key and limit that nobody can aim.
    pub fn note(&self, id: u128, (stats, hits): (&LimitStats, u64), now: Time, text: impl FnOnce() -> Arc<str>) {
        let Some(shards) = &self.shards else { return };
        let seconds = now.as_micros() / 1_000_000;
        let (minute, mark) = (seconds / MINUTE_S, 1 << (seconds % MINUTE_S));
        let mut windows = shards.lock(lower_half(id));
        if windows.back().is_none_or(|newest| newest.minute < minute) {
            drop_old(&mut windows, minute);
            windows.push_back(MinuteWindow { minute, sketch: SpaceSaving::new(self.counters_per_shard) });
        }
        // A clock that was set back counts in the newest minute.
        if let Some(window) = windows.back_mut() {
            window.sketch.note(id, (hits, mark), || KeyLabel { limit: Arc::clone(stats.shared_name()), text: text() });
        }
    }

    /// What was refused in the last `minutes`, the one that is running included; only by limits that are `wanted`.
    pub fn snapshot(&self, now: Time, minutes: u64, wanted: impl Fn(&LimitName) -> bool) -> TopKeysSnapshot {
        let minute = now.as_micros() / 1_000_000 / MINUTE_S;
        let first = (minute + 1).saturating_sub(minutes.clamp(1, MINUTES));
        let mut found = TopKeysSnapshot::default();
        for windows in self.shards.iter().flat_map(Sharded::iter) {
            let mut keys: HashMap<u128, KeySum> = HashMap::new();
            let mut missed = 0;
            for window in windows.iter().filter(|window| window.minute >= first) {
                let most_missed = window.sketch.most_missed();
                missed += most_missed;
                for (id, label, counter) in window.sketch.iter().filter(|(_, label, _)| wanted(&label.limit)) {
                    keys.entry(id).or_insert_with(|| KeySum::new(label)).add(counter, most_missed);
                }
            }
            found.most_missed = found.most_missed.max(missed);
            found.keys.extend(keys.into_values().map(|sum| sum.refused(missed)));
        }
        found.keys.sort_by(|a, b| (b.at_least, b.at_most, &a.text).cmp(&(a.at_least, a.at_most, &b.text)));
        found
    }

    /// Lets go of minutes that are over.
    pub fn sweep(&self, now: Time) {
        let minute = now.as_micros() / 1_000_000 / MINUTE_S;
        self.shards.iter().flat_map(Sharded::iter).for_each(|mut windows| drop_old(&mut windows, minute));
    }
}

/// The counters of a key, over several minutes.
struct KeySum {
    refused: RejectedKey,
    /// What the minutes in which it has a counter could have missed of it, had it none.
    counted: u64,
}

impl KeySum {
    fn new(label: &KeyLabel) -> Self {
        let refused = RejectedKey {
            limit: Arc::clone(&label.limit),
            text: Arc::clone(&label.text),
            at_least: 0,
            at_most: 0,
            in_bursts: 0,
            largest_burst: 0,
        };
        Self { refused, counted: 0 }
    }

    fn add(&mut self, counter: Counter, most_missed: u64) {
        let certain = counter.count - counter.error;
        self.refused.at_least += certain;
        self.refused.at_most += counter.count;
        self.counted += most_missed;
        if counter.marks.count_ones() <= BURST_SECONDS {
            self.refused.in_bursts += certain;
            self.refused.largest_burst = self.refused.largest_burst.max(certain);
        }
    }

    /// `missed`: what all minutes together can have missed of a key.
    fn refused(self, missed: u64) -> RejectedKey {
        RejectedKey { at_most: self.refused.at_most + missed.saturating_sub(self.counted), ..self.refused }
    }
}

fn drop_old(windows: &mut VecDeque<MinuteWindow>, minute: u64) {
    while windows.front().is_some_and(|oldest| oldest.minute + MINUTES <= minute) {
        windows.pop_front();
    }
}
