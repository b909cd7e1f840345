//! One stream of HTTP/2: the body of its request, read within limits of time and bytes, and its response, written.
//!
//! Decides: how long a client may take to send a message (`RequestBody`).
//! Decides: the end of a successful call (`send_grpc_message`).
//! Decides: that reports of a quota stream keep a connection from idleness.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, Response, header};
use axum::{BoxError, body};
use bytes::{Buf, Bytes};
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep};
use tonic::Status;
use tonic::metadata::GRPC_CONTENT_TYPE;

use crate::serve::quota::evidence::BodyPart;
use crate::serve::server::admission::{BufferedBytes, ConnectionPermit, RequestPermit};
use crate::telemetry::listener_stats::ExceededLimit;

/// Body of a request, which releases flow-control capacity as it is read.
///
/// Readers gather the bytes, so the bytes count until the body is dropped.
#[derive(Debug)]
pub(super) struct RequestBody {
    stream: RecvStream,
    received: BufferedBytes,
    /// `None`: the client may send messages at any time.
    timeout: Option<Duration>,
    /// Of a body with many messages: where it is in them.
    messages: Option<MessagePosition>,
    /// A message is complete. Its bytes count until its reader wants the next one: it works on this one meanwhile.
    has_complete_message: bool,
    /// Set from the first wait for the client on.
    timer: Option<Pin<Box<Sleep>>>,
}

impl RequestBody {
    /// Body that must be complete within `timeout` from the first wait for it.
    pub(super) const fn new(stream: RecvStream, received: BufferedBytes, timeout: Duration) -> Self {
        Self { stream, received, timeout: Some(timeout), messages: None, has_complete_message: false, timer: None }
    }

    /// Body of a call with many messages, over any time: the bytes of each count until the next one is read.
    pub(super) fn for_streaming_call(stream: RecvStream, received: BufferedBytes) -> Self {
        let messages = Some(MessagePosition::default());
        Self { stream, received, timeout: None, messages, has_complete_message: false, timer: None }
    }

    /// The connection of the request.
    pub(super) const fn connection_permit(&self) -> &Arc<ConnectionPermit> {
        self.received.connection()
    }

    fn poll_stream(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if std::mem::take(&mut self.has_complete_message) {
            self.received.clear();
        }
        let stream = &mut self.stream;
        Poll::Ready(match ready!(stream.poll_data(context)) {
            Some(Ok(data)) => match self.received.add_bytes(data.len()) {
                Ok(()) => {
                    if let Some(messages) = &mut self.messages {
                        self.received.connection().mark_active();
                        self.has_complete_message = messages.advance(&data);
                    }
                    let released = stream.flow_control().release_capacity(data.len());
                    Some(released.map(|()| Frame::data(data)).map_err(Into::into))
                }
                Err(limit) => Some(Err(self.record_and_build_refusal(limit))),
            },
            Some(Err(error)) => Some(Err(error.into())),
            None => {
                let trailers = ready!(stream.poll_trailers(context)).transpose();
                trailers.map(|trailers| trailers.map(Frame::trailers).map_err(Into::into))
            }
        })
    }

    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<BoxError> {
        let Some(timeout) = self.timeout else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(self.record_and_build_refusal(ExceededLimit::MessageTimeout))
    }

    fn record_and_build_refusal(&self, limit: ExceededLimit) -> BoxError {
        self.received.connection().record_refusal(limit);
        match limit {
            ExceededLimit::MessageTimeout => Status::deadline_exceeded("the message took too long").into(),
            _ => build_too_many_bytes_status().into(),
        }
    }
}

/// Size of the head of a gRPC message: a byte for the compression, four for the length.
const FRAME_HEAD_BYTES: usize = 5;

/// Position in a sequence of gRPC messages.
#[derive(Clone, Copy, Debug, Default)]
struct MessagePosition {
    /// Bytes of the frame head that have come.
    head: [u8; FRAME_HEAD_BYTES],
    head_bytes: usize,
    /// Bytes of the message that are missing.
    left: usize,
}

impl MessagePosition {
    /// Advances by `data`; returns true if a message ends with it.
    fn advance(&mut self, mut data: &[u8]) -> bool {
        while !data.is_empty() {
            if self.left > 0 {
                let part = self.left.min(data.len());
                self.left -= part;
                data = &data[part..];
                continue;
            }
            let part = (FRAME_HEAD_BYTES - self.head_bytes).min(data.len());
            self.head[self.head_bytes..self.head_bytes + part].copy_from_slice(&data[..part]);
            self.head_bytes += part;
            data = &data[part..];
            if self.head_bytes == FRAME_HEAD_BYTES {
                let [_, length @ ..] = self.head;
                self.left = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
                self.head_bytes = 0;
            }
        }
        self.left == 0 && self.head_bytes == 0
    }
}

/// Status of a call whose request or response does not fit beside those in progress.
fn build_too_many_bytes_status() -> Status {
    Status::resource_exhausted("too many bytes of requests and responses in progress; try again later")
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.poll_stream(context) {
            Poll::Pending => self.poll_timeout(context).map(|error| Some(Err(error))),
            ready => ready,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}

/// Data of a response. h2 drops it when it is written, or when its stream ends; until then the request keeps its place.
#[derive(Debug)]
pub(super) struct ResponseData {
    bytes: Bytes,
    _permit: Option<RequestPermit>,
    _buffered: Option<BufferedBytes>,
    /// Counts the bytes of a quota stream once they are written.
    _part: Option<BodyPart>,
}

impl ResponseData {
    /// Data of a response whose request keeps its place elsewhere.
    const fn without_permit(bytes: Bytes) -> Self {
        Self { bytes, _permit: None, _buffered: None, _part: None }
    }

    /// A whole response; its request keeps `permit` until the client has taken it.
    ///
    /// # Errors
    /// Too many bytes wait for the client.
    pub(super) fn for_request(
        bytes: Bytes,
        connection: &Arc<ConnectionPermit>,
        permit: Option<RequestPermit>,
    ) -> Result<Self, Status> {
        match BufferedBytes::reserve_for_response(connection, bytes.len()) {
            Ok(buffered) => Ok(Self { bytes, _permit: permit, _buffered: buffered, _part: None }),
            Err(limit) => {
                connection.record_refusal(limit);
                Err(build_too_many_bytes_status())
            }
        }
    }
}

impl Buf for ResponseData {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

/// Sends a gRPC message with status OK.
///
/// h2 buffers the message until the client has capacity.
pub(super) fn send_grpc_message(
    sender: &mut SendResponse<ResponseData>,
    message: ResponseData,
) -> Result<(), h2::Error> {
    let mut head = Response::new(());
    head.headers_mut().insert(header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    let mut stream = sender.send_response(head, false)?;
    stream.send_data(message, false)?;
    stream.send_trailers(HeaderMap::from_iter([(Status::GRPC_STATUS, HeaderValue::from_static("0"))]))
}

/// Sends the head of a response and returns its stream and body.
pub(super) fn send_head(
    sender: &mut SendResponse<ResponseData>,
    page: Response<body::Body>,
    is_end_of_stream: bool,
) -> Result<(SendStream<ResponseData>, body::Body), h2::Error> {
    let (head, body) = page.into_parts();
    Ok((sender.send_response(Response::from_parts(head, ()), is_end_of_stream)?, body))
}

/// Sends a response frame by frame, as the client grants capacity. `written` counts the bytes of a quota stream.
pub(super) async fn send_streamed_response(
    sender: &mut SendResponse<ResponseData>,
    page: Response<body::Body>,
    written: Option<&Arc<watch::Sender<u64>>>,
) -> Result<(), h2::Error> {
    let is_empty = page.body().is_end_stream();
    let (mut stream, mut body) = send_head(sender, page, is_empty)?;
    if is_empty {
        return Ok(());
    }
    loop {
        // A body that waits for events, such as a health watch, ends when the client resets the stream.
        let next = poll_fn(|context| match pin!(body.frame()).poll(context) {
            Poll::Ready(next) => Poll::Ready(Ok(next)),
            Poll::Pending => stream.poll_reset(context).map(Err),
        });
        let frame = match next.await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_body_error))) => {
                stream.send_reset(Reason::INTERNAL_ERROR);
                return Ok(());
            }
            Ok(None) => return stream.send_data(ResponseData::without_permit(Bytes::new()), true),
            Err(_reset) => return Ok(()),
        };
        match frame.into_data() {
            Ok(data) => send_body_data(&mut stream, data, written).await?,
            Err(frame) => match frame.into_trailers() {
                Ok(trailers) => return stream.send_trailers(trailers),
                Err(_unknown) => {}
            },
        }
    }
}

async fn send_body_data(
    stream: &mut SendStream<ResponseData>,
    mut data: Bytes,
    written: Option<&Arc<watch::Sender<u64>>>,
) -> Result<(), h2::Error> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let Some(capacity) = poll_fn(|context| stream.poll_capacity(context)).await else { return Ok(()) };
        // The capacity can be 0 again by now; an empty frame must not be sent.
        match capacity?.min(data.len()) {
            0 => {}
            length => {
                let part = written.map(|written| BodyPart::new(written, length));
                let data = ResponseData::without_permit(data.split_to(length));
                stream.send_data(ResponseData { _part: part, ..data }, false)?;
            }
        }
    }
    Ok(())
}
