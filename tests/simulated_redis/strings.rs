//! Commands on strings.

use bytes::Bytes;

use crate::arguments::{element_range, integer, option_name};
use crate::keys::{Unit, invalid_expiry};
use crate::keyspace::{Entry, Keyspace, Value};
use crate::numbers::parse_integer;
use crate::reply::{CommandResult, Failure, Reply};

/// Maximum length of a string.
const MAX_STRING_BYTES: usize = 512 << 20;

/// GET.
pub(crate) fn get(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::bulk_or_null(keyspace.find_as::<Bytes>(&words[1])?.cloned()))
}

/// Options of SET.
#[derive(Default)]
struct SetOptions {
    only_new: bool,
    only_existing: bool,
    returns_old: bool,
    keeps_expiry: bool,
    expiry: Option<SetExpiry>,
}

/// Expiry that SET gives.
struct SetExpiry {
    word: Bytes,
    unit: Unit,
    is_relative: bool,
}

impl SetOptions {
    fn parse(words: &[Bytes]) -> Result<Self, Failure> {
        let mut options = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match &*option_name(word) {
                b"NX" if !options.only_existing => options.only_new = true,
                b"XX" if !options.only_new => options.only_existing = true,
                b"GET" => options.returns_old = true,
                b"KEEPTTL" if options.expiry.is_none() => options.keeps_expiry = true,
                name @ (b"EX" | b"PX" | b"EXAT" | b"PXAT") if !options.keeps_expiry && options.expiry.is_none() => {
                    let unit = if name.starts_with(b"E") { Unit::Seconds } else { Unit::Milliseconds };
                    let word = words.next().ok_or(Failure::SYNTAX)?.clone();
                    options.expiry = Some(SetExpiry { word, unit, is_relative: name.len() == 2 });
                }
                _ => return Err(Failure::SYNTAX),
            }
        }
        Ok(options)
    }
}

impl SetExpiry {
    /// Returns the time in milliseconds since 1970; `None` if it is out of range.
    fn at_ms(&self, now_ms: i64) -> Result<Option<i64>, Failure> {
        let time = integer(&self.word)?;
        let time_ms = if self.unit == Unit::Seconds { time.checked_mul(1000) } else { Some(time) };
        let base_ms = if self.is_relative { now_ms } else { 0 };
        Ok(time_ms.filter(|time_ms| *time_ms > 0).and_then(|time_ms| time_ms.checked_add(base_ms)))
    }
}

/// SET.
pub(crate) fn set(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let (key, value) = (&words[1], Value::String(words[2].clone()));
    let options = SetOptions::parse(&words[3..])?;
    let now_ms = keyspace.now_ms();
    let expires_at_ms = match &options.expiry {
        None => None,
        Some(expiry) => Some(expiry.at_ms(now_ms)?.ok_or_else(|| invalid_expiry(words))?),
    };
    let old = if options.returns_old { get(keyspace, words)? } else { Reply::Null };
    let found = keyspace.find(key);
    let is_wanted = if found.is_some() { !options.only_new } else { !options.only_existing };
    if is_wanted {
        let kept_ms = found.and_then(|entry| entry.expires_at_ms).filter(|_| options.keeps_expiry);
        keyspace.set(key, Entry { value, expires_at_ms: expires_at_ms.or(kept_ms) });
    }
    Ok(if is_wanted && !options.returns_old { Reply::ok() } else { old })
}

/// STRLEN.
pub(crate) fn strlen(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::count(keyspace.find_as::<Bytes>(&words[1])?.map_or(0, |value| value.len())))
}

/// GETRANGE.
pub(crate) fn getrange(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let (start, stop) = (integer(&words[2])?, integer(&words[3])?);
    let Some(value) = keyspace.find_as::<Bytes>(&words[1])? else { return Ok(Reply::text("")) };
    let is_reversed = start < 0 && stop < start;
    // Unlike in a list, an end before the first byte is the first byte.
    let stop = if stop < 0 { stop.saturating_add(i64::try_from(value.len()).unwrap_or(i64::MAX)).max(0) } else { stop };
    let range = element_range(start, stop, value.len()).filter(|_| !is_reversed);
    Ok(Reply::Bulk(range.map_or_else(Bytes::new, |range| value.slice(range))))
}

/// SETRANGE.
pub(crate) fn setrange(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let offset = integer(&words[2])?;
    let offset = usize::try_from(offset).map_err(|_| Failure::fixed("ERR offset is out of range"))?;
    let written = &words[3];
    let current_length = keyspace.find_as::<Bytes>(&words[1])?.map_or(0, |value| value.len());
    if written.is_empty() {
        return Ok(Reply::count(current_length));
    }
    if offset.saturating_add(written.len()) > MAX_STRING_BYTES {
        return Err(Failure::fixed("ERR string exceeds maximum allowed size (proto-max-bulk-len)"));
    }
    let value = keyspace.find_or_create::<Bytes>(&words[1])?;
    let mut bytes = value.to_vec();
    bytes.resize(bytes.len().max(offset + written.len()), 0);
    bytes[offset..offset + written.len()].copy_from_slice(written);
    *value = bytes.into();
    Ok(Reply::count(value.len()))
}

/// INCRBY.
pub(crate) fn incrby(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let by = integer(&words[2])?;
    let current = match keyspace.find_as::<Bytes>(&words[1])? {
        None => 0,
        Some(value) => parse_integer(value).ok_or(Failure::NOT_AN_INTEGER)?,
    };
    let overflow = Failure::fixed("ERR increment or decrement would overflow");
    let next = current.checked_add(by).ok_or(overflow)?;
    *keyspace.find_or_create::<Bytes>(&words[1])? = next.to_string().into();
    Ok(Reply::Integer(next))
}
