//! Hash slots of a Redis cluster.
//!
//! Decides: the slot of a key in a cluster.

use std::sync::LazyLock;

/// Number of hash slots in a cluster.
pub const HASH_SLOTS: u16 = 16_384;

/// Hash tags that fall into the first and the last slot.
pub const TAGS_OF_FIRST_AND_LAST_SLOT: [u32; 2] = [3560, 39296];

/// Returns the slot of a key: CRC-16, modulo [`HASH_SLOTS`], of its hash tag, or of the whole key without one.
pub fn hash_slot(key: &[u8]) -> u16 {
    redis_protocol::redis_keyslot(key)
}

/// Returns the hash tag of `slot`: a number whose decimal digits hash to it. `slot` must be below [`HASH_SLOTS`].
pub(crate) fn hash_tag_for_slot(slot: u16) -> u32 {
    TAG_OF_SLOT[usize::from(slot)]
}

/// Computes the table behind [`hash_tag_for_slot`], which takes some milliseconds.
pub(crate) fn prepare_hash_tags() {
    LazyLock::force(&TAG_OF_SLOT);
}

/// One hash tag for each slot.
static TAG_OF_SLOT: LazyLock<Box<[u32]>> = LazyLock::new(|| {
    let mut tags = vec![u32::MAX; usize::from(HASH_SLOTS)];
    let mut missing = tags.len();
    for tag in 0.. {
        let entry = &mut tags[usize::from(hash_slot(tag.to_string().as_bytes()))];
        if *entry == u32::MAX {
            *entry = tag;
            missing -= 1;
        }
        if missing == 0 {
            break;
        }
    }
    tags.into()
});
