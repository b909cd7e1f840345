//! Body of a request: read within limits of time and bytes, as the client sends it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::BoxError;
use bytes::Bytes;
use h2::RecvStream;
use hyper::body::{Body, Frame};
use tokio::time::{Sleep, sleep};
use tonic::Status;

use crate::serve::server::admission::{BufferedBytes, ConnectionPermit};
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
    /// Set from the first wait for the client on.
    timer: Option<Pin<Box<Sleep>>>,
}

impl RequestBody {
    /// Body that must be complete within `timeout` from the first wait for it.
    pub(super) const fn new(stream: RecvStream, received: BufferedBytes, timeout: Duration) -> Self {
        Self { stream, received, timeout: Some(timeout), messages: None, timer: None }
    }

    /// Body of a call with many messages, over any time: the bytes of each count until it is complete.
    pub(super) fn for_streaming_call(stream: RecvStream, received: BufferedBytes) -> Self {
        Self { stream, received, timeout: None, messages: Some(MessagePosition::default()), timer: None }
    }

    /// The connection of the request.
    pub(super) const fn connection_permit(&self) -> &Arc<ConnectionPermit> {
        self.received.connection()
    }

    fn poll_stream(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let stream = &mut self.stream;
        Poll::Ready(match ready!(stream.poll_data(context)) {
            Some(Ok(data)) => match self.received.add_bytes(data.len()) {
                Ok(()) => {
                    if let Some(messages) = &mut self.messages {
                        self.received.connection().mark_active();
                        if messages.advance(&data) {
                            self.received.clear();
                        }
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
pub(super) fn build_too_many_bytes_status() -> Status {
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
