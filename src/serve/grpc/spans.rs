//! Span attributes of a call and of its decision.
//!
//! Names follow OpenTelemetry's conventions where there are any: `rpc.*` as of their release candidate. Descriptors are
//! recorded only if the operator asks for them, because keys and values may identify persons.

use super::encode::{AnswerError, ResponseWithDelay};
use crate::base::pb::RATE_LIMIT_METHOD_NAME;
use crate::base::pb::rate_limit_response::Code;
use crate::limit::request::Request;
use crate::telemetry::traces::Span;

const STATUS_CODE_ATTRIBUTE: &str = "rpc.response.status_code";

/// Maximum number of descriptors recorded of a request.
const MAX_RECORDED_DESCRIPTORS: usize = 16;

/// Records what is known at the start of a call.
pub(super) fn record_call_start(span: &mut Span) {
    span.set_attribute("rpc.system.name", "grpc");
    span.set_attribute("rpc.method", RATE_LIMIT_METHOD_NAME);
    // Replaced when the call ends; stays if the caller gives up before.
    span.set_attribute(STATUS_CODE_ATTRIBUTE, "CANCELLED");
}

/// Records the end of a call.
pub(super) fn record_call_end(mut span: Span, error: Option<&AnswerError>) {
    let code = error.map_or("OK", |error| grpc_code_name(error.grpc_code()));
    span.replace_attribute(STATUS_CODE_ATTRIBUTE, code);
    match error {
        // A fault of the caller is not a server error.
        Some(error) if error.grpc_code() != tonic::Code::InvalidArgument => span.set_error(code, error.to_string()),
        Some(_) | None => {}
    }
}

/// Name of a code that calls end with.
const fn grpc_code_name(code: tonic::Code) -> &'static str {
    match code {
        tonic::Code::Ok => "OK",
        tonic::Code::InvalidArgument => "INVALID_ARGUMENT",
        tonic::Code::Unavailable => "UNAVAILABLE",
        _ => "UNKNOWN",
    }
}

/// Records a decision.
pub(super) fn record_decision(
    mut span: Span,
    request: &Request<'_>,
    decided: &Result<ResponseWithDelay, AnswerError>,
    shows_descriptors: bool,
) {
    span.set_text_attribute("tollkeeper.domain", request.domain);
    span.set_attribute("tollkeeper.descriptors", i64::try_from(request.descriptors.len()).unwrap_or(i64::MAX));
    if shows_descriptors {
        let descriptors = request.descriptors.iter().take(MAX_RECORDED_DESCRIPTORS).map(ToString::to_string);
        span.set_text_attribute("tollkeeper.request", &descriptors.collect::<Vec<_>>().join("; "));
    }
    match decided {
        Ok(ResponseWithDelay { response, delay }) => {
            let code = match response.overall_code() {
                Code::OverLimit => "OVER_LIMIT",
                Code::Ok => "OK",
                Code::Unknown => "UNKNOWN",
            };
            span.set_attribute("tollkeeper.code", code);
            if !delay.is_zero() {
                span.set_attribute("tollkeeper.hold_ms", i64::try_from(delay.as_millis()).unwrap_or(i64::MAX));
            }
        }
        Err(error) => span.set_error(grpc_code_name(error.grpc_code()), error.to_string()),
    }
}
