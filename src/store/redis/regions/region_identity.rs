//! Argument and reply of `lua/region_identity.lua`: the identity of a region's Redis.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::algorithm::reply_reader::{MalformedReply, ReplyReader};
use crate::store::redis::key;
use crate::store::redis::replicas::claim::OwnerId;

/// Random identity of a region's Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionId(pub [u8; 16]);

impl RegionId {
    /// Creates a new identity.
    pub fn random() -> Self {
        Self(OwnerId::random().0)
    }
}

/// Hash of a list of regions; equal lists have equal hashes, in any order of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionListHash(pub [u8; 16]);

impl RegionListHash {
    /// Hashes the names of regions, which must be in their order.
    pub fn new(names: &[String]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for name in names {
            hasher.update(name.as_bytes());
            // No name has a line break.
            hasher.update(b"\n");
        }
        let mut hash = [0; 16];
        hash.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(hash)
    }
}

/// Identity of a region's Redis, as it is stored there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionIdentity {
    /// The identity.
    pub id: RegionId,
    /// Time of that Redis at which the list of regions last changed; 0: it never changed.
    pub list_changed: Time,
    /// True if that Redis cannot know of an earlier list; its creation counts as a change.
    pub is_new: bool,
}

/// What a process knows when it asks for the identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityClaim {
    /// It knows nothing, and proposes an id.
    Propose(RegionId),
    /// It remembers an earlier reply.
    Remember {
        /// The earlier reply.
        identity: RegionIdentity,
        /// No region has had another list.
        is_settled: bool,
    },
}

/// Reply of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityReply {
    /// Time of the region's Redis.
    pub now: Time,
    /// Identity that is stored now.
    pub identity: RegionIdentity,
}

/// Returns the key of the identity. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn identity_key(prefix: &str) -> Bytes {
    let mut key = key::head(prefix);
    key.extend_from_slice(b"region}");
    key.freeze()
}

/// Encodes the argument of the script, for `now`, or the server's own time if `now` is `None`.
pub fn encode(claim: IdentityClaim, list: RegionListHash, now: Option<Time>) -> Bytes {
    let (identity, remembers, is_settled) = match claim {
        IdentityClaim::Propose(id) => {
            (RegionIdentity { id, list_changed: Time::default(), is_new: false }, false, false)
        }
        IdentityClaim::Remember { identity, is_settled } => (identity, true, is_settled),
    };
    let mut argument = BytesMut::with_capacity(72);
    argument.put_i64_le(now.and_then(|now| i64::try_from(now.as_micros()).ok()).unwrap_or(-1));
    argument.put_i64_le(i64::from(remembers));
    argument.put_i64_le(i64::from(is_settled));
    argument.put_u64_le(identity.list_changed.as_micros());
    argument.put_i64_le(i64::from(identity.is_new));
    argument.put_slice(&identity.id.0);
    argument.put_slice(&list.0);
    argument.freeze()
}

/// Decodes the reply of the script.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode(reply: &[u8]) -> Result<IdentityReply, MalformedReply> {
    let (numbers, id) = reply.split_at_checked(24).ok_or(MalformedReply)?;
    let mut reader = ReplyReader::new(numbers);
    let (now, list_changed, is_new) = (reader.time()?, reader.time()?, reader.number()?);
    let id = RegionId(id.try_into().map_err(|_| MalformedReply)?);
    if is_new > 1 {
        return Err(MalformedReply);
    }
    Ok(IdentityReply { now, identity: RegionIdentity { id, list_changed, is_new: is_new == 1 } })
}
