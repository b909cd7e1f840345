//! Commands on hashes.

use bytes::Bytes;

use crate::arguments::command_name;
use crate::keys::{ScanOptions, scan_reply};
use crate::keyspace::{self, Hash, Keyspace, ScanKey};
use crate::reply::{CommandResult, Failure, Reply};

/// HSET.
pub(crate) fn hset(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    if words.len() % 2 == 1 {
        let name = command_name(words);
        return Err(Failure::new(format!("ERR wrong number of arguments for '{name}' command")));
    }
    let hash = keyspace.find_or_create::<Hash>(&words[1])?;
    let is_new = |pair: &&[Bytes]| hash.insert(ScanKey::new(&pair[0]), pair[1].clone()).is_none();
    Ok(Reply::count(words[2..].chunks_exact(2).filter(is_new).count()))
}

/// HGET.
pub(crate) fn hget(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let hash = keyspace.find_as::<Hash>(&words[1])?;
    Ok(Reply::bulk_or_null(hash.and_then(|hash| hash.get(&ScanKey::new(&words[2])).cloned())))
}

/// HMGET.
pub(crate) fn hmget(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let hash = keyspace.find_as::<Hash>(&words[1])?;
    let value = |field| hash.as_ref().and_then(|hash| hash.get(&ScanKey::new(field)).cloned());
    Ok(Reply::Array(words[2..].iter().map(|field| Reply::bulk_or_null(value(field))).collect()))
}

/// HDEL.
pub(crate) fn hdel(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let Some(hash) = keyspace.find_as::<Hash>(&words[1])? else { return Ok(Reply::Integer(0)) };
    let removed = words[2..].iter().filter(|field| hash.remove(&ScanKey::new(field)).is_some()).count();
    keyspace.remove_if_empty(&words[1]);
    Ok(Reply::count(removed))
}

/// HLEN.
pub(crate) fn hlen(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::count(keyspace.find_as::<Hash>(&words[1])?.map_or(0, |hash| hash.len())))
}

/// HEXISTS.
pub(crate) fn hexists(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let hash = keyspace.find_as::<Hash>(&words[1])?;
    Ok(Reply::flag(hash.is_some_and(|hash| hash.contains_key(&ScanKey::new(&words[2])))))
}

/// HGETALL, in the order of a walk.
pub(crate) fn hgetall(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let Some(hash) = keyspace.find_as::<Hash>(&words[1])? else { return Ok(Reply::Map(Vec::new())) };
    let pair = |(field, value): (&ScanKey, &Bytes)| (Reply::Bulk(field.name().clone()), Reply::Bulk(value.clone()));
    Ok(Reply::Map(hash.iter().map(pair).collect()))
}

/// HSCAN.
pub(crate) fn hscan(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let cursor = crate::arguments::cursor(&words[2])?;
    let Some(hash) = keyspace.find_as::<Hash>(&words[1])? else { return Ok(scan_reply(0, Vec::new())) };
    let options = ScanOptions::parse(&words[2..], false)?;
    let page = keyspace::scan(hash, cursor, options.count);
    let found = page.found.into_iter().filter(|(field, _)| options.matches(field.name()));
    let found = found.flat_map(|(field, value)| [field.name(), value].map(|bytes| Reply::Bulk(bytes.clone())));
    Ok(scan_reply(page.next_cursor, found.collect()))
}
