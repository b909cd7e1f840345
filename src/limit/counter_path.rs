//! Path of counters, which identifies them with the tag of their limit, and its hashes.
//!
//! A path is the domain and the entries of a descriptor, with a pattern in place of a shared value, and the name of a
//! candidate limit. Two paths never share a counter: every part of a key is delimited, and the secret of the hash keeps
//! clients from choosing two values that collide.
//!
//! Decides: the hash of a counter's path and its secret.
//! Decides: the hash of the decision log's sample, equal in all replicas (`hash_for_sampling`).
//! Decides: the keys of a share (`KeyShare`): those of a smaller share are among those of a larger one.

use std::fmt;
use std::hash::Hasher;
use std::sync::LazyLock;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::base::random::random_u64_pair;
use crate::base::sharded::upper_half;
use crate::base::text::format_milli_percent;
use crate::limit::request::Entry;

/// Path of counters: the domain and the matched entries of a descriptor.
#[derive(Clone, Copy, Debug)]
pub struct CounterPath<'a> {
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
static HASH_SECRET: LazyLock<SipHasher13> = LazyLock::new(|| {
    let (first, second) = random_u64_pair();
    SipHasher13::new_with_keys(first, second)
});

impl CounterPath<'_> {
    /// Hashes the path to 128 bits that identify it in this process; other processes have other hashes.
    pub fn hash_for_process(&self) -> u128 {
        self.hash_parts(*HASH_SECRET)
    }

    /// Hashes the path to a number that is the same in all processes and versions, for samples of keys.
    pub fn hash_for_sampling(&self) -> u64 {
        upper_half(self.hash_for_all_processes())
    }

    /// Hashes the path to 128 bits that are the same in all processes and versions.
    fn hash_for_all_processes(&self) -> u128 {
        self.hash_parts(SipHasher13::new_with_keys(0, 0))
    }

    /// Hashes the parts. Each part is preceded by its length, and a shared value by a mark, so that no two paths hash
    /// the same input.
    pub fn hash_parts(&self, hasher: SipHasher13) -> u128 {
        let mut input = BufferedHasher { hasher, buffered: [0; HASH_BUFFER_BYTES], length: 0 };
        input.write_part(0, self.domain.as_bytes());
        let mut shared = self.shared.iter().peekable();
        for (index, entry) in self.entries.iter().enumerate() {
            input.write_part(0, entry.key);
            match shared.next_if(|(shared_index, _)| *shared_index == index) {
                Some((_, pattern)) => input.write_part(1, pattern),
                None => input.write_part(0, entry.value),
            }
        }
        // Entries are pairs of parts, so a single part after them is the name of a candidate.
        if let Some(name) = self.candidate {
            input.write_part(0, name.as_bytes());
        }
        input.finish()
    }
}

/// Share of all paths, by a hash that is the same in all processes and versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyShare {
    /// The share in thousandths of a percent, at most 100 000.
    pub milli_percent: u32,
}

impl fmt::Display for KeyShare {
    /// Writes the value of `enforced_share` in a rule file: `10%`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_milli_percent(self.milli_percent))
    }
}

impl KeyShare {
    /// True if the share contains a path. A larger share contains the paths of every smaller one, 100 % contains all.
    /// It is independent of the decision log's sample, which has the other half of the hash.
    pub fn contains(self, path: &CounterPath<'_>) -> bool {
        let lower_half = path.hash_for_all_processes() & u128::from(u64::MAX);
        (lower_half * 100_000) >> 64 < u128::from(self.milli_percent)
    }
}

/// Maximum number of bytes that are collected before a hasher gets them.
const HASH_BUFFER_BYTES: usize = 128;

/// Input of a hasher, collected because a call of the hasher costs as much as a dozen bytes.
struct BufferedHasher {
    hasher: SipHasher13,
    buffered: [u8; HASH_BUFFER_BYTES],
    length: usize,
}

impl BufferedHasher {
    /// Adds a part after its length and its mark.
    #[inline]
    fn write_part(&mut self, mark: u64, part: &[u8]) {
        let head = ((part.len() as u64) << 1 | mark).to_le_bytes();
        let added = head.len() + part.len();
        match self.buffered.get_mut(self.length..self.length + added) {
            Some(free) => {
                free[..head.len()].copy_from_slice(&head);
                free[head.len()..].copy_from_slice(part);
                self.length += added;
            }
            None => self.flush_and_write(head, part),
        }
    }

    /// Passes a part to the hasher, after what was collected.
    #[cold]
    fn flush_and_write(&mut self, head: [u8; 8], part: &[u8]) {
        self.hasher.write(&self.buffered[..self.length]);
        self.hasher.write(&head);
        self.hasher.write(part);
        self.length = 0;
    }

    fn finish(mut self) -> u128 {
        self.hasher.write(&self.buffered[..self.length]);
        self.hasher.finish128().as_u128()
    }
}
