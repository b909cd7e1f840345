//! Commands on keys of any type: expiry, removal, walks.

use bytes::Bytes;

use crate::arguments::{command_name, cursor, integer, option_name, shown};
use crate::glob;
use crate::keyspace::Keyspace;
use crate::reply::{CommandResult, Failure, Reply};

/// Unit of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Seconds,
    Milliseconds,
}

/// Returns the error of an expiry out of range.
pub(crate) fn invalid_expiry(words: &[Bytes]) -> Failure {
    Failure::new(format!("ERR invalid expire time in '{}' command", command_name(words)))
}

/// EXPIRE.
pub(crate) fn expire(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let now_ms = keyspace.now_ms();
    set_expiry(keyspace, words, Unit::Seconds, now_ms)
}

/// PEXPIRE.
pub(crate) fn pexpire(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let now_ms = keyspace.now_ms();
    set_expiry(keyspace, words, Unit::Milliseconds, now_ms)
}

/// PEXPIREAT.
pub(crate) fn pexpireat(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    set_expiry(keyspace, words, Unit::Milliseconds, 0)
}

fn set_expiry(keyspace: &mut Keyspace, words: &[Bytes], unit: Unit, base_ms: i64) -> CommandResult {
    // The product uses no option.
    if let Some(option) = words.get(3) {
        return Err(Failure::new(format!("ERR Unsupported option {}", shown(option, usize::MAX))));
    }
    let time = integer(&words[2])?;
    let time_ms = if unit == Unit::Seconds { time.checked_mul(1000) } else { Some(time) };
    let at_ms = time_ms.and_then(|time_ms| time_ms.checked_add(base_ms)).ok_or_else(|| invalid_expiry(words))?;
    let now_ms = keyspace.now_ms();
    let Some(entry) = keyspace.find(&words[1]) else { return Ok(Reply::Integer(0)) };
    if at_ms > now_ms {
        entry.expires_at_ms = Some(at_ms);
    } else {
        keyspace.remove(&words[1]);
    }
    Ok(Reply::Integer(1))
}

/// TTL.
pub(crate) fn ttl(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::Integer(time_to_live(keyspace, &words[1], |ttl_ms| (ttl_ms + 500) / 1000)))
}

/// PTTL.
pub(crate) fn pttl(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::Integer(time_to_live(keyspace, &words[1], |ttl_ms| ttl_ms)))
}

fn time_to_live(keyspace: &mut Keyspace, key: &Bytes, in_unit: impl Fn(i64) -> i64) -> i64 {
    let now_ms = keyspace.now_ms();
    match keyspace.find(key) {
        None => -2,
        Some(entry) => entry.expires_at_ms.map_or(-1, |at_ms| in_unit(at_ms - now_ms)),
    }
}

/// PERSIST.
pub(crate) fn persist(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::flag(keyspace.find(&words[1]).is_some_and(|entry| entry.expires_at_ms.take().is_some())))
}

/// DEL and UNLINK.
pub(crate) fn del(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::count(words[1..].iter().filter(|key| keyspace.remove(key)).count()))
}

/// EXISTS.
pub(crate) fn exists(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::count(words[1..].iter().filter(|key| keyspace.find(key).is_some()).count()))
}

/// TYPE.
pub(crate) fn type_of(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let name = keyspace.find(&words[1]).map_or("none", |entry| entry.value.type_name());
    Ok(Reply::Status(Bytes::from_static(name.as_bytes())))
}

/// DBSIZE.
pub(crate) fn dbsize(keyspace: &mut Keyspace, _words: &[Bytes]) -> CommandResult {
    Ok(Reply::count(keyspace.len()))
}

/// FLUSHALL and FLUSHDB.
pub(crate) fn flushall(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    match words[1..].iter().map(|word| option_name(word)).collect::<Vec<_>>().as_slice() {
        [] => {}
        [option] if option == b"ASYNC" || option == b"SYNC" => {}
        _ => return Err(Failure::SYNTAX),
    }
    keyspace.clear();
    Ok(Reply::ok())
}

/// KEYS, in the order of names.
pub(crate) fn keys(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let names = keyspace.live_entries(keyspace.now_us()).into_iter().map(|(name, _)| name.clone());
    Ok(Reply::Array(names.filter(|name| glob::matches(&words[1], name)).map(Reply::Bulk).collect()))
}

/// Options of SCAN and HSCAN.
pub(crate) struct ScanOptions {
    pub(crate) cursor: u64,
    pub(crate) count: usize,
    pattern: Option<Bytes>,
    type_name: Option<Vec<u8>>,
}

impl ScanOptions {
    /// Parses the options in `words`; the first is the cursor.
    pub(crate) fn parse(words: &[Bytes], has_types: bool) -> Result<Self, Failure> {
        let mut options = Self { cursor: cursor(&words[0])?, count: 10, pattern: None, type_name: None };
        for pair in words[1..].chunks(2) {
            let [name, value] = pair else { return Err(Failure::SYNTAX) };
            match &*option_name(name) {
                b"COUNT" => {
                    let count = integer(value)?;
                    options.count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(Failure::SYNTAX)?;
                }
                b"MATCH" => options.pattern = Some(value.clone()),
                b"TYPE" if has_types => options.type_name = Some(value.to_ascii_lowercase()),
                _ => return Err(Failure::SYNTAX),
            }
        }
        Ok(options)
    }

    /// Returns true if a walk returns this name.
    pub(crate) fn matches(&self, name: &[u8]) -> bool {
        self.pattern.as_ref().is_none_or(|pattern| glob::matches(pattern, name))
    }
}

/// Returns the reply to a walk.
pub(crate) fn scan_reply(next_cursor: u64, found: Vec<Reply>) -> Reply {
    Reply::Array(vec![Reply::Bulk(next_cursor.to_string().into()), Reply::Array(found)])
}

/// SCAN.
pub(crate) fn scan(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let options = ScanOptions::parse(&words[1..], true)?;
    let page = keyspace.scan(options.cursor, options.count);
    let has_type = |type_name: &str| options.type_name.as_ref().is_none_or(|wanted| wanted == type_name.as_bytes());
    let mut is_found = |name: &Bytes| {
        options.matches(name) && keyspace.find(name).is_some_and(|entry| has_type(entry.value.type_name()))
    };
    let found = page.found.into_iter().filter(|name| is_found(name)).map(Reply::Bulk).collect();
    Ok(scan_reply(page.next_cursor, found))
}
