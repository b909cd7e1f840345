//! Frames of gRPC, and protobuf with a bound on the decoded size of a message.
//!
//! Two bytes of a message, an empty descriptor, can need a hundred bytes of memory. Therefore the fields of a message
//! and of its descriptors are counted before it is decoded. The decoder rejects bytes that are not protobuf. Compressed
//! messages are decompressed before, within the size limit of messages.
//!
//! Decides: how many entries and fields a message may have (`MAX_MESSAGE_FIELDS`).
//! Decides: refusal of bytes that are not protobuf; that gRPC responses are never compressed.

use bytes::{Buf, Bytes};
use prost::Message;
use prost::encoding::decode_varint;
use tonic::Status;

/// Upper bound on the fields of a message and its descriptors: several for each of 10 000 descriptors.
pub const MAX_MESSAGE_FIELDS: usize = 100_000;

/// Decodes the message in `buffer`, which must be contiguous.
///
/// # Errors
/// `INVALID_ARGUMENT` if it has [`MAX_MESSAGE_FIELDS`] fields or more, `INTERNAL` if it is malformed.
pub fn decode_with_field_bound<U: Message + Default>(buffer: impl Buf) -> Result<U, Status> {
    // A field has at least one byte, so a message with fewer bytes need not be counted.
    let mut left = MAX_MESSAGE_FIELDS;
    if buffer.remaining() >= MAX_MESSAGE_FIELDS {
        count_down_fields(buffer.chunk(), true, &mut left);
    }
    if left == 0 {
        return Err(Status::invalid_argument(format!("the message has {MAX_MESSAGE_FIELDS} fields or more")));
    }
    U::decode(buffer).map_err(|error| Status::internal(error.to_string()))
}

/// Size of a gRPC frame head: one byte for the compression, four for the length of the message.
pub const GRPC_FRAME_HEAD_BYTES: usize = 5;

/// Encodes a message as an uncompressed gRPC frame. The message must be shorter than 4 GiB.
pub fn encode_grpc_frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = vec![0; GRPC_FRAME_HEAD_BYTES + length];
    let (head, mut body) = frame.split_at_mut(GRPC_FRAME_HEAD_BYTES);
    head[1..].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    // A slice takes many small writes faster than a buffer that may grow. Fails only without room.
    let _ = message.encode(&mut body);
    frame.into()
}

/// Decrements `left` for each field of `message` and, with `within`, of its descriptors. Stops at malformed bytes.
fn count_down_fields(mut message: &[u8], within: bool, left: &mut usize) {
    while *left > 0 && !message.is_empty() {
        *left -= 1;
        let Ok(tag) = decode_varint(&mut message) else { return };
        let length = match tag & 7 {
            0 => match decode_varint(&mut message) {
                Ok(_) => 0,
                Err(_) => return,
            },
            1 => 8,
            2 => match decode_varint(&mut message).map(usize::try_from) {
                Ok(Ok(length)) => length,
                _ => return,
            },
            5 => 4,
            // Start or end of a group, whose fields count as those of the message.
            _ => 0,
        };
        let Some((value, rest)) = message.split_at_checked(length) else { return };
        if within && tag & 7 == 2 && tag >> 3 == DESCRIPTORS_FIELD_NUMBER {
            count_down_fields(value, false, left);
        }
        message = rest;
    }
}

/// Field number of a request's descriptors.
const DESCRIPTORS_FIELD_NUMBER: u64 = 2;
