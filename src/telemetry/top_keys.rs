//! Keys that are rejected most, over the last minutes; and by the same means those with most hits, from a sample of
//! the decisions.
//!
//! Rejections are counted by one [`SpaceSaving`] sketch per minute, in shards, so that threads rarely contend. A
//! rejection takes a short lock; admitted requests come here only as part of a sample. A window is one minute, by the
//! clock of Redis once its offset is known, and the last [`KEPT_MINUTES`] windows are kept. The count of a key is known
//! as a lower and an upper bound. Of older windows, up to an hour, the keys rejected most are remembered: at most
//! 12 800 keys, which are 5 MB.
//!
//! [`weight_if_sampled`] samples the request path, for statistics that are too costly to keep for each decision. Each
//! thread takes its first [`OBSERVATIONS_BEFORE_SAMPLING`] whole, so that small numbers are exact, and then one of
//! [`SAMPLED_WEIGHT`] at random, so that no pattern of the traffic is missed. Nothing is shared between threads.
//!
//! Decides: over how many minutes busy keys are counted (`KEPT_MINUTES`), and rejections remembered (an hour).
//! Decides: which decisions are in the sample (`weight_if_sampled`); the longest text of a key.
//! Decides: when a rejection is a burst (`MAX_BURST_SECONDS`).

pub mod space_saving;

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use serde::{Deserialize, Serialize};

use self::space_saving::{CountEstimate, SpaceSaving};
use super::metrics::limit_stats::{LimitName, LimitStats};
use crate::base::clock::Time;
use crate::base::sharded::{Sharded, lower_half};

/// Number of minutes that are kept, including the current one.
pub const KEPT_MINUTES: u64 = 10;
/// Number of minutes whose rejections are remembered, including the current one.
pub const REMEMBERED_MINUTES: u64 = 60;
/// Maximum number of keys that each shard remembers of a minute before the last [`KEPT_MINUTES`].
const MAX_PAST_KEYS_PER_SHARD: usize = 32;
/// Maximum number of seconds with rejections in a minute for its rejections to be a burst.
pub const MAX_BURST_SECONDS: u32 = 5;
/// Maximum length of a key's text in bytes; the rest is cut off.
pub const MAX_KEY_TEXT_BYTES: usize = 256;

const SHARD_COUNT: usize = 8;
const MINUTE_S: u64 = 60;

/// Keys with most hits.
#[derive(Debug)]
pub struct TopKeys {
    /// `None` if tracking is off.
    shards: Option<Sharded<MinuteWindows>>,
    counters_per_shard: usize,
    remembers_past: bool,
    /// Time of Redis less that of this process, in microseconds.
    clock_offset_us: AtomicI64,
}

/// Windows of a shard, the oldest first.
#[derive(Debug, Default)]
struct MinuteWindows {
    kept: VecDeque<MinuteWindow>,
    past: VecDeque<PastMinute>,
}

/// Keys with most hits in a minute that is no longer kept.
#[derive(Debug)]
struct PastMinute {
    minute: u64,
    keys: Vec<(LimitAndKey, CountEstimate)>,
    /// Upper bound of the hits of every other key.
    max_missed: u64,
}

#[derive(Debug)]
struct MinuteWindow {
    /// Minutes since the Unix epoch.
    minute: u64,
    sketch: SpaceSaving<LimitAndKey>,
}

/// Limit and text of a key.
#[derive(Clone, Debug)]
struct LimitAndKey {
    limit: Arc<LimitName>,
    mode: Option<UnenforcedMode>,
    /// UTF-8.
    text: Vec<u8>,
}

/// Why a limit that was exceeded rejected nothing.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UnenforcedMode {
    /// It stands beside an enforced limit to be compared.
    Candidate,
    /// It was in shadow mode.
    Shadow,
}

impl UnenforcedMode {
    /// Mark behind the name of a limit.
    pub const fn name_suffix(self) -> &'static str {
        match self {
            Self::Candidate => " (candidate)",
            Self::Shadow => " (shadow)",
        }
    }
}

/// Hits of a key: those that a limit rejected, or all of a sampled decision.
#[derive(Clone, Copy, Debug)]
pub struct KeyHits<'l> {
    /// Hash of key and limit that clients cannot predict.
    pub id: u128,
    /// Limit that the key counts under.
    pub limit: &'l LimitStats,
    /// Why the limit rejected nothing; `None` if it did. Both are counted apart.
    pub mode: Option<UnenforcedMode>,
    /// Number of hits that had to fit: 1 for a peek.
    pub hits: u64,
}

/// A key with its hits: the rejected ones, or all.
#[derive(Clone, Debug)]
pub struct KeyCount {
    /// Limit that the key counts under.
    pub limit: Arc<LimitName>,
    /// Why the limit rejected nothing; `None` if it did.
    pub mode: Option<UnenforcedMode>,
    /// `key=value,key=value`, escaped, with a hash if it is cut to [`MAX_KEY_TEXT_BYTES`].
    pub text: Arc<str>,
    /// True if the values in the text are known to be as sent.
    pub has_plain_values: bool,
    /// Lower bound of the hits.
    pub at_least: u64,
    /// Upper bound of the hits.
    pub at_most: u64,
    /// Lower bound of the requests.
    pub requests: u64,
    /// Part of `at_least` in bursts: minutes with hits in at most [`MAX_BURST_SECONDS`] seconds.
    pub in_bursts: u64,
    /// Hits of the largest burst.
    pub largest_burst: u64,
}

/// Keys with hits in one minute.
#[derive(Clone, Debug, Default)]
pub struct KeyCountsInMinute {
    /// Minutes since the Unix epoch.
    pub minute: u64,
    /// Upper bound of the hits of every key without a counter.
    pub max_missed: u64,
    /// All keys that have a counter, the largest upper bound first.
    pub keys: Vec<KeyCount>,
}

/// Hits in one minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HitsInMinute {
    /// Minutes since the Unix epoch.
    pub minute: u64,
    /// Lower bound of the hits.
    pub at_least: u64,
}

/// Keys at one time.
#[derive(Clone, Debug, Default)]
pub struct TopKeysSnapshot {
    /// All keys that have a counter, those with most hits first.
    pub keys: Vec<KeyCount>,
    /// Upper bound of the hits of every key without a counter.
    pub max_missed: u64,
}

impl TopKeys {
    /// Tracks about `keys` keys at a time; 0 switches tracking off.
    pub fn new(keys: usize) -> Self {
        let shards = (keys > 0).then(|| Sharded::new(SHARD_COUNT, MinuteWindows::default));
        let counters_per_shard = keys.div_ceil(SHARD_COUNT);
        Self { shards, counters_per_shard, remembers_past: false, clock_offset_us: AtomicI64::new(0) }
    }

    /// As [`TopKeys::new`], and remembers the keys of the last hour.
    pub fn remembering_past(keys: usize) -> Self {
        Self { remembers_past: true, ..Self::new(keys) }
    }

    /// Returns `true` if keys are tracked.
    pub const fn is_tracking(&self) -> bool {
        self.shards.is_some()
    }

    /// Number of decisions that this one stands for in a sample; `None` if it is left out, or tracking is off.
    pub fn weight_if_sampled(&self) -> Option<u64> {
        self.shards.as_ref().and_then(|_| weight_if_sampled(SampledStatistic::BusiestKeys))
    }

    /// Counts hits of a key. `push_text` is called with an empty text if the key is new, and
    /// appends UTF-8.
    pub fn record_key(&self, counted: KeyHits<'_>, now: Time, push_text: impl FnOnce(&mut Vec<u8>)) {
        let Some(shards) = &self.shards else { return };
        let KeyHits { id, limit, mode, hits } = counted;
        let id = id ^ mode.map_or(0, |mode| mode as u128 + 1);
        let seconds = self.unix_seconds_by_redis_clock(now);
        let (minute, second_mark) = (seconds / MINUTE_S, 1 << (seconds % MINUTE_S));
        let mut windows = shards.lock_shard(lower_half(id));
        if windows.kept.back().is_none_or(|newest| newest.minute < minute) {
            windows.drop_expired_at(minute, self.remembers_past);
            windows.kept.push_back(MinuteWindow { minute, sketch: SpaceSaving::new(self.counters_per_shard) });
        }
        // If the clock was set back, count in the newest window.
        if let Some(window) = windows.kept.back_mut() {
            // The memory of a replaced text is used again, so that a new key allocates nothing.
            let set_label = |label: &mut Option<LimitAndKey>| {
                let label = label.get_or_insert_with(|| LimitAndKey::new(limit));
                if !Arc::ptr_eq(&label.limit, limit.name_arc()) {
                    label.limit = Arc::clone(limit.name_arc());
                }
                label.mode = mode;
                label.text.clear();
                push_text(&mut label.text);
            };
            window.sketch.add_count(id, hits, second_mark, set_label);
        }
    }

    /// Returns the keys of the last `minutes`, including the current one, under limits that `filter` accepts.
    pub fn snapshot(&self, now: Time, minutes: u64, filter: impl Fn(&LimitName) -> bool) -> TopKeysSnapshot {
        let minute = self.unix_minute_by_redis_clock(now);
        let first = (minute + 1).saturating_sub(minutes.clamp(1, KEPT_MINUTES));
        let mut snapshot = TopKeysSnapshot::default();
        for windows in self.shards.iter().flat_map(Sharded::lock_each) {
            let mut keys: HashMap<u128, KeySum> = HashMap::new();
            let mut missed = 0;
            for window in windows.kept.iter().filter(|window| window.minute >= first) {
                let max_missed = window.sketch.max_missed();
                missed += max_missed;
                for (id, label, count) in window.sketch.iter().filter(|(_, label, _)| filter(&label.limit)) {
                    keys.entry(id).or_insert_with(|| KeySum::new(label)).add_window(count, max_missed);
                }
            }
            snapshot.max_missed = snapshot.max_missed.max(missed);
            snapshot.keys.extend(keys.into_values().map(|sum| sum.into_key_count(missed)));
        }
        snapshot.keys.sort_by(|a, b| (b.at_least, b.at_most, &a.text).cmp(&(a.at_least, a.at_most, &b.text)));
        snapshot
    }

    /// Returns the hits in the last `minutes`, including the current one, that limits that `filter` accepts rejected.
    ///
    /// The number is exact if it accepts all of them; else hits of keys without a counter may count for others.
    pub fn hits_in_last_minutes(&self, now: Time, minutes: u64, filter: impl Fn(&LimitName) -> bool) -> u64 {
        let first = (self.unix_minute_by_redis_clock(now) + 1).saturating_sub(minutes.clamp(1, KEPT_MINUTES));
        let mut hits = 0_u64;
        for windows in self.shards.iter().flat_map(Sharded::lock_each) {
            for window in windows.kept.iter().filter(|window| window.minute >= first) {
                let counted = window.sketch.iter();
                let counted = counted.filter(|(_, label, _)| label.mode.is_none() && filter(&label.limit));
                hits = counted.fold(hits, |hits, (_, _, count)| hits.saturating_add(count.count));
            }
        }
        hits
    }

    /// Returns the keys of each of the last [`KEPT_MINUTES`] minutes with hits, the oldest first.
    pub fn recent_keys_by_minute(&self, now: Time) -> Vec<KeyCountsInMinute> {
        self.keys_by_minute(now, KEPT_MINUTES)
    }

    /// Returns the keys of each of the last [`REMEMBERED_MINUTES`] minutes with hits, the oldest first.
    pub fn remembered_keys_by_minute(&self, now: Time) -> Vec<KeyCountsInMinute> {
        self.keys_by_minute(now, REMEMBERED_MINUTES)
    }

    fn keys_by_minute(&self, now: Time, last_minutes: u64) -> Vec<KeyCountsInMinute> {
        let current = self.unix_minute_by_redis_clock(now);
        let mut minutes: BTreeMap<u64, KeyCountsInMinute> = BTreeMap::new();
        for windows in self.shards.iter().flat_map(Sharded::lock_each) {
            // Windows end with the next hits in their shard, so some are kept that should be past.
            for PastMinute { minute, keys, max_missed } in &windows.past {
                if minute + last_minutes > current {
                    let counts = keys.iter().map(|(label, count)| (label, *count));
                    add_keys_of_minute(minutes.entry(*minute).or_default(), *minute, counts, *max_missed);
                }
            }
            for MinuteWindow { minute, sketch } in &windows.kept {
                if minute + last_minutes > current {
                    let counts = sketch.iter().map(|(_, label, count)| (label, count));
                    add_keys_of_minute(minutes.entry(*minute).or_default(), *minute, counts, sketch.max_missed());
                }
            }
        }
        minutes.into_values().map(KeyCountsInMinute::sorted).collect()
    }

    /// Returns the lower bounds of the hits in each of the last [`KEPT_MINUTES`], under limits that `filter` accepts.
    pub fn hits_by_minute(&self, now: Time, filter: impl Fn(&LimitName) -> bool) -> Vec<HitsInMinute> {
        let current = self.unix_minute_by_redis_clock(now);
        let first = (current + 1).saturating_sub(KEPT_MINUTES);
        let mut sums: Vec<HitsInMinute> =
            (first..=current).map(|minute| HitsInMinute { minute, at_least: 0 }).collect();
        for windows in self.shards.iter().flat_map(Sharded::lock_each) {
            for window in &windows.kept {
                let Some(sum) = sums.iter_mut().find(|sum| sum.minute == window.minute) else { continue };
                let counted = window.sketch.iter().filter(|(_, label, _)| filter(&label.limit));
                sum.at_least += counted.map(|(_, _, count)| count.count - count.error).sum::<u64>();
            }
        }
        sums
    }

    /// Sets the time of Redis less that of this process, in microseconds, so that minutes are the same in all replicas.
    pub fn set_redis_clock_offset(&self, offset_us: i64) {
        self.clock_offset_us.store(offset_us, Ordering::Relaxed);
    }

    fn unix_minute_by_redis_clock(&self, now: Time) -> u64 {
        self.unix_seconds_by_redis_clock(now) / MINUTE_S
    }

    fn unix_seconds_by_redis_clock(&self, now: Time) -> u64 {
        now.as_micros().saturating_add_signed(self.clock_offset_us.load(Ordering::Relaxed)) / 1_000_000
    }

    /// Removes windows that are too old.
    pub fn drop_old_windows(&self, now: Time) {
        let minute = self.unix_minute_by_redis_clock(now);
        self.shards
            .iter()
            .flat_map(Sharded::lock_each)
            .for_each(|mut windows| windows.drop_expired_at(minute, self.remembers_past));
    }
}

impl KeyCountsInMinute {
    fn sorted(mut self) -> Self {
        self.keys.sort_by(|a, b| (b.at_most, b.at_least, &a.text).cmp(&(a.at_most, a.at_least, &b.text)));
        self
    }
}

/// Adds the counters of one shard to a minute.
fn add_keys_of_minute<'k>(
    merged: &mut KeyCountsInMinute,
    minute: u64,
    counts: impl Iterator<Item = (&'k LimitAndKey, CountEstimate)>,
    max_missed: u64,
) {
    merged.minute = minute;
    merged.max_missed = merged.max_missed.max(max_missed);
    merged.keys.extend(counts.map(|(label, count)| {
        let mut sum = KeySum::new(label);
        sum.add_window(count, max_missed);
        sum.into_key_count(max_missed)
    }));
}

impl LimitAndKey {
    fn new(limit: &LimitStats) -> Self {
        Self { limit: Arc::clone(limit.name_arc()), mode: None, text: Vec::new() }
    }
}

/// Sum of a key's counters over several windows.
struct KeySum {
    key: KeyCount,
    /// Upper bound of the hits that a key without a counter had in the windows in which this key has one.
    covered: u64,
}

impl KeySum {
    fn new(label: &LimitAndKey) -> Self {
        let key = KeyCount {
            limit: Arc::clone(&label.limit),
            mode: label.mode,
            text: String::from_utf8_lossy(&label.text).into(),
            has_plain_values: true,
            at_least: 0,
            at_most: 0,
            requests: 0,
            in_bursts: 0,
            largest_burst: 0,
        };
        Self { key, covered: 0 }
    }

    fn add_window(&mut self, count: CountEstimate, max_missed: u64) {
        let certain = count.count - count.error;
        self.key.at_least += certain;
        self.key.at_most += count.count;
        self.key.requests += count.additions;
        self.covered += max_missed;
        if count.marks.count_ones() <= MAX_BURST_SECONDS {
            self.key.in_bursts += certain;
            self.key.largest_burst = self.key.largest_burst.max(certain);
        }
    }

    /// Adds the windows in which the key had no counter to its upper bound; `missed` is the bound over all windows.
    fn into_key_count(self, missed: u64) -> KeyCount {
        KeyCount { at_most: self.key.at_most + missed.saturating_sub(self.covered), ..self.key }
    }
}

impl MinuteWindows {
    /// Drops windows that are too old, and remembers their keys if `remembers`.
    fn drop_expired_at(&mut self, minute: u64, remembers: bool) {
        while self.kept.front().is_some_and(|oldest| oldest.minute + KEPT_MINUTES <= minute) {
            let expired = self.kept.pop_front().filter(|_| remembers);
            self.past.extend(expired.map(PastMinute::new));
        }
        while self.past.front().is_some_and(|oldest| oldest.minute + REMEMBERED_MINUTES <= minute) {
            self.past.pop_front();
        }
    }
}

impl PastMinute {
    fn new(window: MinuteWindow) -> Self {
        let MinuteWindow { minute, sketch } = window;
        let max_missed = sketch.max_missed();
        let mut counters: Vec<(&LimitAndKey, CountEstimate)> =
            sketch.iter().map(|(_, label, count)| (label, count)).collect();
        counters.sort_by_key(|(_, count)| Reverse(count.count));
        let left_out = counters.get(MAX_PAST_KEYS_PER_SHARD).map_or(0, |(_, count)| count.count);
        let keys = counters.into_iter().take(MAX_PAST_KEYS_PER_SHARD);
        // A clone has the capacity that it needs.
        let keys = keys.map(|(label, count)| (label.clone(), count)).collect();
        Self { minute, keys, max_missed: max_missed.max(left_out) }
    }
}

/// Number of observations of each thread that are all taken.
pub const OBSERVATIONS_BEFORE_SAMPLING: u32 = 1024;

/// Observations that a sampled one stands for.
pub const SAMPLED_WEIGHT: u64 = 16;

/// Statistics that are sampled, each with a number of observations of its own: the few of one are not lost among the
/// many of another.
#[derive(Clone, Copy, Debug)]
pub enum SampledStatistic {
    /// Keys with most hits.
    BusiestKeys,
    /// Descriptors that match no rule.
    UnmatchedDescriptors,
}

thread_local! {
    /// Number of observations of each statistic up to [`OBSERVATIONS_BEFORE_SAMPLING`], and the state of a linear
    /// congruential generator.
    static SAMPLER_STATE: Cell<([u32; 2], u32)> = const { Cell::new(([0; 2], 1)) };
}

/// Returns the number of observations that this one stands for; `None` if it is left out.
pub fn weight_if_sampled(statistic: SampledStatistic) -> Option<u64> {
    SAMPLER_STATE.with(|state| {
        let (mut taken, random) = state.get();
        let own = &mut taken[statistic as usize];
        if *own < OBSERVATIONS_BEFORE_SAMPLING {
            *own += 1;
            state.set((taken, random));
            return Some(1);
        }
        // Constants of Numerical Recipes; the upper bits are the random ones.
        let random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.set((taken, random));
        (random >> 28 == 0).then_some(SAMPLED_WEIGHT)
    })
}
