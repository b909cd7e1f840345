//! Argument and reply of `lua/global_members.lua`: the registry of regions in the global Redis.

use bytes::{BufMut, Bytes, BytesMut};

use super::region_identity::{RegionId, RegionListHash};
use crate::base::clock::Time;
use crate::limit::algorithm::reply_reader::{MalformedReply, ReplyReader};
use crate::store::redis::key;

/// Maximum length of a region's name in bytes, as in the settings.
const MAX_NAME_BYTES: usize = 63;
/// Maximum number of other regions in a reply, as in the script.
const MAX_OTHERS: usize = 128;

/// Report of a region to the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberReport<'r> {
    /// Name of the region, at most 63 bytes.
    pub name: &'r str,
    /// Identity of its Redis.
    pub id: RegionId,
    /// Hash of its list of regions.
    pub list: RegionListHash,
}

/// Reply of the script. All times are of the global Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MembersReply {
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
pub fn members_key(prefix: &str) -> Bytes {
    let mut key = key::head(prefix);
    key.extend_from_slice(b"regions}");
    key.freeze()
}

/// Encodes the argument of the script, for `now`, or the server's own time if `now` is `None`.
pub fn encode(report: MemberReport<'_>, now: Option<Time>) -> Bytes {
    let mut argument = BytesMut::with_capacity(40 + report.name.len());
    argument.put_i64_le(now.and_then(|now| i64::try_from(now.as_micros()).ok()).unwrap_or(-1));
    argument.put_slice(&report.id.0);
    argument.put_slice(&report.list.0);
    argument.put_slice(report.name.as_bytes());
    argument.freeze()
}

/// Decodes the reply of the script.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode(reply: &[u8]) -> Result<MembersReply, MalformedReply> {
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
    Ok(MembersReply { now, is_second: is_second == 1, list_changed, others })
}

/// Returns a name that is safe to log.
fn plain_name(name: &[u8]) -> Result<String, MalformedReply> {
    let is_plain = (1..=MAX_NAME_BYTES).contains(&name.len()) && name.iter().all(u8::is_ascii_graphic);
    let name = std::str::from_utf8(name).map_err(|_| MalformedReply)?;
    if is_plain { Ok(name.to_owned()) } else { Err(MalformedReply) }
}
