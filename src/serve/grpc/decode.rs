//! Decodes a protobuf message into the pipeline's request, which borrows from it.
//!
//! A number of hits that was not sent differs from 0: a descriptor without one takes the request's, at least 1, and a
//! descriptor with 0 is a peek. Only too many descriptors are rejected here, by [`check_descriptor_count`], which the
//! service calls for all sources of requests. `decide` answers an empty domain or list, and the unit and multiplier of
//! an override stay as sent.
//!
//! [`decode_borrowed_request`] reads common messages without prost, which allocates for every list and string. It
//! returns `None` for all others, but never a result that differs from prost's.
//!
//! Decides: how many descriptors a request may have (`TOLLKEEPER_MAX_DESCRIPTORS`).
//! Decides: absent, zero or negative `hits_addend` (refund), of request or descriptor (`convert_hits`).
//! Decides: a domain that is not UTF-8.

use prost::encoding::{WireType, decode_key, decode_varint};
use smallvec::SmallVec;

use crate::base::pb::codec::MAX_MESSAGE_FIELDS;
use crate::base::pb::rate_limit_descriptor::RateLimitOverride;
use crate::base::pb::{RateLimitDescriptor, RateLimitRequest};
use crate::limit::request::{Descriptor, Entry, Hits, LimitOverride, Request};

/// A request with too many descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rate limit descriptor list has {count} entries, more than {max}")]
pub struct TooManyDescriptors {
    /// Number of descriptors in the request.
    count: usize,
    /// `TOLLKEEPER_MAX_DESCRIPTORS`.
    max: usize,
}

/// Checks the number of descriptors of a request.
///
/// # Errors
/// There are more than `max`.
pub fn check_descriptor_count(request: &Request<'_>, max: usize) -> Result<(), TooManyDescriptors> {
    let count = request.descriptors.len();
    if count <= max { Ok(()) } else { Err(TooManyDescriptors { count, max }) }
}

/// Converts a decoded message. Hits are clamped to [`crate::limit::request::MAX_HITS_OF_DESCRIPTOR`].
pub fn convert_request(message: &RateLimitRequest) -> Request<'_> {
    let hits_addend = message.hits_addend;
    Request {
        domain: &message.domain,
        descriptors: message.descriptors.iter().map(|sent| convert_descriptor(sent, hits_addend)).collect(),
        hits_addend,
    }
}

fn convert_descriptor(sent: &RateLimitDescriptor, request_hits: u32) -> Descriptor<'_> {
    Descriptor {
        entries: sent.entries.iter().map(|entry| Entry { key: &entry.key, value: &entry.value }).collect(),
        hits: convert_hits(sent.hits_addend, sent.is_negative_hits, request_hits),
        hits_addend: sent.hits_addend,
        limit_override: sent.limit.as_ref().map(convert_override),
    }
}

fn convert_hits(sent: Option<u64>, is_negative: bool, request_hits: u32) -> Hits {
    Hits::new(sent.unwrap_or(u64::from(request_hits.max(1))), is_negative)
}

fn convert_override(sent: &RateLimitOverride) -> LimitOverride {
    LimitOverride {
        requests_per_unit: sent.requests_per_unit,
        unit: sent.unit,
        unit_multiplier: sent.unit_multiplier.unwrap_or(1),
    }
}

/// Decodes a message in protobuf; `None` if it is long, has an override or unknown fields, or may be malformed.
pub fn decode_borrowed_request(message: &[u8]) -> Option<Request<'_>> {
    // A shorter message cannot have more fields than may be decoded.
    if message.len() >= MAX_MESSAGE_FIELDS {
        return None;
    }
    let mut request = Request::default();
    for_each_field(message, |number, value| {
        match (number, value) {
            (1, FieldValue::Bytes(domain)) => request.domain = std::str::from_utf8(domain).ok()?,
            (2, FieldValue::Bytes(descriptor)) => request.descriptors.push(decode_borrowed_descriptor(descriptor)?),
            (3, FieldValue::Number(hits)) => request.hits_addend = u32::try_from(hits).ok()?,
            _ => return None,
        }
        Some(())
    })?;
    // The hits of the request may come after its descriptors.
    for descriptor in &mut request.descriptors {
        descriptor.hits =
            convert_hits(descriptor.hits_addend, matches!(descriptor.hits, Hits::Refund(_)), request.hits_addend);
    }
    Some(request)
}

/// Decodes a descriptor; its hits only tell charge and refund apart, the caller sets their number.
fn decode_borrowed_descriptor(message: &[u8]) -> Option<Descriptor<'_>> {
    let (mut entries, mut hits, mut hits_addend) = (SmallVec::new(), Hits::Charge(1), None);
    for_each_field(message, |number, value| {
        match (number, value) {
            (1, FieldValue::Bytes(entry)) => entries.push(decode_borrowed_entry(entry)?),
            // Duplicate fields: defer to prost, which merges them.
            (3, FieldValue::Bytes(number)) if hits_addend.is_none() => hits_addend = Some(decode_uint64_value(number)?),
            (4, FieldValue::Number(is_negative)) => hits = Hits::new(1, is_negative != 0),
            _ => return None,
        }
        Some(())
    })?;
    Some(Descriptor { entries, hits, hits_addend, limit_override: None })
}

fn decode_borrowed_entry(message: &[u8]) -> Option<Entry<'_>> {
    let mut entry = Entry { key: &[], value: &[] };
    for_each_field(message, |number, value| {
        match (number, value) {
            (1, FieldValue::Bytes(key)) => entry.key = key,
            (2, FieldValue::Bytes(value)) => entry.value = value,
            _ => return None,
        }
        Some(())
    })?;
    Some(entry)
}

/// Decodes a `google.protobuf.UInt64Value`.
fn decode_uint64_value(message: &[u8]) -> Option<u64> {
    let mut found = 0;
    for_each_field(message, |number, value| match (number, value) {
        (1, FieldValue::Number(number)) => {
            found = number;
            Some(())
        }
        _ => None,
    })?;
    Some(found)
}

/// Value of a field; requests have no other types.
enum FieldValue<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// Calls `each` for every field of a message; `None` if `each` returns it or the bytes are malformed.
fn for_each_field<'a>(mut message: &'a [u8], mut each: impl FnMut(u32, FieldValue<'a>) -> Option<()>) -> Option<()> {
    while !message.is_empty() {
        let (number, wire_type) = decode_key(&mut message).ok()?;
        let value = match wire_type {
            WireType::Varint => FieldValue::Number(decode_varint(&mut message).ok()?),
            WireType::LengthDelimited => {
                let length = usize::try_from(decode_varint(&mut message).ok()?).ok()?;
                let (bytes, rest) = message.split_at_checked(length)?;
                message = rest;
                FieldValue::Bytes(bytes)
            }
            _ => return None,
        };
        each(number, value)?;
    }
    Some(())
}
