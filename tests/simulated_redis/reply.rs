//! Replies, and their encoding in RESP2 and RESP3.

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};

use crate::numbers::format_double;

/// Version of the protocol, which HELLO selects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// RESP2, that of a new connection.
    #[default]
    Resp2,
    /// RESP3.
    Resp3,
}

/// Reply to a command that did not fail.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// Simple string, such as OK.
    Status(Bytes),
    /// Error that a script returned.
    Error(String),
    /// Integer.
    Integer(i64),
    /// Floating point number; a string in RESP2.
    Double(f64),
    /// String of bytes.
    Bulk(Bytes),
    /// No value; in RESP2 in the form of a string.
    Null,
    /// No value; in RESP2 in the form of an array.
    NullArray,
    /// Array.
    Array(Vec<Self>),
    /// Pairs of key and value; a flat array in RESP2.
    Map(Vec<(Self, Self)>),
    /// Names of streams with their entries; an array of pairs in RESP2.
    Streams(Vec<(Self, Self)>),
    /// Members of a sorted set with their scores; a flat array in RESP2, pairs in RESP3.
    ScoredMembers(Vec<(Bytes, f64)>),
}

/// Error reply to a command: its text, which begins with a code such as `ERR`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(pub Cow<'static, str>);

/// Reply or error reply.
pub type CommandResult = Result<Reply, Failure>;

impl Failure {
    /// The value has another type than the command needs.
    pub const WRONG_TYPE: Self = Self::fixed("WRONGTYPE Operation against a key holding the wrong kind of value");
    /// The options are wrong.
    pub const SYNTAX: Self = Self::fixed("ERR syntax error");
    /// A word is no integer.
    pub const NOT_AN_INTEGER: Self = Self::fixed("ERR value is not an integer or out of range");
    /// A word is no number.
    pub const NOT_A_FLOAT: Self = Self::fixed("ERR value is not a valid float");

    /// Creates an error of a constant text.
    pub const fn fixed(text: &'static str) -> Self {
        Self(Cow::Borrowed(text))
    }

    /// Creates an error of this text.
    pub const fn new(text: String) -> Self {
        Self(Cow::Owned(text))
    }
}

impl Reply {
    /// Returns OK.
    pub const fn ok() -> Self {
        Self::Status(Bytes::from_static(b"OK"))
    }

    /// Returns a string of a constant text.
    pub const fn text(text: &'static str) -> Self {
        Self::Bulk(Bytes::from_static(text.as_bytes()))
    }

    /// Returns 1 for true, 0 for false.
    pub fn flag(is_set: bool) -> Self {
        Self::Integer(i64::from(is_set))
    }

    /// Returns a number of elements.
    pub fn count(count: usize) -> Self {
        Self::Integer(i64::try_from(count).unwrap_or(i64::MAX))
    }

    /// Returns a string, or null.
    pub fn bulk_or_null(value: Option<Bytes>) -> Self {
        value.map_or(Self::Null, Self::Bulk)
    }

    /// Returns the elements of the array that represents a collection in RESP2.
    ///
    /// # Errors
    /// The reply is no collection; returns it.
    pub fn into_flat_elements(self) -> Result<Vec<Self>, Self> {
        match self {
            Self::Array(elements) => Ok(elements),
            Self::Map(pairs) => Ok(pairs.into_iter().flat_map(|(key, value)| [key, value]).collect()),
            Self::Streams(pairs) => Ok(pairs.into_iter().map(|(key, value)| Self::Array(vec![key, value])).collect()),
            Self::ScoredMembers(members) => Ok(members
                .into_iter()
                .flat_map(|(member, score)| [Self::Bulk(member), Self::Bulk(format_double(score).into())])
                .collect()),
            other => Err(other),
        }
    }

    /// Appends the encoded reply.
    pub fn encode(self, protocol: Protocol, out: &mut BytesMut) {
        let is_resp3 = protocol == Protocol::Resp3;
        match self {
            Self::Status(text) => write_line(out, b'+', &text),
            Self::Error(text) => write_error(&text, out),
            Self::Integer(number) => write_line(out, b':', number.to_string().as_bytes()),
            Self::Double(number) if is_resp3 => write_line(out, b',', format_double(number).as_bytes()),
            Self::Double(number) => Self::Bulk(format_double(number).into()).encode(protocol, out),
            Self::Bulk(bytes) => {
                write_line(out, b'$', bytes.len().to_string().as_bytes());
                out.put_slice(&bytes);
                out.put_slice(b"\r\n");
            }
            Self::Null | Self::NullArray if is_resp3 => out.put_slice(b"_\r\n"),
            Self::Null => out.put_slice(b"$-1\r\n"),
            Self::NullArray => out.put_slice(b"*-1\r\n"),
            Self::Map(pairs) | Self::Streams(pairs) if is_resp3 => {
                write_line(out, b'%', pairs.len().to_string().as_bytes());
                pairs.into_iter().for_each(|(key, value)| {
                    key.encode(protocol, out);
                    value.encode(protocol, out);
                });
            }
            Self::ScoredMembers(members) if is_resp3 => {
                let pair = |(member, score)| Self::Array(vec![Self::Bulk(member), Self::Double(score)]);
                Self::Array(members.into_iter().map(pair).collect()).encode(protocol, out);
            }
            collection => {
                let elements = collection.into_flat_elements().unwrap_or_default();
                write_line(out, b'*', elements.len().to_string().as_bytes());
                elements.into_iter().for_each(|element| element.encode(protocol, out));
            }
        }
    }
}

/// Appends an error reply; line breaks become spaces, as in Redis.
pub fn write_error(text: &str, out: &mut BytesMut) {
    let text = text.trim_end_matches(['\r', '\n']).replace(['\r', '\n'], " ");
    write_line(out, b'-', text.as_bytes());
}

fn write_line(out: &mut BytesMut, kind: u8, text: &[u8]) {
    out.put_u8(kind);
    out.put_slice(text);
    out.put_slice(b"\r\n");
}
