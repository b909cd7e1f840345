//! What a matched descriptor charges from: a path, and the limits that count along it.
//!
//! A counter is identified by its path (domain and entries, with a pattern in place of a shared value) and its limit's
//! algorithm, period and epoch. Two paths never share a counter: wherever a path becomes a key, every part is told from
//! the next. The number of hits a limit allows is no part of it, so a counter survives a change of that.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use siphasher::sip128::{Hasher128, SipHasher13};
use smallvec::SmallVec;

use crate::algorithm::{ChargeRequest, EnforcedLimit};
use crate::limit::Limit;
use crate::request::Entry;

/// A charge on all counters of one descriptor, which are decided together.
#[derive(Clone, Debug)]
pub struct Charge<'a> {
    /// Where they count.
    pub path: Path<'a>,
    /// What [`Path::key`] says of it.
    pub key: u128,
    /// At least one, no two of one tag.
    pub counters: SmallVec<[Counter<'a>; 1]>,
    /// What is charged.
    pub request: ChargeRequest,
}

impl<'a> Charge<'a> {
    /// A charge of `request` on these counters of a path: at least one, no two of one tag.
    pub fn new(path: Path<'a>, counters: SmallVec<[Counter<'a>; 1]>, request: ChargeRequest) -> Self {
        Self { key: path.key(), path, counters, request }
    }
}

/// One counter of a path.
#[derive(Clone, Copy, Debug)]
pub struct Counter<'a> {
    /// Its limit.
    pub limit: &'a Limit,
    /// Whether exceeding the limit rejects the descriptor; `false` in shadow mode.
    pub enforced: bool,
    /// What tells it from others of the path: see [`crate::rule::set::counter_tag`].
    pub tag: u128,
    /// Raised by whoever wants to begin anew; part of the tag.
    pub epoch: u64,
}

impl<'a> Counter<'a> {
    /// The limit of the counter, as [`charge_together`](crate::algorithm::state::charge_together) takes it.
    pub const fn enforced_limit(&self) -> EnforcedLimit<'a> {
        EnforcedLimit { limit: self.limit, enforced: self.enforced }
    }
}

/// The identity of a descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Path<'a> {
    /// The domain.
    pub domain: &'a str,
    /// The entries as they were sent.
    pub entries: &'a [Entry<'a>],
    /// Places of entries whose values share one counter, ascending, with the pattern that stands for the value.
    pub shared: &'a [(usize, &'a [u8])],
}

/// What keys are made with in this process: strangers choose the values, and must not be able to choose two that meet.
static SECRET: LazyLock<SipHasher13> = LazyLock::new(|| {
    let random = RandomState::new();
    SipHasher13::new_with_keys(random.hash_one(1_u8), random.hash_one(2_u8))
});

impl Path<'_> {
    /// The 128-bit key that counters of this path are found by in this process; another process has another. Parts are
    /// preceded by their length, and shared values by a mark, so that no two paths are hashed alike.
    pub fn key(&self) -> u128 {
        let mut hasher = *SECRET;
        write_part(&mut hasher, 0, self.domain.as_bytes());
        let mut shared = self.shared.iter().peekable();
        for (place, entry) in self.entries.iter().enumerate() {
            write_part(&mut hasher, 0, entry.key);
            match shared.next_if(|(shared_place, _)| *shared_place == place) {
                Some((_, pattern)) => write_part(&mut hasher, 1, pattern),
                None => write_part(&mut hasher, 0, entry.value),
            }
        }
        hasher.finish128().as_u128()
    }
}

fn write_part(hasher: &mut SipHasher13, mark: u64, bytes: &[u8]) {
    hasher.write_u64((bytes.len() as u64) << 1 | mark);
    hasher.write(bytes);
}
