//! Bodies of requests, and responses that several pages share.

use std::error::Error;
use std::iter::successors;

use axum::RequestExt as _;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use http_body_util::{BodyExt as _, LengthLimitError};
use serde::Serialize;

use crate::base::text::to_pretty_json;

/// Body of a request, in one buffer. axum's `Bytes` keeps each chunk apart until the last: 32 bytes for one of one byte.
pub(super) struct WholeBody(pub(super) Vec<u8>);

impl<S: Sync> FromRequest<S> for WholeBody {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let mut body = request.into_limited_body();
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| respond_bad_body(&error))?;
            if let Ok(chunk) = frame.into_data() {
                bytes.extend_from_slice(&chunk);
            }
        }
        Ok(Self(bytes))
    }
}

/// Status 413 for a body above the limit, else 400, as axum has them.
fn respond_bad_body(error: &(dyn Error + 'static)) -> Response {
    let is_too_long =
        successors(Some(error), |error| <dyn Error>::source(*error)).any(|error| error.is::<LengthLimitError>());
    let status = if is_too_long { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::BAD_REQUEST };
    respond_text(status, format!("Failed to buffer the request body: {error}"))
}

/// Plain text.
pub(super) fn respond_text(status: StatusCode, body: impl Into<Body>) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body.into()).into_response()
}

/// JSON that is encoded already.
pub(super) fn respond_json(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Indented JSON of a value, with status 200.
pub(super) fn respond_pretty_json(value: &impl Serialize) -> Response {
    to_pretty_json(value).map_or_else(|_| respond_internal_error(), |page| respond_json(StatusCode::OK, page))
}

/// An error in the form of Go's `http.Error`, as envoyproxy/ratelimit sends it.
pub(super) fn respond_error(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = respond_text(status, body);
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Status 500 without a body.
pub(super) fn respond_internal_error() -> Response {
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

/// Status 400 with the reason why the query string is invalid.
pub(super) fn respond_bad_query(rejection: &QueryRejection) -> Response {
    respond_text(StatusCode::BAD_REQUEST, format!("{}\n", rejection.body_text()))
}

/// Why a page about the rules has status 503.
pub(super) const NO_RULES_TEXT: &str = "no rate limit configuration loaded\n";

/// Why a page has status 503 instead of a report of zeros, which would show every rule as unused.
pub(super) const METRICS_OFF: &str = "DISABLE_STATS=true: keys and rules are not counted (unset it and restart)\n";

/// Status 503: no rules are loaded.
pub(super) fn respond_no_rules() -> Response {
    respond_text(StatusCode::SERVICE_UNAVAILABLE, NO_RULES_TEXT)
}
