//! Fields of a decision's record: one declaration gives the struct, its reader, and a fast writer.
//!
//! The writer gives the JSON of the derived `Serialize` at a fraction of the time: names of fields are constants, which
//! need no scan for characters to escape, and text is scanned eight bytes at a time. A test compares both.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use smallvec::{Array, SmallVec};

use crate::limit::algorithm::Algorithm;
use crate::limit::period::Unit;
use crate::limit::slot::SlotChange;
use crate::limit::{RegionLossPolicy, StoreFailurePolicy};

/// Text of a record, borrowed if possible.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RecordText<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl<'a> From<&'a str> for RecordText<'a> {
    fn from(text: &'a str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl From<String> for RecordText<'_> {
    fn from(text: String) -> Self {
        Self(Cow::Owned(text))
    }
}

impl std::ops::Deref for RecordText<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

/// Value of a field.
pub(super) trait RecordField {
    /// Returns true for the value that a field with `= default` leaves out.
    fn is_absent(&self) -> bool;

    /// Appends `start` and the value. `start` has the name of the field, and ends with the opening quote of a text; values
    /// that are no text leave that quote out.
    fn append_field(&self, line: &mut Vec<u8>, start: &str);
}

/// Appends `start` without its last byte, the opening quote of a text: for values that are none.
pub(super) fn append_start_without_quote(line: &mut Vec<u8>, start: &str) {
    line.extend_from_slice(&start.as_bytes()[..start.len() - 1]);
}

/// Declares a record: a JSON object of these fields, in this order. A field with `= default` is absent if its value is
/// the default; `as` gives the name of a field in JSON if it differs.
macro_rules! declare_record {
    ($(#[$meta:meta])* pub struct $record:ident<'a> { $($fields:tt)* }) => {
        declare_record! { @declare [$(#[$meta])* #[serde(bound(deserialize = "'de: 'a"))]] $record [<'a>] [<'_>] $($fields)* }
    };
    ($(#[$meta:meta])* pub struct $record:ident { $($fields:tt)* }) => {
        declare_record! { @declare [$(#[$meta])*] $record [] [] $($fields)* }
    };
    (
        @declare [$(#[$meta:meta])*] $record:ident [$($lifetime:tt)*] [$($elided:tt)*]
        $($(#[$doc:meta])* $name:ident $(as $json:literal)?: $type:ty $(= $default:ident)?,)*
    ) => {
        #[derive(serde::Serialize, serde::Deserialize)]
        $(#[$meta])*
        pub struct $record $($lifetime)* {
            $(
                $(#[$doc])*
                $(#[serde($default, skip_serializing_if = "crate::decide::log::record_field::RecordField::is_absent")])?
                $(#[serde(rename = $json)])?
                pub $name: $type,
            )*
        }

        impl $record $($elided)* {
            /// Appends the fields, each after a comma.
            fn append_fields(&self, line: &mut Vec<u8>) {
                $(
                    if stringify!($($default)?).is_empty() || !RecordField::is_absent(&self.$name) {
                        let start = concat!(",\"", declare_record!(@name $name $($json)?), "\":\"");
                        RecordField::append_field(&self.$name, line, start);
                    }
                )*
            }
        }

        impl RecordField for $record $($elided)* {
            fn is_absent(&self) -> bool {
                false
            }

            fn append_field(&self, line: &mut Vec<u8>, start: &str) {
                append_start_without_quote(line, start);
                let fields = line.len();
                self.append_fields(line);
                match line.get_mut(fields) {
                    // The comma of the first field.
                    Some(first) => *first = b'{',
                    None => line.push(b'{'),
                }
                line.push(b'}');
            }
        }
    };
    (@name $name:ident) => {
        stringify!($name)
    };
    (@name $name:ident $json:literal) => {
        $json
    };
}
pub(super) use declare_record;

impl<T: RecordField> RecordField for Option<T> {
    fn is_absent(&self) -> bool {
        self.is_none()
    }

    fn append_field(&self, line: &mut Vec<u8>, start: &str) {
        if let Some(value) = self {
            value.append_field(line, start);
        }
    }
}

impl<A: Array<Item: RecordField>> RecordField for SmallVec<A> {
    fn is_absent(&self) -> bool {
        self.is_empty()
    }

    fn append_field(&self, line: &mut Vec<u8>, start: &str) {
        append_start_without_quote(line, start);
        line.push(b'[');
        for (index, item) in self.iter().enumerate() {
            item.append_field(line, if index > 0 { ",\"" } else { "\"" });
        }
        line.push(b']');
    }
}

impl RecordField for bool {
    fn is_absent(&self) -> bool {
        !self
    }

    fn append_field(&self, line: &mut Vec<u8>, start: &str) {
        append_start_without_quote(line, start);
        line.extend_from_slice(if *self { b"true" } else { b"false" });
    }
}

macro_rules! impl_number_fields {
    ($($number:ty)*) => {$(
        impl RecordField for $number {
            fn is_absent(&self) -> bool {
                *self == 0
            }

            fn append_field(&self, line: &mut Vec<u8>, start: &str) {
                append_start_without_quote(line, start);
                line.extend_from_slice(itoa::Buffer::new().format(*self).as_bytes());
            }
        }
    )*};
}
impl_number_fields! { u32 u64 i64 }

/// Values of a closed set, by their names, which need no escapes.
macro_rules! impl_fields_by_name {
    ($($named:ty)*) => {$(
        impl RecordField for $named {
            fn is_absent(&self) -> bool {
                false
            }

            fn append_field(&self, line: &mut Vec<u8>, start: &str) {
                append_quoted(line, start, self.name());
            }
        }
    )*};
}
pub(super) use impl_fields_by_name;

impl_fields_by_name! { Algorithm Unit StoreFailurePolicy RegionLossPolicy }

impl RecordField for SlotChange {
    fn is_absent(&self) -> bool {
        self.name().is_none()
    }

    fn append_field(&self, line: &mut Vec<u8>, start: &str) {
        append_quoted(line, start, self.name().unwrap_or_default());
    }
}

impl RecordField for RecordText<'_> {
    fn is_absent(&self) -> bool {
        self.is_empty()
    }

    fn append_field(&self, line: &mut Vec<u8>, start: &str) {
        if needs_no_escape(self.as_bytes()) {
            append_quoted(line, start, self);
        } else {
            append_start_without_quote(line, start);
            // Writing text to memory does not fail.
            let _ = serde_json::to_writer(line, &**self);
        }
    }
}

/// Appends a text that needs no escapes.
pub(super) fn append_quoted(line: &mut Vec<u8>, start: &str, text: &str) {
    line.extend_from_slice(start.as_bytes());
    line.extend_from_slice(text.as_bytes());
    line.push(b'"');
}

/// True if JSON needs no escape for any of the bytes.
fn needs_no_escape(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [b' '; 8];
    last[..rest.len()].copy_from_slice(rest);
    words.iter().chain([&last]).all(|word| word_needs_no_escape(u64::from_ne_bytes(*word)))
}

/// True if none of eight bytes is a control character, a quote or a backslash.
const fn word_needs_no_escape(word: u64) -> bool {
    const LOW_BIT_OF_EACH_BYTE: u64 = u64::MAX / 0xff;
    const HIGH_BIT_OF_EACH_BYTE: u64 = 0x80 * LOW_BIT_OF_EACH_BYTE;
    // The lowest match has its high bit set; a borrow affects only higher bytes. Bytes from 0x80 on are plain.
    let below_space = word.wrapping_sub(0x20 * LOW_BIT_OF_EACH_BYTE) & !word;
    let quote = word ^ (b'"' as u64 * LOW_BIT_OF_EACH_BYTE);
    let backslash = word ^ (b'\\' as u64 * LOW_BIT_OF_EACH_BYTE);
    let is_zero = (quote.wrapping_sub(LOW_BIT_OF_EACH_BYTE) & !quote)
        | (backslash.wrapping_sub(LOW_BIT_OF_EACH_BYTE) & !backslash);
    (below_space | is_zero) & HIGH_BIT_OF_EACH_BYTE == 0
}
