//! Set of values in little memory, for lists of a million values.
//!
//! All values are in one buffer; a hash table has their indices. The hash is SipHash with random keys, because clients
//! choose the values that are looked up.
//!
//! Decides: how `in` matches.

use std::hash::Hasher;

use hashbrown::HashTable;
use siphasher::sip::SipHasher13;

use crate::base::random::random_u64_pair;

/// Set of values; may be empty.
#[derive(Debug)]
pub struct ValueSet {
    /// All values, one after the other; below 4 GiB, because files are bounded far below that.
    bytes: Vec<u8>,
    /// End of each value in `bytes`.
    ends: Vec<u32>,
    table: HashTable<u32>,
    hasher: SipHasher13,
}

impl<'v> FromIterator<&'v [u8]> for ValueSet {
    fn from_iter<I: IntoIterator<Item = &'v [u8]>>(values: I) -> Self {
        let mut set = Self { bytes: Vec::new(), ends: Vec::new(), table: HashTable::new(), hasher: keyed_hasher() };
        values.into_iter().for_each(|value| set.insert(value));
        set.bytes.shrink_to_fit();
        set.ends.shrink_to_fit();
        set
    }
}

impl ValueSet {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns `true` if there are no values.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns `true` if the set has the value.
    pub fn contains(&self, value: &[u8]) -> bool {
        self.table.find(self.hash(value), |index| self.value(*index) == value).is_some()
    }

    fn insert(&mut self, value: &[u8]) {
        if self.contains(value) {
            return;
        }
        let end = u32::try_from(self.bytes.len() + value.len());
        let (Ok(end), Ok(index)) = (end, u32::try_from(self.ends.len())) else { return };
        self.bytes.extend_from_slice(value);
        self.ends.push(end);
        let hash = self.hash(value);
        let (bytes, ends, hasher) = (&self.bytes, &self.ends, self.hasher);
        self.table.insert_unique(hash, index, |index| hash_value(&hasher, value_at(bytes, ends, *index)));
    }

    fn value(&self, index: u32) -> &[u8] {
        value_at(&self.bytes, &self.ends, index)
    }

    fn hash(&self, value: &[u8]) -> u64 {
        hash_value(&self.hasher, value)
    }
}

fn value_at<'b>(bytes: &'b [u8], ends: &[u32], index: u32) -> &'b [u8] {
    let index = index as usize;
    let start = index.checked_sub(1).map_or(0, |before| ends[before]);
    &bytes[start as usize..ends[index] as usize]
}

/// A hasher with random keys, to be copied for each value.
fn keyed_hasher() -> SipHasher13 {
    let keys = random_u64_pair();
    SipHasher13::new_with_keys(keys.0, keys.1)
}

fn hash_value(keyed: &SipHasher13, value: &[u8]) -> u64 {
    let mut hasher = *keyed;
    hasher.write(value);
    hasher.finish()
}
