//! Commands on sorted sets.

use bytes::Bytes;

use crate::arguments::{element_range, float, integer, option_name};
use crate::keyspace::Keyspace;
use crate::numbers::parse_float;
use crate::reply::{CommandResult, Failure, Reply};
use crate::sorted_sets::{ScoreBound, ScoreRange, SortedSet};

/// ZADD, without options.
pub(crate) fn zadd(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let pairs = &words[2..];
    if pairs.len() % 2 == 1 {
        return Err(Failure::SYNTAX);
    }
    let scores = pairs.chunks_exact(2).map(|pair| float(&pair[0])).collect::<Result<Vec<f64>, Failure>>()?;
    let set = keyspace.find_or_create::<SortedSet>(&words[1])?;
    let members = pairs.chunks_exact(2).map(|pair| &pair[1]);
    Ok(Reply::count(members.zip(scores).filter(|(member, score)| set.insert((*member).clone(), *score)).count()))
}

/// ZREM.
pub(crate) fn zrem(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let Some(set) = keyspace.find_as::<SortedSet>(&words[1])? else { return Ok(Reply::Integer(0)) };
    let removed = set.remove_all(&words[2..]);
    keyspace.remove_if_empty(&words[1]);
    Ok(Reply::count(removed))
}

/// ZSCORE.
pub(crate) fn zscore(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let set = keyspace.find_as::<SortedSet>(&words[1])?;
    Ok(set.and_then(|set| set.score(&words[2])).map_or(Reply::Null, Reply::Double))
}

fn owned((member, score): (&Bytes, f64)) -> (Bytes, f64) {
    (member.clone(), score)
}

impl ScoreRange {
    fn parse(min: &[u8], max: &[u8]) -> Result<Self, Failure> {
        let bound = |word: &[u8]| {
            let (is_exclusive, number) = match word.strip_prefix(b"(") {
                Some(number) => (true, number),
                None => (false, word),
            };
            // As strtod of C reads a number: white space before it, and no digits at all, are allowed.
            let number = number.trim_ascii_start();
            let score = if number.is_empty() { Some(0.0) } else { parse_float(number) };
            let score = score.ok_or(Failure::fixed("ERR min or max is not a float"))?;
            Ok(ScoreBound { score, is_exclusive })
        };
        Ok(Self { min: bound(min)?, max: bound(max)? })
    }
}

/// ZREVRANGEBYSCORE, with WITHSCORES and LIMIT.
pub(crate) fn zrevrangebyscore(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let (mut with_scores, mut offset, mut limit) = (false, 0, -1);
    let mut rest = &words[4..];
    loop {
        rest = match rest {
            [] => break,
            [option, rest @ ..] if option_name(option) == b"WITHSCORES" => {
                with_scores = true;
                rest
            }
            [option, first, count, rest @ ..] if option_name(option) == b"LIMIT" => {
                (offset, limit) = (integer(first)?, integer(count)?);
                rest
            }
            _ => return Err(Failure::SYNTAX),
        };
    }
    let range = ScoreRange::parse(&words[3], &words[2])?;
    let Some(set) = keyspace.find_as::<SortedSet>(&words[1])? else { return Ok(Reply::Array(Vec::new())) };
    let Ok(offset) = usize::try_from(offset) else { return Ok(Reply::Array(Vec::new())) };
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let members: Vec<(Bytes, f64)> = set.in_range(range).rev().skip(offset).take(limit).map(owned).collect();
    Ok(match with_scores {
        true => Reply::ScoredMembers(members),
        false => Reply::Array(members.into_iter().map(|(member, _)| Reply::Bulk(member)).collect()),
    })
}

/// ZREMRANGEBYSCORE.
pub(crate) fn zremrangebyscore(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let range = ScoreRange::parse(&words[2], &words[3])?;
    remove_members(keyspace, &words[1], |set| set.in_range(range).map(|(member, _)| member.clone()).collect())
}

/// ZREMRANGEBYRANK.
pub(crate) fn zremrangebyrank(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let (start, stop) = (integer(&words[2])?, integer(&words[3])?);
    remove_members(keyspace, &words[1], |set| match element_range(start, stop, set.len()) {
        Some(range) => set.iter().skip(*range.start()).take(range.count()).map(|(member, _)| member.clone()).collect(),
        None => Vec::new(),
    })
}

fn remove_members(
    keyspace: &mut Keyspace,
    key: &Bytes,
    select: impl FnOnce(&SortedSet) -> Vec<Bytes>,
) -> CommandResult {
    let Some(set) = keyspace.find_as::<SortedSet>(key)? else { return Ok(Reply::Integer(0)) };
    let members = select(set);
    let removed = set.remove_all(&members);
    keyspace.remove_if_empty(key);
    Ok(Reply::count(removed))
}
