//! Requests and responses as proto3 JSON, the format of `/json`, `call` and request files.
//!
//! Conversion follows the protobuf descriptors: field names in camelCase or as in the proto files, numbers as numbers
//! or strings; unknown fields and fields that come twice are errors, as in protojson of Go
//! (`strict_json`). Entry keys and values are JSON strings. Callers bound the size of the text;
//! this module bounds the number of objects, and the parser the depth (128 levels).

use std::io;
use std::sync::LazyLock;

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Deserializer, Serializer};

use super::strict_json::StrictJson;
use crate::base::pb::{self, RateLimitRequest, RateLimitResponse};
use crate::base::text::escape_unprintable_json;

/// Error of a conversion.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// The text has more objects than [`MAX_REQUEST_JSON_OBJECTS`]; the sender is at fault.
    #[error("the request has {0} objects, more than {MAX_REQUEST_JSON_OBJECTS}")]
    TooManyObjects(usize),
    /// The text is not JSON, or not a request; the sender is at fault. Holds the position and the problem.
    #[error("{0}")]
    NotARequest(serde_json::Error),
    /// A value cannot be represented in JSON, such as a number in metadata that is not finite.
    #[error("the response cannot be encoded as JSON: {0}")]
    Unprintable(serde_json::Error),
    /// The message nests deeper than protobuf allows.
    #[error("the message cannot be converted: {0}")]
    Unconvertible(#[from] prost::DecodeError),
}

/// Maximum number of objects in a request: several per descriptor for 10 000 descriptors. Two bytes of text become
/// hundreds of bytes in memory.
pub const MAX_REQUEST_JSON_OBJECTS: usize = 100_000;

/// Decodes a request.
///
/// # Errors
/// [`JsonError::NotARequest`] if `text` is anything but one JSON object with a request's fields;
/// [`JsonError::TooManyObjects`] before parsing.
pub fn request_from_json(text: &[u8]) -> Result<RateLimitRequest, JsonError> {
    // Braces in strings count too, which no real request has that many of.
    let objects = memchr::memchr_iter(b'{', text).count();
    if objects > MAX_REQUEST_JSON_OBJECTS {
        return Err(JsonError::TooManyObjects(objects));
    }
    static REQUEST_MESSAGE_DESCRIPTOR: LazyLock<MessageDescriptor> =
        LazyLock::new(|| find_message_descriptor("RateLimitRequest"));
    let mut json = Deserializer::from_slice(text);
    let message = DynamicMessage::deserialize(REQUEST_MESSAGE_DESCRIPTOR.clone(), StrictJson::new(&mut json))
        .map_err(JsonError::NotARequest)?;
    json.end().map_err(JsonError::NotARequest)?;
    Ok(message.transcode_to()?)
}

/// Encodes a response as one line of JSON: camelCase names, fields ordered by number, defaults left out.
///
/// # Errors
/// None for responses of `grpc::encode`. For a response of another server, [`JsonError::Unprintable`] if its metadata
/// holds a number that is not finite or it has a time out of range, [`JsonError::Unconvertible`] if it nests too deep.
pub fn response_to_json(response: &RateLimitResponse) -> Result<String, JsonError> {
    static RESPONSE_MESSAGE_DESCRIPTOR: LazyLock<MessageDescriptor> =
        LazyLock::new(|| find_message_descriptor("RateLimitResponse"));
    encode_json_line(&DynamicMessage::decode(RESPONSE_MESSAGE_DESCRIPTOR.clone(), response.encode_to_vec().as_slice())?)
}

/// Encodes a request as one line of JSON, which [`request_from_json`] decodes.
///
/// # Errors
/// [`JsonError::Unconvertible`] if a key or value is not UTF-8, which JSON cannot represent.
pub fn request_to_json(request: &RateLimitRequest) -> Result<String, JsonError> {
    let message = find_message_descriptor("RateLimitRequest");
    encode_json_line(&DynamicMessage::decode(message, request.encode_to_vec().as_slice())?)
}

fn encode_json_line(message: &DynamicMessage) -> Result<String, JsonError> {
    let mut line = Vec::new();
    message
        .serialize(&mut Serializer::with_formatter(&mut line, ShortNumberFormatter))
        .map_err(JsonError::Unprintable)?;
    Ok(escape_unprintable_json(str::from_utf8(&line).expect("the serializer writes UTF-8")).into_owned())
}

/// Descriptor of a message of the service.
fn find_message_descriptor(message: &str) -> MessageDescriptor {
    static DESCRIPTOR_POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
        DescriptorPool::decode(pb::file_descriptor_set()).expect("the build wrote a complete descriptor set")
    });
    DESCRIPTOR_POOL
        .get_message_by_name(&format!("envoy.service.ratelimit.v3.{message}"))
        .expect("the descriptor set holds the service's messages")
}

/// Formats compact JSON with integral numbers as `5` instead of `5.0`, as proto3 JSON requires.
struct ShortNumberFormatter;

impl Formatter for ShortNumberFormatter {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        // `Display` writes the shortest exact digits and never an exponent.
        write!(writer, "{value}")
    }
}
