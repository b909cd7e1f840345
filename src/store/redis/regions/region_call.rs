//! Arguments of `lua/region_grant.lua`, `lua/region_bucket_grant.lua` and `lua/region_reset.lua`: grants at a region's
//! counters, returns, and resets.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::region_bucket_grant::RegionTerm;
use crate::limit::algorithm::region_grant::RegionGrant;

/// Encodes a grant to a counter of windows of this length. The script replies 1 if the counter took it, else 0.
pub fn encode_grant(period_ms: u64, grant: &RegionGrant) -> Bytes {
    let mut argument = BytesMut::with_capacity(72);
    let next_request_at = grant.next_request_at.as_micros();
    let head = [0, period_ms, grant.window];
    let rest = [grant.request, grant.epoch, grant.hits, grant.low, u64::from(grant.exhausted), next_request_at];
    head.into_iter().chain(rest).for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}

/// Encodes the return of the unused hits of a window. The script replies their number.
pub fn encode_return(period_ms: u64, window: u64) -> Bytes {
    let mut argument = BytesMut::with_capacity(24);
    [1, period_ms, window].into_iter().for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}

/// Encodes a grant to the bucket of a limit, given at `now`, or at the server's own time if `now` is `None`. Two more
/// arguments follow it: an empty one, and the clock of the global Redis. The script replies 1 if the bucket took the
/// grant, else 0.
pub fn encode_term(limit: &Limit, now: Option<Time>, term: &RegionTerm) -> Bytes {
    let mut argument = BytesMut::with_capacity(112);
    argument.put_i64_le(now.and_then(|now| i64::try_from(now.as_micros()).ok()).unwrap_or(-1));
    let own = [limit.region_reserve().into(), limit.region_capacity().into(), limit.clock_slack_us()];
    let head = [limit.period_us(), limit.region_ttl_ms()].into_iter().chain(own);
    let granted = [u64::from(term.rate), u64::from(term.capacity), term.start.as_micros(), term.end.as_micros()];
    let rest = [u64::from(term.exhausted), term.next_request_at.as_micros()];
    let numbers = head.chain([term.request, term.epoch]).chain(granted).chain(rest);
    numbers.for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}

/// Encodes a reset of a counter with this period, at a time of the global Redis. The script replies 1 if the counter
/// followed it, 0 if there is none or it is younger.
pub fn encode_reset(period_ms: u64, epoch: Time) -> Bytes {
    let mut argument = BytesMut::with_capacity(16);
    [period_ms, epoch.as_micros()].into_iter().for_each(|number| argument.put_u64_le(number));
    argument.freeze()
}
