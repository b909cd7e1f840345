//! Arguments and replies of the scripts that tell who a region is: `lua/regions/region_identity.lua`, the identity of a
//! region's Redis, and `lua/regions/global_members.lua`, the registry of regions in the global Redis.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::algorithm::stored_state::{MalformedReply, ReplyReader};
use crate::store::redis::key;
use crate::store::redis::replicas::claim::OwnerId;
use crate::store::redis::script::put_time;

/// Maximum length of a region's name in bytes, as in the settings.
const MAX_NAME_BYTES: usize = 63;
/// Maximum number of other regions in a reply, as in the script.
const MAX_OTHERS: usize = 128;

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

/// Reply of `region_identity.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityReply {
    /// Time of the region's Redis.
    pub now: Time,
    /// Identity that is stored now.
    pub identity: RegionIdentity,
}

/// Returns the key of the identity. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn region_identity_key(prefix: &str) -> Bytes {
    let mut key = key::head(prefix);
    key.extend_from_slice(b"region}");
    key.freeze()
}

/// Encodes the argument of `region_identity.lua`, for `now`, or the server's own time if `now` is `None`.
pub fn encode_claim(claim: IdentityClaim, list: RegionListHash, now: Option<Time>) -> Bytes {
    let (identity, remembers, is_settled) = match claim {
        IdentityClaim::Propose(id) => {
            (RegionIdentity { id, list_changed: Time::default(), is_new: false }, false, false)
        }
        IdentityClaim::Remember { identity, is_settled } => (identity, true, is_settled),
    };
    let mut argument = BytesMut::with_capacity(72);
    put_time(&mut argument, now);
    argument.put_i64_le(i64::from(remembers));
    argument.put_i64_le(i64::from(is_settled));
    argument.put_u64_le(identity.list_changed.as_micros());
    argument.put_i64_le(i64::from(identity.is_new));
    argument.put_slice(&identity.id.0);
    argument.put_slice(&list.0);
    argument.freeze()
}

/// Decodes the reply of `region_identity.lua`.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_identity(reply: &[u8]) -> Result<IdentityReply, MalformedReply> {
    let (numbers, id) = reply.split_at_checked(24).ok_or(MalformedReply)?;
    let mut reader = ReplyReader::new(numbers);
    let (now, list_changed, is_new) = (reader.time()?, reader.time()?, reader.number()?);
    let id = RegionId(id.try_into().map_err(|_| MalformedReply)?);
    if is_new > 1 {
        return Err(MalformedReply);
    }
    Ok(IdentityReply { now, identity: RegionIdentity { id, list_changed, is_new: is_new == 1 } })
}

/// Report of a region to the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionReport<'r> {
    /// Name of the region, at most 63 bytes.
    pub name: &'r str,
    /// Identity of its Redis.
    pub id: RegionId,
    /// Hash of its list of regions.
    pub list: RegionListHash,
}

/// Reply of `global_members.lua`. All times are of the global Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryReply {
    /// Time of the global Redis.
    pub now: Time,
    /// True if another Redis has had the name of this region within a minute.
    pub is_second: bool,
    /// Time at which the list of this region last changed; 0: it never changed.
    pub list_changed: Time,
    /// The other regions.
    pub others: Vec<OtherRegion>,
}

/// A region other than that of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherRegion {
    /// Its name.
    pub name: String,
    /// True if its list is not that of this process.
    pub has_other_list: bool,
    /// Time at which its list last changed; 0: it never changed.
    pub list_changed: Time,
    /// Time of its last report.
    pub seen: Time,
}

/// Returns the key of the registry. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn region_registry_key(prefix: &str) -> Bytes {
    let mut key = key::head(prefix);
    key.extend_from_slice(b"regions}");
    key.freeze()
}

/// Encodes the argument of `global_members.lua`, for `now`, or the server's own time if `now` is `None`.
pub fn encode_report(report: RegionReport<'_>, now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(40 + report.name.len());
    put_time(&mut argument, now);
    argument.put_slice(&report.id.0);
    argument.put_slice(&report.list.0);
    argument.put_slice(report.name.as_bytes());
    argument.freeze()
}

/// Decodes the reply of `global_members.lua`.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_registry(reply: &[u8]) -> Result<RegistryReply, MalformedReply> {
    let (head, mut rest) = reply.split_at_checked(24).ok_or(MalformedReply)?;
    let mut reader = ReplyReader::new(head);
    let (now, is_second, list_changed) = (reader.time()?, reader.number()?, reader.time()?);
    if is_second > 1 {
        return Err(MalformedReply);
    }
    let mut others = Vec::new();
    while let Some((length, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(*length)).ok_or(MalformedReply)?;
        let (other_list, after) = after.split_first().ok_or(MalformedReply)?;
        let (times, after) = after.split_at_checked(16).ok_or(MalformedReply)?;
        let mut reader = ReplyReader::new(times);
        let (list_changed, seen) = (reader.time()?, reader.time()?);
        if others.len() == MAX_OTHERS || *other_list > 1 {
            return Err(MalformedReply);
        }
        others.push(OtherRegion { name: plain_name(name)?, has_other_list: *other_list == 1, list_changed, seen });
        rest = after;
    }
    Ok(RegistryReply { now, is_second: is_second == 1, list_changed, others })
}

/// Returns a name that is safe to log.
fn plain_name(name: &[u8]) -> Result<String, MalformedReply> {
    let is_plain = (1..=MAX_NAME_BYTES).contains(&name.len()) && name.iter().all(u8::is_ascii_graphic);
    let name = std::str::from_utf8(name).map_err(|_| MalformedReply)?;
    if is_plain { Ok(name.to_owned()) } else { Err(MalformedReply) }
}
