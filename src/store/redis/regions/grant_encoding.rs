//! Arguments and replies of the scripts of grants: what the global Redis grants, and what the region's counters take.
//!
//! A function with a `now` encodes a call made at that time, or at the server's own time if it is `None`.
//!
//! | Script in `lua/regions/` | Runs in | Does |
//! |---|---|---|
//! | `global_window.lua` | global Redis | grants hits of a window, takes unused ones back, forgets all |
//! | `global_bucket.lua` | global Redis | grants hits of a token bucket, fills it |
//! | `region_grant.lua` | region's Redis | gives hits to a counter of windows, takes unused ones out of it |
//! | `region_bucket_grant.lua` | region's Redis | gives hits to a bucket |
//! | `region_reset.lua` | region's Redis | empties a counter whose limit was reset |
//!
//! Decides: how a call for a grant is written, and its reply read.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::global_bucket::GlobalBucketParameters;
use crate::limit::algorithm::global_window::{GlobalWindowParameters, ReturnedHits};
use crate::limit::algorithm::region_bucket::PrepaidHitsGrant;
use crate::limit::algorithm::region_window::HitsGrant;
use crate::limit::algorithm::stored_state::{MalformedReply, ReplyReader};
use crate::store::redis::script::put_time;

/// Purpose of a call of `global_window.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GlobalWindowAction {
    /// Grants at most these hits.
    Grant {
        /// Hits that the region wants.
        wanted: u32,
    },
    /// Takes back hits that the region has not used.
    Return(ReturnedHits),
    /// Forgets all hits and starts a new epoch.
    Reset,
}

/// Reply of `global_window.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalWindowReply {
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
pub fn encode_global_window_call(pool: GlobalWindowParameters, call: GlobalWindowAction, now: Option<Time>) -> Bytes {
    let (purpose, hits, window, epoch) = match call {
        GlobalWindowAction::Grant { wanted } => (0, u64::from(wanted), 0, 0),
        GlobalWindowAction::Return(ReturnedHits { window, hits, epoch }) => (1, hits, window, epoch.as_micros()),
        GlobalWindowAction::Reset => (2, 0, 0, 0),
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
pub fn decode_global_window_reply(reply: &[u8]) -> Result<GlobalWindowReply, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let decoded = GlobalWindowReply {
        now: reader.read_time()?,
        epoch: reader.read_time()?,
        window: reader.read_number()?,
        hits: reader.read_number()?,
        free: reader.read_number()?,
    };
    if reader.is_empty() { Ok(decoded) } else { Err(MalformedReply) }
}

/// Purpose of a call of `global_bucket.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GlobalBucketAction {
    /// Grants at most these hits.
    Grant {
        /// Hits that the region wants.
        wanted: u32,
    },
    /// Fills the bucket and starts a new epoch.
    Reset,
}

/// Reply of `global_bucket.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalBucketReply {
    /// Time of the global Redis.
    pub now: Time,
    /// Time of the last reset; 0: none is known.
    pub epoch: Time,
    /// Time of the global Redis at which the hits of a grant end.
    pub end: Time,
    /// Hits granted.
    pub hits: u64,
    /// Tokens that stay in the bucket.
    pub free: u64,
}

/// Encodes a call of `global_bucket.lua`.
pub fn encode_global_bucket_call(pool: GlobalBucketParameters, call: GlobalBucketAction, now: Option<Time>) -> Bytes {
    let (purpose, wanted) = match call {
        GlobalBucketAction::Grant { wanted } => (0, wanted),
        GlobalBucketAction::Reset => (1, 0),
    };
    let GlobalBucketParameters { period_us, rate, capacity, prepaid_lifetime_us } = pool;
    let mut argument = BytesMut::with_capacity(56);
    put_time(&mut argument, now);
    let numbers = [purpose, period_us, rate.into(), capacity.into(), wanted.into(), prepaid_lifetime_us];
    numbers.into_iter().for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}

/// Decodes the reply of `global_bucket.lua`.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode_global_bucket_reply(reply: &[u8]) -> Result<GlobalBucketReply, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let decoded = GlobalBucketReply {
        now: reader.read_time()?,
        epoch: reader.read_time()?,
        end: reader.read_time()?,
        hits: reader.read_number()?,
        free: reader.read_number()?,
    };
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

/// Encodes a grant to the bucket of a limit. The script replies 1 if the bucket took the grant, else 0.
pub fn encode_prepaid_hits_grant(limit: &Limit, grant: &PrepaidHitsGrant) -> Bytes {
    let mut argument = BytesMut::with_capacity(80);
    let head = [limit.region_ttl_ms(), limit.region_capacity().into(), grant.request, grant.epoch];
    let hits = [grant.hits, grant.low, grant.start.as_micros(), grant.end.as_micros()];
    let rest = [u64::from(grant.exhausted), grant.next_request_at.as_micros()];
    head.into_iter().chain(hits).chain(rest).for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}

/// Encodes a reset of a counter with this period, at a time of the global Redis. The script replies 1 if the counter
/// followed it, 0 if there is none or it is younger.
pub fn encode_counter_reset(period_ms: u64, epoch: Time) -> Bytes {
    let mut argument = BytesMut::with_capacity(16);
    [period_ms, epoch.as_micros()].into_iter().for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}
