//! Argument and reply of `lua/replicas.lua`: claims on slots.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::base::random::random_u64_pair;
use crate::limit::algorithm::stored_state::MalformedReply;
use crate::store::redis::key;
use crate::store::redis::script::put_time;

/// Random identity of a process, different from all others, earlier ones included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerId(pub [u8; 16]);

impl OwnerId {
    /// Creates a new identity.
    pub fn random() -> Self {
        let (first, second) = random_u64_pair();
        let mut id = [0; 16];
        id[..8].copy_from_slice(&first.to_le_bytes());
        id[8..].copy_from_slice(&second.to_le_bytes());
        Self(id)
    }
}

/// Action on a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimAction {
    /// Makes or renews the claim.
    Claim,
    /// Ends the claim, because the process stops.
    Release,
}

/// Reply of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimReply {
    /// Time of Redis.
    pub now: Time,
    /// Slot of the process, from 0 on; `None`: all are taken, or claims under another number of slots still run.
    pub slot: Option<u32>,
    /// End of the claim before the process's own; 0 if there was none.
    pub previous_end: Time,
    /// Number of live processes, with and without a slot.
    pub live: u32,
    /// Number of slots that applies in Redis.
    pub slots: u32,
}

/// Returns the key of the registry. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn replica_registry_key(prefix: &str) -> Bytes {
    let mut key = key::key_head(prefix);
    key.extend_from_slice(b"replicas}");
    key.freeze()
}

/// Encodes the argument of the script. The claim is made at `now`, or at the server's own time if `now` is `None`.
pub fn encode_claim_argument(owner: OwnerId, slots: u32, action: ClaimAction, now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(40);
    put_time(&mut argument, now);
    argument.put_i64_le(i64::from(slots));
    argument.put_i64_le(i64::from(action == ClaimAction::Release));
    argument.put_slice(&owner.0);
    argument.freeze()
}

/// Decodes the reply of the script.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_claim_reply(reply: &[u8]) -> Result<ClaimReply, MalformedReply> {
    let (words, []) = reply.as_chunks::<8>() else { return Err(MalformedReply) };
    let &[now, slot, previous_end, live, slots] = words else { return Err(MalformedReply) };
    let time = |word| u64::try_from(i64::from_le_bytes(word)).map(Time::from_micros).map_err(|_| MalformedReply);
    let count = |word| u32::try_from(i64::from_le_bytes(word)).map_err(|_| MalformedReply);
    let slot = if i64::from_le_bytes(slot) == -1 { None } else { Some(count(slot)?) };
    Ok(ClaimReply {
        now: time(now)?,
        slot,
        previous_end: time(previous_end)?,
        live: count(live)?,
        slots: count(slots)?,
    })
}
