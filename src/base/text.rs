//! Text made safe and short for people: unprintable characters are escaped, replaced or removed. Also bytes as text:
//! hexadecimal digits, and the percent-encoding of URLs and forms.
//!
//! Names, values and messages come from clients, files and other servers. A terminal acts on control characters, marks
//! of writing direction show a text in another order than it has, and characters without a glyph make two names look
//! alike. [`is_unprintable`] is the one set of such characters, and no output has one of them raw: text for people
//! escapes them, JSON escapes them so that it decodes to the same text, and where no escape exists, as in headers, they
//! are replaced or removed.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde::Serialize;

/// True for control characters, line and paragraph separators, annotation marks, and characters that are shown as
/// nothing: Unicode's `Default_Ignorable_Code_Point`, which includes marks of writing direction, joiners and tags.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || c > '\u{ac}'
            && matches!(c,
                '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
                | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
                | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}')
}

/// True if all bytes are printable ASCII, as in nearly all texts.
fn is_printable_ascii(bytes: &[u8]) -> bool {
    // Without branches inside a run, so that the compiler can vectorize it.
    bytes.chunks(64).all(|run| run.iter().fold(true, |all, byte| all & matches!(byte, b' '..=b'~')))
}

/// Escapes unprintable characters as in Rust's string literals, such as `\n` and `\u{202e}`.
pub fn escape_unprintable(text: &str) -> String {
    if is_printable_ascii(text.as_bytes()) {
        return text.to_owned();
    }
    let mut printable = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unprintable(c) {
            printable.extend(c.escape_default());
        } else {
            printable.push(c);
        }
    }
    printable
}

/// Cuts a text at a number of characters, and escapes unprintable ones; `...` stands for the rest.
pub fn truncate_and_escape(text: &str, max_chars: usize) -> String {
    match first_chars_if_longer(text, max_chars) {
        Some(start) => escape_unprintable(start) + "...",
        None => escape_unprintable(text),
    }
}

/// Returns the first characters of a text; `None` if it has no more than these.
pub fn first_chars_if_longer(text: &str, max_chars: usize) -> Option<&str> {
    text.char_indices().nth(max_chars).map(|(end, _)| &text[..end])
}

/// Returns the whole characters among the first bytes of a text.
pub fn truncate_to_bytes(text: &str, max_bytes: usize) -> &str {
    let is_end = |end: &usize| text.is_char_boundary(*end);
    let end = (0..=max_bytes.min(text.len())).rev().find(is_end).unwrap_or(0);
    &text[..end]
}

/// Returns a character, or U+FFFD in place of an unprintable one.
pub fn replace_unprintable_char(c: char) -> char {
    if is_unprintable(c) { char::REPLACEMENT_CHARACTER } else { c }
}

/// Replaces unprintable characters of a text or a page by U+FFFD; line feeds stay.
pub fn replace_unprintable(text: &str) -> String {
    text.chars().map(|c| if c == '\n' { c } else { replace_unprintable_char(c) }).collect()
}

/// Removes unprintable characters.
pub fn remove_unprintable(text: &str) -> Cow<'_, str> {
    if is_printable_ascii(text.as_bytes()) || !text.contains(is_unprintable) {
        return Cow::Borrowed(text);
    }
    text.chars().filter(|c| !is_unprintable(*c)).collect()
}

/// Encloses a text in quotes, with escapes as in JSON.
pub fn quote_as_json(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            c if is_unprintable(c) => push_json_escape(&mut quoted, c),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Escapes the unprintable characters that valid JSON may have, so that it decodes to the same values.
///
/// Line feeds stay: JSON has them raw only between values. Other white space between values becomes a space.
pub fn escape_unprintable_json(json: &str) -> Cow<'_, str> {
    if is_printable_ascii(json.as_bytes()) {
        return Cow::Borrowed(json);
    }
    let must_change = |c: char| c != '\n' && is_unprintable(c);
    let Some(first) = json.find(must_change) else { return Cow::Borrowed(json) };
    let mut printable = String::with_capacity(json.len() + 16);
    printable.push_str(&json[..first]);
    for c in json[first..].chars() {
        match c {
            '\r' | '\t' => printable.push(' '),
            c if must_change(c) => push_json_escape(&mut printable, c),
            c => printable.push(c),
        }
    }
    Cow::Owned(printable)
}

/// Does what [`escape_unprintable_json`] does, for lines of JSON in UTF-8.
pub fn escape_unprintable_json_lines(lines: &[u8]) -> Cow<'_, [u8]> {
    if lines.split(|byte| *byte == b'\n').all(is_printable_ascii) {
        return Cow::Borrowed(lines);
    }
    match String::from_utf8_lossy(lines) {
        Cow::Owned(text) => Cow::Owned(escape_unprintable_json(&text).into_owned().into_bytes()),
        Cow::Borrowed(text) => match escape_unprintable_json(text) {
            Cow::Borrowed(_) => Cow::Borrowed(lines),
            Cow::Owned(printable) => Cow::Owned(printable.into_bytes()),
        },
    }
}

/// Encodes a value as indented JSON without unprintable characters.
///
/// # Errors
/// The value has a map whose keys are not text.
pub fn to_pretty_json(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string_pretty(value).map(|json| escape_unprintable_json(&json).into_owned())
}

/// Appends an escape of JSON, a pair of them above 16 bits.
fn push_json_escape(json: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        // Writing to a String does not fail.
        let _ = write!(json, "\\u{unit:04x}");
    }
}

/// Returns bytes as lower-case hexadecimal digits.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

/// Encodes everything but letters, digits, `-`, `_`, `.` and `~` as `%XX`, as queries, forms and AWS need it.
pub fn percent_encode(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len() + 16), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _infallible = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}

/// Formats thousandths of a percent: `12.5%`.
pub fn format_milli_percent(milli_percent: u32) -> String {
    let decimals = format!("{}.{:03}", milli_percent / 1000, milli_percent % 1000);
    format!("{}%", decimals.trim_end_matches('0').trim_end_matches('.'))
}
