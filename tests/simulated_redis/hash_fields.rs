//! Fields of a hash.
//!
//! A small hash is walked in one step, in the order in which its fields were set first, as Redis does with its compact
//! form. A hash that was larger once is walked in steps, in another order.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::scan::{ScanKey, ScanPage, scan};

/// Maximum number of fields of the compact form.
const MAX_COMPACT_FIELDS: usize = 128;
/// Maximum length of a field or value of the compact form.
const MAX_COMPACT_BYTES: usize = 64;

/// Fields with their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hash {
    fields: BTreeMap<ScanKey, Field>,
    /// Fields in the order in which they were set first.
    order: BTreeMap<u64, ScanKey>,
    next_number: u64,
    is_large: bool,
}

/// Value of a field, and its place in the order.
#[derive(Clone, Debug, PartialEq)]
struct Field {
    value: Bytes,
    number: u64,
}

impl Hash {
    /// Number of fields.
    pub fn len(&self) -> usize {
        self.fields.len()
    }

    /// Returns true if there are no fields.
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Value of a field.
    pub fn get(&self, field: &Bytes) -> Option<&Bytes> {
        self.fields.get(&ScanKey::new(field)).map(|field| &field.value)
    }

    /// Fields with their values, in the order of HGETALL.
    pub fn iter(&self) -> Box<dyn Iterator<Item = (&Bytes, &Bytes)> + '_> {
        if self.is_large {
            return Box::new(self.fields.iter().map(|(key, field)| (key.name(), &field.value)));
        }
        Box::new(self.order.values().filter_map(|key| Some((key.name(), &self.fields.get(key)?.value))))
    }

    /// Sets a field; returns true if it is new.
    pub(crate) fn insert(&mut self, field: &Bytes, value: Bytes) -> bool {
        self.is_large |= field.len().max(value.len()) > MAX_COMPACT_BYTES;
        let key = ScanKey::new(field);
        if let Some(field) = self.fields.get_mut(&key) {
            field.value = value;
            return false;
        }
        self.order.insert(self.next_number, key.clone());
        self.fields.insert(key, Field { value, number: self.next_number });
        self.next_number += 1;
        self.is_large |= self.fields.len() > MAX_COMPACT_FIELDS;
        true
    }

    /// Removes a field; returns true if it was there.
    pub(crate) fn remove(&mut self, field: &Bytes) -> bool {
        let removed = self.fields.remove(&ScanKey::new(field));
        removed.is_some_and(|field| self.order.remove(&field.number).is_some())
    }

    /// Walks the fields from a cursor on.
    pub(crate) fn scan(&self, cursor: u64, count: usize) -> ScanPage<(&Bytes, &Bytes)> {
        if !self.is_large {
            return ScanPage { next_cursor: 0, found: self.iter().collect() };
        }
        let page = scan(&self.fields, cursor, count);
        let found = page.found.into_iter().map(|(key, field)| (key.name(), &field.value)).collect();
        ScanPage { next_cursor: page.next_cursor, found }
    }
}
