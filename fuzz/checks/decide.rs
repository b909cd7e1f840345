//! A message as it comes over the wire: decoded, decided, answered.
//!
//! The decoder is compared with prost's own, and with the reflection that `/json` uses, which knows the same messages
//! from their descriptors: what both accept must be the same message.

use prost::Message;
use prost::bytes::Bytes;
use prost_reflect::{DescriptorPool, DynamicMessage};
use tollkeeper::grpc::decode;
use tollkeeper::pb::codec::{self, MAX_FIELDS};
use tollkeeper::pb::{self, RateLimitRequest, RateLimitResponse};
use tollkeeper::request::{Hits, MAX_HITS};

use super::decider;

pub(crate) fn check(data: &[u8]) {
    let ours = codec::decode::<RateLimitRequest>(Bytes::copy_from_slice(data));
    let plain = RateLimitRequest::decode(data);
    match (&ours, &plain) {
        (Ok(ours), Ok(plain)) => assert_eq!(ours, plain),
        (Err(_), Err(_)) => {}
        (Err(_), Ok(_)) => assert!(data.len() >= MAX_FIELDS, "refused, and prost accepts it"),
        (Ok(_), Err(error)) => panic!("accepted, and prost says {error}"),
    }
    let Ok(request) = ours else {
        assert!(decode::decode_borrowed(data).is_none(), "it is no message");
        return;
    };
    same_by_reflection(data, &request);
    let again = RateLimitRequest::decode(&*request.encode_to_vec()).expect("it is our own");
    assert_eq!(again, request);
    same_in_the_pipeline(data, &request);
    if let Some(response) = decider::decide(&request) {
        let sent = response.encode_to_vec();
        assert_eq!(RateLimitResponse::decode(&*sent).expect("it is our own"), response);
        assert_eq!(response.statuses.len(), request.descriptors.len());
        assert!(matches!(response.overall_code, 1 | 2), "{response:?}");
        let texts = response.response_headers_to_add.iter().flat_map(|header| [&header.key, &header.value]);
        assert!(texts.into_iter().all(|text| !text.contains(char::is_control)), "{response:?}");
    }
}

/// The descriptors say `string` where ours are bytes, so what is not UTF-8 is refused there.
fn same_by_reflection(data: &[u8], request: &RateLimitRequest) {
    thread_local! {
        static POOL: DescriptorPool = DescriptorPool::decode(pb::descriptor_set()).expect("the build wrote it");
    }
    let name = "envoy.service.ratelimit.v3.RateLimitRequest";
    let message = POOL.with(|pool| pool.get_message_by_name(name)).expect("it is in the set");
    let entries = || request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
    let is_text = entries().all(|e| std::str::from_utf8(&e.key).is_ok() && std::str::from_utf8(&e.value).is_ok());
    match DynamicMessage::decode(message, data) {
        Ok(other) => assert_eq!(other.transcode_to::<RateLimitRequest>().as_ref(), Ok(request)),
        // A key that stands twice counts once, and the first may have been no text.
        Err(error) => assert!(!is_text || std::str::from_utf8(data).is_err(), "{error}: {request:?}"),
    }
}

/// The view that is decided says what the message does.
fn same_in_the_pipeline(data: &[u8], message: &RateLimitRequest) {
    let request = decode::request(message);
    if let Some(in_place) = decode::decode_borrowed(data) {
        assert_eq!(in_place, request);
    }
    assert_eq!((request.domain, request.descriptors.len()), (&*message.domain, message.descriptors.len()));
    for (seen, sent) in request.descriptors.iter().zip(&message.descriptors) {
        let entries = seen.entries.iter().map(|entry| (entry.key, entry.value));
        assert!(entries.eq(sent.entries.iter().map(|entry| (&*entry.key, &*entry.value))));
        let hits = sent.hits_addend.unwrap_or(u64::from(message.hits_addend.max(1))).min(MAX_HITS);
        let expected = match (hits, sent.is_negative_hits) {
            (0, _) => Hits::Peek,
            (_, true) => Hits::Refund(hits),
            (_, false) => Hits::Charge(hits),
        };
        assert_eq!(seen.hits, expected);
    }
}
