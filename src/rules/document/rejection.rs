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
    pub fn report_keys_beside_format(self, reader: &mut DocumentReader<'_>, field_path: &FieldPath<'_>) -> Self {
        if self.format.is_none() {
            return self;
        }
        let beside = [
            ("over_limit_body", self.body.map(|body| body.at)),
            ("over_limit_content_type", self.content_type.map(|content_type| content_type.at)),
        ];
        for (key, at) in beside.into_iter().filter_map(|(key, at)| Some((key, at?))) {
            let message = format!("`{key}` beside `over_limit_format`, which sets it too");
            reader.report_error(at, &field_path.with_key(key), message, "remove one of the two");
        }
        Self { body: None, content_type: None, ..self }
    }

    /// Completes the keys by those of lower precedence. A body replaces a lower format, and a format a lower body.
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
        let jitter_milli_percent = self.jitter.map(|jitter| jitter.value);
        RejectionResponse { body, content_type, headers, jitter_milli_percent }
    }
}

impl ReadValue for RejectionBody {
    const KIND: ValueKind = ValueKind::Body;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let text = String::read_value(reader, field)?;
        if text.len() > MAX_OVER_LIMIT_BODY_BYTES {
            let message = format!("an `{}` of {} bytes", field.key.name, text.len());
            let hint = format!("write {MAX_OVER_LIMIT_BODY_BYTES} bytes at most");
            reader.report_error(field.at, &field.path, message, hint);
        }
        let (message, hint) = match Self::parse(text.into()) {
            Ok(body) => return Some(body),
            Err(BodyError::UnknownValue(name)) => {
                let known: Vec<String> = BodyValue::NAMES.iter().map(|name| format!("%{name}%")).collect();
                let name = escape_for_message(&name);
                let hint = format!("write one of {}, or %%{name}% for this text", known.join(", "));
                (format!("unknown value %{name}%"), hint)
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
const RESERVED_HEADERS: [&str; 12] = [
    "connection",
    "content-length",
    "content-type",
    "date",
    "host",
    "keep-alive",
    "retry-after",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

impl ReadValue for Arc<RejectionHeaders> {
    const KIND: ValueKind = ValueKind::Headers;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let YamlContent::Map(map) = &field.node.content else {
            let hint = "write a mapping such as {x-should-retry: \"false\"}";
            reader.report_error(field.node.at, &field.path, format!("`{}` is no mapping", field.key.name), hint);
            return None;
        };
        let mut headers = RejectionHeaders::new();
        for (name, node) in map.iter() {
            let text = name.as_scalar().map_or("", |scalar| scalar.text());
            let (path, shown) = (field.path.with_key(text), escape_for_message(text));
            match find_problem_of_header_name(text) {
                None => {}
                Some(hint) => {
                    let message = format!("'{shown}' cannot be a header of a rejection");
                    reader.report_error(name.at, &path, message, hint);
                    continue;
                }
            }
            let value = node.as_scalar().map_or("", |scalar| scalar.text()).trim();
            let has_values = RejectionBody::parse(value.into()).map_or(true, |value| value.has_values());
            if is_header_value(value) && !has_values {
                headers.push((text.to_ascii_lowercase(), value.to_owned()));
            } else {
                let hint = match has_values {
                    true => "values such as %LIMIT% are for `over_limit_body`",
                    false => "write 1 to 256 printable characters of ASCII",
                };
                reader.report_error(node.at, &path, format!("the value of '{shown}' cannot be sent"), hint);
            }
        }
        if headers.len() > MAX_REJECTION_HEADERS {
            let message = format!("{} headers of a rejection", headers.len());
            reader.report_error(field.at, &field.path, message, format!("write {MAX_REJECTION_HEADERS} at most"));
        }
        Some(headers.into())
    }
}

/// Returns why a rejection cannot have a header of this name, as a hint.
fn find_problem_of_header_name(name: &str) -> Option<&'static str> {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if name.is_empty() || name.len() > 64 || !name.bytes().all(is_of_name) {
        return Some("write 1 to 64 letters, digits, `-` and `_`");
    }
    let lower = name.to_ascii_lowercase();
    match &*lower {
        "content-type" => Some("write `over_limit_content_type`"),
        "retry-after" => Some("it is set by itself; see `jitter`"),
        name if RESERVED_HEADERS.contains(&name) => Some("it is set by itself"),
        _ => None,
    }
}
