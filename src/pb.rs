//! The protobuf messages and the service that Envoy speaks, generated from `proto/`, under one flat path each.
//!
//! `Entry.key` and `Entry.value` are `Bytes`: a slice of what arrived, UTF-8 or not. The well-known wrappers are
//! `Option`s, so that a number that was not sent differs from a 0. Nothing here interprets a message; `grpc` does.

pub mod codec;

#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, reason = "generated")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/pb.rs"));
}

// The generated modules follow the packages, five levels deep; the names are distinct without them.
pub use generated::envoy::config::core::v3::HeaderValue;
pub use generated::envoy::extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor};
pub use generated::envoy::service::ratelimit::v3::{
    RateLimitRequest, RateLimitResponse, rate_limit_response, rate_limit_service_client, rate_limit_service_server,
};
pub use generated::envoy::r#type::v3::RateLimitUnit;

/// The path of the service's only method, as HTTP/2 has it.
pub const METHOD_PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// The name of that method, as traces have it.
pub const METHOD: &str = METHOD_PATH.split_at(1).1;

/// The messages and the service as a serialized `google.protobuf.FileDescriptorSet`, imports included.
///
/// `Entry.key` and `Entry.value` are `string` in it, as in Envoy's own files.
pub const fn descriptor_set() -> &'static [u8] {
    include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"))
}
