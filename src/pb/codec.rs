//! The codec of the service: protobuf, once a message is known to unfold to a bounded size.
//!
//! Two bytes of a message can become a hundred in memory: an empty descriptor is one. So the fields of a message
//! are counted before it is decoded, down to those of a descriptor, where all repetition is. What is not protobuf at
//! all is left to the decoder to refuse. Compression is undone before, within the bound for messages.

use std::marker::PhantomData;

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use prost::Message;
use prost::encoding::decode_varint;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstEncoder};

/// The most fields of a message, those of its descriptors included: several for each of 10 000 descriptors.
pub const MAX_FIELDS: usize = 100_000;

/// Protobuf with at most [`MAX_FIELDS`] fields in what is received.
#[derive(Clone, Copy, Debug)]
pub struct BoundedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(PhantomData)
    }
}

/// Decodes what has at most [`MAX_FIELDS`] fields.
#[derive(Clone, Copy, Debug)]
pub struct BoundedDecoder<U>(PhantomData<U>);

impl<U: Message + Default> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        decode(buffer).map(Some)
    }
}

/// The message that is all of `buffer`, which is one piece.
///
/// # Errors
/// `INVALID_ARGUMENT` if it has [`MAX_FIELDS`] fields or more, `INTERNAL` if it is no such message.
pub fn decode<U: Message + Default>(buffer: impl Buf) -> Result<U, Status> {
    // A field takes a byte at least, so a message of fewer bytes need not be counted.
    let mut left = MAX_FIELDS;
    if buffer.remaining() >= MAX_FIELDS {
        count_fields(buffer.chunk(), true, &mut left);
    }
    if left == 0 {
        return Err(Status::invalid_argument(format!("the message has {MAX_FIELDS} fields or more")));
    }
    U::decode(buffer).map_err(|error| Status::internal(error.to_string()))
}

/// What stands before a message on its way: a byte that says whether it is compressed, and four with its length.
pub const FRAME_HEAD_BYTES: usize = 5;

/// `message` as gRPC sends it, uncompressed. It is shorter than 4 GiB, as any that was decoded.
pub fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(FRAME_HEAD_BYTES + length);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // It fails where there is no room only.
    let _ = message.encode(&mut frame);
    frame.freeze()
}

/// Takes one from `left` for each field of `message`, and with `within` for those of its descriptors. Stops where the
/// bytes make no sense.
fn count_fields(mut message: &[u8], within: bool, left: &mut usize) {
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
            // Where a group begins or ends; its fields are counted as if they were outside.
            _ => 0,
        };
        let Some((value, rest)) = message.split_at_checked(length) else { return };
        if within && tag & 7 == 2 && tag >> 3 == DESCRIPTORS {
            count_fields(value, false, left);
        }
        message = rest;
    }
}

/// The number of the field that holds the descriptors of a request.
const DESCRIPTORS: u64 = 2;
