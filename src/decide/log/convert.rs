//! Conversions between parts of a request and parts of a record.

use std::borrow::Cow;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use super::record::{EntryRecord, OverrideRecord, RecordText};
use crate::limit::period::Unit;
use crate::limit::request::{Entry, Hits, LimitOverride};

impl<'a> EntryRecord<'a> {
    /// Key of an entry, without its value.
    pub fn without_value(entry: &Entry<'a>) -> Self {
        let (key, key_base64) = encode_text_or_base64(entry.key);
        Self { key, key_base64, ..Self::default() }
    }

    /// An entry with its value, as it was sent.
    pub fn with_plain_value(entry: &Entry<'a>) -> Self {
        let (value, value_base64) = encode_text_or_base64(entry.value);
        Self { value, value_base64, ..Self::without_value(entry) }
    }

    /// Bytes of the key; `None` if the base64 is invalid.
    pub fn key_bytes(&self) -> Option<Cow<'_, [u8]>> {
        decode_text_or_base64(self.key.as_ref(), self.key_base64.as_ref())
    }

    /// Bytes of the value; `None` if it was hashed or left out.
    pub fn value_bytes(&self) -> Option<Cow<'_, [u8]>> {
        decode_text_or_base64(self.value.as_ref(), self.value_base64.as_ref())
    }
}

/// Bytes as text, or else in base64.
pub(crate) fn encode_text_or_base64<'b, T: From<&'b str> + From<String>>(bytes: &'b [u8]) -> (Option<T>, Option<T>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text.into()), None),
        Err(_) => (None, Some(BASE64_STANDARD.encode(bytes).into())),
    }
}

fn decode_text_or_base64<'t>(
    text: Option<&'t RecordText<'_>>,
    base64: Option<&RecordText<'_>>,
) -> Option<Cow<'t, [u8]>> {
    match (text, base64) {
        (Some(text), _) => Some(Cow::Borrowed(text.as_bytes())),
        (None, Some(base64)) => BASE64_STANDARD.decode(base64.as_bytes()).ok().map(Cow::Owned),
        (None, None) => None,
    }
}

impl From<&LimitOverride> for OverrideRecord<'_> {
    fn from(sent: &LimitOverride) -> Self {
        let known = Unit::from_protobuf_number(sent.unit);
        Self {
            requests_per_unit: sent.requests_per_unit,
            unit: known.map_or_else(|| sent.unit.to_string().into(), |unit| unit.name().into()),
            multiplier: sent.unit_multiplier,
        }
    }
}

impl OverrideRecord<'_> {
    /// The limit as it was sent; `None` if the unit is neither a name nor a number.
    pub fn to_limit_override(&self) -> Option<LimitOverride> {
        let known = Unit::ALL.into_iter().find(|unit| unit.name() == &*self.unit);
        Some(LimitOverride {
            requests_per_unit: self.requests_per_unit,
            unit: known.map_or_else(|| self.unit.parse().ok(), Unit::protobuf_number)?,
            unit_multiplier: self.multiplier,
        })
    }
}

/// Number of hits in a record: 0 for a peek, negative for a refund.
pub const fn hits_to_number(hits: Hits) -> i64 {
    match hits {
        Hits::Peek => 0,
        Hits::Charge(count) => count.cast_signed(),
        Hits::Refund(count) => -count.cast_signed(),
    }
}

/// Converts the signed number of a record to hits; a negative one is a refund.
pub const fn hits_from_number(signed: i64) -> Hits {
    Hits::new(signed.unsigned_abs(), signed < 0)
}
