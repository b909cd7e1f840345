//! Encodes a decision into an answer: a protobuf response with its delay, or an error with its gRPC code.
//!
//! The numbers of a decision are copied as they are.
//! Fields that envoyproxy/ratelimit leaves unset stay unset: a multiplier of 1, the quotas.
//! Envoy reads only `HeaderValue.value` and whole seconds. Control characters are removed from text that Envoy writes
//! into headers. Metadata is cut where it nests too deep: protobuf parsers stop at 100 levels, and Envoy would treat
//! the whole response as an error.
//!
//! Decides: gRPC code of a failed decision, also while no rules are loaded.
//! Decides: how a limit is written in a status (unit, multiplier); which characters of a name or header reach Envoy.
//! Decides: how deep metadata may nest.

use std::time::Duration;

use prost_types::value::Kind;
use prost_types::{ListValue, NullValue, Struct, Value};
use tonic::Code as GrpcCode;

use super::decode::TooManyDescriptors;
use crate::base::pb::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit};
use crate::base::pb::{HeaderValue, RateLimitResponse};
use crate::base::text::remove_unprintable;
use crate::decide::decision::{CurrentLimit, DecideError, Decision, Header, ReportedStatus};
use crate::limit::charge::clamp_to_u32;

/// Maximum nesting of maps and lists in dynamic metadata; deeper ones are sent as null.
///
/// A map takes three levels of protobuf (struct, entry, value), and 3 x 32 is within a parser's 100.
pub const MAX_METADATA_DEPTH: u32 = 32;

/// Response to a request, and its delay.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponseWithDelay {
    /// The response.
    pub response: RateLimitResponse,
    /// Time from the decision until the response is due; zero unless a limit delays it.
    pub delay: Duration,
}

impl ResponseWithDelay {
    /// The response that encodes a decision.
    pub fn from_decision(decision: &Decision<'_>) -> Self {
        Self { response: encode_response(decision), delay: Duration::from_micros(decision.delay_us) }
    }
}

/// Reason why a request got no response. [`AnswerError::grpc_code`] tells whose fault it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The request is too large: the caller's fault.
    #[error(transparent)]
    TooManyDescriptors(#[from] TooManyDescriptors),
    /// There is no decision.
    #[error(transparent)]
    Undecided(#[from] DecideError),
}

impl AnswerError {
    /// The gRPC code of this error. Envoy treats all but OK alike: its `failure_mode_deny` decides.
    pub const fn grpc_code(&self) -> GrpcCode {
        match self {
            Self::TooManyDescriptors(_)
            | Self::Undecided(
                DecideError::EmptyDomain
                | DecideError::NoDescriptors
                | DecideError::LiteralFormatter
                | DecideError::TooMuchBacktracking { .. },
            ) => GrpcCode::InvalidArgument,
            Self::Undecided(DecideError::NoRules | DecideError::Store) => GrpcCode::Unavailable,
        }
    }
}

/// Encodes a decision.
pub fn encode_response(decision: &Decision<'_>) -> RateLimitResponse {
    let body = decision.body.as_ref().filter(|_| decision.over_limit);
    RateLimitResponse {
        overall_code: encode_code(decision.over_limit).into(),
        statuses: decision.statuses.iter().map(encode_status).collect(),
        response_headers_to_add: decision.headers.iter().map(encode_header).collect(),
        raw_body: body.map(|text| text.as_bytes().to_vec()).unwrap_or_default(),
        dynamic_metadata: decision.metadata.as_ref().map(|fields| encode_struct(fields, MAX_METADATA_DEPTH - 1)),
        request_headers_to_add: decision.request_headers.iter().map(encode_header).collect(),
        quota: None,
    }
}

fn encode_code(over_limit: bool) -> Code {
    if over_limit { Code::OverLimit } else { Code::Ok }
}

fn encode_status(status: &ReportedStatus<'_>) -> DescriptorStatus {
    DescriptorStatus {
        code: encode_code(status.over_limit).into(),
        current_limit: status.current_limit.as_ref().map(encode_current_limit),
        // The protocol has 32 bits; headers and pages have all.
        limit_remaining: clamp_to_u32(status.remaining),
        duration_until_reset: status.until_reset_s.map(encode_duration),
        quota: None,
    }
}

fn encode_current_limit(limit: &CurrentLimit<'_>) -> RateLimit {
    let multiplier = limit.period.multiplier();
    RateLimit {
        name: remove_unprintable(limit.name).into_owned(),
        requests_per_unit: clamp_to_u32(limit.requests_per_unit),
        unit: limit.period.unit().protobuf_number().unwrap_or(rate_limit::Unit::Unknown as i32),
        unit_multiplier: (multiplier != 1).then_some(multiplier),
    }
}

/// Encodes whole seconds, at most the 10 000 years of a protobuf duration.
fn encode_duration(seconds: u64) -> prost_types::Duration {
    const MAX_SECONDS: i64 = 315_576_000_000;
    prost_types::Duration {
        seconds: i64::try_from(seconds).map_or(MAX_SECONDS, |seconds| seconds.min(MAX_SECONDS)),
        nanos: 0,
    }
}

/// Encodes a header. Envoy writes names and values into headers unchanged, and a line end would start another header.
fn encode_header(header: &Header<'_>) -> HeaderValue {
    let key = remove_unprintable(header.name).into_owned();
    let value = remove_unprintable(&header.value).into_owned();
    HeaderValue { key, value, raw_value: Vec::new() }
}

/// Encodes a map with at most `deeper` more levels of maps and lists.
fn encode_struct(fields: &serde_json::Map<String, serde_json::Value>, deeper: u32) -> Struct {
    Struct { fields: fields.iter().map(|(name, field)| (name.clone(), encode_value(field, deeper))).collect() }
}

fn encode_value(json: &serde_json::Value, deeper: u32) -> Value {
    use serde_json::Value as Json;
    let null = Kind::NullValue(NullValue::NullValue.into());
    let kind = match json {
        Json::Null => null,
        Json::Bool(truth) => Kind::BoolValue(*truth),
        // Protobuf numbers are doubles, which are inexact above 2^53.
        Json::Number(number) => number.as_f64().map_or(null, Kind::NumberValue),
        Json::String(text) => Kind::StringValue(text.clone()),
        Json::Array(_) | Json::Object(_) if deeper == 0 => null,
        Json::Array(items) => {
            Kind::ListValue(ListValue { values: items.iter().map(|item| encode_value(item, deeper - 1)).collect() })
        }
        Json::Object(fields) => Kind::StructValue(encode_struct(fields, deeper - 1)),
    };
    Value { kind: Some(kind) }
}
