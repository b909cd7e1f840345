//! Fast path of `ShouldRateLimit`, without tonic's router, boxed futures and boxed bodies, which cost more than the
//! decision.
//!
//! Uncompressed requests in protobuf are read, decided and answered here. All other requests go to tonic's service.
//! Both paths call `Service::call`, and tonic's own decoder handles a message that is truncated or too large.

use std::sync::Arc;

use axum::BoxError;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header, request};
use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Body;
use tonic::Status;
use tonic::codec::{DecodeBuf, Decoder, Streaming};

use super::decode;
use super::service::Service;
use crate::pb::codec::{self, FRAME_HEAD_BYTES, frame};
use crate::pb::{METHOD_PATH, RateLimitRequest};

/// Answers uncompressed calls of `ShouldRateLimit`.
#[derive(Clone, Debug)]
pub struct FastPath {
    service: Arc<Service>,
    max_message_bytes: usize,
}

static GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");

impl FastPath {
    /// Creates the fast path of a service; messages are limited to `max_message_bytes`.
    pub const fn new(service: Arc<Service>, max_message_bytes: usize) -> Self {
        Self { service, max_message_bytes }
    }

    /// True if responses that no limit delays are ready on the first poll.
    pub fn is_immediate(&self) -> bool {
        self.service.decider.store.is_immediate()
    }

    /// True if the fast path can answer a request.
    pub fn accepts(&self, head: &request::Parts) -> bool {
        let is_grpc = |of: &HeaderValue| of.as_bytes().starts_with(b"application/grpc");
        head.uri.path() == METHOD_PATH
            && head.method == Method::POST
            && head.headers.get(header::CONTENT_TYPE).is_some_and(is_grpc)
            && !head.headers.contains_key(&GRPC_ENCODING)
    }

    /// Answers a request; returns the framed response or the status of the error.
    pub async fn answer<B>(&self, headers: &HeaderMap, body: B) -> Result<Bytes, Status>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        let message = self.read(body).await?;
        let decoded: RateLimitRequest;
        let request = match decode::decode_borrowed(&message) {
            Some(request) => request,
            None => {
                decoded = codec::decode(message.clone())?;
                decode::request(&decoded)
            }
        };
        Ok(frame(&self.service.call(headers, &request).await?))
    }

    /// Reads the message; a body in one piece, the common case, is not copied.
    async fn read<B>(&self, mut body: B) -> Result<Bytes, Status>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        let mut buffer = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Status::from_error(error.into()))?;
            let Ok(piece) = frame.into_data() else { break };
            if buffer.is_empty() && body.is_end_stream() {
                return self.message(piece).await;
            }
            buffer.extend_from_slice(&piece);
            // A body that is too long is rejected without reading the rest.
            if buffer.len() > FRAME_HEAD_BYTES + self.max_message_bytes {
                break;
            }
        }
        self.message(buffer.freeze()).await
    }

    async fn message(&self, mut bytes: Bytes) -> Result<Bytes, Status> {
        if let Some((&[0, a, b, c, d], message)) = bytes.split_first_chunk()
            && usize::try_from(u32::from_be_bytes([a, b, c, d])) == Ok(message.len())
            && message.len() <= self.max_message_bytes
        {
            bytes.advance(FRAME_HEAD_BYTES);
            return Ok(bytes);
        }
        let mut messages = Streaming::new_request(RawDecoder, Full::new(bytes), None, Some(self.max_message_bytes));
        let message = Box::pin(async move { messages.message().await });
        message.await?.ok_or_else(|| Status::internal("Missing request message."))
    }
}

/// Decoder that returns the bytes of a message, so that tonic checks its frame.
struct RawDecoder;

impl Decoder for RawDecoder {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(message.copy_to_bytes(message.remaining())))
    }
}
