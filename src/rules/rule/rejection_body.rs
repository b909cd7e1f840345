//! Body of a rejection: text with places for what the limit that rejects says.
//!
//! A place is `%NAME%`, and `%%NAME%` the text `%NAME%`. Names have three letters or more, because `%CE%` is a part of a
//! URL. In JSON, HTML and XML values are escaped, so none can leave the text around it. `over_limit_format` names a ready
//! body: what well-known APIs answer with 429.
//!
//! Decides: values in `over_limit_body`, and how they are escaped; bodies of `over_limit_format`.

use std::borrow::Cow;
use std::sync::Arc;

use crate::base::named_enum::named_enum;
use crate::base::text::{quote_as_json, remove_unprintable};

/// Maximum number of places of a body: bounds how much longer its values make it.
const MAX_PLACES: usize = 32;
/// Shortest name of a place.
const MIN_NAME_BYTES: usize = 3;

named_enum! {
    /// What a place in a body is for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum BodyValue {
        /// Name of the limit, else its path.
        LimitName = "LIMIT_NAME",
        /// Hits per period.
        Limit = "LIMIT",
        /// Hits that would still be admitted.
        Remaining = "REMAINING",
        /// Seconds until the request can pass.
        RetryAfter = "RETRY_AFTER",
        /// Time at which the request can pass, RFC 3339 in UTC.
        RetryAt = "RETRY_AT",
    }
}

named_enum! {
    /// Value of `over_limit_format`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RejectionFormat {
        /// RFC 9457, with the type of draft-ietf-httpapi-ratelimit-headers-11.
        ProblemJson = "problem+json",
        /// Error of JSON-RPC 2.0. The id of the request is not known.
        JsonRpc = "json-rpc",
        /// API of OpenAI.
        OpenAi = "openai",
        /// API of Anthropic.
        Anthropic = "anthropic",
        /// API of Gemini: google.rpc.Status.
        Gemini = "gemini",
    }
}

impl RejectionFormat {
    /// Content type of the body.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::ProblemJson => "application/problem+json",
            Self::JsonRpc | Self::OpenAi | Self::Anthropic | Self::Gemini => "application/json",
        }
    }

    /// Text of the body.
    pub const fn body(self) -> &'static str {
        match self {
            Self::ProblemJson => {
                r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Too many requests","status":429,"detail":"%LIMIT_NAME% allows %LIMIT%. Try again in %RETRY_AFTER% s.","violated-policies":["%LIMIT_NAME%"]}"#
            }
            Self::JsonRpc => {
                r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32029,"message":"Too many requests","data":{"limit":"%LIMIT_NAME%","retryAfterSeconds":%RETRY_AFTER%}}}"#
            }
            Self::OpenAi => {
                r#"{"error":{"message":"Rate limit reached for %LIMIT_NAME%: limit %LIMIT%, remaining %REMAINING%. Please try again in %RETRY_AFTER%s.","type":"requests","param":null,"code":"rate_limit_exceeded"}}"#
            }
            Self::Anthropic => {
                r#"{"type":"error","error":{"type":"rate_limit_error","message":"This request would exceed the rate limit of %LIMIT% (%LIMIT_NAME%). Please try again in %RETRY_AFTER% seconds."}}"#
            }
            Self::Gemini => {
                r#"{"error":{"code":429,"message":"Quota exceeded for %LIMIT_NAME%, limit: %LIMIT%. Please retry in %RETRY_AFTER%s.","status":"RESOURCE_EXHAUSTED","details":[{"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"%RETRY_AFTER%s"}]}}"#
            }
        }
    }
}

/// Text of a body, with its places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectionBody {
    text: Arc<str>,
    places: Box<[Place]>,
}

/// What stands in place of the bytes from `start` to `end`: a value, or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    start: usize,
    end: usize,
    value: Option<BodyValue>,
}

/// Why a text cannot be a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyError {
    /// No value has this name.
    UnknownValue(String),
    /// There are more places than this.
    TooManyPlaces(usize),
}

impl RejectionBody {
    /// Finds the places of a text.
    ///
    /// # Errors
    /// A place has an unknown name, or there are too many.
    pub fn parse(text: Arc<str>) -> Result<Self, BodyError> {
        let mut places = Vec::new();
        let (mut at, mut end_of_last) = (0, 0);
        while let Some(start) = text[at..].find('%').map(|found| at + found) {
            at = start + 1;
            let is_of_name = |c: char| c.is_ascii_uppercase() || c == '_';
            let name = &text[at..at + text[at..].find(|c| !is_of_name(c)).unwrap_or(text.len() - at)];
            let end = at + name.len() + 1;
            if name.len() < MIN_NAME_BYTES || text.as_bytes().get(end - 1) != Some(&b'%') {
                continue;
            }
            if text[end_of_last..start].ends_with('%') {
                places.push(Place { start: start - 1, end: start, value: None });
            } else {
                let value = BodyValue::from_name(name).ok_or_else(|| BodyError::UnknownValue(name.to_owned()))?;
                places.push(Place { start, end, value: Some(value) });
            }
            (at, end_of_last) = (end, end);
        }
        if places.len() > MAX_PLACES {
            return Err(BodyError::TooManyPlaces(MAX_PLACES));
        }
        Ok(Self { text, places: places.into() })
    }

    /// The text as written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns `true` if there are values to fill in.
    pub fn has_values(&self) -> bool {
        self.places.iter().any(|place| place.value.is_some())
    }

    /// The text with its values, each escaped for this content type.
    pub fn fill(&self, content_type: Option<&str>, value: impl Fn(BodyValue) -> String) -> Cow<'_, str> {
        if self.places.is_empty() {
            return Cow::Borrowed(&self.text);
        }
        let escape = find_escape(content_type);
        let (mut filled, mut at) = (String::with_capacity(self.text.len() + 64), 0);
        for place in &self.places {
            filled += &self.text[at..place.start];
            if let Some(of) = place.value {
                filled += &escape(&value(of));
            }
            at = place.end;
        }
        filled += &self.text[at..];
        Cow::Owned(filled)
    }

    /// Returns `false` if the content type is JSON and the body is not, once values are filled in.
    pub fn is_json_if_declared(&self, content_type: Option<&str>) -> bool {
        let sample = |value| match value {
            BodyValue::LimitName => "name".to_owned(),
            BodyValue::RetryAt => "2026-01-01T00:00:00Z".to_owned(),
            BodyValue::Limit | BodyValue::Remaining | BodyValue::RetryAfter => "1".to_owned(),
        };
        let parses = |text: &str| serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok();
        !is_of_kind(content_type, &["json"]) || parses(&self.fill(content_type, sample))
    }

    /// Returns `true` for a body that looks like JSON, has values, and does not say that it is JSON: they are not escaped.
    pub fn lacks_content_type(&self, content_type: Option<&str>) -> bool {
        self.has_values() && content_type.is_none() && self.text.trim_start().starts_with(['{', '['])
    }
}

/// Returns the escape of values in a body of this content type. For any other, unprintable characters are left out.
fn find_escape(content_type: Option<&str>) -> fn(&str) -> String {
    match () {
        () if is_of_kind(content_type, &["json", "x-ndjson", "ndjson", "javascript"]) => escape_for_json,
        () if is_of_kind(content_type, &["html", "xml"]) => escape_for_markup,
        () => |text| remove_unprintable(text).into_owned(),
    }
}

/// True for `application/json`, `application/problem+json; charset=utf-8` and the like, if `kinds` has `json`.
fn is_of_kind(content_type: Option<&str>, kinds: &[&str]) -> bool {
    let essence = content_type.and_then(|text| text.split(';').next()).unwrap_or_default().trim();
    let last = essence.rsplit(['/', '+']).next().unwrap_or_default();
    kinds.iter().any(|kind| last.eq_ignore_ascii_case(kind))
}

fn escape_for_json(text: &str) -> String {
    let quoted = quote_as_json(text);
    quoted[1..quoted.len() - 1].to_owned()
}

fn escape_for_markup(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in remove_unprintable(text).chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            c => escaped.push(c),
        }
    }
    escaped
}
