//! Commands on lists.

use bytes::Bytes;

use crate::arguments::{element_range, integer};
use crate::keyspace::{Keyspace, List};
use crate::reply::{CommandResult, Failure, Reply};

/// LLEN.
pub(crate) fn llen(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::count(keyspace.find_as::<List>(&words[1])?.map_or(0, |list| list.len())))
}

/// LRANGE.
pub(crate) fn lrange(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let (start, stop) = (integer(&words[2])?, integer(&words[3])?);
    let Some(list) = keyspace.find_as::<List>(&words[1])? else { return Ok(Reply::Array(Vec::new())) };
    let range = element_range(start, stop, list.len());
    let elements = range.map(|range| list.range(range).cloned().map(Reply::Bulk).collect());
    Ok(Reply::Array(elements.unwrap_or_default()))
}

/// Returns the position of an element, which counts from the end if it is negative; `None` if there is none.
fn position(word: &[u8], list: &List) -> Result<Option<usize>, Failure> {
    let index = integer(word)?;
    Ok(element_range(index, index, list.len()).map(|range| *range.start()))
}

/// LINDEX.
pub(crate) fn lindex(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let Some(list) = keyspace.find_as::<List>(&words[1])? else { return Ok(Reply::Null) };
    Ok(Reply::bulk_or_null(position(&words[2], list)?.and_then(|position| list.get(position).cloned())))
}

/// LSET.
pub(crate) fn lset(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let list = keyspace.find_as::<List>(&words[1])?.ok_or(Failure::fixed("ERR no such key"))?;
    let element = position(&words[2], list)?.and_then(|position| list.get_mut(position));
    *element.ok_or(Failure::fixed("ERR index out of range"))? = words[3].clone();
    Ok(Reply::ok())
}

/// LTRIM.
pub(crate) fn ltrim(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let (start, stop) = (integer(&words[2])?, integer(&words[3])?);
    let Some(list) = keyspace.find_as::<List>(&words[1])? else { return Ok(Reply::ok()) };
    match element_range(start, stop, list.len()) {
        Some(range) => {
            list.truncate(range.end() + 1);
            list.drain(..range.start());
        }
        None => list.clear(),
    }
    keyspace.remove_if_empty(&words[1]);
    Ok(Reply::ok())
}

/// RPUSH.
pub(crate) fn rpush(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let list = keyspace.find_or_create::<List>(&words[1])?;
    list.extend(words[2..].iter().cloned());
    Ok(Reply::count(list.len()))
}
