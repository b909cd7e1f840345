//! Commands on streams, without consumer groups.

use bytes::Bytes;

use crate::arguments::{integer, option_name};
use crate::commands::wrong_word_count;
use crate::keyspace::Keyspace;
use crate::reply::{CommandResult, Failure, Reply};
use crate::streams::{Stream, StreamId, Trim};

const INVALID_ID: Failure = Failure::fixed("ERR Invalid stream ID specified as stream command argument");

const ID_TOO_SMALL: Failure =
    Failure::fixed("ERR The ID specified in XADD is equal or smaller than the target stream top item");
const EXHAUSTED: Failure =
    Failure::fixed("ERR The stream has exhausted the last possible ID, unable to add more items");

/// Parses an id; without a number after the time, that is `default_sequence`.
fn parse_id(word: &[u8], default_sequence: u64) -> Result<StreamId, Failure> {
    let text = std::str::from_utf8(word).map_err(|_| INVALID_ID)?;
    // As strtoull of C reads a number: white space before it, a plus sign and zeros are allowed.
    let number = |text: &str| text.trim_ascii_start().parse().ok();
    let (ms, sequence) = match text.split_once('-') {
        Some((ms, sequence)) => (number(ms), number(sequence)),
        None => (number(text), Some(default_sequence)),
    };
    Ok(StreamId { ms: ms.ok_or(INVALID_ID)?, sequence: sequence.ok_or(INVALID_ID)? })
}

/// Parses an end of an interval: an id, or the smallest or largest one.
fn parse_interval_id(word: &[u8], default_sequence: u64) -> Result<StreamId, Failure> {
    match word {
        b"-" => Ok(StreamId::default()),
        b"+" => Ok(StreamId::MAX),
        _ => parse_id(word, default_sequence),
    }
}

/// Parses MAXLEN with what follows it; returns the words after that.
fn parse_trim(words: &[Bytes]) -> Result<Option<(Trim, &[Bytes])>, Failure> {
    let (is_approximate, threshold, rest) = match words {
        [option, ..] if option_name(option) != b"MAXLEN" => return Ok(None),
        [_, sign, threshold, rest @ ..] if **sign == *b"~" => (true, threshold, rest),
        [_, sign, threshold, rest @ ..] if **sign == *b"=" => (false, threshold, rest),
        [_, threshold, rest @ ..] => (false, threshold, rest),
        _ => return Ok(None),
    };
    let kept = usize::try_from(integer(threshold)?);
    let kept = kept.map_err(|_| Failure::fixed("ERR The MAXLEN argument must be >= 0."))?;
    Ok(Some((Trim { kept, is_approximate }, rest)))
}

/// XADD, with MAXLEN.
pub(crate) fn xadd(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let (trim, rest) = match parse_trim(&words[2..])? {
        Some((trim, rest)) => (Some(trim), rest),
        None => (None, &words[2..]),
    };
    let [id, fields @ ..] = rest else { return Err(Failure::SYNTAX) };
    let given = if **id == *b"*" { None } else { Some(parse_id(id, 0)?) };
    if fields.is_empty() || fields.len() % 2 == 1 {
        return Err(wrong_word_count("xadd"));
    }
    if given == Some(StreamId::default()) {
        return Err(Failure::fixed("ERR The ID specified in XADD must be greater than 0-0"));
    }
    let now = StreamId { ms: keyspace.now_us() / 1000, sequence: 0 };
    let last = keyspace.find_as::<Stream>(&words[1])?.map_or_else(StreamId::default, |stream| stream.last_id());
    let next = last.next().ok_or(EXHAUSTED)?;
    let id = given.unwrap_or(if now.ms > last.ms { now } else { next });
    if id <= last {
        return Err(ID_TOO_SMALL);
    }
    let stream = keyspace.find_or_create::<Stream>(&words[1])?;
    stream.push(id, fields.to_vec());
    trim.map(|trim| stream.trim(trim));
    Ok(Reply::Bulk(id.to_string().into()))
}

/// XLEN.
pub(crate) fn xlen(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::count(keyspace.find_as::<Stream>(&words[1])?.map_or(0, |stream| stream.entries().len())))
}

/// XTRIM.
pub(crate) fn xtrim(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let Some((trim, [])) = parse_trim(&words[2..])? else { return Err(Failure::SYNTAX) };
    Ok(Reply::count(keyspace.find_as::<Stream>(&words[1])?.map_or(0, |stream| stream.trim(trim))))
}

fn entry_reply((id, fields): (&StreamId, &Vec<Bytes>)) -> Reply {
    let fields = fields.iter().cloned().map(Reply::Bulk).collect();
    Reply::Array(vec![Reply::Bulk(id.to_string().into()), Reply::Array(fields)])
}

/// XRANGE.
pub(crate) fn xrange(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    range_of_entries(keyspace, words, [&words[2], &words[3]], false)
}

/// XREVRANGE.
pub(crate) fn xrevrange(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    range_of_entries(keyspace, words, [&words[3], &words[2]], true)
}

fn range_of_entries(
    keyspace: &mut Keyspace,
    words: &[Bytes],
    [start, end]: [&Bytes; 2],
    is_reversed: bool,
) -> CommandResult {
    let start = match start.strip_prefix(b"(") {
        Some(id) => parse_id(id, 0)?.next().ok_or(Failure::fixed("ERR invalid start ID for the interval"))?,
        None => parse_interval_id(start, 0)?,
    };
    let end = match end.strip_prefix(b"(") {
        Some(id) => parse_id(id, u64::MAX)?.previous().ok_or(Failure::fixed("ERR invalid end ID for the interval"))?,
        None => parse_interval_id(end, u64::MAX)?,
    };
    let mut limit = usize::MAX;
    for pair in words[4..].chunks(2) {
        match pair {
            [option, count] if option_name(option) == b"COUNT" => limit = usize::try_from(integer(count)?).unwrap_or(0),
            _ => return Err(Failure::SYNTAX),
        }
    }
    let Some(stream) = keyspace.find_as::<Stream>(&words[1])? else { return Ok(Reply::Array(Vec::new())) };
    if limit == 0 {
        return Ok(Reply::NullArray);
    }
    if start > end {
        return Ok(Reply::Array(Vec::new()));
    }
    let found = stream.entries().range(start..=end);
    Ok(Reply::Array(match is_reversed {
        false => found.take(limit).map(entry_reply).collect(),
        true => found.rev().take(limit).map(entry_reply).collect(),
    }))
}

const UNBALANCED_STREAMS: Failure =
    Failure::fixed("ERR Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified.");

/// Options of XREAD.
#[derive(Clone, Debug)]
pub(crate) struct ReadOptions<'w> {
    count: usize,
    /// Time to wait for entries in milliseconds, 0: without end; `None` if the read does not wait.
    pub(crate) block_ms: Option<u64>,
    pub(crate) keys: &'w [Bytes],
    ids: &'w [Bytes],
}

impl<'w> ReadOptions<'w> {
    /// Parses the options.
    pub(crate) fn parse(words: &'w [Bytes]) -> Result<Self, Failure> {
        let (mut count, mut block_ms, mut rest) = (usize::MAX, None, &words[1..]);
        loop {
            rest = match rest {
                [option, number, rest @ ..] if option_name(option) == b"COUNT" => {
                    let given = usize::try_from(integer(number)?).unwrap_or(0);
                    count = if given == 0 { usize::MAX } else { given };
                    rest
                }
                [option, number, rest @ ..] if option_name(option) == b"BLOCK" => {
                    let ms =
                        integer(number).map_err(|_| Failure::fixed("ERR timeout is not an integer or out of range"))?;
                    let ms = u64::try_from(ms).map_err(|_| Failure::fixed("ERR timeout is negative"))?;
                    block_ms = Some(ms);
                    rest
                }
                [option, streams @ ..] if option_name(option) == b"STREAMS" && !streams.is_empty() => {
                    if streams.len() % 2 == 1 {
                        return Err(UNBALANCED_STREAMS);
                    }
                    let (keys, ids) = streams.split_at(streams.len() / 2);
                    return Ok(Self { count, block_ms, keys, ids });
                }
                _ => return Err(Failure::SYNTAX),
            };
        }
    }
}

/// XREAD. A read that would wait returns null; the server tells the caller that it waits.
pub(crate) fn xread(keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    let ReadOptions { count, keys, ids, .. } = ReadOptions::parse(words)?;
    let mut found = Vec::new();
    for (key, id) in keys.iter().zip(ids) {
        let stream = keyspace.find_as::<Stream>(key)?;
        let after = match (&**id, &stream) {
            (b"$", Some(stream)) => stream.last_id(),
            (b"$", None) => StreamId::default(),
            (id, _) => parse_id(id, 0)?,
        };
        let Some((stream, first)) = stream.zip(after.next()) else { continue };
        let entries: Vec<Reply> = stream.entries().range(first..).take(count).map(entry_reply).collect();
        if !entries.is_empty() {
            found.push((Reply::Bulk(key.clone()), Reply::Array(entries)));
        }
    }
    Ok(if found.is_empty() { Reply::NullArray } else { Reply::Streams(found) })
}
