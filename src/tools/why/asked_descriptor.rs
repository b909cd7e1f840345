//! The asked descriptor, compared with those of records; and those most like it, if the logs do not have it.
//!
//! Decides: which descriptor of a log is meant, and which are nearest.

use std::collections::HashSet;

use smallvec::SmallVec;

use crate::base::text::first_chars_if_longer;
use crate::decide::log::record::{DescriptorRecord, EntryRecord};
use crate::decide::log::value_form::ValueForm;
use crate::limit::request::Entry;

/// A domain and a whole descriptor.
#[derive(Clone, Debug)]
pub struct AskedDescriptor<'a> {
    /// Domain.
    pub domain: &'a str,
    /// Entries with their values.
    plain: Vec<EntryRecord<'a>>,
    /// Entries with hashed values, if there is a key to hash with.
    hashed: Option<Vec<EntryRecord<'a>>>,
}

/// Likeness of a recorded descriptor to the asked one; the greatest of its entries is that of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Likeness {
    /// The same keys and values.
    Same,
    /// The same keys, and values that were left out.
    HiddenValues,
    /// The same keys, and hashes that are not those of the asked values, or that no key was given for.
    OtherHashes,
    /// Other keys or values.
    Different,
}

impl<'a> AskedDescriptor<'a> {
    /// Creates the descriptor; `hash` is the form of hashed values, if their key is known.
    pub fn new(domain: &'a str, entries: &[Entry<'a>], hash: Option<&ValueForm>) -> Self {
        let plain = entries.iter().map(EntryRecord::with_plain_value).collect();
        let hashed = hash.map(|hash| entries.iter().map(|entry| hash.build_entry_record(entry)).collect());
        Self { domain, plain, hashed }
    }

    /// True if hashed values can be compared.
    pub const fn has_hash_key(&self) -> bool {
        self.hashed.is_some()
    }

    /// Text of the descriptor, not escaped.
    pub fn descriptor_text(&self) -> String {
        format_entries(&self.plain)
    }

    /// Compares a recorded descriptor, apart from its domain and from the order of its entries.
    pub fn compare_descriptor(&self, record: &DescriptorRecord<'_>) -> Likeness {
        if record.entries.len() != self.plain.len() {
            return Likeness::Different;
        }
        let mut likeness = Likeness::Same;
        let mut left: SmallVec<[usize; 8]> = (0..self.plain.len()).collect();
        for entry in &record.entries {
            let of_entries = left.iter().map(|index| self.compare_entry(entry, *index));
            match of_entries.enumerate().min_by_key(|(_, of_entry)| *of_entry) {
                None | Some((_, Likeness::Different)) => return Likeness::Different,
                Some((position, of_entry)) => {
                    left.remove(position);
                    likeness = likeness.max(of_entry);
                }
            }
        }
        likeness
    }

    /// Compares a recorded entry with the asked one at `index`.
    fn compare_entry(&self, entry: &EntryRecord<'_>, index: usize) -> Likeness {
        let asked = &self.plain[index];
        if entry.key_bytes() != asked.key_bytes() {
            return Likeness::Different;
        }
        let asked_hash = self.hashed.as_ref().and_then(|hashed| hashed[index].value_hash.as_ref());
        match (entry.value_bytes(), &entry.value_hash) {
            (Some(value), _) if Some(&value) == asked.value_bytes().as_ref() => Likeness::Same,
            (Some(_), _) => Likeness::Different,
            (None, Some(hash)) if Some(hash) == asked_hash => Likeness::Same,
            (None, Some(_)) => Likeness::OtherHashes,
            (None, None) => Likeness::HiddenValues,
        }
    }
}

/// Formats entries as `key=value,key=value`, not escaped; a hash is `hash:...`, a value that was left out `?`.
pub fn format_entries(entries: &[EntryRecord<'_>]) -> String {
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let text = |entry: &EntryRecord<'_>| {
        let key = entry.key_bytes().map(|key| lossy(&key)).unwrap_or_default();
        let value = match (entry.value_bytes(), &entry.value_hash) {
            (Some(value), _) => lossy(&value),
            (None, Some(hash)) => format!("hash:{}", &**hash),
            (None, None) => "?".to_owned(),
        };
        format!("{key}={value}")
    };
    entries.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Maximum number of nearest descriptors in the results.
const MAX_NEAREST_LOGGED_DESCRIPTORS: usize = 5;
/// Maximum number of different descriptors that are compared.
const MAX_COMPARED_DESCRIPTORS: usize = 10_000;
/// Maximum number of characters of a descriptor that are compared.
const MAX_COMPARED_CHARS: usize = 200;

/// Descriptors most like the asked one.
#[derive(Debug)]
pub(super) struct NearestDescriptors {
    asked: String,
    compared: HashSet<String>,
    /// Best first.
    nearest: Vec<NearDescriptor>,
}

#[derive(Debug)]
struct NearDescriptor {
    text: String,
    likeness: f64,
}

impl NearestDescriptors {
    /// Creates an empty list for the text of a descriptor.
    pub(super) fn new(asked: &str) -> Self {
        Self { asked: cut_text(asked), compared: HashSet::new(), nearest: Vec::new() }
    }

    /// True after 10 000 different descriptors: no more are compared.
    pub(super) fn is_full(&self) -> bool {
        self.compared.len() == MAX_COMPARED_DESCRIPTORS
    }

    /// Compares a descriptor with the asked one; keeps it if it is among the nearest.
    pub(super) fn keep_if_among_nearest(&mut self, text: &str) {
        let text = cut_text(text);
        if self.is_full() || self.compared.contains(&text) {
            return;
        }
        let likeness = strsim::jaro_winkler(&self.asked, &text);
        let position = self.nearest.partition_point(|other| other.likeness >= likeness);
        if position < MAX_NEAREST_LOGGED_DESCRIPTORS {
            self.nearest.insert(position, NearDescriptor { text: text.clone(), likeness });
            self.nearest.truncate(MAX_NEAREST_LOGGED_DESCRIPTORS);
        }
        self.compared.insert(text);
    }

    /// The nearest descriptors, best first.
    pub(super) fn nearest_texts(&self) -> Vec<String> {
        self.nearest.iter().map(|near| near.text.clone()).collect()
    }
}

/// Cuts a text; whoever prints it escapes it.
fn cut_text(text: &str) -> String {
    first_chars_if_longer(text, MAX_COMPARED_CHARS).map_or_else(|| text.to_owned(), |start| format!("{start}..."))
}
