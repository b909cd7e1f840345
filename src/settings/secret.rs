//! Secrets, and the text of variables made fit for messages.
//!
//! Nothing that holds a secret can print it: [`Secret`] masks itself, and credentials in URLs are masked before they
//! are shown. Shown text is short and on one line.
//!
//! Decides: how secrets are masked in messages, `/settings` and `check --env`.

use std::fmt;

use crate::base::text::truncate_and_escape;

/// A text that neither `Display` nor `Debug` reveals.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text, for sending it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(SECRET_MASK)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(SECRET_MASK)
    }
}

/// Replacement for a secret of any length.
pub(crate) const SECRET_MASK: &str = "***";

/// Masks user, password and query of an address or a list of addresses.
///
/// A password may contain any character, so everything before the last `@` is masked, other addresses included, and all
/// of the text if a query may contain that `@`. Text in the place of a port that is not a port is masked too: it may be
/// a password whose `@host` was forgotten.
pub(crate) fn mask_credentials(text: &str) -> String {
    // Text before `://` is kept only if it cannot be part of a password.
    let scheme = ["redis://", "rediss://"].into_iter().find(|scheme| text.starts_with(scheme)).unwrap_or_default();
    let masked = match (text.find('?'), text.rfind('@')) {
        (None, None) => mask_invalid_ports(text),
        (Some(query), None) => format!("{}?{SECRET_MASK}", mask_invalid_ports(&text[..query])),
        (Some(query), Some(at)) if query < at => format!("{scheme}{SECRET_MASK}"),
        (Some(query), Some(at)) => {
            format!("{scheme}{SECRET_MASK}@{}?{SECRET_MASK}", mask_invalid_ports(&text[at + 1..query]))
        }
        (None, Some(at)) => format!("{scheme}{SECRET_MASK}@{}", mask_invalid_ports(&text[at + 1..])),
    };
    shorten_for_message(&masked)
}

/// Masks the text after each host of a list that is neither a port nor a database.
fn mask_invalid_ports(text: &str) -> String {
    let shown = text.split(',').map(|address| {
        let letters = address.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(address.len());
        let scheme = if address[letters..].starts_with("://") { letters + 3 } else { 0 };
        let bracket = address[scheme..].find(']').map_or(scheme, |bracket| scheme + bracket);
        let is_path = address.starts_with('/');
        let after = if is_path { None } else { address[bracket..].find([':', '/', '#']) };
        let Some(after) = after.map(|after| bracket + after) else { return address.to_owned() };
        let is_port = address[after + 1..].bytes().all(|b| b.is_ascii_digit() || b == b'/');
        if is_port { address.to_owned() } else { format!("{}{SECRET_MASK}", &address[..=after]) }
    });
    shown.collect::<Vec<_>>().join(",")
}

/// Makes a text of a variable fit for a message: printable, and at most 100 characters of it.
pub(crate) fn shorten_for_message(text: &str) -> String {
    truncate_and_escape(text, 100)
}
