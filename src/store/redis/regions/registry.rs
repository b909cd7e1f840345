//! Arguments and replies of the scripts that tell who a region is: `lua/regions/region_identity.lua`, the identity of a
//! region's Redis, and `lua/regions/global_members.lua`, the registry of regions in the global Redis.
//!
//! Decides: form and proof of the fencing token by which `lua/regions/global_members.lua` finds a copied Redis.
//!
//! # Fencing tokens
//!
//! A copy of a region's Redis, by replication or from a snapshot, has its identity. What a copy cannot keep is a chain
//! of random tokens. Each Redis stores a *current* and a *next* token. Its processes report both. The registry has one
//! token: if that is the current one of a report, it takes the next one. When a process tells the region's Redis that
//! the next token was accepted, it becomes the current one, and a new random one is the next. Two copies propose
//! different next tokens, and the registry accepts one; the other reports two tokens that the registry does not have.
//! So two copies that both report are found within 25 s, and both are told.
//!
//! - *Several processes* read the tokens from the same Redis, which changes them. What a process reports it has read in
//!   the last 2 s, and a report is void 5 s after it was sent. Tokens change every 10 s at most, so an older report has
//!   the token before, which counts for 10 s.
//! - *Lost replies, and processes that die*: the region's Redis had the next token before the registry, so nothing is
//!   known by one process alone. Any other reports both tokens, and learns that the next one was accepted.
//! - *A region's Redis that forgets its last writes* gets them back from each process that remembers a later token. If
//!   all processes restart too, the region counts as copied once, and recovers after the lease.
//! - *A global Redis that forgets its last writes* has an earlier token: a report of a later generation is accepted.
//! - *A Redis that is restored from a snapshot* counts as copied once.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::base::random::random_u64;
use crate::limit::algorithm::stored_state::{MAX_LUA_INTEGER, MalformedReply, ReplyReader};
use crate::store::redis::key;
use crate::store::redis::replicas::OwnerId;
use crate::store::redis::script::put_time;

/// Maximum length of a region's name in bytes, as in the settings.
const MAX_REGION_NAME_BYTES: usize = 63;
/// Maximum number of other regions in a reply, as in the script.
const MAX_OTHER_REGIONS: usize = 128;

/// Random identity of a region's Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionRedisId(pub [u8; 16]);

impl RegionRedisId {
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

/// Random number that a region's Redis proposes, and the registry accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FencingToken(pub [u8; 8]);

impl FencingToken {
    /// Stands for an absent token.
    pub const NONE: Self = Self([0; 8]);

    /// Creates a new token.
    pub fn random() -> Self {
        Self(random_u64().to_le_bytes())
    }
}

/// Fencing tokens of a region's Redis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FencingTokens {
    /// Number of the current token, from 1 on.
    pub generation: u64,
    /// Token that the registry accepted last, as far as the region's Redis knows.
    pub current: FencingToken,
    /// Token that the registry is to accept now.
    pub next: FencingToken,
}

/// Identity of a region's Redis, as it is stored there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionIdentity {
    /// The identity.
    pub id: RegionRedisId,
    /// Time of that Redis at which the list of a region last changed; 0: none changed.
    pub list_changed: Time,
    /// True if that Redis cannot know of an earlier list; its creation counts as a change.
    pub is_new: bool,
    /// Its fencing tokens.
    pub fence: FencingTokens,
}

/// What a process knows when it asks for the identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityClaim {
    /// It knows nothing, and proposes an id.
    Propose(RegionRedisId),
    /// It remembers an earlier reply.
    Remember {
        /// The earlier reply.
        identity: RegionIdentity,
        /// No region has had another list.
        is_settled: bool,
    },
}

/// Call of `region_identity.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityCall {
    /// Identity that the process knows or proposes.
    pub claim: IdentityClaim,
    /// Hash of the process's list of regions.
    pub list: RegionListHash,
    /// Microseconds since a list of another region changed, by the registry; `None`: none did.
    pub other_list_changed_ago_us: Option<u64>,
    /// Time of the region's Redis at which the lease of the region's parts ends; 0: the process knows none.
    pub leased_until: Time,
    /// Microseconds since the clock of the region's Redis jumped; `None`: it did not.
    pub jumped_ago_us: Option<u64>,
    /// Token that the registry accepted.
    pub accepted: FencingToken,
    /// Token to be proposed after it.
    pub proposal: FencingToken,
}

/// Reply of `region_identity.lua`. All times are of the region's Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityReply {
    /// Time of the region's Redis.
    pub now: Time,
    /// Identity that is stored now.
    pub identity: RegionIdentity,
    /// End of the lease of the region's parts, as far as a process of the region knows; 0: it is unknown.
    pub leased_until: Time,
    /// Time of the last jump of its clock; 0: there was none.
    pub clock_jumped: Time,
}

/// Returns the key of the identity. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn region_identity_key(prefix: &str) -> Bytes {
    let mut key = key::key_head(prefix);
    key.extend_from_slice(b"identity}");
    key.freeze()
}

/// Encodes the argument of `region_identity.lua`, for `now`, or the server's own time if `now` is `None`.
pub fn encode_identity_call(call: &IdentityCall, now: Option<Time>) -> Bytes {
    let (identity, remembers, is_settled) = match call.claim {
        IdentityClaim::Propose(id) => {
            let fence = FencingTokens::default();
            (RegionIdentity { id, list_changed: Time::default(), is_new: false, fence }, false, false)
        }
        IdentityClaim::Remember { identity, is_settled } => (identity, true, is_settled),
    };
    let mut argument = BytesMut::with_capacity(136);
    put_time(&mut argument, now);
    argument.put_i64_le(i64::from(remembers));
    argument.put_i64_le(i64::from(is_settled));
    argument.put_u64_le(identity.list_changed.as_micros());
    argument.put_i64_le(encode_optional_us(call.other_list_changed_ago_us));
    argument.put_i64_le(i64::from(identity.is_new));
    argument.put_u64_le(identity.fence.generation);
    argument.put_u64_le(call.leased_until.as_micros());
    argument.put_i64_le(encode_optional_us(call.jumped_ago_us));
    argument.put_slice(&identity.id.0);
    argument.put_slice(&call.list.0);
    for FencingToken(token) in [identity.fence.current, identity.fence.next, call.accepted, call.proposal] {
        argument.put_slice(&token);
    }
    argument.freeze()
}

/// Encodes optional microseconds of a script's argument; -1: absent.
fn encode_optional_us(us: Option<u64>) -> i64 {
    us.and_then(|us| i64::try_from(us.min(MAX_LUA_INTEGER)).ok()).unwrap_or(-1)
}

/// Decodes the reply of `region_identity.lua`.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_identity_reply(reply: &[u8]) -> Result<IdentityReply, MalformedReply> {
    let (numbers, rest) = reply.split_at_checked(48).ok_or(MalformedReply)?;
    let mut reader = ReplyReader::new(numbers);
    let (now, list_changed, is_new) = (reader.read_time()?, reader.read_time()?, decode_flag(reader.read_number()?)?);
    let (generation, leased_until, clock_jumped) = (reader.read_number()?, reader.read_time()?, reader.read_time()?);
    let (id, rest) = rest.split_first_chunk().ok_or(MalformedReply)?;
    let (current, rest) = rest.split_first_chunk().ok_or(MalformedReply)?;
    let next = rest.try_into().map_err(|_| MalformedReply)?;
    let fence = FencingTokens { generation, current: FencingToken(*current), next: FencingToken(next) };
    let identity = RegionIdentity { id: RegionRedisId(*id), list_changed, is_new, fence };
    Ok(IdentityReply { now, identity, leased_until, clock_jumped })
}

/// Report of a region to the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionReport<'r> {
    /// Name of the region, at most 63 bytes.
    pub name: &'r str,
    /// Identity of its Redis.
    pub id: RegionRedisId,
    /// Fencing tokens of its Redis.
    pub fence: FencingTokens,
    /// Hash of its list of regions.
    pub list: RegionListHash,
    /// Time of the global Redis at which the report is sent, at the latest; 0: it only reads.
    pub sent: Time,
    /// Time in microseconds for which the region may use its parts after the report.
    pub lease_us: u64,
    /// Microseconds since the clock of the global Redis jumped; `None`: it did not.
    pub jumped_ago_us: Option<u64>,
}

/// Reply of `global_members.lua`. All times are of the global Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryReply {
    /// Time of the global Redis.
    pub now: Time,
    /// True if the report counts; false if it only read, or came too late.
    pub recorded: bool,
    /// True if the registry has accepted the next token of the region's Redis.
    pub accepted: bool,
    /// Time at which the list of this region last changed; 0: it never changed.
    pub list_changed: Time,
    /// Time until which the region's Redis counts as copied; 0: it never did.
    pub contested_until: Time,
    /// Time of the last jump of the clock; 0: none is known.
    pub clock_jumped: Time,
    /// The Redis of the other regions, and others with the name of this one.
    pub others: Vec<OtherRegion>,
}

/// Region with another Redis than that of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherRegion {
    /// Its name.
    pub name: String,
    /// Identity of its Redis.
    pub id: RegionRedisId,
    /// True if its list is not that of this process.
    pub has_other_list: bool,
    /// Time at which its list last changed; 0: it never changed.
    pub list_changed: Time,
    /// Time of its last report.
    pub seen: Time,
    /// Time until which it may use its parts.
    pub leased_until: Time,
}

/// Returns the key of the registry. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn region_registry_key(prefix: &str) -> Bytes {
    let mut key = key::key_head(prefix);
    key.extend_from_slice(b"members}");
    key.freeze()
}

/// Encodes the argument of `global_members.lua`, for `now`, or the server's own time if `now` is `None`.
pub fn encode_region_report(report: RegionReport<'_>, now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(88 + report.name.len());
    put_time(&mut argument, now);
    argument.put_u64_le(report.sent.as_micros());
    argument.put_u64_le(report.lease_us);
    argument.put_u64_le(report.fence.generation);
    argument.put_i64_le(encode_optional_us(report.jumped_ago_us));
    argument.put_slice(&report.id.0);
    argument.put_slice(&report.list.0);
    argument.put_slice(&report.fence.current.0);
    argument.put_slice(&report.fence.next.0);
    argument.put_slice(report.name.as_bytes());
    argument.freeze()
}

/// Decodes the reply of `global_members.lua`.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_registry_reply(reply: &[u8]) -> Result<RegistryReply, MalformedReply> {
    let (head, mut rest) = reply.split_at_checked(48).ok_or(MalformedReply)?;
    let mut reader = ReplyReader::new(head);
    let (now, recorded, accepted) =
        (reader.read_time()?, decode_flag(reader.read_number()?)?, decode_flag(reader.read_number()?)?);
    let (list_changed, contested_until, clock_jumped) = (reader.read_time()?, reader.read_time()?, reader.read_time()?);
    let mut others = Vec::new();
    while let Some((length, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(*length)).ok_or(MalformedReply)?;
        let (other_list, after) = after.split_first().ok_or(MalformedReply)?;
        let (id, after) = after.split_first_chunk().ok_or(MalformedReply)?;
        let (times, after) = after.split_at_checked(24).ok_or(MalformedReply)?;
        let mut reader = ReplyReader::new(times);
        let (list_changed, seen, leased_until) = (reader.read_time()?, reader.read_time()?, reader.read_time()?);
        if others.len() == MAX_OTHER_REGIONS {
            return Err(MalformedReply);
        }
        let (name, has_other_list) = (decode_region_name(name)?, decode_flag(u64::from(*other_list))?);
        others.push(OtherRegion { name, id: RegionRedisId(*id), has_other_list, list_changed, seen, leased_until });
        rest = after;
    }
    Ok(RegistryReply { now, recorded, accepted, list_changed, contested_until, clock_jumped, others })
}

/// Decodes 0 or 1.
const fn decode_flag(number: u64) -> Result<bool, MalformedReply> {
    match number {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(MalformedReply),
    }
}

/// Decodes the name of a region; an error unless it is safe to log.
fn decode_region_name(name: &[u8]) -> Result<String, MalformedReply> {
    let is_plain = (1..=MAX_REGION_NAME_BYTES).contains(&name.len()) && name.iter().all(u8::is_ascii_graphic);
    let name = std::str::from_utf8(name).map_err(|_| MalformedReply)?;
    if is_plain { Ok(name.to_owned()) } else { Err(MalformedReply) }
}
