//! Requests and responses as proto3 JSON, the form of `/json`, of `call` and of request files.
//!
//! The descriptors do the work: field names in camelCase or as in the proto files, numbers as numbers or strings, and
//! an unknown name is an error. An entry's key and value are JSON strings. Of a key that stands twice the last one
//! counts. Whoever calls bounds the size of the text; its objects and its depth are bounded here, by a count and
//! by the parser's 128 levels.

use std::io;
use std::sync::LazyLock;

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Deserializer, Serializer};

use crate::pb::{self, RateLimitRequest, RateLimitResponse};

/// Why a message has no other form.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// The text has more objects than [`MAX_OBJECTS`]: the sender's fault.
    #[error("the request has {0} objects, more than {MAX_OBJECTS}")]
    TooManyObjects(usize),
    /// The text is not JSON, or not that of a request: the sender's fault. Says where and what.
    #[error("{0}")]
    NotARequest(serde_json::Error),
    /// A value has no form in JSON, such as metadata with a number that is not finite.
    #[error("the response has no form in json: {0}")]
    Unprintable(serde_json::Error),
    /// The message nests deeper than protobuf allows.
    #[error("the message can not be converted: {0}")]
    Unconvertible(#[from] prost::DecodeError),
}

/// The most objects in the text of a request: two bytes of it become hundreds in memory. Several for each of 10 000
/// descriptors.
pub const MAX_OBJECTS: usize = 100_000;

/// The request that `text` says.
///
/// # Errors
/// [`JsonError::NotARequest`] if `text` is anything but one JSON object with a request's fields;
/// [`JsonError::TooManyObjects`] before it is read.
pub fn request_from_json(text: &[u8]) -> Result<RateLimitRequest, JsonError> {
    // Braces within strings are counted too; no request has so many.
    let objects = memchr::memchr_iter(b'{', text).count();
    if objects > MAX_OBJECTS {
        return Err(JsonError::TooManyObjects(objects));
    }
    static REQUEST: LazyLock<MessageDescriptor> = LazyLock::new(|| descriptor("RateLimitRequest"));
    let mut json = Deserializer::from_slice(text);
    let message = DynamicMessage::deserialize(REQUEST.clone(), &mut json).map_err(JsonError::NotARequest)?;
    json.end().map_err(JsonError::NotARequest)?;
    Ok(message.transcode_to()?)
}

/// `response` as one line of JSON: camelCase, fields in the order of their numbers, those at their default left out.
///
/// # Errors
/// Never for what `grpc::encode` made. For a response of another server, [`JsonError::Unprintable`] if its metadata
/// holds a number that is not finite or it has a time out of range, [`JsonError::Unconvertible`] if it nests too deep.
pub fn response_to_json(response: &RateLimitResponse) -> Result<String, JsonError> {
    static RESPONSE: LazyLock<MessageDescriptor> = LazyLock::new(|| descriptor("RateLimitResponse"));
    line(&DynamicMessage::decode(RESPONSE.clone(), response.encode_to_vec().as_slice())?)
}

/// `request` as one line of JSON, so that [`request_from_json`] reads it back.
///
/// # Errors
/// [`JsonError::Unconvertible`] if a key or a value is not UTF-8: JSON has no form for it.
pub fn request_to_json(request: &RateLimitRequest) -> Result<String, JsonError> {
    let message = descriptor("RateLimitRequest");
    line(&DynamicMessage::decode(message, request.encode_to_vec().as_slice())?)
}

fn line(message: &DynamicMessage) -> Result<String, JsonError> {
    let mut line = Vec::new();
    message.serialize(&mut Serializer::with_formatter(&mut line, ShortNumbers)).map_err(JsonError::Unprintable)?;
    Ok(String::from_utf8(line).expect("the serializer writes UTF-8"))
}

/// The descriptor of one of the service's messages.
fn descriptor(message: &str) -> MessageDescriptor {
    static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
        DescriptorPool::decode(pb::descriptor_set()).expect("the build wrote a complete descriptor set")
    });
    POOL.get_message_by_name(&format!("envoy.service.ratelimit.v3.{message}"))
        .expect("the descriptor set holds the service's messages")
}

/// Compact JSON with a whole number in a struct written as `5`, not `5.0`: that is how proto3 JSON has it.
struct ShortNumbers;

impl Formatter for ShortNumbers {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        // `Display` writes the shortest digits that mean this number, and never an exponent.
        write!(writer, "{value}")
    }
}
