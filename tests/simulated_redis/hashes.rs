//! Commands on hashes.

use bytes::Bytes;

use crate::arguments::command_name;
use crate::hash_fields::Hash;
use crate::keys::{ScanOptions, scan_reply};
use crate::keyspace::Keyspace;
use crate::reply::{CommandResult, Failure, Reply};

/// HSET.
pub(crate) fn hset(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    if words.len() % 2 == 1 {
        let name = command_name(words);
        return Err(Failure::new(format!("ERR wrong number of arguments for '{name}' command")));
    }
    let hash = keyspace.find_or_create::<Hash>(&words[1])?;
    let is_new = |pair: &&[Bytes]| hash.insert(&pair[0], pair[1].clone());
    Ok(Reply::count(words[2..].chunks_exact(2).filter(is_new).count()))
}

/// HGET.
pub(crate) fn hget(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let hash = keyspace.find_as::<Hash>(&words[1])?;
    Ok(Reply::bulk_or_null(hash.and_then(|hash| hash.get(&words[2]).cloned())))
}

/// HMGET.
pub(crate) fn hmget(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let hash = keyspace.find_as::<Hash>(&words[1])?;
    let value = |field| hash.as_ref().and_then(|hash| hash.get(field).cloned());
    Ok(Reply::Array(words[2..].iter().map(|field| Reply::bulk_or_null(value(field))).collect()))
}

/// HDEL.
pub(crate) fn hdel(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let Some(hash) = keyspace.find_as::<Hash>(&words[1])? else { return Ok(Reply::Integer(0)) };
    let removed = words[2..].iter().filter(|field| hash.remove(field)).count();
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
    Ok(Reply::flag(hash.is_some_and(|hash| hash.get(&words[2]).is_some())))
}

/// HGETALL.
pub(crate) fn hgetall(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let Some(hash) = keyspace.find_as::<Hash>(&words[1])? else { return Ok(Reply::Map(Vec::new())) };
    let pair = |(field, value): (&Bytes, &Bytes)| (Reply::Bulk(field.clone()), Reply::Bulk(value.clone()));
    Ok(Reply::Map(hash.iter().map(pair).collect()))
}

/// HSCAN.
pub(crate) fn hscan(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let cursor = crate::arguments::cursor(&words[2])?;
    let Some(hash) = keyspace.find_as::<Hash>(&words[1])? else { return Ok(scan_reply(0, Vec::new())) };
    let options = ScanOptions::parse(&words[2..], false)?;
    let page = hash.scan(cursor, options.count);
    let found = page.found.into_iter().filter(|(field, _)| options.matches(field));
    let found = found.flat_map(|(field, value)| [field, value].map(|bytes| Reply::Bulk(bytes.clone())));
    Ok(scan_reply(page.next_cursor, found.collect()))
}
