//! Keys of what a rejection tells the client: body, content type, headers, and the time to wait.
//!
//! Decides: which text is a content type; names and values of `over_limit_headers`.

use std::sync::Arc;

use super::fields::{DocumentReader, Field, FieldPath};
use super::keys::ReadValue;
use crate::rules::diagnostic::escape_for_message;
use crate::rules::key_table::{MAX_OVER_LIMIT_BODY_BYTES, ValueKind};
use crate::rules::rule::rejection_body::{BodyError, BodyValue, RejectionBody, RejectionFormat};
use crate::rules::rule::{RejectionHeaders, RejectionResponse};
use crate::rules::yaml::{Spanned, YamlContent};

/// Keys of the response to a rejection.
#[derive(Clone, Copy, Debug, Default)]
pub struct RejectionKeys<'w> {
    /// `over_limit_body`.
    pub body: Option<&'w Spanned<RejectionBody>>,
    /// `over_limit_content_type`.
    pub content_type: Option<&'w Spanned<Arc<str>>>,
    /// `over_limit_format`.
    pub format: Option<&'w Spanned<RejectionFormat>>,
    /// `over_limit_headers`.
    pub headers: Option<&'w Spanned<Arc<RejectionHeaders>>>,
    /// `jitter`.
    pub jitter: Option<&'w Spanned<u32>>,
}

impl RejectionKeys<'_> {
    /// Reports a body or a content type beside `over_limit_format`, which has both; returns the keys without them.
    pub fn check_format(self, reader: &mut DocumentReader<'_>, field_path: &FieldPath<'_>) -> Self {
        if self.format.is_none() {
            return self;
        }
        let beside = [
            ("over_limit_body", self.body.map(|body| body.at)),
            ("over_limit_content_type", self.content_type.map(|content_type| content_type.at)),
        ];
        for (key, at) in beside.into_iter().filter_map(|(key, at)| Some((key, at?))) {
            let message = format!("`{key}` beside `over_limit_format`, which has one");
            reader.report_error(at, &field_path.with_key(key), message, "remove one of the two");
        }
        Self { body: None, content_type: None, ..self }
    }

    /// Completes the keys by those of lower precedence. A body, or a format in its place, is one thing.
    pub fn or(self, lower: Self) -> Self {
        let (body, format) = if self.body.is_some() || self.format.is_some() {
            (self.body, self.format)
        } else {
            (lower.body, lower.format)
        };
        Self {
            body,
            format,
            content_type: self.content_type.or(lower.content_type),
            headers: self.headers.or(lower.headers),
            jitter: self.jitter.or(lower.jitter),
        }
    }

    /// Creates the response.
    pub fn build(self) -> RejectionResponse {
        let (body, content_type) = match self.format.map(|format| format.value) {
            Some(format) => (RejectionBody::parse(format.body().into()).ok(), Some(format.content_type().into())),
            None => {
                let content_type = self.content_type.map(|content_type| Arc::clone(&content_type.value));
                (self.body.map(|body| body.value.clone()), content_type)
            }
        };
        let headers = self.headers.map(|headers| Arc::clone(&headers.value));
        let jitter_milli_percent = self.jitter.map_or(0, |jitter| jitter.value);
        RejectionResponse { body, content_type, headers, jitter_milli_percent }
    }
}

impl ReadValue for RejectionBody {
    const KIND: ValueKind = ValueKind::Body;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let text = String::read_value(reader, field)?;
        if text.len() > MAX_OVER_LIMIT_BODY_BYTES {
            let message = format!("an `{}` of {} bytes", field.key.name, text.len());
            let hint = format!("at most {MAX_OVER_LIMIT_BODY_BYTES} are sent");
            reader.report_error(field.at, &field.path, message, hint);
        }
        let (message, hint) = match Self::parse(text.into()) {
            Ok(body) => return Some(body),
            Err(BodyError::UnknownValue(name)) => {
                let known: Vec<String> = BodyValue::NAMES.iter().map(|name| format!("%{name}%")).collect();
                (format!("unknown value %{}%", escape_for_message(&name)), format!("write one of {}", known.join(", ")))
            }
            Err(BodyError::TooManyPlaces(most)) => {
                (format!("more than {most} values in an `{}`", field.key.name), "remove some".to_owned())
            }
        };
        reader.report_error(field.node.at, &field.path, message, hint);
        None
    }
}

/// Content type.
impl ReadValue for Arc<str> {
    const KIND: ValueKind = ValueKind::ContentType;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let text = String::read_value(reader, field)?;
        if !is_header_value(&text) {
            let message = format!("`{}` is not a content type", escape_for_message(&text));
            reader.report_error(field.at, &field.path, message, "write one such as application/json");
        }
        Some(text.trim().into())
    }
}

/// Returns true for a text that can be sent as the value of a header. Anything but visible ASCII would break the response
/// or split it.
fn is_header_value(text: &str) -> bool {
    let visible = text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    visible && !text.trim().is_empty() && text.len() <= 256
}

/// Maximum number of `over_limit_headers`.
const MAX_REJECTION_HEADERS: usize = 16;
/// Headers that this service or Envoy sets, or that frame a message.
const RESERVED_HEADERS: [&str; 8] = [
    "connection",
    "content-length",
    "content-type",
    "host",
    "keep-alive",
    "retry-after",
    "transfer-encoding",
    "upgrade",
];

impl ReadValue for Arc<RejectionHeaders> {
    const KIND: ValueKind = ValueKind::Headers;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let YamlContent::Map(map) = &field.node.content else {
            let hint = "write a mapping such as {x-should-retry: \"false\"}";
            reader.report_wrong_type(field.node, "a mapping", hint, &field.path);
            return None;
        };
        let mut headers = RejectionHeaders::new();
        for (name, node) in map.iter() {
            let text = name.as_scalar().map_or("", |scalar| scalar.text());
            let path = field.path.with_key(text);
            let is_of_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
            let is_name = !text.is_empty() && text.len() <= 64 && text.bytes().all(is_of_name);
            if !is_name || RESERVED_HEADERS.contains(&text) {
                let message = format!("'{}' cannot be a header of a rejection", escape_for_message(text));
                let hint = "write up to 64 lower-case letters, digits, `-` and `_`, and no header that is always set";
                reader.report_error(name.at, &path, message, hint);
                continue;
            }
            match node.as_scalar().map(|scalar| scalar.text()).filter(|text| is_header_value(text)) {
                Some(value) => headers.push((text.to_owned(), value.trim().to_owned())),
                None => {
                    let message = format!("'{text}' has no value that can be sent");
                    reader.report_error(node.at, &path, message, "write up to 256 visible characters of ASCII");
                }
            }
        }
        if headers.len() > MAX_REJECTION_HEADERS {
            let message = format!("{} headers of a rejection", headers.len());
            reader.report_error(field.at, &field.path, message, format!("at most {MAX_REJECTION_HEADERS} are sent"));
        }
        Some(headers.into())
    }
}
