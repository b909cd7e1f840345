//! The text of a counter's key.
//!
//! `<prefix>tk1:{<domain>|<key>=<value>|...}:<algorithm>:<period>[:<epoch>]`. The path stands in braces, so that all
//! limits of a descriptor are in one slot of a cluster. What has a meaning in this form, `\ | = { }`, is escaped as `\`
//! and two hexadecimal digits; the pattern of a shared value follows `\*`. So no two paths meet, and no value can
//! choose its slot. A path of more than 200 bytes keeps its head and ends in `\#` and its BLAKE3-128. The prefix stands
//! as it was given but for `\ { }`, which are escaped too: the first brace of a key is that before its path.
//!
//! This is a published form: other programs read it, and a counter is found again after an upgrade. What has to change
//! becomes `tk2`.

use std::fmt::Write;

use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

use crate::counter::{Counter, Path};
use crate::limit::Limit;

/// The longest path in a key, in bytes; the prefix and what follows the path come besides.
pub const MOST_PATH_BYTES: usize = 200;

/// What takes the place of the rest of a longer path: `\#` and 32 digits.
const DIGEST_BYTES: usize = 34;

/// The keys of a descriptor's counters, in their order. `prefix` is `CACHE_KEY_PREFIX`.
pub fn keys(prefix: &str, path: &Path<'_>, counters: &[Counter<'_>]) -> SmallVec<[Bytes; 1]> {
    let mut head = head(prefix);
    let start = head.len();
    write_path(&mut head, path);
    shorten(&mut head, start);
    head.extend_from_slice(b"}");
    let Some((last, others)) = counters.split_last() else { return SmallVec::new() };
    let mut keys: SmallVec<[Bytes; 1]> = others.iter().map(|counter| suffixed(head.clone(), counter)).collect();
    keys.push(suffixed(head, last));
    keys
}

/// What comes before the path: the prefix, the version and the opening brace.
pub(super) fn head(prefix: &str) -> BytesMut {
    let mut head = BytesMut::with_capacity(prefix.len() + 128);
    escape(&mut head, prefix.as_bytes(), br"\{}");
    head.extend_from_slice(b"tk1:{");
    head
}

/// What has a meaning in a path.
const SPECIAL: &[u8] = br"\|={}";

fn write_path(key: &mut BytesMut, path: &Path<'_>) {
    escape(key, path.domain.as_bytes(), SPECIAL);
    let mut shared = path.shared.iter().peekable();
    for (place, entry) in path.entries.iter().enumerate() {
        key.extend_from_slice(b"|");
        escape(key, entry.key, SPECIAL);
        key.extend_from_slice(b"=");
        match shared.next_if(|(shared_place, _)| *shared_place == place) {
            Some((_, pattern)) => {
                key.extend_from_slice(br"\*");
                escape(key, pattern, SPECIAL);
            }
            None => escape(key, entry.value, SPECIAL),
        }
    }
}

fn escape(key: &mut BytesMut, mut text: &[u8], special: &[u8]) {
    while let Some(place) = text.iter().position(|byte| special.contains(byte)) {
        key.extend_from_slice(&text[..place]);
        write!(key, "\\{:02x}", text[place]).expect("a buffer grows");
        text = &text[place + 1..];
    }
    key.extend_from_slice(text);
}

/// No path that is short enough has `\#` in it, so none is the text of a shortened one.
fn shorten(key: &mut BytesMut, start: usize) {
    if key.len() - start > MOST_PATH_BYTES {
        let digest = blake3::hash(&key[start..]);
        key.truncate(start + MOST_PATH_BYTES - DIGEST_BYTES);
        key.extend_from_slice(br"\#");
        for byte in &digest.as_bytes()[..16] {
            write!(key, "{byte:02x}").expect("a buffer grows");
        }
    }
}

/// A path as the text of a key tells it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParsedKey {
    /// The domain.
    pub domain: Vec<u8>,
    /// Key and value of each entry.
    pub entries: Vec<[Vec<u8>; 2]>,
    /// Places of the entries whose value is a pattern that several values share.
    pub shared: Vec<usize>,
}

/// What SCAN finds the counters of a domain by.
pub(super) fn pattern_of(prefix: &str, domain: &str) -> Vec<u8> {
    let mut key = head(prefix);
    escape(&mut key, domain.as_bytes(), SPECIAL);
    key.extend_from_slice(b"|");
    let mut pattern = Vec::with_capacity(key.len() + 8);
    for byte in key {
        if br"*?[]\".contains(&byte) {
            pattern.push(b'\\');
        }
        pattern.push(byte);
    }
    pattern.push(b'*');
    pattern
}

/// The path that a key is of; `None` if it is no key of this form, or its path was too long to be told.
pub fn read(prefix: &str, key: &[u8]) -> Option<ParsedKey> {
    let path = key.strip_prefix(&*head(prefix))?;
    let end = path.iter().position(|byte| *byte == b'}')?;
    let mut parts = path[..end].split(|byte| *byte == b'|');
    let domain = unescape(parts.next()?)?;
    let (mut entries, mut shared) = (Vec::new(), Vec::new());
    for (place, part) in parts.enumerate() {
        let equals = part.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&part[..equals], &part[equals + 1..]);
        let value = match value.strip_prefix(br"\*") {
            Some(pattern) => {
                shared.push(place);
                pattern
            }
            None => value,
        };
        entries.push([unescape(name)?, unescape(value)?]);
    }
    Some(ParsedKey { domain, entries, shared })
}

fn unescape(mut text: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::with_capacity(text.len());
    while let Some(place) = text.iter().position(|byte| *byte == b'\\') {
        plain.extend_from_slice(&text[..place]);
        let digits = std::str::from_utf8(text.get(place + 1..place + 3)?).ok()?;
        plain.push(u8::from_str_radix(digits, 16).ok()?);
        text = &text[place + 3..];
    }
    plain.extend_from_slice(text);
    Some(plain)
}

/// What tells the counters of a path apart: two periods of one length are one.
fn suffixed(mut key: BytesMut, counter: &Counter<'_>) -> Bytes {
    let limit = counter.limit;
    key.extend_from_slice(b":");
    key.extend_from_slice(limit.algorithm().name().as_bytes());
    write_period(&mut key, limit);
    if counter.epoch != 0 {
        write!(key, ":{}", counter.epoch).expect("a buffer grows");
    }
    key.freeze()
}

fn write_period(key: &mut BytesMut, limit: &Limit) {
    let written = if limit.calendar_months() {
        write!(key, ":{}mo", limit.period().multiplier())
    } else {
        write!(key, ":{}s", limit.period_us() / 1_000_000)
    };
    written.expect("a buffer grows");
}
