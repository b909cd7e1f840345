//! Counters of a matched descriptor: its path, and the limits that apply to it.
//!
//! A counter is identified by its path (domain and entries, with a pattern in place of a shared value) and by its
//! limit's algorithm, period and epoch; that of a candidate limit by its name too. Two paths never share a counter:
//! every part of a key is delimited. The number of hits that a limit allows is not part of the key, so a counter
//! survives a change of it.

use std::hash::Hasher;
use std::sync::LazyLock;

use siphasher::sip128::{Hasher128, SipHasher13};
use smallvec::SmallVec;

use crate::base::random::random_u64_pair;
use crate::base::sharded::upper_half;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, JointLimit};
use crate::limit::request::Entry;
use crate::telemetry::service_metrics::HashSeed;

/// Charge on all counters of one descriptor, which are decided together.
#[derive(Clone, Debug)]
pub struct Charge<'a> {
    /// Path of the counters.
    pub path: Path<'a>,
    /// Result of [`Path::key`] for the path.
    pub key: u128,
    /// Counters, at least one, with distinct tags.
    pub counters: SmallVec<[Counter<'a>; 1]>,
    /// Hits and maximum delay.
    pub request: ChargeRequest,
}

impl<'a> Charge<'a> {
    /// Creates a charge on counters of a path: at least one, with distinct tags.
    pub fn new(path: Path<'a>, counters: SmallVec<[Counter<'a>; 1]>, request: ChargeRequest) -> Self {
        Self { key: path.key(), path, counters, request }
    }
}

/// One counter of a path.
#[derive(Clone, Copy, Debug)]
pub struct Counter<'a> {
    /// Limit of the counter.
    pub limit: &'a Limit,
    /// The limit is in shadow mode: it never rejects the descriptor.
    pub shadow: bool,
    /// The limit is a quota: its rejection does not keep the other counters from being charged.
    pub quota: bool,
    /// Hash that identifies the counter within its path: see [`crate::rules::rule::set::counter_tag`].
    pub tag: u128,
    /// Epoch of the rule, which is part of the tag; raising it resets the counter.
    pub epoch: u64,
}

impl<'a> Counter<'a> {
    /// The limit of the counter, as [`charge_together`](crate::limit::algorithm::state::charge_together) takes it.
    pub const fn joint_limit(&self) -> JointLimit<'a> {
        JointLimit { limit: self.limit, rejects_others: !self.shadow && !self.quota }
    }
}

/// Identity of a descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Path<'a> {
    /// Domain.
    pub domain: &'a str,
    /// Entries as sent.
    pub entries: &'a [Entry<'a>],
    /// Indices of entries whose values share one counter, ascending, with the pattern that replaces the value.
    pub shared: &'a [(usize, &'a [u8])],
    /// Name of the candidate limit that counts alone; `None`: the limits that decide.
    pub candidate: Option<&'a str>,
}

/// Random hash key of this process. Clients choose the values, and must not be able to choose two that collide.
static SECRET: LazyLock<SipHasher13> = LazyLock::new(|| {
    let (first, second) = random_u64_pair();
    SipHasher13::new_with_keys(first, second)
});

impl Path<'_> {
    /// Hashes the path to the 128-bit key of its counters in this process; other processes have other keys.
    pub fn key(&self) -> u128 {
        self.hash(*SECRET)
    }

    /// Hashes the path to a number that is the same in all processes and versions, for samples of keys.
    pub fn sample_hash(&self) -> u64 {
        upper_half(self.hash(SipHasher13::new_with_keys(0, 0)))
    }

    /// Hashes the path to a number that is the same in all processes with this seed.
    pub fn hash_with(&self, seed: HashSeed) -> u64 {
        upper_half(self.hash(SipHasher13::new_with_keys(seed.0, seed.1)))
    }

    /// Hashes the parts. Each part is preceded by its length, and a shared value by a mark, so that no two paths hash
    /// the same input.
    fn hash(&self, mut hasher: SipHasher13) -> u128 {
        write_part(&mut hasher, 0, self.domain.as_bytes());
        let mut shared = self.shared.iter().peekable();
        for (index, entry) in self.entries.iter().enumerate() {
            write_part(&mut hasher, 0, entry.key);
            match shared.next_if(|(shared_index, _)| *shared_index == index) {
                Some((_, pattern)) => write_part(&mut hasher, 1, pattern),
                None => write_part(&mut hasher, 0, entry.value),
            }
        }
        // Entries are pairs of parts, so a single part after them is the name of a candidate.
        if let Some(name) = self.candidate {
            write_part(&mut hasher, 0, name.as_bytes());
        }
        hasher.finish128().as_u128()
    }
}

fn write_part(hasher: &mut SipHasher13, mark: u64, bytes: &[u8]) {
    hasher.write_u64((bytes.len() as u64) << 1 | mark);
    hasher.write(bytes);
}
