//! Body of a rejection: text with places for what the limit that rejects says.
//!
//! A place is `%NAME%`, as in Envoy's formats. Values are escaped by the content type, so none can leave the text
//! around it. `over_limit_format` names a ready body: what well-known APIs answer with 429.
//!
//! Decides: values in `over_limit_body`, and how they are escaped; bodies of `over_limit_format`.

use std::borrow::Cow;
use std::sync::Arc;

use crate::base::named_enum::named_enum;
use crate::base::text::remove_unprintable;

/// Maximum number of places of a body: each takes the length of a value.
const MAX_PLACES: usize = 32;

named_enum! {
    /// Value that a body can have.
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

/// A value in the text, in place of the bytes from `start` to `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    start: usize,
    end: usize,
    value: BodyValue,
}

/// Reason why a text is no body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyError {
    /// A place with this name, which no value has.
    UnknownValue(String),
    /// More places than are filled.
    TooManyPlaces(usize),
}

impl RejectionBody {
    /// Finds the places of a text.
    ///
    /// # Errors
    /// A place has an unknown name, or there are too many.
    pub fn parse(text: Arc<str>) -> Result<Self, BodyError> {
        let mut places = Vec::new();
        let mut at = 0;
        while let Some(start) = text[at..].find('%').map(|found| at + found) {
            at = start + 1;
            let is_of_name = |c: char| c.is_ascii_uppercase() || c == '_';
            let name = &text[at..at + text[at..].find(|c| !is_of_name(c)).unwrap_or(text.len() - at)];
            let end = at + name.len() + 1;
            if name.is_empty() || text.as_bytes().get(end - 1) != Some(&b'%') {
                continue;
            }
            let value = BodyValue::from_name(name).ok_or_else(|| BodyError::UnknownValue(name.to_owned()))?;
            places.push(Place { start, end, value });
            at = end;
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

    /// The text with its values, each escaped for this content type.
    pub fn fill(&self, content_type: Option<&str>, value: impl Fn(BodyValue) -> String) -> Cow<'_, str> {
        if self.places.is_empty() {
            return Cow::Borrowed(&self.text);
        }
        let escape = find_escape(content_type);
        let (mut filled, mut at) = (String::with_capacity(self.text.len() + 64), 0);
        for place in &self.places {
            filled += &self.text[at..place.start];
            filled += &escape(&value(place.value));
            at = place.end;
        }
        filled += &self.text[at..];
        Cow::Owned(filled)
    }

    /// Returns `false` if the content type is of JSON, and the body is none once values fill its places.
    pub fn is_valid_for(&self, content_type: Option<&str>) -> bool {
        let is_json = content_type.is_some_and(|content_type| is_of_kind(content_type, "json"));
        let sample = |value| match value {
            BodyValue::LimitName => "name".to_owned(),
            BodyValue::RetryAt => "2026-01-01T00:00:00Z".to_owned(),
            BodyValue::Limit | BodyValue::Remaining | BodyValue::RetryAfter => "1".to_owned(),
        };
        let parses = |text: &str| serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok();
        self.places.is_empty() || !is_json || parses(&self.fill(content_type, sample))
    }
}

/// Returns the escape of values in a body of this content type. Without a markup, unprintable characters are left out.
fn find_escape(content_type: Option<&str>) -> fn(&str) -> String {
    let is_kind = |kind| content_type.is_some_and(|content_type| is_of_kind(content_type, kind));
    match () {
        () if is_kind("json") => escape_for_json,
        () if is_kind("html") || is_kind("xml") => escape_for_markup,
        () => |text| remove_unprintable(text).into_owned(),
    }
}

/// True for `application/json`, `application/problem+json; charset=utf-8` and the like, if `kind` is `json`.
fn is_of_kind(content_type: &str, kind: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.rsplit(['/', '+']).next().is_some_and(|last| last.eq_ignore_ascii_case(kind))
}

fn escape_for_json(text: &str) -> String {
    // A text in quotes.
    let quoted = serde_json::Value::from(text).to_string();
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
