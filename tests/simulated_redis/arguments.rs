//! Words of commands as numbers and options.

use bytes::Bytes;

use crate::numbers::{parse_float, parse_integer};
use crate::reply::Failure;

/// Returns an integer.
///
/// # Errors
/// The word is no integer.
pub(crate) fn integer(word: &[u8]) -> Result<i64, Failure> {
    parse_integer(word).ok_or(Failure::NOT_AN_INTEGER)
}

/// Returns a number, which may be infinite.
///
/// # Errors
/// The word is no number.
pub(crate) fn float(word: &[u8]) -> Result<f64, Failure> {
    parse_float(word).ok_or(Failure::NOT_A_FLOAT)
}

/// Returns the cursor of a walk.
///
/// # Errors
/// The word is no cursor.
pub(crate) fn cursor(word: &[u8]) -> Result<u64, Failure> {
    let cursor = std::str::from_utf8(word).ok().and_then(|text| text.parse().ok());
    cursor.ok_or(Failure::fixed("ERR invalid cursor"))
}

/// Returns the options of a command in upper case.
pub(crate) fn option_name(word: &[u8]) -> Vec<u8> {
    word.to_ascii_uppercase()
}

/// Returns a word as errors show it: a text of C, which ends at a zero byte, of at most `max_bytes`.
pub(crate) fn shown(word: &[u8], max_bytes: usize) -> String {
    let text = word.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(&text[..text.len().min(max_bytes)]).into_owned()
}

/// Returns the name of a command in lower case, for messages.
pub(crate) fn command_name(words: &[Bytes]) -> String {
    words.first().map(|word| String::from_utf8_lossy(word).to_lowercase()).unwrap_or_default()
}

/// Returns the range of elements from `start` to `stop`, which count from the end if they are negative; `None` if it is
/// empty.
pub(crate) fn element_range(start: i64, stop: i64, length: usize) -> Option<std::ops::RangeInclusive<usize>> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let from_end = |index: i64| if index < 0 { index.saturating_add(length) } else { index };
    let (start, stop) = (from_end(start).max(0), from_end(stop).min(length - 1));
    let index = |index: i64| usize::try_from(index).ok();
    if start > stop { None } else { Some(index(start)?..=index(stop)?) }
}
