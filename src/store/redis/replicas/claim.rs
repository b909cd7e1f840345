//! What a process says to the table of slots, and what it hears: the numbers of `lua/replicas.lua`.

use std::hash::{BuildHasher, RandomState};

use bytes::{BufMut, Bytes, BytesMut};

use crate::clock::Time;
use crate::store::redis::key;
use crate::store::redis::script::reply_reader::MalformedReply;

/// What tells a process from all others, those that ran before included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub [u8; 16]);

impl Owner {
    /// One that nobody else is.
    pub fn random() -> Self {
        // IdentityHasher under keys that the system drew.
        let random = RandomState::new();
        let half = |place: u8| random.hash_one(place).to_le_bytes();
        let mut owner = [0; 16];
        owner[..8].copy_from_slice(&half(0));
        owner[8..].copy_from_slice(&half(1));
        Self(owner)
    }
}

/// What is to become of a process's claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimAction {
    /// It is made or renewed.
    Claim,
    /// It ends now, because the process does.
    Release,
}

/// What Redis says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Redis's time.
    pub now: Time,
    /// The slot that the process has, from 0 on; `None`: all are taken, or another number of them is in force.
    pub slot: Option<u32>,
    /// When the claim ended that came before the process's own; 0 if there was none.
    pub previous_end: Time,
    /// How many processes are alive, with and without a slot.
    pub live: u32,
    /// How many slots are in force.
    pub slots: u32,
}

/// The key of the table. No counter's key ends in a brace. `prefix` is `CACHE_KEY_PREFIX`.
pub fn key(prefix: &str) -> Bytes {
    let mut key = key::head(prefix);
    key.extend_from_slice(b"replicas}");
    key.freeze()
}

/// The argument of the script, for one of `slots`, at `now` or, if there is none, at the server's own time.
pub fn argument(owner: Owner, slots: u32, wish: ClaimAction, now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(40);
    argument.put_i64_le(now.and_then(|now| i64::try_from(now.as_micros()).ok()).unwrap_or(-1));
    argument.put_i64_le(i64::from(slots));
    argument.put_i64_le(i64::from(wish == ClaimAction::Release));
    argument.put_slice(&owner.0);
    argument.freeze()
}

/// What the script returned.
///
/// # Errors
/// What it can not have returned.
pub fn read(reply: &[u8]) -> Result<Reply, MalformedReply> {
    let (words, []) = reply.as_chunks::<8>() else { return Err(MalformedReply) };
    let &[now, slot, previous_end, live, slots] = words else { return Err(MalformedReply) };
    let time = |word| u64::try_from(i64::from_le_bytes(word)).map(Time::from_micros).map_err(|_| MalformedReply);
    let count = |word| u32::try_from(i64::from_le_bytes(word)).map_err(|_| MalformedReply);
    let slot = if i64::from_le_bytes(slot) == -1 { None } else { Some(count(slot)?) };
    Ok(Reply { now: time(now)?, slot, previous_end: time(previous_end)?, live: count(live)?, slots: count(slots)? })
}
