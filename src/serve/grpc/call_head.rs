//! Head of a gRPC call, checked before its message is read.
//!
//! The statuses are those of grpc-go. The HTTP status keeps clients of other protocols from taking a gRPC error, whose
//! usual status is 200, for success. A refused call charges nothing.

use std::net::IpAddr;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header, request};
use tonic::Status;

use crate::limit::slot::CallingEnvoy;

/// Head of a gRPC call.
#[derive(Clone, Copy, Debug)]
pub struct CallHead<'a> {
    /// All headers of the call.
    pub headers: &'a HeaderMap,
    /// Time that the caller waits for the response; `None` for a call without `grpc-timeout`.
    pub timeout: Option<Duration>,
    /// Address of the caller; `None` for a Unix socket.
    pub peer: Option<IpAddr>,
}

/// Reason why a request is no valid gRPC call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCallHead {
    /// The method is not POST.
    #[error("the method of a gRPC call must be POST")]
    Method,
    /// The content type is missing, or not one of gRPC.
    #[error("the content-type of a gRPC call must be application/grpc")]
    ContentType,
    /// The `grpc-timeout` header is not one to eight digits and a unit.
    #[error("malformed grpc-timeout: it must be one to eight digits and one of H, M, S, m, u, n")]
    Timeout,
}

/// Metadata that names the Envoy, in calls and in health checks.
pub const SLOT_HOLDER_HEADER: HeaderName = HeaderName::from_static("x-tollkeeper-holder");

static GRPC_TIMEOUT_HEADER: HeaderName = HeaderName::from_static("grpc-timeout");

impl<'a> CallHead<'a> {
    /// Head of a request.
    ///
    /// # Errors
    /// The request is no valid gRPC call.
    pub fn parse(head: &'a request::Parts) -> Result<Self, InvalidCallHead> {
        if head.method != Method::POST {
            return Err(InvalidCallHead::Method);
        }
        let content_type = head.headers.get(header::CONTENT_TYPE);
        if !content_type.is_some_and(|value| is_grpc_content_type(value.as_bytes())) {
            return Err(InvalidCallHead::ContentType);
        }
        Self::from_headers(&head.headers)
    }

    /// Head of a gRPC call with these headers.
    ///
    /// # Errors
    /// The timeout is malformed.
    pub fn from_headers(headers: &'a HeaderMap) -> Result<Self, InvalidCallHead> {
        let timeout = headers.get(&GRPC_TIMEOUT_HEADER).map(parse_grpc_timeout);
        match timeout {
            Some(None) => Err(InvalidCallHead::Timeout),
            timeout => Ok(Self { headers, timeout: timeout.flatten(), peer: None }),
        }
    }

    /// Envoy that makes the call.
    pub fn slot_holder(&self) -> CallingEnvoy<'a> {
        let named = self.headers.get(SLOT_HOLDER_HEADER).filter(|name| !name.is_empty());
        let by_address = || self.peer.map_or(CallingEnvoy::Unknown, CallingEnvoy::Address);
        named.map_or_else(by_address, |name| CallingEnvoy::Named(name.as_bytes()))
    }
}

impl InvalidCallHead {
    /// Response to the request.
    pub fn into_response(self) -> Response<Body> {
        let (http_status, status) = match self {
            Self::Method => (StatusCode::METHOD_NOT_ALLOWED, Status::internal(self.to_string())),
            Self::ContentType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, Status::invalid_argument(self.to_string())),
            Self::Timeout => (StatusCode::BAD_REQUEST, Status::internal(self.to_string())),
        };
        let mut response = status.into_http();
        *response.status_mut() = http_status;
        if self == Self::Method {
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
        }
        response
    }
}

/// True for `application/grpc`, alone or followed by `+` and a format or by `;` and parameters.
fn is_grpc_content_type(content_type: &[u8]) -> bool {
    const GRPC_CONTENT_TYPE: &[u8] = b"application/grpc";
    content_type.split_at_checked(GRPC_CONTENT_TYPE.len()).is_some_and(|(essence, rest)| {
        essence.eq_ignore_ascii_case(GRPC_CONTENT_TYPE) && matches!(rest.first(), None | Some(b'+' | b';'))
    })
}

/// Duration of one to eight digits and a unit; `None` if it is malformed.
fn parse_grpc_timeout(value: &HeaderValue) -> Option<Duration> {
    let (unit, digits) = value.as_bytes().split_last()?;
    if !(1..=8).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = digits.iter().fold(0, |count, digit| count * 10 + u64::from(digit - b'0'));
    match unit {
        b'H' => Some(Duration::from_secs(count * 3600)),
        b'M' => Some(Duration::from_secs(count * 60)),
        b'S' => Some(Duration::from_secs(count)),
        b'm' => Some(Duration::from_millis(count)),
        b'u' => Some(Duration::from_micros(count)),
        b'n' => Some(Duration::from_nanos(count)),
        _ => None,
    }
}
