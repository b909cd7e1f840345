//! Argument of `lua/region_grant.lua`: grants and returns at a region's counter of windows.

use bytes::{BufMut, Bytes, BytesMut};

use crate::algorithm::region_grant::RegionGrant;

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
