//! Span attributes of a call and of its decision.
//!
//! Names follow OpenTelemetry's conventions where there are any: `rpc.*` as of their release candidate. Descriptors are
//! recorded only if the operator asks for them, because keys and values may identify persons.

use super::encode::{AnswerError, DelayedResponse};
use crate::base::pb::METHOD_NAME;
use crate::base::pb::rate_limit_response::Code;
use crate::limit::request::Request;
use crate::telemetry::traces::Span;

const STATUS_CODE: &str = "rpc.response.status_code";

/// Maximum number of descriptors recorded of a request.
const MAX_RECORDED_DESCRIPTORS: usize = 16;

/// Records what is known at the start of a call.
pub(super) fn begin_call(span: &mut Span) {
    span.set("rpc.system.name", "grpc");
    span.set("rpc.method", METHOD_NAME);
    // Replaced when the call ends; stays if the caller gives up before.
    span.set(STATUS_CODE, "CANCELLED");
}

/// Records the end of a call.
pub(super) fn end_call(mut span: Span, error: Option<&AnswerError>) {
    let code = error.map_or("OK", |error| code_name(error.code()));
    span.replace(STATUS_CODE, code);
    match error {
        // A fault of the caller is not a server error.
        Some(error) if error.code() != tonic::Code::InvalidArgument => span.fail(code, error.to_string()),
        Some(_) | None => {}
    }
}

/// Name of a code that calls end with.
const fn code_name(code: tonic::Code) -> &'static str {
    match code {
        tonic::Code::Ok => "OK",
        tonic::Code::InvalidArgument => "INVALID_ARGUMENT",
        tonic::Code::Unavailable => "UNAVAILABLE",
        _ => "UNKNOWN",
    }
}

/// Records a decision.
pub(super) fn end_decision(
    mut span: Span,
    request: &Request<'_>,
    decided: &Result<DelayedResponse, AnswerError>,
    shows_descriptors: bool,
) {
    span.set_text("tollkeeper.domain", request.domain);
    span.set("tollkeeper.descriptors", i64::try_from(request.descriptors.len()).unwrap_or(i64::MAX));
    if shows_descriptors {
        let descriptors = request.descriptors.iter().take(MAX_RECORDED_DESCRIPTORS).map(ToString::to_string);
        span.set_text("tollkeeper.request", &descriptors.collect::<Vec<_>>().join("; "));
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
