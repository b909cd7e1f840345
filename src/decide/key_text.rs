//! Text of a key: the entries of its path, as reports show it and as replicas merge it.
//!
//! Two paths have two texts. `,`, `=` and `\` inside keys and values are escaped by `\`. A text that is cut, or that
//! replaces bytes that are not UTF-8, ends in `,#` and a hash of the whole path, which no entry looks like.
//!
//! Decides: how a key is written in reports, plain or hashed, and when it is cut.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::decide::log::value_form::ValueForm;
use crate::limit::counter_path::CounterPath;
use crate::telemetry::top_keys::MAX_KEY_TEXT_BYTES;

/// Entry of a key, as reports show it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct KeyEntry {
    /// Key.
    pub key: String,
    /// Value, or the pattern of values that share a counter; absent if values are hashed or left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

/// Text of the entries of a path, as `write_entries_text` writes it.
pub fn key_text(path: &CounterPath<'_>, form: &ValueForm) -> Arc<str> {
    let mut text = Vec::new();
    write_entries_text(&mut text, path, form);
    String::from_utf8_lossy(&text).into()
}

/// Writes the entries as `key=value,key=value` to an empty text, in UTF-8.
///
/// A value that others share a counter with is replaced by their pattern, as the rule has it. A value that is left out
/// has no `=` either.
pub(super) fn write_entries_text(text: &mut Vec<u8>, path: &CounterPath<'_>, form: &ValueForm) {
    if text.capacity() == 0 {
        let length: usize = path.entries.iter().map(|entry| entry.key.len() + entry.value.len() + 2).sum();
        text.reserve_exact(length.min(MAX_KEY_TEXT_BYTES));
    }
    let mut is_exact = true;
    for (index, entry) in path.entries.iter().enumerate() {
        let shared = path.shared.iter().find(|(shared, _)| *shared == index).map(|(_, pattern)| *pattern);
        if index > 0 {
            text.push(b',');
        }
        is_exact &= append_escaped(text, entry.key);
        if shared.is_some() || !matches!(form, ValueForm::Omitted) {
            text.push(b'=');
            is_exact &= append_escaped(text, &shared.map_or_else(|| form.shown_value(entry), Cow::Borrowed));
        }
        if text.len() > MAX_KEY_TEXT_BYTES {
            is_exact = false;
            break;
        }
    }
    if !is_exact {
        let is_boundary = |end: usize| text.get(end).is_none_or(|byte| !is_utf8_continuation(*byte));
        text.truncate((0..=MAX_KEY_TEXT_BYTES).rev().find(|end| is_boundary(*end)).unwrap_or(0));
        // The comma must not complete an escape that was cut.
        if text.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1 {
            text.pop();
        }
        text.extend_from_slice(b",#");
        text.extend_from_slice(hash_path_to_hex(path, form).as_bytes());
    }
    if text.capacity() > MAX_KEY_TEXT_BYTES {
        text.shrink_to_fit();
    }
}

/// Appends an escaped part, of which more than [`MAX_KEY_TEXT_BYTES`] need not be whole; false if it is not exact.
fn append_escaped(text: &mut Vec<u8>, part: &[u8]) -> bool {
    let start = &part[..part.len().min(MAX_KEY_TEXT_BYTES + 1)];
    // Tests each byte without a branch.
    if start.iter().fold(true, |is_plain, byte| is_plain & NEEDS_NO_ESCAPE[usize::from(*byte)]) {
        text.extend_from_slice(start);
        return start.len() == part.len();
    }
    for character in String::from_utf8_lossy(start).chars() {
        if matches!(character, ',' | '=' | '\\') {
            text.push(b'\\');
        }
        text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
    }
    start.len() == part.len() && std::str::from_utf8(part).is_ok()
}

/// True for each byte of ASCII that needs no escape.
const NEEDS_NO_ESCAPE: [bool; 256] = {
    let mut is_plain = [false; 256];
    let mut byte = 0_u8;
    while byte.is_ascii() {
        is_plain[byte as usize] = !matches!(byte, b',' | b'=' | b'\\');
        byte += 1;
    }
    is_plain
};

/// True for a byte inside a character's encoding, after its first.
const fn is_utf8_continuation(byte: u8) -> bool {
    byte & 0xc0 == 0x80
}

/// Hashes the entries of a path, with values in this form, to 16 hexadecimal digits.
fn hash_path_to_hex(path: &CounterPath<'_>, form: &ValueForm) -> String {
    let mut hasher = blake3::Hasher::new();
    for (index, entry) in path.entries.iter().enumerate() {
        let shared = path.shared.iter().find(|(shared, _)| *shared == index).map(|(_, pattern)| *pattern);
        let value = shared.map_or_else(|| form.shown_value(entry), Cow::Borrowed);
        for part in [entry.key, &value] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
    }
    hasher.finalize().to_hex()[..16].to_owned()
}
