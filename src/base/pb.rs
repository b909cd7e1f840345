//! Protobuf messages and services of Envoy's rate limit and discovery APIs, each under one path, generated
//! from `proto/` by `.ci/generate`.
//!
//! `Entry.key` and `Entry.value` are `Bytes`: slices of the received message, UTF-8 or not. Well-known wrappers are
//! `Option`s, so that a number that was not sent differs from 0. Nothing here interprets a message; `serve::grpc` and
//! `rules::xds` do.

pub mod codec;
pub mod proto_json;

#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::too_many_lines,
    reason = "generated"
)]
mod generated {
    include!("../../proto/generated/pb.rs");
}

// The generated modules follow the packages, up to five levels deep; the names are distinct without them.
pub use generated::envoy::config::core::v3::HeaderValue;
pub use generated::envoy::extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor};
pub use generated::envoy::service::ratelimit::v3::{
    RateLimitRequest, RateLimitResponse, rate_limit_response, rate_limit_service_client, rate_limit_service_server,
};
pub use generated::envoy::r#type::v3::RateLimitUnit;

/// Messages and service of rate limit quotas.
pub mod rlqs {
    pub use super::generated::envoy::service::rate_limit_quota::v3::{
        BucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports, bucket_id, rate_limit_quota_response,
        rate_limit_quota_service_client, rate_limit_quota_usage_reports,
    };
    pub use super::generated::envoy::r#type::v3::{RateLimitStrategy, TokenBucket, rate_limit_strategy};
}

/// Messages and service of a control plane that sends rules.
pub mod xds {
    pub use super::generated::envoy::config::core::v3::Node;
    pub use super::generated::envoy::service::discovery::v3::{
        DiscoveryRequest, DiscoveryResponse, aggregated_discovery_service_client, aggregated_discovery_service_server,
    };
    pub use super::generated::google::rpc::Status;
    pub use super::generated::ratelimit::config::ratelimit::v3::{
        RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitReplace, RateLimitUnit,
    };
}

/// Path of the only method of the rate limit service in HTTP/2 requests.
pub const RATE_LIMIT_METHOD_PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Name of that method in traces.
pub const RATE_LIMIT_METHOD_NAME: &str = RATE_LIMIT_METHOD_PATH.split_at(1).1;

/// Path of the only method of the quota service in HTTP/2 requests.
pub const QUOTA_METHOD_PATH: &str = "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas";

/// Messages and service as a serialized `google.protobuf.FileDescriptorSet`, imports included.
///
/// There `Entry.key` and `Entry.value` are `string`, as in Envoy's own files.
pub const fn file_descriptor_set() -> &'static [u8] {
    include_bytes!("../../proto/descriptors.bin")
}
