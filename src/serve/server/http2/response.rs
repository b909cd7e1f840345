//! Writes responses to HTTP/2 streams.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Response, header};
use bytes::{Buf, Bytes};
use h2::server::SendResponse;
use h2::{Reason, SendStream};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use tokio::sync::watch;
use tonic::Status;
use tonic::metadata::GRPC_CONTENT_TYPE;

use super::request_body::build_too_many_bytes_status;
use crate::serve::quota::evidence::BodyPart;
use crate::serve::server::admission::{BufferedBytes, RequestPermit};

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
    pub(super) fn for_request(bytes: Bytes, permit: RequestPermit) -> Result<Self, Status> {
        match BufferedBytes::reserve_for_response(permit.connection_permit(), bytes.len()) {
            Ok(buffered) => Ok(Self { bytes, _permit: Some(permit), _buffered: buffered, _part: None }),
            Err(limit) => {
                permit.connection_permit().record_refusal(limit);
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
    page: Response<Body>,
    is_end_of_stream: bool,
) -> Result<(SendStream<ResponseData>, Body), h2::Error> {
    let (head, body) = page.into_parts();
    Ok((sender.send_response(Response::from_parts(head, ()), is_end_of_stream)?, body))
}

/// Sends a response frame by frame, as the client grants capacity. `written` counts the bytes of a quota stream.
pub(super) async fn send_streamed_response(
    sender: &mut SendResponse<ResponseData>,
    page: Response<Body>,
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
