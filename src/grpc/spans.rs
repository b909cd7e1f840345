//! What spans tell of a call and of its decision.
//!
//! Names are those of OpenTelemetry's conventions where there are any: `rpc.*` as of their release candidate. What a
//! caller asked for is told only where that is wanted: keys and values may tell who somebody is.

use super::service::{AnswerError, DelayedResponse};
use crate::decide::explain::descriptor_text;
use crate::pb::METHOD;
use crate::pb::rate_limit_response::Code;
use crate::request::Request;
use crate::telemetry::traces::Span;

const STATUS_CODE: &str = "rpc.response.status_code";

/// The descriptors of a request that are told, at most.
const MOST_TOLD: usize = 16;

/// What is known of a call at once.
pub(super) fn begin_call(span: &mut Span) {
    span.set("rpc.system.name", "grpc");
    span.set("rpc.method", METHOD);
    // That is what becomes of it if its caller gives up: then nobody comes to say otherwise.
    span.set(STATUS_CODE, "CANCELLED");
}

/// How a call ended.
pub(super) fn end_call(mut span: Span, error: Option<&AnswerError>) {
    let code = error.map_or("OK", |error| code_name(error.code()));
    span.replace(STATUS_CODE, code);
    match error {
        // Who asks wrongly is no error of ours.
        Some(error) if error.code() != tonic::Code::InvalidArgument => span.fail(code, error.to_string()),
        Some(_) | None => {}
    }
}

/// The name of a code that calls end with.
const fn code_name(code: tonic::Code) -> &'static str {
    match code {
        tonic::Code::Ok => "OK",
        tonic::Code::InvalidArgument => "INVALID_ARGUMENT",
        tonic::Code::Unavailable => "UNAVAILABLE",
        _ => "UNKNOWN",
    }
}

/// What was decided.
pub(super) fn conclude(
    mut span: Span,
    request: &Request<'_>,
    decided: &Result<DelayedResponse, AnswerError>,
    shows_descriptors: bool,
) {
    span.set_text("tollkeeper.domain", request.domain);
    span.set("tollkeeper.descriptors", i64::try_from(request.descriptors.len()).unwrap_or(i64::MAX));
    if shows_descriptors {
        let told = request.descriptors.iter().take(MOST_TOLD).map(descriptor_text);
        span.set_text("tollkeeper.request", &told.collect::<Vec<_>>().join("; "));
    }
    match decided {
        Ok(DelayedResponse { response, delay }) => {
            let code = match response.overall_code() {
                Code::OverLimit => "OVER_LIMIT",
                Code::Ok => "OK",
                Code::Unknown => "UNKNOWN",
            };
            span.set("tollkeeper.code", code);
            if !delay.is_zero() {
                span.set("tollkeeper.hold_ms", i64::try_from(delay.as_millis()).unwrap_or(i64::MAX));
            }
        }
        Err(error) => span.fail(code_name(error.code()), error.to_string()),
    }
}
