//! Decodes the bytes of a rule file to text.
//!
//! UTF-8 is accepted with or without a byte order mark, UTF-16 with one. Lines end with LF or CR LF. No control characters
//! are allowed except tab and line breaks; a file with others is damaged or binary. The size is checked before anything is allocated.
//!
//! Decides: encodings and control characters of a rule file.

use std::borrow::Cow;

use super::Position;

/// Maximum size of a rule file, in bytes.
pub const MAX_YAML_BYTES: usize = 64 * 1024 * 1024;

/// Reason why bytes are not text, with position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableText {
    /// Position of the first invalid character.
    pub at: Position,
    /// Error message.
    pub message: String,
    /// Suggested fix.
    pub hint: &'static str,
}

/// Decodes the bytes of a file.
pub fn decode_text(bytes: &[u8]) -> Result<Cow<'_, str>, UnreadableText> {
    let start = Position { line: 1, column: 1 };
    if bytes.len() > MAX_YAML_BYTES {
        let message =
            format!("a rule file of {} MB, and at most {} MB are read", bytes.len() >> 20, MAX_YAML_BYTES >> 20);
        return Err(UnreadableText { at: start, message, hint: "split it into several files" });
    }
    let text = match bytes {
        [0xef, 0xbb, 0xbf, rest @ ..] => decode_utf8(rest)?.into(),
        [0xff, 0xfe, rest @ ..] => decode_utf16(rest, u16::from_le_bytes)?.into(),
        [0xfe, 0xff, rest @ ..] => decode_utf16(rest, u16::from_be_bytes)?.into(),
        _ => Cow::Borrowed(decode_utf8(bytes)?),
    };
    if is_plain_ascii_text(text.as_bytes()) {
        return Ok(text);
    }
    match text.char_indices().find(|(_, character)| is_forbidden_character(*character)) {
        None => Ok(text),
        Some((index, character)) => Err(UnreadableText {
            at: end_position(&text[..index]),
            message: format!("control characters are not allowed, and here is U+{:04X}", u32::from(character)),
            hint: if character == '\0' { "this looks like a binary file" } else { "write it as an escape in quotes" },
        }),
    }
}

fn decode_utf8(bytes: &[u8]) -> Result<&str, UnreadableText> {
    std::str::from_utf8(bytes).map_err(|error| {
        let valid = std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default();
        let (message, hint) = if bytes.contains(&0) {
            ("this is not text", "this looks like a binary file")
        } else {
            ("invalid UTF-8", "save the file as UTF-8")
        };
        UnreadableText { at: end_position(valid), message: message.into(), hint }
    })
}

fn decode_utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, UnreadableText> {
    let units = bytes.chunks_exact(2).map(|pair| unit([pair[0], pair[1]]));
    let text: Result<String, _> = char::decode_utf16(units).collect();
    let whole = bytes.len().is_multiple_of(2);
    text.ok().filter(|_| whole).ok_or_else(|| UnreadableText {
        at: Position { line: 1, column: 1 },
        message: "invalid UTF-16".into(),
        hint: "save the file as UTF-8",
    })
}

/// Returns `true` if all bytes are printable ASCII or line breaks, as in most large rule files.
///
/// Runs of 256 bytes are folded without branches, so that the compiler can vectorize the loop.
fn is_plain_ascii_text(bytes: &[u8]) -> bool {
    let plain = |byte: u8| (0x20..0x7f).contains(&byte) | matches!(byte, b'\t' | b'\n' | b'\r');
    bytes.chunks(256).all(|run| run.iter().fold(true, |all, byte| all & plain(*byte)))
}

/// Returns `true` if YAML rejects the character outside of an escape.
fn is_forbidden_character(character: char) -> bool {
    match character {
        '\t' | '\n' | '\r' => false,
        '\u{fffe}' | '\u{ffff}' => true,
        _ => character.is_control(),
    }
}

/// Returns the position after `before`.
fn end_position(before: &str) -> Position {
    let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |last| last.chars().count()) + 1;
    let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Position { line: small(line), column: small(column) }
}
