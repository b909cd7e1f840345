//! Reads the only message of a unary call from its body.
//!
//! A message is refused as early as its bytes allow: at the frame head if it is too large, at the first byte after its
//! end. Statuses are those of the gRPC protocol over HTTP/2 and of grpc-go.

use axum::BoxError;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Body;
use tonic::Status;
use tonic::codec::{CompressionEncoding, DecodeBuf, Decoder, Streaming};

use crate::base::pb::codec::GRPC_FRAME_HEAD_BYTES;
use crate::base::threads;

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

static GRPC_ENCODING_HEADER: HeaderName = HeaderName::from_static("grpc-encoding");

impl MessageReader {
    /// Reader for a call with these headers.
    ///
    /// # Errors
    /// The compression is not supported.
    pub(super) fn new(headers: &HeaderMap, max_bytes: usize) -> Result<Self, Status> {
        let compression = match headers.get(&GRPC_ENCODING_HEADER).map(HeaderValue::as_bytes) {
            None | Some(b"identity") => None,
            Some(b"gzip") => Some(CompressionEncoding::Gzip),
            Some(other) => return Err(build_encoding_refusal(other)),
        };
        Ok(Self { compression, max_bytes })
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

fn build_encoding_refusal(encoding: &[u8]) -> Status {
    let encoding = encoding.escape_ascii();
    let mut status = Status::unimplemented(format!("grpc-encoding `{encoding}` is not supported"));
    let supported = tonic::metadata::MetadataValue::from_static("identity,gzip");
    status.metadata_mut().insert("grpc-accept-encoding", supported);
    status
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
