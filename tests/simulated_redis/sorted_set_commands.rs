//! Commands on sorted sets.

use bytes::Bytes;

use crate::arguments::{element_range, float, integer, option_name};
use crate::keyspace::Keyspace;
use crate::numbers::parse_float;
use crate::reply::{CommandResult, Failure, Reply};
use crate::sorted_sets::{ScoreBound, ScoreRange, SortedSet};

/// Options of ZADD.
#[derive(Clone, Copy, Default)]
struct AddOptions {
    only_new: bool,
    only_existing: bool,
    only_greater: bool,
    only_less: bool,
    counts_changes: bool,
    increments: bool,
}

impl AddOptions {
    /// Parses the options, and returns the pairs after them.
    fn parse(words: &[Bytes]) -> Result<(Self, &[Bytes]), Failure> {
        let mut options = Self::default();
        let mut rest = words;
        while let [word, after @ ..] = rest {
            match &*option_name(word) {
                b"NX" => options.only_new = true,
                b"XX" => options.only_existing = true,
                b"GT" => options.only_greater = true,
                b"LT" => options.only_less = true,
                b"CH" => options.counts_changes = true,
                b"INCR" => options.increments = true,
                _ => break,
            }
            rest = after;
        }
        if rest.is_empty() || rest.len() % 2 == 1 {
            return Err(Failure::SYNTAX);
        }
        if options.only_new && options.only_existing {
            return Err(Failure::fixed("ERR XX and NX options at the same time are not compatible"));
        }
        let exclusive = [options.only_greater, options.only_less, options.only_new];
        if exclusive.iter().filter(|is_set| **is_set).count() > 1 {
            return Err(Failure::fixed("ERR GT, LT, and/or NX options at the same time are not compatible"));
        }
        if options.increments && rest.len() > 2 {
            return Err(Failure::fixed("ERR INCR option supports a single increment-element pair"));
        }
        Ok((options, rest))
    }

    /// Returns the new score of a member; `None` if it stays as it is.
    fn new_score(self, current: Option<f64>, given: f64) -> Result<Option<f64>, Failure> {
        let Some(current) = current else { return Ok((!self.only_existing).then_some(given)) };
        if self.only_new {
            return Ok(None);
        }
        let score = if self.increments { current + given } else { given };
        if score.is_nan() {
            return Err(Failure::fixed("ERR resulting score is not a number (NaN)"));
        }
        let is_refused = self.only_greater && score <= current || self.only_less && score >= current;
        Ok((!is_refused).then_some(score))
    }
}

/// ZADD.
pub(crate) fn zadd(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let (options, pairs) = AddOptions::parse(&words[2..])?;
    let scores = pairs.chunks_exact(2).map(|pair| float(&pair[0])).collect::<Result<Vec<f64>, Failure>>()?;
    let set = keyspace.find_or_create::<SortedSet>(&words[1])?;
    let (mut added, mut updated, mut last) = (0, 0, Reply::Null);
    let mut outcome = Ok(());
    for (pair, given) in pairs.chunks_exact(2).zip(scores) {
        let current = set.score(&pair[1]);
        let score = match options.new_score(current, given) {
            Ok(Some(score)) => score,
            Ok(None) => continue,
            Err(failure) => {
                outcome = Err(failure);
                break;
            }
        };
        match current {
            None => added += 1,
            Some(current) if current != score => updated += 1,
            Some(_) => {}
        }
        if current != Some(score) {
            set.insert(pair[1].clone(), score);
        }
        last = Reply::Double(score);
    }
    keyspace.remove_if_empty(&words[1]);
    outcome?;
    Ok(match options {
        AddOptions { increments: true, .. } => last,
        AddOptions { counts_changes: true, .. } => Reply::count(added + updated),
        _ => Reply::count(added),
    })
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

/// ZCARD.
pub(crate) fn zcard(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::count(keyspace.find_as::<SortedSet>(&words[1])?.map_or(0, |set| set.len())))
}

/// ZRANGE by rank, with WITHSCORES.
pub(crate) fn zrange(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let with_scores = match &words[4..] {
        [] => false,
        [option] if option_name(option) == b"WITHSCORES" => true,
        _ => return Err(Failure::SYNTAX),
    };
    let (start, stop) = (integer(&words[2])?, integer(&words[3])?);
    let Some(set) = keyspace.find_as::<SortedSet>(&words[1])? else { return Ok(Reply::Array(Vec::new())) };
    let members = element_range(start, stop, set.len())
        .map(|range| set.iter().skip(*range.start()).take(range.count()).map(owned).collect());
    Ok(members_reply(members.unwrap_or_default(), with_scores))
}

fn owned((member, score): (&Bytes, f64)) -> (Bytes, f64) {
    (member.clone(), score)
}

fn members_reply(members: Vec<(Bytes, f64)>, with_scores: bool) -> Reply {
    if with_scores {
        Reply::ScoredMembers(members)
    } else {
        Reply::Array(members.into_iter().map(|(member, _)| Reply::Bulk(member)).collect())
    }
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

/// ZRANGEBYSCORE.
pub(crate) fn zrangebyscore(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    range_by_score(keyspace, words, false)
}

/// ZREVRANGEBYSCORE.
pub(crate) fn zrevrangebyscore(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    range_by_score(keyspace, words, true)
}

fn range_by_score(keyspace: &mut Keyspace, words: &[Bytes], is_reversed: bool) -> CommandResult {
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
    let (min, max) = if is_reversed { (&words[3], &words[2]) } else { (&words[2], &words[3]) };
    let range = ScoreRange::parse(min, max)?;
    let Some(set) = keyspace.find_as::<SortedSet>(&words[1])? else { return Ok(Reply::Array(Vec::new())) };
    let Ok(offset) = usize::try_from(offset) else { return Ok(Reply::Array(Vec::new())) };
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let found = set.in_range(range).map(owned);
    let members = match is_reversed {
        false => found.skip(offset).take(limit).collect(),
        true => found.rev().skip(offset).take(limit).collect(),
    };
    Ok(members_reply(members, with_scores))
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
