//! Messages as received over gRPC: decoded, decided and encoded.
//!
//! The decoder is compared with prost's, and with the reflection that `/json` uses, which decodes by descriptors. A
//! message that both accept must be the same.

use prost::Message;
use prost::bytes::Bytes;
use prost_reflect::{DescriptorPool, DynamicMessage};
use tollkeeper::base::pb::codec::{self, MAX_MESSAGE_FIELDS};
use tollkeeper::base::pb::{self, RateLimitRequest, RateLimitResponse};
use tollkeeper::limit::request::{Hits, MAX_HITS_OF_DESCRIPTOR};
use tollkeeper::serve::grpc::decode;

use super::decider;

pub(crate) fn check(data: &[u8]) {
    let ours = codec::decode_with_field_bound::<RateLimitRequest>(Bytes::copy_from_slice(data));
    let plain = RateLimitRequest::decode(data);
    match (&ours, &plain) {
        (Ok(ours), Ok(plain)) => assert_eq!(ours, plain),
        (Err(_), Err(_)) => {}
        (Err(_), Ok(_)) => assert!(data.len() >= MAX_MESSAGE_FIELDS, "rejected, but prost accepts it"),
        (Ok(_), Err(error)) => panic!("accepted, but prost fails: {error}"),
    }
    let Ok(request) = ours else {
        assert!(decode::decode_borrowed_request(data).is_none(), "a malformed message is rejected");
        return;
    };
    same_by_reflection(data, &request);
    let again = RateLimitRequest::decode(&*request.encode_to_vec()).expect("it is our own");
    assert_eq!(again, request);
    same_in_the_pipeline(data, &request);
    for response in decider::decide(&request) {
        let sent = response.encode_to_vec();
        assert_eq!(RateLimitResponse::decode(&*sent).expect("it is our own"), response);
        assert_eq!(response.statuses.len(), request.descriptors.len());
        assert!(matches!(response.overall_code, 1 | 2), "{response:?}");
        let texts = response.response_headers_to_add.iter().flat_map(|header| [&header.key, &header.value]);
        assert!(texts.into_iter().all(|text| !text.contains(char::is_control)), "{response:?}");
    }
}

/// Compares with reflection, which rejects invalid UTF-8 because the descriptors have `string` for our bytes.
fn same_by_reflection(data: &[u8], request: &RateLimitRequest) {
    thread_local! {
        static POOL: DescriptorPool = DescriptorPool::decode(pb::file_descriptor_set()).expect("the build wrote it");
    }
    let name = "envoy.service.ratelimit.v3.RateLimitRequest";
    let message = POOL.with(|pool| pool.get_message_by_name(name)).expect("it is in the set");
    let entries = || request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
    let is_text = entries().all(|e| std::str::from_utf8(&e.key).is_ok() && std::str::from_utf8(&e.value).is_ok());
    match DynamicMessage::decode(message, data) {
        Ok(other) => assert_eq!(other.transcode_to::<RateLimitRequest>().as_ref(), Ok(request)),
        // Only the last duplicate of a field counts; an earlier one may be invalid UTF-8.
        Err(error) => assert!(!is_text || std::str::from_utf8(data).is_err(), "{error}: {request:?}"),
    }
}

/// Compares the borrowed request with the message.
fn same_in_the_pipeline(data: &[u8], message: &RateLimitRequest) {
    let request = decode::convert_request(message);
    if let Some(in_place) = decode::decode_borrowed_request(data) {
        assert_eq!(in_place, request);
    }
    assert_eq!((request.domain, request.descriptors.len()), (&*message.domain, message.descriptors.len()));
    for (seen, sent) in request.descriptors.iter().zip(&message.descriptors) {
        let entries = seen.entries.iter().map(|entry| (entry.key, entry.value));
        assert!(entries.eq(sent.entries.iter().map(|entry| (&*entry.key, &*entry.value))));
        let hits = sent.hits_addend.unwrap_or(u64::from(message.hits_addend.max(1))).min(MAX_HITS_OF_DESCRIPTOR);
        let expected = match (hits, sent.is_negative_hits) {
            (0, _) => Hits::Peek,
            (_, true) => Hits::Refund(hits),
            (_, false) => Hits::Charge(hits),
        };
        assert_eq!(seen.hits, expected);
    }
}
