//! Arguments and replies of the scripts of grants: what the global Redis grants, and what the region's counters take.
//!
//! A function with a `now` encodes a call made at that time, or at the server's own time if it is `None`.
//!
//! | Script in `lua/regions/` | Runs in | Does |
//! |---|---|---|
//! | `global_window.lua` | global Redis | grants hits of a window, takes unused ones back, forgets all |
//! | `global_bucket.lua` | global Redis | grants a rate and a capacity of a bucket for a term, starts a new epoch |
//! | `region_grant.lua` | region's Redis | gives hits to a counter of windows, takes unused ones out of it |
//! | `region_bucket_grant.lua` | region's Redis | gives a rate and a capacity to a bucket |
//! | `region_reset.lua` | region's Redis | empties a counter whose limit was reset |

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::global_bucket::TermRequest;
use crate::limit::algorithm::global_window::{WindowPool, WindowReturn};
use crate::limit::algorithm::region_bucket::RateGrant;
use crate::limit::algorithm::region_window::HitsGrant;
use crate::limit::algorithm::stored_state::{MalformedReply, ReplyReader};
use crate::store::redis::script::put_time;

/// Purpose of a call of `global_window.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowCall {
    /// Grants at most these hits.
    Grant {
        /// Hits that the region wants.
        wanted: u32,
    },
    /// Takes back hits that the region has not used.
    Return(WindowReturn),
    /// Forgets all hits and starts a new epoch.
    Reset,
}

/// Reply of `global_window.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowReply {
    /// Time of the global Redis.
    pub now: Time,
    /// Time of the last reset; 0: none is known.
    pub epoch: Time,
    /// Window that contains `now`.
    pub window: u64,
    /// Hits granted, or taken back.
    pub hits: u64,
    /// Hits that stay free after a grant.
    pub free: u64,
}

/// Encodes a call of `global_window.lua`.
pub fn encode_window_call(pool: WindowPool, call: WindowCall, now: Option<Time>) -> Bytes {
    let (purpose, hits, window, epoch) = match call {
        WindowCall::Grant { wanted } => (0, u64::from(wanted), 0, 0),
        WindowCall::Return(WindowReturn { window, hits, epoch }) => (1, hits, window, epoch.as_micros()),
        WindowCall::Reset => (2, 0, 0, 0),
    };
    let mut argument = BytesMut::with_capacity(64);
    put_time(&mut argument, now);
    for number in [purpose, pool.period_us, u64::from(pool.is_sliding), u64::from(pool.max), hits, window, epoch] {
        argument.put_u64_le(number);
    }
    argument.freeze()
}

/// Decodes the reply of `global_window.lua`.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_window_call(reply: &[u8]) -> Result<WindowReply, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let decoded = WindowReply {
        now: reader.time()?,
        epoch: reader.time()?,
        window: reader.number()?,
        hits: reader.number()?,
        free: reader.number()?,
    };
    if reader.is_empty() { Ok(decoded) } else { Err(MalformedReply) }
}

/// Reply of `global_bucket.lua` to a request for a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketReply {
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

/// Reply of `global_bucket.lua` to a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketResetReply {
    /// Time of the global Redis.
    pub now: Time,
    /// Time of the last reset.
    pub epoch: Time,
}

/// Encodes a request to `global_bucket.lua`.
pub fn encode_bucket_request(request: TermRequest, now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(56);
    put_time(&mut argument, now);
    argument.put_i64_le(0);
    argument.put_u64_le(u64::from(request.region));
    argument.put_u64_le(u64::from(request.wanted));
    argument.put_u64_le(request.term_us);
    argument.put_u64_le(u64::from(request.pool.rate));
    argument.put_u64_le(u64::from(request.pool.capacity));
    argument.freeze()
}

/// Encodes a reset by `global_bucket.lua`.
pub fn encode_bucket_reset(now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(16);
    put_time(&mut argument, now);
    argument.put_i64_le(1);
    argument.freeze()
}

/// Decodes the reply to a request.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_bucket_request(reply: &[u8]) -> Result<BucketReply, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let decoded = BucketReply {
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
pub fn decode_bucket_reset(reply: &[u8]) -> Result<BucketResetReply, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let decoded = BucketResetReply { now: reader.time()?, epoch: reader.time()? };
    if reader.is_empty() { Ok(decoded) } else { Err(MalformedReply) }
}

/// Encodes a grant to a counter of windows of this length. The script replies 1 if the counter took it, else 0.
pub fn encode_hits_grant(period_ms: u64, grant: &HitsGrant) -> Bytes {
    let mut argument = BytesMut::with_capacity(72);
    let next_request_at = grant.next_request_at.as_micros();
    let head = [0, period_ms, grant.window];
    let rest = [grant.request, grant.epoch, grant.hits, grant.low, u64::from(grant.exhausted), next_request_at];
    head.into_iter().chain(rest).for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}

/// Encodes the return of the unused hits of a window. The script replies their number.
pub fn encode_hits_return(period_ms: u64, window: u64) -> Bytes {
    let mut argument = BytesMut::with_capacity(24);
    [1, period_ms, window].into_iter().for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}

/// Encodes a grant to the bucket of a limit, given at `now`. Two more arguments follow it: an
/// empty one, and the view of the global Redis. The script replies 1 if the bucket took the
/// grant, else 0.
pub fn encode_rate_grant(limit: &Limit, now: Option<Time>, grant: &RateGrant) -> Bytes {
    let mut argument = BytesMut::with_capacity(112);
    put_time(&mut argument, now);
    let own = [limit.region_reserve().into(), limit.region_capacity().into(), limit.clock_slack_us()];
    let head = [limit.period_us(), limit.region_ttl_ms()].into_iter().chain(own);
    let granted = [u64::from(grant.rate), u64::from(grant.capacity), grant.start.as_micros(), grant.end.as_micros()];
    let rest = [u64::from(grant.exhausted), grant.next_request_at.as_micros()];
    let numbers = head.chain([grant.request, grant.epoch]).chain(granted).chain(rest);
    numbers.for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}

/// Encodes a reset of a counter with this period, at a time of the global Redis. The script replies 1 if the counter
/// followed it, 0 if there is none or it is younger.
pub fn encode_counter_reset(period_ms: u64, epoch: Time) -> Bytes {
    let mut argument = BytesMut::with_capacity(16);
    [period_ms, epoch.as_micros()].into_iter().for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}
