//! Values of descriptors in the log: as sent, hashed, or left out.
//!
//! The hash is keyed, because an unkeyed one of a user name or an address is reversed by trying all of them. It covers
//! the key of the entry, so that equal values under different keys have different hashes.
//!
//! Decides: whether values reach the log plain, hashed or left out; that none is cut.

use std::borrow::Cow;

use super::record::EntryRecord;
use crate::limit::request::Entry;
use crate::settings::decision_log::{DecisionLogSettings, LoggedValueForm};
use crate::settings::problem::UnusableSetting;

/// Context of the derived key, which keeps it apart from other uses of the same secret.
const KEY_DERIVATION_CONTEXT: &str = "tollkeeper decision log v1 values";
/// Length of a hash in bytes.
const HASH_BYTES: usize = 16;

/// Form of the values of descriptors.
#[derive(Clone)]
pub enum ValueForm {
    /// As sent.
    Plain,
    /// Hashes by this key.
    Hashed(Box<[u8; 32]>),
    /// Left out.
    Omitted,
}

impl std::fmt::Debug for ValueForm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Plain => "Plain",
            Self::Hashed(_) => "Hashed(***)",
            Self::Omitted => "Omitted",
        })
    }
}

impl ValueForm {
    /// The form that the settings ask for.
    ///
    /// # Errors
    /// The file with the key cannot be used.
    pub fn new(settings: &DecisionLogSettings) -> Result<Self, UnusableSetting> {
        Ok(match (settings.values, &settings.hash_key) {
            (LoggedValueForm::Plain, _) => Self::Plain,
            (LoggedValueForm::Hashed, Some(key)) => Self::hashed_with(key.load_secret()?.reveal()),
            (LoggedValueForm::Hashed, None) | (LoggedValueForm::None, _) => Self::Omitted,
        })
    }

    /// Hashes by a key that is derived from this secret.
    pub fn hashed_with(secret: &str) -> Self {
        Self::Hashed(Box::new(blake3::derive_key(KEY_DERIVATION_CONTEXT, secret.as_bytes())))
    }

    /// Value of an entry in this form; empty if it is left out.
    pub fn shown_value<'a>(&self, entry: &Entry<'a>) -> Cow<'a, [u8]> {
        match self {
            Self::Plain => Cow::Borrowed(entry.value),
            Self::Hashed(key) => Cow::Owned(hash_value(key, entry).into_bytes()),
            Self::Omitted => Cow::Borrowed(&[]),
        }
    }

    /// Builds the record of an entry, with its value in this form.
    pub fn build_entry_record<'a>(&self, entry: &Entry<'a>) -> EntryRecord<'a> {
        match self {
            Self::Plain => EntryRecord::with_plain_value(entry),
            Self::Hashed(key) => {
                EntryRecord { value_hash: Some(hash_value(key, entry).into()), ..EntryRecord::without_value(entry) }
            }
            Self::Omitted => EntryRecord::without_value(entry),
        }
    }
}

fn hash_value(key: &[u8; 32], entry: &Entry<'_>) -> String {
    let mut hasher = blake3::Hasher::new_keyed(key);
    // The length keeps key and value apart.
    hasher.update(&(entry.key.len() as u64).to_le_bytes()).update(entry.key).update(entry.value);
    hasher.finalize().to_hex()[..2 * HASH_BYTES].to_owned()
}
