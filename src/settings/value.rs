//! The value of a setting as it was written, and how it may be shown.
//!
//! Nothing that holds a secret can print it: `Secret` masks itself, and `shown` is the only way from the text of a
//! variable to a message. Shown text is short and on one line.

use std::fmt;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use super::address::Address;
use super::setting::Kind;

/// A value, by the kind of its setting.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each is named after its kind")]
pub enum Value {
    Bool(bool),
    Int(i64),
    Float(f64),
    Duration(Duration),
    Bytes(u64),
    Text(String),
    Path(PathBuf),
    List(Vec<String>),
    Map(Vec<(String, String)>),
    Address(Address),
    /// The word as the table has it, whatever its case was.
    Word(&'static str),
    /// A secret, or an address that may hold one.
    Secret(Secret),
}

/// A text that is not to be shown: neither `Display` nor `Debug` gives it away.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps `text` from being shown.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for the one who must send it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

/// What stands for a secret, whatever its length.
const MASK: &str = "***";

/// `text` as it may be shown: masked if its kind holds secrets, escaped, and cut at 100 characters.
pub fn shown(kind: Kind, text: &str) -> String {
    match kind {
        _ if text.is_empty() => String::new(),
        Kind::Secret => MASK.to_owned(),
        Kind::Url => one_line(&without_credentials(text)),
        _ => one_line(text),
    }
}

/// An address, or a list of them, without what may be a user, password or query. A password may hold any character, so
/// all before the last `@` goes, other addresses included; all of it where a query may hold that `@`; and what stands
/// where a port should and is none, as when the `@` and what follows it were forgotten.
fn without_credentials(text: &str) -> String {
    // What stands before `://` is kept only if it is surely no part of a password.
    let scheme = ["redis://", "rediss://"].into_iter().find(|scheme| text.starts_with(scheme)).unwrap_or_default();
    match (text.find('?'), text.rfind('@')) {
        (None, None) => without_false_ports(text),
        (Some(query), None) => format!("{}?{MASK}", without_false_ports(&text[..query])),
        (Some(query), Some(at)) if query < at => format!("{scheme}{MASK}"),
        (Some(query), Some(at)) => format!("{scheme}{MASK}@{}?{MASK}", without_false_ports(&text[at + 1..query])),
        (None, Some(at)) => format!("{scheme}{MASK}@{}", without_false_ports(&text[at + 1..])),
    }
}

/// A list of addresses in which what follows a host, if it is neither port nor database, is masked.
fn without_false_ports(text: &str) -> String {
    let shown = text.split(',').map(|address| {
        let letters = address.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(address.len());
        let scheme = if address[letters..].starts_with("://") { letters + 3 } else { 0 };
        let bracket = address[scheme..].find(']').map_or(scheme, |bracket| scheme + bracket);
        let is_path = address.starts_with('/');
        let after = if is_path { None } else { address[bracket..].find([':', '/', '#']) };
        let Some(after) = after.map(|after| bracket + after) else { return address.to_owned() };
        let is_port = address[after + 1..].bytes().all(|b| b.is_ascii_digit() || b == b'/');
        if is_port { address.to_owned() } else { format!("{}{MASK}", &address[..=after]) }
    });
    shown.collect::<Vec<_>>().join(",")
}

/// `text` without line breaks and other controls, cut at 100 characters.
pub(crate) fn one_line(text: &str) -> String {
    const MOST_CHARS: usize = 100;
    let mut line = String::new();
    for c in text.chars().take(MOST_CHARS) {
        if c.is_control() {
            // Writing to a String does not fail.
            let _ = write!(line, "{}", c.escape_default());
        } else {
            line.push(c);
        }
    }
    if text.chars().nth(MOST_CHARS).is_some() {
        line.push_str("...");
    }
    line
}
