//! Keys, their values and their expiry, at the time of the current command.
//!
//! A key that has expired is removed when a command meets it.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use crate::hash_fields::Hash;
use crate::reply::Failure;
use crate::scan::{ScanKey, ScanPage, scan};
use crate::sorted_sets::SortedSet;
use crate::streams::Stream;

/// Elements of a list.
pub type List = VecDeque<Bytes>;

/// Value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// String.
    String(Bytes),
    /// List.
    List(List),
    /// Hash.
    Hash(Hash),
    /// Sorted set.
    SortedSet(SortedSet),
    /// Stream.
    Stream(Stream),
}

impl Value {
    /// Name of the type, as TYPE returns it.
    pub const fn type_name(&self) -> &'static str {
        match self {
            Self::String(_) => "string",
            Self::List(_) => "list",
            Self::Hash(_) => "hash",
            Self::SortedSet(_) => "zset",
            Self::Stream(_) => "stream",
        }
    }

    /// Returns true if a collection has no elements. Such a key is removed, unless it is a stream.
    fn is_empty_collection(&self) -> bool {
        match self {
            Self::String(_) | Self::Stream(_) => false,
            Self::List(list) => list.is_empty(),
            Self::Hash(hash) => hash.is_empty(),
            Self::SortedSet(set) => set.is_empty(),
        }
    }

    /// Bytes of all names and elements.
    fn bytes(&self) -> usize {
        let sum = |parts: &mut dyn Iterator<Item = usize>| parts.map(|bytes| bytes + ELEMENT_OVERHEAD_BYTES).sum();
        match self {
            Self::String(bytes) => bytes.len(),
            Self::List(list) => sum(&mut list.iter().map(Bytes::len)),
            Self::Hash(hash) => sum(&mut hash.iter().map(|(field, value)| field.len() + value.len())),
            Self::SortedSet(set) => sum(&mut set.iter().map(|(member, _)| member.len() + 8)),
            Self::Stream(stream) => {
                sum(&mut stream.entries().values().map(|fields| fields.iter().map(Bytes::len).sum::<usize>()))
            }
        }
    }
}

/// Estimated memory of a key beyond its name and value.
const KEY_OVERHEAD_BYTES: usize = 72;
/// Estimated memory of an element of a collection beyond its bytes.
const ELEMENT_OVERHEAD_BYTES: usize = 16;

/// Type of a value that a command works on.
pub(crate) trait Typed: Default {
    /// Returns the value if it has this type.
    fn of(value: &mut Value) -> Option<&mut Self>;
    /// Makes it a value.
    fn into_value(self) -> Value;
}

macro_rules! typed {
    ($($type:ty = $variant:ident;)*) => {$(
        impl Typed for $type {
            fn of(value: &mut Value) -> Option<&mut Self> {
                if let Value::$variant(value) = value { Some(value) } else { None }
            }

            fn into_value(self) -> Value {
                Value::$variant(self)
            }
        }
    )*};
}

typed! {
    Bytes = String;
    List = List;
    Hash = Hash;
    SortedSet = SortedSet;
    Stream = Stream;
}

/// Value of a key, and the time at which it expires.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The value.
    pub value: Value,
    /// Last millisecond since 1970 in which the key is there; `None` if it does not expire.
    pub expires_at_ms: Option<i64>,
}

impl Entry {
    fn is_expired(&self, now_ms: i64) -> bool {
        self.expires_at_ms.is_some_and(|at_ms| now_ms > at_ms)
    }
}

/// Keys of a server.
#[derive(Clone, Debug, Default)]
pub struct Keyspace {
    entries: BTreeMap<ScanKey, Entry>,
    now_us: u64,
    /// Number of keys that were removed because they had expired.
    pub(crate) expired_keys: u64,
}

impl Keyspace {
    /// Sets the time of the current command.
    pub(crate) const fn set_now_us(&mut self, now_us: u64) {
        self.now_us = now_us;
    }

    /// Time of the current command in microseconds since 1970.
    pub(crate) const fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Time of the current command in milliseconds since 1970.
    pub(crate) fn now_ms(&self) -> i64 {
        i64::try_from(self.now_us / 1000).unwrap_or(i64::MAX)
    }

    /// Returns the entry of a key.
    pub(crate) fn find(&mut self, key: &Bytes) -> Option<&mut Entry> {
        let (key, now_ms) = (ScanKey::new(key), self.now_ms());
        if self.entries.get(&key)?.is_expired(now_ms) {
            self.entries.remove(&key);
            self.expired_keys += 1;
        }
        self.entries.get_mut(&key)
    }

    /// Value of a key that has not expired at a time.
    pub(crate) fn live_value(&self, key: &Bytes, now_us: u64) -> Option<&Value> {
        let now_ms = i64::try_from(now_us / 1000).unwrap_or(i64::MAX);
        self.entries.get(&ScanKey::new(key)).filter(|entry| !entry.is_expired(now_ms)).map(|entry| &entry.value)
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// The value has another type.
    pub(crate) fn find_as<T: Typed>(&mut self, key: &Bytes) -> Result<Option<&mut T>, Failure> {
        self.find(key).map(|entry| T::of(&mut entry.value).ok_or(Failure::WRONG_TYPE)).transpose()
    }

    /// Returns the value of a key, or a new one without expiry.
    ///
    /// # Errors
    /// The value has another type.
    pub(crate) fn find_or_create<T: Typed>(&mut self, key: &Bytes) -> Result<&mut T, Failure> {
        self.find(key);
        let new = || Entry { value: T::default().into_value(), expires_at_ms: None };
        T::of(&mut self.entries.entry(ScanKey::new(key)).or_insert_with(new).value).ok_or(Failure::WRONG_TYPE)
    }

    /// Sets the value of a key, and its expiry.
    pub(crate) fn set(&mut self, key: &Bytes, entry: Entry) {
        self.entries.insert(ScanKey::new(key), entry);
    }

    /// Removes a key; returns true if it was there.
    pub(crate) fn remove(&mut self, key: &Bytes) -> bool {
        self.find(key).is_some() && self.entries.remove(&ScanKey::new(key)).is_some()
    }

    /// Removes a key if it holds an empty collection.
    pub(crate) fn remove_if_empty(&mut self, key: &Bytes) {
        if self.find(key).is_some_and(|entry| entry.value.is_empty_collection()) {
            self.remove(key);
        }
    }

    /// Removes all keys.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Number of keys, including those that have expired and were not removed yet.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Walks the keys from a cursor on, including those that have expired.
    pub(crate) fn scan(&self, cursor: u64, count: usize) -> ScanPage<Bytes> {
        let page = scan(&self.entries, cursor, count);
        let found = page.found.into_iter().map(|(key, _)| key.name().clone()).collect();
        ScanPage { next_cursor: page.next_cursor, found }
    }

    /// Keys that have not expired at a time, in the order of their names.
    pub(crate) fn live_entries(&self, now_us: u64) -> Vec<(&Bytes, &Entry)> {
        let now_ms = i64::try_from(now_us / 1000).unwrap_or(i64::MAX);
        let live = self.entries.iter().filter(|(_, entry)| !entry.is_expired(now_ms));
        let mut live: Vec<(&Bytes, &Entry)> = live.map(|(key, entry)| (key.name(), entry)).collect();
        live.sort_unstable_by_key(|(name, _)| *name);
        live
    }

    /// Estimate of the memory that the keys need, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.entries.iter().map(|(key, entry)| key.name().len() + entry.value.bytes() + KEY_OVERHEAD_BYTES).sum()
    }
}
