//! Descriptors that matched no rule, by domain and keys, over the last minutes.
//!
//! Descriptors with the same domain and keys are counted together, because it is the keys that do not match; each such
//! path has the entries of one request as an example. Counts are sampled ([`weight_if_sampled`]), in two windows of
//! [`WINDOW_S`] seconds, by [`SpaceSaving`] sketches of a fixed size. A thread that finds a shard locked leaves its
//! descriptor out rather than wait.
//!
//! Decides: which unmatched descriptors are kept for `/unmatched`, how many, for how long.

use std::collections::{HashMap, VecDeque};
use std::hash::Hasher as _;

use siphasher::sip128::{Hasher128 as _, SipHasher13};

use super::top_keys::space_saving::SpaceSaving;
use super::top_keys::{SampledStatistic, weight_if_sampled};
use crate::base::clock::Time;
use crate::base::random::random_u64_pair;
use crate::base::sharded::{Sharded, lower_half};
use crate::base::text::truncate_to_bytes;

/// Length of a window in seconds; the current one and the one before it are shown.
pub const WINDOW_S: u64 = 300;

const SHARD_COUNT: usize = 4;
const COUNTERS_PER_SHARD: usize = 32;
/// Maximum length of a domain's name that is kept, in bytes.
const MAX_DOMAIN_BYTES: usize = 128;
/// Number of windows that are kept.
const KEPT_WINDOWS: u64 = 2;

/// Descriptors that matched no rule.
#[derive(Debug)]
pub struct UnmatchedDescriptors {
    /// `None` if tracking is off.
    shards: Option<Sharded<VecDeque<Window>>>,
    hash_keys: (u64, u64),
}

#[derive(Debug)]
struct Window {
    /// Number of the window since the Unix epoch.
    number: u64,
    sketch: SpaceSaving<UnmatchedLabel>,
}

#[derive(Clone, Debug, Default)]
struct UnmatchedLabel {
    domain: String,
    has_rules: bool,
    /// UTF-8.
    text: Vec<u8>,
}

/// A descriptor that matched no rule.
#[derive(Clone, Copy, Debug)]
pub struct UnmatchedDescriptor<'d, K> {
    /// Domain of the request.
    pub domain: &'d str,
    /// The domain has rules.
    pub has_rules: bool,
    /// Keys of its entries.
    pub keys: K,
}

/// Descriptors with the same domain and keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnmatchedPath {
    /// Domain; cut to 128 bytes.
    pub domain: String,
    /// The domain had rules.
    pub has_rules: bool,
    /// Entries of one such descriptor, as keys of `/top` are written.
    pub example: String,
    /// Estimated number of descriptors.
    pub count: u64,
}

impl UnmatchedDescriptors {
    /// Tracks descriptors, or nothing.
    pub fn new(is_tracking: bool) -> Self {
        Self { shards: is_tracking.then(|| Sharded::new(SHARD_COUNT, VecDeque::new)), hash_keys: random_u64_pair() }
    }

    /// Counts a descriptor, if it is in the sample. `push_text` is called with an empty text if its path is new, and
    /// appends UTF-8.
    pub fn record<'k>(
        &self,
        descriptor: UnmatchedDescriptor<'_, impl Iterator<Item = &'k [u8]>>,
        now: Time,
        push_text: impl FnOnce(&mut Vec<u8>),
    ) {
        let Some(shards) = &self.shards else { return };
        let Some(weight) = weight_if_sampled(SampledStatistic::UnmatchedDescriptors) else { return };
        let UnmatchedDescriptor { domain, has_rules, keys } = descriptor;
        let domain = truncate_to_bytes(domain, MAX_DOMAIN_BYTES);
        let id = self.hash_path(domain, keys);
        let Some(mut windows) = shards.try_lock_shard(lower_half(id)) else { return };
        let number = window_number(now);
        if windows.back().is_none_or(|newest| newest.number < number) {
            drop_windows_expired_at(&mut windows, number);
            windows.push_back(Window { number, sketch: SpaceSaving::new(COUNTERS_PER_SHARD) });
        }
        // If the clock was set back, count in the newest window.
        if let Some(window) = windows.back_mut() {
            window.sketch.add_count(id, weight, 0, |label| {
                let label = label.get_or_insert_default();
                label.domain.clear();
                label.domain.push_str(domain);
                label.has_rules = has_rules;
                label.text.clear();
                push_text(&mut label.text);
            });
        }
    }

    fn hash_path<'k>(&self, domain: &str, keys: impl Iterator<Item = &'k [u8]>) -> u128 {
        let mut hasher = SipHasher13::new_with_keys(self.hash_keys.0, self.hash_keys.1);
        hasher.write(domain.as_bytes());
        for key in keys {
            // The length keeps keys apart.
            hasher.write_usize(key.len());
            hasher.write(key);
        }
        hasher.finish128().as_u128()
    }

    /// Returns the paths of the current window and the one before it, the most frequent first.
    pub fn snapshot(&self, now: Time) -> Vec<UnmatchedPath> {
        let first = (window_number(now) + 1).saturating_sub(KEPT_WINDOWS);
        let mut paths: HashMap<u128, UnmatchedPath> = HashMap::new();
        for windows in self.shards.iter().flat_map(Sharded::lock_each) {
            for window in windows.iter().filter(|window| window.number >= first) {
                for (id, label, count) in window.sketch.iter() {
                    // What a path took over from another one is not its own.
                    let certain = count.count - count.error;
                    let known = paths.entry(id).or_insert_with(|| UnmatchedPath {
                        domain: label.domain.clone(),
                        has_rules: label.has_rules,
                        example: String::from_utf8_lossy(&label.text).into_owned(),
                        count: 0,
                    });
                    known.count += certain;
                }
            }
        }
        let mut paths: Vec<UnmatchedPath> = paths.into_values().collect();
        paths.sort_by(|a, b| (b.count, &a.domain, &a.example).cmp(&(a.count, &b.domain, &b.example)));
        paths
    }

    /// Removes windows that are too old.
    pub fn drop_old_windows(&self, now: Time) {
        let number = window_number(now);
        self.shards
            .iter()
            .flat_map(Sharded::lock_each)
            .for_each(|mut windows| drop_windows_expired_at(&mut windows, number));
    }
}

const fn window_number(now: Time) -> u64 {
    now.as_micros() / 1_000_000 / WINDOW_S
}

fn drop_windows_expired_at(windows: &mut VecDeque<Window>, number: u64) {
    while windows.front().is_some_and(|oldest| oldest.number + KEPT_WINDOWS <= number) {
        windows.pop_front();
    }
}
