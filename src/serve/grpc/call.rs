//! A gRPC call as a client sends it: its head, and the only message of a unary call.
//!
//! The head is checked before the message is read, and what is needed of the headers is copied: a call that waits for its
//! message or its decision keeps no header. A message is refused as early as its bytes allow: at the frame head
//! if it is too large, at the first byte after its end. A refused call charges nothing.
//!
//! Statuses are those of the gRPC protocol over HTTP/2 and of grpc-go. The HTTP status of a refused head keeps clients
//! of other protocols from taking a gRPC error, whose usual status is 200, for success.
//!
//! Decides: which calls are refused before a decision: method, content type, `grpc-timeout`, `grpc-encoding`
//! (`InvalidCallHead`).
//! Decides: messages too long, compressed, cut short or missing (`MessageReader`).
//! Decides: which Envoy a call comes from (`slot_holder`).

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header, request};
use axum::{BoxError, body};
use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Body;
use tonic::Status;
use tonic::codec::{CompressionEncoding, DecodeBuf, Decoder, Streaming};

use crate::base::pb::codec::GRPC_FRAME_HEAD_BYTES;
use crate::base::threads;
use crate::limit::slot::CallingEnvoy;
use crate::telemetry::traces::{SampledTrace, Tracer};

/// Head of a gRPC call.
#[derive(Clone, Debug, Default)]
pub struct CallHead {
    /// Time that the caller waits for the response; `None` for a call without `grpc-timeout`.
    pub timeout: Option<Duration>,
    /// Address of the caller; `None` for a Unix socket.
    pub peer: Option<IpAddr>,
    /// Name of the Envoy that makes the call, at most [`MAX_SLOT_HOLDER_BYTES`]; `None` if it sends none.
    holder: Option<Box<[u8]>>,
    /// Trace of the call; `None` if it is not sampled.
    trace: Option<SampledTrace>,
    /// Compression of messages whose frame has the compressed flag.
    compression: Option<CompressionEncoding>,
}

/// Address of a caller, an extension of a request that the router answers.
#[derive(Clone, Copy, Debug)]
pub struct CallPeer(pub SocketAddr);

/// Reason why a request is no valid gRPC call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
    /// The `grpc-encoding` header, of which this is the start, is not `identity` or `gzip`.
    #[error("grpc-encoding `{0}` is not supported")]
    Encoding(String),
}

/// Metadata that names the Envoy, in calls and in health checks.
pub const SLOT_HOLDER_HEADER: HeaderName = HeaderName::from_static("x-tollkeeper-holder");
/// Maximum length of its value in bytes; a call with a longer one comes from an Envoy without a name.
const MAX_SLOT_HOLDER_BYTES: usize = 1024;

static GRPC_TIMEOUT_HEADER: HeaderName = HeaderName::from_static("grpc-timeout");
static GRPC_ENCODING_HEADER: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_ACCEPT_ENCODING_HEADER: HeaderName = HeaderName::from_static("grpc-accept-encoding");

impl CallHead {
    /// Head of a request. `tracer` decides whether it is sampled.
    ///
    /// # Errors
    /// The request is no valid gRPC call.
    pub fn parse(head: &request::Parts, tracer: Option<&Tracer>) -> Result<Self, InvalidCallHead> {
        if head.method != Method::POST {
            return Err(InvalidCallHead::Method);
        }
        let content_type = head.headers.get(header::CONTENT_TYPE);
        if !content_type.is_some_and(|value| is_grpc_content_type(value.as_bytes())) {
            return Err(InvalidCallHead::ContentType);
        }
        Self::from_headers(&head.headers, tracer)
    }

    /// Head of a gRPC call with these headers. `tracer` decides whether it is sampled.
    ///
    /// # Errors
    /// The timeout is malformed, or the compression is not supported.
    pub fn from_headers(headers: &HeaderMap, tracer: Option<&Tracer>) -> Result<Self, InvalidCallHead> {
        let timeout = headers.get(&GRPC_TIMEOUT_HEADER);
        let timeout = timeout.map(|value| parse_grpc_timeout(value).ok_or(InvalidCallHead::Timeout)).transpose()?;
        let compression = match headers.get(&GRPC_ENCODING_HEADER).map(HeaderValue::as_bytes) {
            None | Some(b"identity") => None,
            Some(b"gzip") => Some(CompressionEncoding::Gzip),
            Some(other) => return Err(InvalidCallHead::Encoding(escape_start(other))),
        };
        let name = headers.get(SLOT_HOLDER_HEADER).map(HeaderValue::as_bytes);
        let holder = name.filter(|name| (1..=MAX_SLOT_HOLDER_BYTES).contains(&name.len())).map(Box::from);
        let trace = tracer.and_then(|tracer| tracer.sample_trace(|name| Some(headers.get(name)?.as_bytes())));
        Ok(Self { timeout, peer: None, holder, trace, compression })
    }

    /// Envoy that makes the call.
    pub fn slot_holder(&self) -> CallingEnvoy<'_> {
        let by_address = || self.peer.map_or(CallingEnvoy::Unknown, CallingEnvoy::Address);
        self.holder.as_deref().map_or_else(by_address, CallingEnvoy::Named)
    }

    /// Trace of the call; `None` if it is not sampled.
    pub(super) const fn trace(&self) -> Option<&SampledTrace> {
        self.trace.as_ref()
    }
}

impl InvalidCallHead {
    /// Response to the request.
    pub fn into_response(self) -> Response<body::Body> {
        let (http_status, status) = match &self {
            Self::Method => (StatusCode::METHOD_NOT_ALLOWED, Status::internal(self.to_string())),
            Self::ContentType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, Status::invalid_argument(self.to_string())),
            Self::Timeout => (StatusCode::BAD_REQUEST, Status::internal(self.to_string())),
            Self::Encoding(_) => (StatusCode::OK, Status::unimplemented(self.to_string())),
        };
        let mut response = status.into_http();
        *response.status_mut() = http_status;
        let header = match self {
            Self::Method => Some((header::ALLOW, HeaderValue::from_static("POST"))),
            Self::Encoding(_) => Some((GRPC_ACCEPT_ENCODING_HEADER, HeaderValue::from_static("identity,gzip"))),
            Self::ContentType | Self::Timeout => None,
        };
        response.headers_mut().extend(header);
        response
    }
}

/// Start of a value, escaped.
fn escape_start(value: &[u8]) -> String {
    const MAX_SHOWN_BYTES: usize = 32;
    value[..value.len().min(MAX_SHOWN_BYTES)].escape_ascii().to_string()
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

/// Reads messages of calls with one compression.
#[derive(Clone, Copy, Debug)]
pub(super) struct MessageReader {
    /// Compression of messages whose frame has the compressed flag.
    compression: Option<CompressionEncoding>,
    /// Maximum size of a message, compressed and decompressed.
    max_bytes: usize,
}

/// Maximum size of a decompressed message: gzip can make it a thousand times larger than the bytes received.
const MAX_DECOMPRESSED_BYTES: usize = 256 * 1024;

impl MessageReader {
    /// Reader for a call with this head.
    pub(super) const fn new(call: &CallHead, max_bytes: usize) -> Self {
        Self { compression: call.compression, max_bytes }
    }

    /// Reads the message; a body in one piece, the common case, is not copied.
    pub(super) async fn read_message<B>(self, mut body: B) -> Result<Bytes, Status>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        let mut joined = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Status::from_error(error.into()))?;
            let Ok(piece) = frame.into_data() else { break };
            let is_end = body.is_end_stream();
            if is_end && joined.is_empty() {
                self.check_received_bytes(&piece)?;
                return self.decode_frame(piece).await;
            }
            // Copied, because the piece keeps the whole buffer that it was received in.
            joined.extend_from_slice(&piece);
            self.check_received_bytes(&joined)?;
            if is_end {
                break;
            }
        }
        self.decode_frame(joined.freeze()).await
    }

    /// Checks the length that the received bytes announce, and that no byte follows the message.
    fn check_received_bytes(self, bytes: &[u8]) -> Result<(), Status> {
        let Some(head) = MessageFrameHead::parse(bytes) else { return Ok(()) };
        if head.length > self.max_bytes {
            let (length, max_bytes) = (head.length, self.max_bytes);
            let message = format!("received message larger than max ({length} vs. {max_bytes})");
            return Err(Status::resource_exhausted(message));
        }
        match bytes.len() > GRPC_FRAME_HEAD_BYTES + head.length {
            true => Err(Status::internal("received bytes after the request message")),
            false => Ok(()),
        }
    }

    /// The message of a whole frame.
    async fn decode_frame(self, mut bytes: Bytes) -> Result<Bytes, Status> {
        let Some(head) =
            MessageFrameHead::parse(&bytes).filter(|head| bytes.len() == GRPC_FRAME_HEAD_BYTES + head.length)
        else {
            let is_missing = bytes.is_empty();
            return Err(Status::internal(if is_missing {
                "missing request message"
            } else {
                "incomplete request message"
            }));
        };
        match (head.flag, self.compression) {
            (0, _) => {
                bytes.advance(GRPC_FRAME_HEAD_BYTES);
                Ok(bytes)
            }
            (1, Some(compression)) => self.decompress_message(bytes, compression).await,
            (1, None) => Err(Status::internal("the message is compressed, but the call has no grpc-encoding")),
            (flag, _) => Err(Status::internal(format!("invalid compressed flag of the message: {flag}"))),
        }
    }

    /// The decompressed message of a whole frame.
    async fn decompress_message(self, frame: Bytes, compression: CompressionEncoding) -> Result<Bytes, Status> {
        // Decompressing takes longer than everything else that a call does.
        threads::consume_task_budget(threads::MAX_CONSUMED_BUDGET_UNITS);
        let max_bytes = Some(self.max_bytes.min(MAX_DECOMPRESSED_BYTES));
        let mut messages = Streaming::new_request(RawBytesDecoder, Full::new(frame), Some(compression), max_bytes);
        // Boxed, so that the future of the common call stays small.
        let message = Box::pin(async move { messages.message().await });
        message.await?.ok_or_else(|| Status::internal("missing request message"))
    }
}

/// Head of a gRPC message frame.
struct MessageFrameHead {
    /// 1 for a compressed message, 0 for another.
    flag: u8,
    /// Length of the message in bytes.
    length: usize,
}

impl MessageFrameHead {
    /// Head of a frame that starts with these bytes; `None` if they are too few.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let [flag, length @ ..] = *bytes.first_chunk::<GRPC_FRAME_HEAD_BYTES>()?;
        Some(Self { flag, length: usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX) })
    }
}

/// Decoder that returns the bytes of a message.
struct RawBytesDecoder;

impl Decoder for RawBytesDecoder {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(message.copy_to_bytes(message.remaining())))
    }
}
