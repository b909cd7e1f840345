//! Requests and responses as proto3 JSON, the format of `/json`, `call` and request files.
//!
//! Conversion follows the protobuf descriptors: field names in camelCase or as in the proto files, numbers as numbers
//! or strings; unknown fields and fields that come twice are errors, as in protojson of Go. Entry keys and values are
//! JSON strings. Callers bound the size of the text; this module bounds the number of objects, and the parser the depth
//! (128 levels).
//!
//! prost-reflect lets the last of equal fields count and parses a number in a string as Rust does, so `"01"` would be 1
//! and `"1.0"` an error. `StrictJson` wraps the deserializer and sees each key and value once, as it passes.
//!
//! Decides: which JSON `/json` accepts: numbers in strings, repeated fields (`StrictJson`).

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::LazyLock;

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use serde::Serialize;
use serde::de::value::CowStrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::ser::Formatter;
use serde_json::{Number, Serializer};
use smallvec::SmallVec;

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
    let mut json = serde_json::Deserializer::from_slice(text);
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

/// Deserializer that refuses fields that come twice, in either spelling, and reads numbers in strings.
struct StrictJson<D> {
    inner: D,
    kind: FieldKind,
}

/// Kind of value that a field takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldKind {
    /// A number, which may be in a string.
    Number,
    /// Word or number of an enum.
    Enum,
    Other,
}

impl<D> StrictJson<D> {
    /// Wraps the deserializer of a whole message.
    const fn new(inner: D) -> Self {
        Self { inner, kind: FieldKind::Other }
    }
}

impl FieldKind {
    /// Returns the kind of value of a field of `RateLimitRequest` or of a message in it.
    fn of_field(name: &str) -> Self {
        match name {
            "hitsAddend" | "hits_addend" | "requestsPerUnit" | "requests_per_unit" | "unitMultiplier"
            | "unit_multiplier" => Self::Number,
            "unit" => Self::Enum,
            _ => Self::Other,
        }
    }
}

/// Forwards each way to deserialize, with the visitor wrapped.
macro_rules! forward_to_inner {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method(StrictVisitor { inner: visitor, kind: self.kind })
        })*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for StrictJson<D> {
    type Error = D::Error;

    forward_to_inner! {
        deserialize_any deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_u8
        deserialize_u16 deserialize_u32 deserialize_u64 deserialize_f32 deserialize_f64 deserialize_char
        deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf deserialize_option deserialize_unit
        deserialize_seq deserialize_map deserialize_identifier deserialize_ignored_any
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_unit_struct(name, StrictVisitor { inner: visitor, kind: self.kind })
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_newtype_struct(name, StrictVisitor { inner: visitor, kind: self.kind })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_tuple(length, StrictVisitor { inner: visitor, kind: self.kind })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_tuple_struct(name, length, StrictVisitor { inner: visitor, kind: self.kind })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_struct(name, fields, StrictVisitor { inner: visitor, kind: self.kind })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_enum(name, variants, StrictVisitor { inner: visitor, kind: self.kind })
    }
}

/// Visitor that wraps what it is given.
struct StrictVisitor<V> {
    inner: V,
    kind: FieldKind,
}

impl<'de, V: Visitor<'de>> StrictVisitor<V> {
    /// Reads a number in a string as JSON writes it: `1e1` and `1.0`, but neither `01` nor `+1`.
    fn visit_number_text<E: Error>(self, text: &str) -> Result<V::Value, E> {
        let number: Number = serde_json::from_str(text)
            .ok()
            .filter(|_| !text.starts_with(char::is_whitespace) && !text.ends_with(char::is_whitespace))
            .ok_or_else(|| E::custom(format_args!("invalid number {text:?}, expected one as JSON writes it")))?;
        match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(number), ..) => self.inner.visit_u64(number),
            (_, Some(number), _) => self.inner.visit_i64(number),
            (_, _, Some(number)) => visit_float(self.inner, number),
            _ => Err(E::custom(format_args!("the number {text:?} is out of range"))),
        }
    }
}

/// Passes a number that may be a whole one written with a fraction or an exponent.
fn visit_float<'de, V: Visitor<'de>, E: Error>(visitor: V, number: f64) -> Result<V::Value, E> {
    // From here on floats do not have every whole number.
    const MAX_EXACT_FLOAT: f64 = 9_007_199_254_740_992.0;
    // 2^64.
    const INTEGER_RANGE_END: f64 = 18_446_744_073_709_551_616.0;
    if number.fract() == 0.0 && number.abs() <= MAX_EXACT_FLOAT {
        #[expect(clippy::cast_possible_truncation, reason = "it is whole and in range")]
        return visitor.visit_i64(number as i64);
    }
    // A conversion to an integer would give the largest one.
    if number >= INTEGER_RANGE_END {
        return Err(E::custom(format_args!("the number {number} is out of range")));
    }
    visitor.visit_f64(number)
}

impl<'de, V: Visitor<'de>> Visitor<'de> for StrictVisitor<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<V::Value, E> {
        self.inner.visit_bool(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<V::Value, E> {
        self.inner.visit_i64(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<V::Value, E> {
        // Visitors of enums take only signed numbers.
        match i64::try_from(value) {
            Ok(value) if self.kind == FieldKind::Enum => self.inner.visit_i64(value),
            _ => self.inner.visit_u64(value),
        }
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<V::Value, E> {
        match self.kind {
            FieldKind::Number | FieldKind::Enum => visit_float(self.inner, value),
            FieldKind::Other => self.inner.visit_f64(value),
        }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V::Value, E> {
        match self.kind {
            FieldKind::Number => self.visit_number_text(text),
            FieldKind::Enum | FieldKind::Other => self.inner.visit_str(text),
        }
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<V::Value, E> {
        match self.kind {
            FieldKind::Number => self.visit_number_text(text),
            FieldKind::Enum | FieldKind::Other => self.inner.visit_borrowed_str(text),
        }
    }

    fn visit_string<E: Error>(self, text: String) -> Result<V::Value, E> {
        match self.kind {
            FieldKind::Number => self.visit_number_text(&text),
            FieldKind::Enum | FieldKind::Other => self.inner.visit_string(text),
        }
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(StrictJson { inner, kind: self.kind })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(StrictJson { inner, kind: self.kind })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(StrictItems(inner))
    }

    fn visit_map<A: MapAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(StrictFields { inner, seen: SmallVec::new(), kind: FieldKind::Other })
    }
}

/// Items of an array.
struct StrictItems<A>(A);

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for StrictItems<A> {
    type Error = A::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, A::Error> {
        self.0.next_element_seed(StrictSeed { inner: seed, kind: FieldKind::Other })
    }
}

/// Fields of an object; messages of a request have five at most, and unknown fields are errors.
struct StrictFields<A> {
    inner: A,
    /// Hashes of the names so far.
    seen: SmallVec<[u64; 8]>,
    kind: FieldKind,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for StrictFields<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        let Some(name) = self.inner.next_key::<Cow<'de, str>>()? else { return Ok(None) };
        let spelling = hash_name_in_any_spelling(&name);
        if self.seen.contains(&spelling) {
            return Err(A::Error::custom(format_args!("the field `{name}` is there twice")));
        }
        self.seen.push(spelling);
        self.kind = FieldKind::of_field(&name);
        seed.deserialize(CowStrDeserializer::new(name)).map(Some)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, A::Error> {
        self.inner.next_value_seed(StrictSeed { inner: seed, kind: self.kind })
    }
}

/// Hashes (FNV-1a) what both spellings of a field, `hitsAddend` and `hits_addend`, have in common.
fn hash_name_in_any_spelling(name: &str) -> u64 {
    name.bytes().filter(|byte| *byte != b'_').fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte.to_ascii_lowercase())).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Seed that gets a wrapped deserializer.
struct StrictSeed<T> {
    inner: T,
    kind: FieldKind,
}

impl<'de, T: DeserializeSeed<'de>> DeserializeSeed<'de> for StrictSeed<T> {
    type Value = T::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<T::Value, D::Error> {
        self.inner.deserialize(StrictJson { inner, kind: self.kind })
    }
}
