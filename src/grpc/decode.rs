//! From the message to the pipeline's request: a view of it, no bytes copied.
//!
//! This is where "not sent" and 0 part ways: a descriptor without a number of hits takes the request's, at least 1,
//! and one with a 0 is a look. Nothing is refused here; an empty domain or list is for `decide` to answer, and
//! an override's unit and multiplier stay as sent.
//!
//! What Envoy sends nearly always is read where it lies, without the message in between, which costs an allocation for
//! every list and text. All else is left to prost: [`in_place`] may say nothing, but never something else than prost.

use prost::encoding::{WireType, decode_key, decode_varint};
use smallvec::SmallVec;

use crate::pb::codec::MAX_FIELDS;
use crate::pb::rate_limit_descriptor::RateLimitOverride;
use crate::pb::{RateLimitDescriptor, RateLimitRequest};
use crate::request::{Descriptor, Entry, Hits, LimitOverride, Request};

/// The request that `message` carries, borrowed from it. Hits are clamped to [`crate::request::MAX_HITS`].
pub fn request(message: &RateLimitRequest) -> Request<'_> {
    let hits_addend = message.hits_addend;
    Request {
        domain: &message.domain,
        descriptors: message.descriptors.iter().map(|sent| descriptor(sent, hits_addend)).collect(),
        hits_addend,
    }
}

fn descriptor(sent: &RateLimitDescriptor, request_hits: u32) -> Descriptor<'_> {
    Descriptor {
        entries: sent.entries.iter().map(|entry| Entry { key: &entry.key, value: &entry.value }).collect(),
        hits: hits(sent.hits_addend, sent.is_negative_hits, request_hits),
        hits_addend: sent.hits_addend,
        limit_override: sent.limit.as_ref().map(limit_override),
    }
}

fn hits(sent: Option<u64>, is_negative: bool, request_hits: u32) -> Hits {
    Hits::new(sent.unwrap_or(u64::from(request_hits.max(1))), is_negative)
}

fn limit_override(sent: &RateLimitOverride) -> LimitOverride {
    LimitOverride {
        requests_per_unit: sent.requests_per_unit,
        unit: sent.unit,
        unit_multiplier: sent.unit_multiplier.unwrap_or(1),
    }
}

/// The same of a message in protobuf; `None` if it is long, carries a limit or unknown fields, or may be none.
pub fn decode_borrowed(message: &[u8]) -> Option<Request<'_>> {
    // Shorter than this it can not unfold to more than may be decoded.
    if message.len() >= MAX_FIELDS {
        return None;
    }
    let mut request = Request::default();
    for_each_field(message, |number, value| {
        match (number, value) {
            (1, FieldValue::Bytes(domain)) => request.domain = std::str::from_utf8(domain).ok()?,
            (2, FieldValue::Bytes(descriptor)) => request.descriptors.push(descriptor_borrowed(descriptor)?),
            (3, FieldValue::Number(hits)) => request.hits_addend = u32::try_from(hits).ok()?,
            _ => return None,
        }
        Some(())
    })?;
    // The number of the request may come after its descriptors.
    for descriptor in &mut request.descriptors {
        descriptor.hits = hits(descriptor.hits_addend, matches!(descriptor.hits, Hits::Refund(_)), request.hits_addend);
    }
    Some(request)
}

/// With any hits to take, or to give back: how many is not known yet.
fn descriptor_borrowed(message: &[u8]) -> Option<Descriptor<'_>> {
    let (mut entries, mut hits, mut hits_addend) = (SmallVec::new(), Hits::Charge(1), None);
    for_each_field(message, |number, value| {
        match (number, value) {
            (1, FieldValue::Bytes(entry)) => entries.push(entry_borrowed(entry)?),
            // Of two numbers prost makes one, in a way of its own.
            (3, FieldValue::Bytes(number)) if hits_addend.is_none() => hits_addend = Some(number_borrowed(number)?),
            (4, FieldValue::Number(is_negative)) => hits = Hits::new(1, is_negative != 0),
            _ => return None,
        }
        Some(())
    })?;
    Some(Descriptor { entries, hits, hits_addend, limit_override: None })
}

fn entry_borrowed(message: &[u8]) -> Option<Entry<'_>> {
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

/// A `google.protobuf.UInt64Value`.
fn number_borrowed(message: &[u8]) -> Option<u64> {
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

/// What a field holds: there are no others in a request.
enum FieldValue<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// Goes through the fields of a message; stops where `each` says `None`, or the bytes are no such fields.
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
