//! Bodies of requests and responses on HTTP listeners, whose bytes count until they are dropped or written.
//!
//! Without a bound, clients that ask for large pages and read nothing would fill the memory. The data of a response
//! carries its count: hyper drops it when it is written, or when the connection ends.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use axum::BoxError;
use axum::body::Body;
use bytes::{Buf, Bytes};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};

use super::admission::BufferedBytes;

/// Body of a request. Handlers gather the bytes, so they count until the request is answered.
#[derive(Debug)]
pub(super) struct CountedRequestBody {
    body: Incoming,
    received: BufferedBytes,
    /// Set when a limit is exceeded.
    is_refused: Arc<AtomicBool>,
}

/// Body of a response.
#[derive(Debug)]
pub(super) struct CountedResponseBody {
    body: Body,
    buffered: Option<Arc<BufferedBytes>>,
}

/// Data of a response, which counts until it is dropped.
#[derive(Debug)]
pub(super) struct CountedData {
    bytes: Bytes,
    _buffered: Option<Arc<BufferedBytes>>,
}

impl CountedRequestBody {
    /// Body whose bytes are added to `received`; `is_refused` is set when they exceed a limit.
    pub(super) const fn new(body: Incoming, received: BufferedBytes, is_refused: Arc<AtomicBool>) -> Self {
        Self { body, received, is_refused }
    }
}

impl CountedResponseBody {
    /// Body whose bytes are in `buffered` already; `None` if they do not count.
    pub(super) fn new(body: Body, buffered: Option<BufferedBytes>) -> Self {
        Self { body, buffered: buffered.map(Arc::new) }
    }
}

impl HttpBody for CountedRequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)) else { return Poll::Ready(None) };
        let frame = frame?;
        let length = frame.data_ref().map_or(0, Bytes::len);
        if let Err(limit) = self.received.add_bytes(length) {
            self.received.connection().record_refusal(limit);
            self.is_refused.store(true, Ordering::Relaxed);
            return Poll::Ready(Some(Err("too many bytes of requests and responses in progress".into())));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl HttpBody for CountedResponseBody {
    type Data = CountedData;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<CountedData>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let buffered = self.buffered.clone();
        let count = |frame: Frame<Bytes>| frame.map_data(|bytes| CountedData { bytes, _buffered: buffered });
        Poll::Ready(frame.map(|frame| frame.map(count)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Buf for CountedData {
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
