//! Argument and reply of `lua/global_resets.lua`: the list of resets in the global Redis.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::algorithm::reply_reader::{MalformedReply, ReplyReader};
use crate::store::redis::key;

/// Counter of a region that follows a reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetCounter {
    /// Key of the counter, in all regions.
    pub key: Bytes,
    /// Its period in milliseconds.
    pub period_ms: u64,
}

/// Entry of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reset {
    /// Time of the reset, by the global Redis.
    pub time: Time,
    /// The counter.
    pub counter: ResetCounter,
}

/// Reply of the script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetsReply {
    /// Time of the global Redis.
    pub now: Time,
    /// Time of the newest reset; 0: there is none.
    pub newest: Time,
    /// Resets that were asked for, newest first.
    pub resets: Vec<Reset>,
}

/// Returns the key of the list. `prefix` is `CACHE_KEY_PREFIX`. No counter's key ends in a brace.
pub fn resets_key(prefix: &str) -> Bytes {
    let mut key = key::head(prefix);
    key.extend_from_slice(b"resets}");
    key.freeze()
}

/// Encodes a read of the resets after a time, at `now`, or at the server's own time if `now` is `None`.
pub fn encode_read(after: Time, now: Option<Time>) -> Bytes {
    head(after, now).freeze()
}

/// Encodes the addition of counters that were reset at a time, at `now`, or at the server's own time if `now` is
/// `None`.
pub fn encode_add(time: Time, counters: &[ResetCounter], now: Option<Time>) -> Bytes {
    let mut argument = head(time, now);
    for ResetCounter { key, period_ms } in counters {
        argument.put_u64_le(*period_ms);
        argument.put_u64_le(key.len() as u64);
        argument.put_slice(key);
    }
    argument.freeze()
}

/// Decodes the reply of the script.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode(reply: &[u8]) -> Result<ResetsReply, MalformedReply> {
    let (times, mut rest) = reply.split_at_checked(16).ok_or(MalformedReply)?;
    let mut reader = ReplyReader::new(times);
    let (now, newest, mut resets) = (reader.time()?, reader.time()?, Vec::new());
    while !rest.is_empty() {
        let (numbers, after) = rest.split_at_checked(24).ok_or(MalformedReply)?;
        let mut reader = ReplyReader::new(numbers);
        let (time, period_ms, length) = (reader.time()?, reader.number()?, reader.number()?);
        let length = usize::try_from(length).map_err(|_| MalformedReply)?;
        let (key, after) = after.split_at_checked(length).ok_or(MalformedReply)?;
        resets.push(Reset { time, counter: ResetCounter { key: Bytes::copy_from_slice(key), period_ms } });
        rest = after;
    }
    Ok(ResetsReply { now, newest, resets })
}

fn head(time: Time, now: Option<Time>) -> BytesMut {
    let mut argument = BytesMut::with_capacity(128);
    argument.put_i64_le(now.and_then(|now| i64::try_from(now.as_micros()).ok()).unwrap_or(-1));
    argument.put_u64_le(time.as_micros());
    argument
}
