//! From the message to the pipeline's request: a view of it, no bytes copied.
//!
//! This is where "not sent" and 0 part ways: a descriptor without a number of hits takes the request's, at least 1,
//! and one with a 0 is a look. Nothing is refused here; an empty domain or list is for `decide` to answer, and
//! an override's unit and multiplier stay as sent.

use crate::pb::rate_limit_descriptor::RateLimitOverride;
use crate::pb::{RateLimitDescriptor, RateLimitRequest};
use crate::request::{Descriptor, Entry, Hits, LimitOverride, Request};

/// The request that `message` carries, borrowed from it. Hits are clamped to [`crate::request::MOST_HITS`].
pub fn request(message: &RateLimitRequest) -> Request<'_> {
    let hits_addend = message.hits_addend;
    Request {
        domain: &message.domain,
        descriptors: message.descriptors.iter().map(|sent| descriptor(sent, hits_addend)).collect(),
        hits_addend,
    }
}

fn descriptor(sent: &RateLimitDescriptor, request_hits: u32) -> Descriptor<'_> {
    let hits = sent.hits_addend.unwrap_or(u64::from(request_hits.max(1)));
    Descriptor {
        entries: sent.entries.iter().map(|entry| Entry { key: &entry.key, value: &entry.value }).collect(),
        hits: Hits::new(hits, sent.is_negative_hits),
        hits_addend: sent.hits_addend,
        limit_override: sent.limit.as_ref().map(limit_override),
    }
}

fn limit_override(sent: &RateLimitOverride) -> LimitOverride {
    LimitOverride {
        requests_per_unit: sent.requests_per_unit,
        unit: sent.unit,
        unit_multiplier: sent.unit_multiplier.unwrap_or(1),
    }
}
