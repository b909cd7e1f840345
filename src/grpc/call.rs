//! The one call that is made tens of thousands of times a second, without what any other call needs.
//!
//! `ShouldRateLimit` as tonic serves it goes through a router, three boxed futures and two boxed bodies, which cost
//! more than the decision. A request that needs nothing of that (a POST in plain protobuf) is read, decided and
//! answered here; whatever else comes, compressed requests among it, is left to tonic's service. Both ways meet in
//! `Service::call`, and a message that is cut or too large is judged by tonic's own decoder.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, header};
use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Frame, Incoming};
use tonic::codec::{DecodeBuf, Decoder, Streaming};
use tonic::{Status, body};

use super::decode;
use super::service::Service;
use crate::pb::codec::{self, FRAME_HEAD_BYTES, frame};
use crate::pb::{METHOD_PATH, RateLimitRequest, RateLimitResponse};

/// Answers `ShouldRateLimit`.
#[derive(Clone, Debug)]
pub struct Calls {
    service: Arc<Service>,
    max_message_bytes: usize,
}

const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

impl Calls {
    /// By `service`; a message has `max_message_bytes` at most.
    pub const fn new(service: Arc<Service>, max_message_bytes: usize) -> Self {
        Self { service, max_message_bytes }
    }

    /// Whether a request can be answered here.
    pub fn takes<B>(&self, request: &Request<B>) -> bool {
        request.uri().path() == METHOD_PATH
            && request.method() == Method::POST
            && request
                .headers()
                .get(header::CONTENT_TYPE)
                .is_some_and(|of| of.as_bytes().starts_with(b"application/grpc"))
            && !request.headers().contains_key("grpc-encoding")
    }

    /// Answers it.
    pub async fn answer(&self, request: Request<Incoming>) -> Response<Answer> {
        match self.decide(request).await {
            Ok(response) => {
                let mut answer = Response::new(Answer::Message(frame(&response)));
                answer.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
                answer
            }
            Err(status) => status.into_http::<body::Body>().map(|_| Answer::Said),
        }
    }

    async fn decide(&self, request: Request<Incoming>) -> Result<RateLimitResponse, Status> {
        let (head, body) = request.into_parts();
        let message = self.read(body).await?;
        let decoded: RateLimitRequest;
        let request = match decode::in_place(&message) {
            Some(request) => request,
            None => {
                decoded = codec::decode(message.clone())?;
                decode::request(&decoded)
            }
        };
        self.service.call(&head.headers, &request).await
    }

    /// The bytes of the message, which nearly always come in one piece and then are not copied.
    async fn read(&self, mut body: Incoming) -> Result<Bytes, Status> {
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
        let mut messages = Streaming::new_request(Unread, Full::new(bytes), None, Some(self.max_message_bytes));
        messages.message().await?.ok_or_else(|| Status::internal("Missing request message."))
    }
}

/// Leaves a message as it is: what has a bad frame has one for tonic, too.
struct Unread;

impl Decoder for Unread {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(message.copy_to_bytes(message.remaining())))
    }
}

/// The body of an answer.
#[derive(Debug)]
pub enum Answer {
    /// A message, and after it the word that all went well.
    Message(Bytes),
    /// That word.
    Trailers,
    /// Nothing more.
    Said,
    /// Of a page.
    Page(Body),
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let next = match &mut *self {
            Self::Page(page) => return Pin::new(page).poll_frame(context),
            Self::Said => return Poll::Ready(None),
            Self::Message(_) => Self::Trailers,
            Self::Trailers => Self::Said,
        };
        let frame = match std::mem::replace(&mut *self, next) {
            Self::Message(message) => Frame::data(message),
            _ => Frame::trailers(HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static("0"))])),
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Page(page) => page.is_end_stream(),
            Self::Said => true,
            Self::Message(_) | Self::Trailers => false,
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Page(page) => page.size_hint(),
            _ => hyper::body::SizeHint::default(),
        }
    }
}

/// A page, as such an answer.
pub fn page(page: Result<Response<Body>, Infallible>) -> Response<Answer> {
    let Ok(page) = page;
    page.map(Answer::Page)
}
