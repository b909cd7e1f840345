//! The one call that is made tens of thousands of times a second, without what any other call needs.
//!
//! `ShouldRateLimit` as tonic serves it goes through a router, three boxed futures and two boxed bodies, which cost
//! more than the decision. A request that needs nothing of that (a POST in plain protobuf) is read, decided and
//! answered here; whatever else comes, compressed requests among it, is left to tonic's service. Both ways meet in
//! `Service::call`, and a message that is cut or too large is judged by tonic's own decoder.

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

/// Answers `ShouldRateLimit`.
#[derive(Clone, Debug)]
pub struct FastPath {
    service: Arc<Service>,
    max_message_bytes: usize,
}

static GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");

impl FastPath {
    /// By `service`; a message has `max_message_bytes` at most.
    pub const fn new(service: Arc<Service>, max_message_bytes: usize) -> Self {
        Self { service, max_message_bytes }
    }

    /// Whether hardly any answer has to wait: counters in this process are asked at once.
    pub fn is_immediate(&self) -> bool {
        self.service.decider.store.is_immediate()
    }

    /// Whether a request can be answered here.
    pub fn accepts(&self, head: &request::Parts) -> bool {
        let is_grpc = |of: &HeaderValue| of.as_bytes().starts_with(b"application/grpc");
        head.uri.path() == METHOD_PATH
            && head.method == Method::POST
            && head.headers.get(header::CONTENT_TYPE).is_some_and(is_grpc)
            && !head.headers.contains_key(&GRPC_ENCODING)
    }

    /// Answers one with these headers and this body: a message as it is sent, or why there is none.
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

    /// The bytes of the message, which nearly always come in one piece and then are not copied.
    async fn read<B>(&self, mut body: B) -> Result<Bytes, Status>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        let mut gathered = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Status::from_error(error.into()))?;
            let Ok(piece) = frame.into_data() else { break };
            if gathered.is_empty() && body.is_end_stream() {
                return self.message(piece).await;
            }
            gathered.extend_from_slice(&piece);
            // What is longer need not be read to its end to be refused.
            if gathered.len() > FRAME_HEAD_BYTES + self.max_message_bytes {
                break;
            }
        }
        self.message(gathered.freeze()).await
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

/// Leaves a message as it is: what has a bad frame has one for tonic, too.
struct RawDecoder;

impl Decoder for RawDecoder {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(message.copy_to_bytes(message.remaining())))
    }
}
