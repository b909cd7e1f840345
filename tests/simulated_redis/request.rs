//! Parser of commands as clients send them: arrays of strings, or lines of words (inline commands).

use bytes::{Buf, Bytes, BytesMut};

use crate::numbers::parse_integer;
use crate::reply::write_error;

/// Maximum length of a line.
const MAX_LINE_BYTES: usize = 64 << 10;
/// Maximum length of a word.
const MAX_WORD_BYTES: i64 = 512 << 20;
/// Maximum number of words of a command.
const MAX_WORDS: i64 = i32::MAX as i64;

/// Bytes that are no command. Redis sends the text as an error reply and closes the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProtocolError(pub String);

impl ProtocolError {
    fn new(problem: &str) -> Self {
        Self(format!("ERR Protocol error: {problem}"))
    }

    /// Appends the error reply that is sent before the connection is closed.
    pub fn encode(&self, reply: &mut BytesMut) {
        write_error(&self.0, reply);
    }
}

/// Removes the first command from `input`; `None` while it is incomplete. An empty command has no words.
///
/// # Errors
/// The bytes are no command.
pub fn parse_command(input: &mut BytesMut) -> Result<Option<Vec<Bytes>>, ProtocolError> {
    if input.first() != Some(&b'*') {
        return parse_inline_command(input);
    }
    let mut position = 0;
    let Some(count) = read_number(input, &mut position, "invalid multibulk length")? else {
        return Ok(None);
    };
    if count > MAX_WORDS {
        return Err(ProtocolError::new("invalid multibulk length"));
    }
    let mut words = Vec::new();
    for _ in 0..count {
        match input.get(position) {
            None => return Ok(None),
            Some(b'$') => {}
            Some(other) => return Err(ProtocolError::new(&format!("expected '$', got '{}'", char::from(*other)))),
        }
        let Some(length) = read_number(input, &mut position, "invalid bulk length")? else {
            return Ok(None);
        };
        let length = usize::try_from(length).ok().filter(|_| length <= MAX_WORD_BYTES);
        let length = length.ok_or_else(|| ProtocolError::new("invalid bulk length"))?;
        words.push(position..position + length);
        position += length + 2;
    }
    if input.len() < position {
        return Ok(None);
    }
    let command = input.split_to(position).freeze();
    Ok(Some(words.into_iter().map(|range| command.slice(range)).collect()))
}

/// Reads the number of the line at `position`, after its kind, and moves `position` to the next line; `None` if the
/// line is incomplete.
fn read_number(input: &[u8], position: &mut usize, problem: &str) -> Result<Option<i64>, ProtocolError> {
    let rest = &input[*position..];
    let Some(length) = rest.windows(2).position(|pair| pair == b"\r\n") else {
        return if rest.len() > MAX_LINE_BYTES { Err(ProtocolError::new(problem)) } else { Ok(None) };
    };
    let number = parse_integer(&rest[1..length]).ok_or_else(|| ProtocolError::new(problem))?;
    *position += length + 2;
    Ok(Some(number))
}

/// Parses a line of words, which are separated by spaces; quotes are not special.
fn parse_inline_command(input: &mut BytesMut) -> Result<Option<Vec<Bytes>>, ProtocolError> {
    let Some(length) = input.iter().position(|byte| *byte == b'\n') else {
        let is_too_long = input.len() > MAX_LINE_BYTES;
        return if is_too_long { Err(ProtocolError::new("too big inline request")) } else { Ok(None) };
    };
    let line = input.split_to(length).freeze();
    input.advance(1);
    let words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    Ok(Some(words.map(|word| line.slice_ref(word)).collect()))
}
