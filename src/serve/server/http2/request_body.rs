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
    timeout: Duration,
    /// Set from the first wait for the client on.
    timer: Option<Pin<Box<Sleep>>>,
}

impl RequestBody {
    /// Body that must be complete within `timeout` from the first wait for it.
    pub(super) const fn new(stream: RecvStream, received: BufferedBytes, timeout: Duration) -> Self {
        Self { stream, received, timeout, timer: None }
    }

    /// The connection of the request.
    pub(super) const fn connection(&self) -> &Arc<ConnectionPermit> {
        self.received.connection()
    }

    fn poll_stream(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let stream = &mut self.stream;
        Poll::Ready(match ready!(stream.poll_data(context)) {
            Some(Ok(data)) => match self.received.add_bytes(data.len()) {
                Ok(()) => {
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
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.timeout)));
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
