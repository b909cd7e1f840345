//! HTTP bodies whose bytes count towards the limits on buffered bytes (`admission.rs`) while they are in memory.
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

/// Request body that adds each frame to the buffered bytes, and fails when a limit on them is reached.
///
/// Handlers gather the bytes, so they count until the body is dropped.
#[derive(Debug)]
pub(super) struct MemoryAccountedRequestBody {
    body: Incoming,
    received: BufferedBytes,
    /// Set when a limit is exceeded.
    is_refused: Arc<AtomicBool>,
}

/// Response body whose bytes are counted already, and stay counted until hyper has written or dropped its data.
#[derive(Debug)]
pub(super) struct MemoryAccountedResponseBody {
    body: Body,
    buffered: Option<Arc<BufferedBytes>>,
}

/// Frame data of a response, which keeps the bytes of the response counted until it is dropped.
#[derive(Debug)]
pub(super) struct MemoryAccountedData {
    bytes: Bytes,
    _buffered: Option<Arc<BufferedBytes>>,
}

impl MemoryAccountedRequestBody {
    /// Body whose bytes are added to `received`; `is_refused` is set when they exceed a limit.
    pub(super) const fn new(body: Incoming, received: BufferedBytes, is_refused: Arc<AtomicBool>) -> Self {
        Self { body, received, is_refused }
    }
}

impl MemoryAccountedResponseBody {
    /// Body whose bytes are in `buffered` already. With `buffered: None` they are not counted.
    pub(super) fn new(body: Body, buffered: Option<BufferedBytes>) -> Self {
        Self { body, buffered: buffered.map(Arc::new) }
    }
}

impl HttpBody for MemoryAccountedRequestBody {
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

impl HttpBody for MemoryAccountedResponseBody {
    type Data = MemoryAccountedData;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<MemoryAccountedData>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let buffered = self.buffered.clone();
        let count = |frame: Frame<Bytes>| frame.map_data(|bytes| MemoryAccountedData { bytes, _buffered: buffered });
        Poll::Ready(frame.map(|frame| frame.map(count)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Buf for MemoryAccountedData {
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
