//! Argument and reply of `lua/global_bucket.lua`: grants of a token bucket to regions.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::algorithm::global_bucket::TermRequest;
use crate::limit::algorithm::reply_reader::{MalformedReply, ReplyReader};

/// Reply to a request for a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReply {
    /// Time of the global Redis.
    pub now: Time,
    /// Time of the last reset; 0: none is known.
    pub epoch: Time,
    /// Tokens per period, beside the region's reserve.
    pub rate: u32,
    /// Tokens that the region's bucket holds, beside those of its reserve.
    pub capacity: u32,
    /// Time of the global Redis at which the grant ends; 0: nothing was granted, as too many grants have not ended.
    pub end: Time,
}

/// Reply to a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetReply {
    /// Time of the global Redis.
    pub now: Time,
    /// Time of the last reset.
    pub epoch: Time,
}

/// Encodes a request, made at `now`, or at the server's own time if `now` is `None`.
pub fn encode_request(request: TermRequest, now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(56);
    put_head(&mut argument, now, 0);
    argument.put_u64_le(u64::from(request.region));
    argument.put_u64_le(u64::from(request.wanted));
    argument.put_u64_le(request.term_us);
    argument.put_u64_le(u64::from(request.pool.rate));
    argument.put_u64_le(u64::from(request.pool.capacity));
    argument.freeze()
}

/// Encodes a reset, made at `now`, or at the server's own time if `now` is `None`.
pub fn encode_reset(now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(16);
    put_head(&mut argument, now, 1);
    argument.freeze()
}

/// Decodes the reply to a request.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_request(reply: &[u8]) -> Result<TermReply, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let decoded = TermReply {
        now: reader.time()?,
        epoch: reader.time()?,
        rate: reader.number_u32()?,
        capacity: reader.number_u32()?,
        end: reader.time()?,
    };
    if reader.is_empty() { Ok(decoded) } else { Err(MalformedReply) }
}

/// Decodes the reply to a reset.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_reset(reply: &[u8]) -> Result<ResetReply, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let decoded = ResetReply { now: reader.time()?, epoch: reader.time()? };
    if reader.is_empty() { Ok(decoded) } else { Err(MalformedReply) }
}

fn put_head(argument: &mut BytesMut, now: Option<Time>, purpose: i64) {
    argument.put_i64_le(now.and_then(|now| i64::try_from(now.as_micros()).ok()).unwrap_or(-1));
    argument.put_i64_le(purpose);
}
