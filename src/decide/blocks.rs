//! Blocked values: every request of a domain that has such an entry is rejected, before any rule and any counter.
//!
//! An operator blocks a key and a value until a time, by `POST /block`. A decision while nothing is blocked costs one
//! relaxed load. Blocks end by the clock of this process. A refund is never rejected, also beside a descriptor that is,
//! and SHADOW_MODE rejects nothing. Keys and values are bytes, as in requests.
//! Sharing blocks between replicas is for `serve::blocks`.
//!
//! Decides: what a blocked value is, how many there may be, when a block ends.
//! Decides: for how many domains blocked requests are counted (`MAX_COUNTED_DOMAINS`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::request::{Hits, Request};

/// Maximum number of blocks.
pub const MAX_BLOCKS: usize = 10_000;

/// Maximum number of domains whose rejections are counted apart; others are counted together.
const MAX_COUNTED_DOMAINS: usize = 100;

/// Name under which rejections in other domains are counted.
const OTHER_DOMAINS_NAME: &str = "other";

/// A blocked value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Domain.
    pub domain: String,
    /// Key of the entry.
    pub key: Vec<u8>,
    /// Value of the entry.
    pub value: Vec<u8>,
    /// End, by the clock of each process.
    pub until: Time,
    /// Reason, for operators.
    pub reason: String,
}

/// Blocks by domain, key and value.
type BlocksByEntry = HashMap<String, HashMap<Vec<u8>, HashMap<Vec<u8>, Arc<Block>>>>;

/// Blocks in force.
#[derive(Debug, Default)]
pub struct Blocks {
    /// True if there are any.
    any: AtomicBool,
    by_entry: ArcSwap<BlocksByEntry>,
    rejections: Mutex<HashMap<String, u64>>,
}

/// Blocks that a request meets.
#[derive(Debug)]
pub struct BlockMatch {
    /// The block of each descriptor that lasts longest; `None`: no entry is blocked, or hits are refunded.
    pub(super) descriptors: SmallVec<[Option<Arc<Block>>; 4]>,
    /// End of the block that lasts longest.
    pub(super) until: Time,
    /// True if a descriptor refunds hits, which are given back all the same.
    pub(super) has_refund: bool,
}

impl BlockMatch {
    /// The block of the descriptor at `index`.
    pub(super) fn block_of_descriptor(&self, index: usize) -> Option<&Block> {
        self.descriptors.get(index)?.as_deref()
    }
}

impl Blocks {
    /// Replaces all blocks.
    pub fn replace_all(&self, blocks: Vec<Block>) {
        let mut by_entry = BlocksByEntry::new();
        let any = !blocks.is_empty();
        for block in blocks {
            let of_domain = by_entry.entry(block.domain.clone()).or_default();
            let of_key = of_domain.entry(block.key.clone()).or_default();
            of_key.insert(block.value.clone(), Arc::new(block));
        }
        self.by_entry.store(Arc::new(by_entry));
        self.any.store(any, Ordering::Relaxed);
    }

    /// All blocks that have not ended, in order of domain, key and value.
    pub fn list(&self, now: Time) -> Vec<Arc<Block>> {
        let by_entry = self.by_entry.load();
        let of_keys = by_entry.values().flat_map(HashMap::values);
        let mut blocks: Vec<_> =
            of_keys.flat_map(HashMap::values).filter(|block| block.until > now).map(Arc::clone).collect();
        blocks.sort_by(|a, b| (&a.domain, &a.key, &a.value).cmp(&(&b.domain, &b.key, &b.value)));
        blocks
    }

    /// Returns the block of an entry, if it has not ended.
    pub fn find_block_of_entry(&self, domain: &str, key: &[u8], value: &[u8], now: Time) -> Option<Arc<Block>> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let by_entry = self.by_entry.load();
        by_entry.get(domain)?.get(key)?.get(value).filter(|block| block.until > now).map(Arc::clone)
    }

    /// Returns the blocks that a request meets; `None` if it meets none, or only refunds hits.
    #[inline]
    pub fn find_for_request(&self, request: &Request<'_>, now: Time) -> Option<BlockMatch> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        self.find_among_blocks(request, now)
    }

    #[cold]
    fn find_among_blocks(&self, request: &Request<'_>, now: Time) -> Option<BlockMatch> {
        let by_entry = self.by_entry.load();
        let of_domain = by_entry.get(request.domain)?;
        let mut found = BlockMatch { descriptors: SmallVec::new(), until: Time::default(), has_refund: false };
        for descriptor in &request.descriptors {
            let is_refund = matches!(descriptor.hits, Hits::Refund(_));
            let entries = descriptor.entries.iter().filter(|_| !is_refund);
            let blocks = entries.filter_map(|entry| of_domain.get(entry.key)?.get(entry.value));
            let longest = blocks.filter(|block| block.until > now).max_by_key(|block| block.until);
            found.until = longest.map_or(found.until, |block| block.until.max(found.until));
            found.has_refund |= is_refund;
            found.descriptors.push(longest.map(Arc::clone));
        }
        found.descriptors.iter().any(Option::is_some).then_some(found)
    }

    /// Counts a rejected request.
    pub fn count_rejection(&self, domain: &str) {
        let mut rejections = lock_ignoring_poison(&self.rejections);
        let name = match rejections.contains_key(domain) || rejections.len() < MAX_COUNTED_DOMAINS {
            true => domain,
            false => OTHER_DOMAINS_NAME,
        };
        match rejections.get_mut(name) {
            Some(count) => *count += 1,
            None => drop(rejections.insert(name.to_owned(), 1)),
        }
    }

    /// Number of rejected requests since the start, by domain, sorted.
    pub fn rejection_counts(&self) -> Vec<(String, u64)> {
        let rejections = lock_ignoring_poison(&self.rejections);
        let mut counts: Vec<_> = rejections.iter().map(|(domain, count)| (domain.clone(), *count)).collect();
        counts.sort_unstable();
        counts
    }
}
