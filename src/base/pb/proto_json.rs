//! Requests and responses as proto3 JSON, the format of `/json`, `call` and request files.
//!
//! Field names are in camelCase or as in the proto files, numbers are numbers or strings; unknown fields and fields
//! that come twice are errors, as in protojson of Go. Entry keys and values are JSON strings. Callers bound the size of
//! the text; this module bounds the number of objects. No text nests deeper than a request does.
//!
//! One table per direction lists the fields in the order of their numbers: `request_messages!` those that are read and
//! written, `response_messages!` those that are only written. Each field has its name in JSON, its name in the proto
//! file, and the functions that convert it.
//!
//! Decides: which lines of logs are read as requests.
//! Decides: which JSON `/json` accepts: numbers in strings, repeated fields, unknown fields.

use std::borrow::Cow;
use std::convert::identity;
use std::fmt;
use std::io;
use std::marker::PhantomData;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use prost_types::value::Kind;
use prost_types::{Duration, Struct, Value};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{self, Serialize, SerializeMap, Serializer};
use serde_json::ser::Formatter;
use serde_json::{Number, Value as Json};
use smallvec::SmallVec;

use crate::base::pb::rate_limit_descriptor::{Entry, RateLimitOverride};
use crate::base::pb::rate_limit_response::quota::ExpirationSpecifier;
use crate::base::pb::rate_limit_response::{Code, DescriptorStatus, Quota, RateLimit, rate_limit};
use crate::base::pb::{HeaderValue, RateLimitDescriptor, RateLimitRequest, RateLimitResponse, RateLimitUnit};
use crate::base::text::escape_unprintable_json;

/// Error of a conversion.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// The text has more objects than [`MAX_REQUEST_JSON_OBJECTS`]; the sender is at fault.
    #[error("the request has {0} objects, more than {MAX_REQUEST_JSON_OBJECTS}")]
    TooManyObjects(usize),
    /// The text is not JSON, or not a request; the sender is at fault. Holds the field, the problem and the position.
    #[error("{0}")]
    NotARequest(serde_json::Error),
    /// A value cannot be represented in JSON, such as a number in metadata that is not finite.
    #[error("the message cannot be encoded as JSON: {0}")]
    Unprintable(serde_json::Error),
}

/// Maximum number of objects in a request: several per descriptor for 10 000 descriptors. Two bytes of text become
/// hundreds of bytes in memory.
pub const MAX_REQUEST_JSON_OBJECTS: usize = 100_000;

/// Decodes a request.
///
/// Also takes a line of a log that has one: a decision record, or an access log with the dynamic metadata of the
/// answer, as docs/why.md prescribes.
///
/// # Errors
/// [`JsonError::NotARequest`] if `text` is neither one JSON object with a request's fields nor such a line;
/// [`JsonError::TooManyObjects`] before parsing.
pub fn request_from_json(text: &[u8]) -> Result<RateLimitRequest, JsonError> {
    // Braces in strings count too, which no real request has that many of.
    let objects = memchr::memchr_iter(b'{', text).count();
    if objects > MAX_REQUEST_JSON_OBJECTS {
        return Err(JsonError::TooManyObjects(objects));
    }
    serde_json::from_slice(text)
        .or_else(|error| request_from_log_line(text).ok_or(error))
        .map_err(JsonError::NotARequest)
}

/// Request in a line of a log. Other fields of the line are ignored.
#[derive(serde::Deserialize)]
struct LoggedRequest {
    domain: String,
    descriptors: Vec<LoggedDescriptor>,
    /// Of the request, as in metadata.
    #[serde(default, rename = "hitsAddend")]
    hits_addend: u32,
    /// Verdict of a decision record.
    verdict: Option<String>,
}

#[derive(serde::Deserialize)]
struct LoggedDescriptor {
    entries: Vec<LoggedEntry>,
    #[serde(rename = "hitsAddend")]
    hits_addend: Option<u64>,
    /// Hits of a decision record, negative for a refund.
    hits: Option<i64>,
}

/// Entry of a logged request: in metadata `key=value`.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum LoggedEntry {
    Text(String),
    Fields(Entry),
}

/// Decodes the request in a line of a log, which is the line or one of its fields; `None` if there is none.
fn request_from_log_line(text: &[u8]) -> Option<RateLimitRequest> {
    let line: Json = serde_json::from_slice(text).ok()?;
    let mut fields = line.as_object()?.values();
    let logged = if line.get("descriptors").is_some() {
        LoggedRequest::deserialize(&line).ok()?
    } else {
        fields.find_map(|field| LoggedRequest::deserialize(field).ok())?
    };
    // What has no entries as metadata has them is a request of its own form, unless this is a decision record.
    let mut entries = logged.descriptors.iter().flat_map(|descriptor| &descriptor.entries).peekable();
    let is_metadata = entries.peek().is_some() && entries.all(|entry| matches!(entry, LoggedEntry::Text(_)));
    (logged.verdict.is_some() || is_metadata).then(|| RateLimitRequest {
        domain: logged.domain,
        descriptors: logged.descriptors.into_iter().map(LoggedDescriptor::into_sent).collect(),
        hits_addend: logged.hits_addend,
    })
}

impl LoggedDescriptor {
    fn into_sent(self) -> RateLimitDescriptor {
        let entry = |entry: LoggedEntry| match entry {
            LoggedEntry::Fields(entry) => entry,
            LoggedEntry::Text(text) => {
                let (key, value) = text.split_once('=').unwrap_or((&text, ""));
                Entry { key: key.to_owned().into(), value: value.to_owned().into() }
            }
        };
        RateLimitDescriptor {
            entries: self.entries.into_iter().map(entry).collect(),
            hits_addend: self.hits.map(i64::unsigned_abs).or(self.hits_addend),
            is_negative_hits: self.hits.is_some_and(i64::is_negative),
            ..RateLimitDescriptor::default()
        }
    }
}

/// Encodes a response as one line of JSON: camelCase names, fields ordered by number, defaults left out.
///
/// # Errors
/// None for responses of `grpc::encode`. For a response of another server, [`JsonError::Unprintable`] if its metadata
/// holds a number that is not finite or nests too deep, or it has a time out of range.
pub fn response_to_json(response: &RateLimitResponse) -> Result<String, JsonError> {
    encode_json_line(response)
}

/// Encodes a request as one line of JSON, which [`request_from_json`] decodes.
///
/// # Errors
/// [`JsonError::Unprintable`] if a key or value is not UTF-8, which JSON cannot represent.
pub fn request_to_json(request: &RateLimitRequest) -> Result<String, JsonError> {
    encode_json_line(request)
}

fn encode_json_line(message: &impl Serialize) -> Result<String, JsonError> {
    let mut line = Vec::new();
    message
        .serialize(&mut serde_json::Serializer::with_formatter(&mut line, ShortNumberFormatter))
        .map_err(JsonError::Unprintable)?;
    Ok(escape_unprintable_json(str::from_utf8(&line).expect("the serializer writes UTF-8")).into_owned())
}

/// Formats compact JSON with integral numbers as `5` instead of `5.0`, as proto3 JSON requires.
struct ShortNumberFormatter;

impl Formatter for ShortNumberFormatter {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        // `Display` writes the shortest exact digits and never an exponent.
        write!(writer, "{value}")
    }
}

/// Implements `Serialize`: fields that have their default are left out, others converted by `write`.
macro_rules! response_messages {
    ($($message:ident { $($name:literal $field:ident: $write:expr;)* })*) => {$(
        impl Serialize for $message {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut object = serializer.serialize_map(None)?;
                $(write_value(&mut object, $name, &self.$field, $write)?;)*
                object.end()
            }
        }
    )*};
}

/// Implements `Deserialize` too, with `read` for values that are there and not `null`.
macro_rules! request_messages {
    ($($message:ident { $($name:literal $field:ident: $read:expr, $write:expr;)* })*) => {$(
        response_messages! { $message { $($name $field: $write;)* } }

        impl RequestMessage for $message {
            const FIELDS: &'static [[&'static str; 2]] = &[$([$name, stringify!($field)]),*];

            fn read_value<'de, A: MapAccess<'de>>(&mut self, field: &str, map: &mut A) -> Result<(), A::Error> {
                match field {
                    $($name => read_value(map, &mut self.$field, $read),)*
                    _ => Err(de::Error::custom("unrecognized field")),
                }
            }
        }

        impl<'de> Deserialize<'de> for $message {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_map(MessageVisitor(PhantomData))
            }
        }
    )*};
}

request_messages! {
    RateLimitRequest {
        "domain" domain: identity, plain;
        "descriptors" descriptors: identity, plain;
        "hitsAddend" hits_addend: |Integer(hits)| hits, plain;
    }
    RateLimitDescriptor {
        "entries" entries: identity, plain;
        "limit" limit: Some, plain;
        "hitsAddend" hits_addend: |Integer(hits)| Some(hits), text_of_integer;
        "isNegativeHits" is_negative_hits: identity, plain;
    }
    Entry {
        "key" key: |key: String| key.into(), text_of_bytes;
        "value" value: |value: String| value.into(), text_of_bytes;
    }
    RateLimitOverride {
        "requestsPerUnit" requests_per_unit: |Integer(requests)| requests, plain;
        "unit" unit: |UnitNumber(unit)| unit, |unit| enum_name(*unit, RateLimitUnit::as_str_name);
        "unitMultiplier" unit_multiplier: |Integer(multiplier)| Some(multiplier), plain;
    }
}

response_messages! {
    RateLimitResponse {
        "overallCode" overall_code: |code| enum_name(*code, Code::as_str_name);
        "statuses" statuses: plain;
        "responseHeadersToAdd" response_headers_to_add: plain;
        "requestHeadersToAdd" request_headers_to_add: plain;
        "rawBody" raw_body: base64_of_bytes;
        "dynamicMetadata" dynamic_metadata: json_of_metadata;
        "quota" quota: plain;
    }
    DescriptorStatus {
        "code" code: |code| enum_name(*code, Code::as_str_name);
        "currentLimit" current_limit: plain;
        "limitRemaining" limit_remaining: plain;
        "durationUntilReset" duration_until_reset: text_of_duration;
        "quota" quota: plain;
    }
    RateLimit {
        "requestsPerUnit" requests_per_unit: plain;
        "unit" unit: |unit| enum_name(*unit, rate_limit::Unit::as_str_name);
        "name" name: plain;
        "unitMultiplier" unit_multiplier: plain;
    }
    Quota {
        "requests" requests: plain;
        "validUntil" expiration_specifier: text_of_end;
        "id" id: plain;
    }
    HeaderValue {
        "key" key: plain;
        "value" value: plain;
        "rawValue" raw_value: base64_of_bytes;
    }
}

/// Message of a request, read from an object.
trait RequestMessage: Default {
    /// Names of each field: in JSON, then in the proto file.
    const FIELDS: &'static [[&'static str; 2]];

    /// Reads the value of a field by its name in JSON.
    fn read_value<'de, A: MapAccess<'de>>(&mut self, field: &str, map: &mut A) -> Result<(), A::Error>;
}

/// Reads a value into a field; `null` leaves the default.
fn read_value<'de, A: MapAccess<'de>, T: Deserialize<'de>, F>(
    map: &mut A,
    field: &mut F,
    convert: impl FnOnce(T) -> F,
) -> Result<(), A::Error> {
    if let Some(value) = map.next_value::<Option<T>>()? {
        *field = convert(value);
    }
    Ok(())
}

struct MessageVisitor<M>(PhantomData<M>);

impl<'de, M: RequestMessage> Visitor<'de> for MessageVisitor<M> {
    type Value = M;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<M, A::Error> {
        let mut message = M::default();
        let mut seen = SmallVec::<[&str; 4]>::new();
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            let Some([field, _]) = M::FIELDS.iter().find(|spellings| spellings.contains(&&*name)) else {
                return Err(de::Error::custom(format_args!("unrecognized field name '{name}'")));
            };
            if seen.contains(field) {
                return Err(de::Error::custom(format_args!("the field `{name}` is there twice")));
            }
            seen.push(field);
            // serde_json keeps the position that is at the end of the text of an error.
            message.read_value(field, &mut map).map_err(|error| de::Error::custom(format_args!("{name}: {error}")))?;
        }
        Ok(message)
    }
}

/// Number of an unsigned field, which may be in a string.
struct Integer<T>(T);

impl<'de, T: TryFrom<i128>> Deserialize<'de> for Integer<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "an integer or a string with one";
        deserializer.deserialize_any(IntegerVisitor { expected, parse: parse_integer, kind: PhantomData }).map(Self)
    }
}

/// Number of a [`RateLimitUnit`], by its name or as a number, which may be unknown.
struct UnitNumber(i32);

impl<'de> Deserialize<'de> for UnitNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parse = |name: &str| match RateLimitUnit::from_str_name(name) {
            Some(unit) => Ok(unit as i128),
            None => Err(format!("unrecognized enum value '{name}'")),
        };
        let expected = "the name or number of a unit";
        deserializer.deserialize_any(IntegerVisitor { expected, parse, kind: PhantomData }).map(Self)
    }
}

/// Visitor of whole numbers, also of those with a fraction of 0 or an exponent, and of strings that stand for one.
struct IntegerVisitor<T> {
    expected: &'static str,
    /// Converts a string.
    parse: fn(&str) -> Result<i128, String>,
    kind: PhantomData<T>,
}

impl<T: TryFrom<i128>> IntegerVisitor<T> {
    fn convert<E: de::Error>(number: i128) -> Result<T, E> {
        T::try_from(number).map_err(|_| E::custom(format_args!("the number {number} is out of range")))
    }
}

impl<T: TryFrom<i128>> Visitor<'_> for IntegerVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        Self::convert(number.into())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        Self::convert(number.into())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        Self::convert(convert_whole_float(number).map_err(E::custom)?)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        Self::convert((self.parse)(text).map_err(E::custom)?)
    }
}

/// Parses a whole number as JSON writes numbers: `1e1` and `1.0`, but neither `01` nor `+1`.
fn parse_integer(text: &str) -> Result<i128, String> {
    let number: Number = serde_json::from_str(text)
        .ok()
        .filter(|_| !text.starts_with(char::is_whitespace) && !text.ends_with(char::is_whitespace))
        .ok_or_else(|| format!("invalid number {text:?}, expected one as JSON writes it"))?;
    number.as_i128().map_or_else(|| convert_whole_float(number.as_f64().unwrap_or(f64::NAN)), Ok)
}

/// Converts a number that may be written with a fraction or an exponent.
fn convert_whole_float(number: f64) -> Result<i128, String> {
    if number.fract() != 0.0 {
        return Err(format!("expected integer, not {number}"));
    }
    #[expect(clippy::cast_possible_truncation, reason = "it is whole; the largest i128 is out of every field's range")]
    Ok(number as i128)
}

/// Writes a field that has not its default.
fn write_value<'m, M: SerializeMap, F: Default + PartialEq, T: Serialize>(
    object: &mut M,
    name: &'static str,
    field: &'m F,
    convert: impl FnOnce(&'m F) -> Result<T, M::Error>,
) -> Result<(), M::Error> {
    if *field == F::default() {
        return Ok(());
    }
    object.serialize_entry(name, &convert(field)?)
}

/// Writes a value as serde does.
fn plain<T, E>(value: &T) -> Result<&T, E> {
    Ok(value)
}

/// Writes a number of 64 bits, which proto3 JSON has in strings.
fn text_of_integer<E>(number: &Option<u64>) -> Result<Option<String>, E> {
    Ok(number.map(|number| number.to_string()))
}

fn text_of_bytes<E: ser::Error>(bytes: &impl AsRef<[u8]>) -> Result<&str, E> {
    str::from_utf8(bytes.as_ref()).map_err(|error| E::custom(format_args!("a key or value is not text: {error}")))
}

fn base64_of_bytes<E>(bytes: &impl AsRef<[u8]>) -> Result<String, E> {
    Ok(BASE64_STANDARD.encode(bytes))
}

/// Name of an enum's value, or its number if it has none.
fn enum_name<T: TryFrom<i32>, E>(number: i32, name: fn(&T) -> &'static str) -> Result<Json, E> {
    Ok(T::try_from(number).map_or_else(|_| number.into(), |value| name(&value).into()))
}

fn text_of_duration<E: ser::Error>(duration: &Option<Duration>) -> Result<Option<String>, E> {
    const MAX_SECONDS: u64 = 315_576_000_000;
    let is_out_of_range = |duration: &Duration| {
        duration.seconds.unsigned_abs() > MAX_SECONDS || duration.nanos.unsigned_abs() > 999_999_999
    };
    match duration {
        Some(duration) if is_out_of_range(duration) => Err(E::custom("a duration is out of range")),
        duration => Ok(duration.map(|duration| duration.to_string())),
    }
}

/// Writes the end of a quota, a time of the years 1 to 9999.
fn text_of_end<E: ser::Error>(end: &Option<ExpirationSpecifier>) -> Result<Option<String>, E> {
    match end {
        None => Ok(None),
        Some(ExpirationSpecifier::ValidUntil(end)) if (-62_135_596_800..=253_402_300_799).contains(&end.seconds) => {
            Ok(Some(end.to_string()))
        }
        Some(_) => Err(E::custom("a time is out of range")),
    }
}

fn json_of_metadata<E: ser::Error>(object: &Option<Struct>) -> Result<Option<Json>, E> {
    /// Levels of objects and arrays; messages that were received have fewer.
    const MAX_LEVELS: u32 = 100;
    object.as_ref().map(|object| json_of_object(object, MAX_LEVELS)).transpose()
}

/// Converts an object whose values have at most `levels` levels.
fn json_of_object<E: ser::Error>(object: &Struct, levels: u32) -> Result<Json, E> {
    object.fields.iter().map(|(name, value)| Ok((name.clone(), json_of_value(value, levels)?))).collect()
}

fn json_of_value<E: ser::Error>(value: &Value, levels: u32) -> Result<Json, E> {
    let deeper = levels.checked_sub(1).ok_or_else(|| E::custom("the metadata nests too deep"))?;
    Ok(match &value.kind {
        None | Some(Kind::NullValue(_)) => Json::Null,
        Some(Kind::BoolValue(value)) => Json::Bool(*value),
        Some(Kind::NumberValue(number)) => {
            Number::from_f64(*number).ok_or_else(|| E::custom("a number in the metadata is not finite"))?.into()
        }
        Some(Kind::StringValue(text)) => Json::String(text.clone()),
        Some(Kind::ListValue(list)) => {
            list.values.iter().map(|value| json_of_value(value, deeper)).collect::<Result<_, E>>()?
        }
        Some(Kind::StructValue(object)) => json_of_object(object, deeper)?,
    })
}
