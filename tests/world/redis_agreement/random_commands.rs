//! Random commands on few keys, with odd arguments, wrong types and expiries that pass.

use bytes::Bytes;
use kit::seeded_random::Chance;

use super::server_pair::ServerPair;

/// Argument of a command, of which one is chosen at random.
#[derive(Clone, Copy)]
enum Argument {
    /// This word.
    Word(&'static str),
    /// One of these words, separated by spaces; `_` stands for none.
    OneOf(&'static str),
    Key,
    Value,
    Field,
    /// Field of a large hash.
    AnyField,
    /// Number of fields or entries of a large value.
    Count,
    /// Integer around 0 or at an edge, rarely something else.
    Integer,
    /// Time in milliseconds, seconds or since 1970.
    Milliseconds,
    Seconds,
    UnixMilliseconds,
    UnixSeconds,
    Score,
    ScoreBound,
    StreamId,
    NewStreamId,
    Pattern,
    /// Up to so many repetitions of the arguments after it.
    Repeated(u64),
}

use Argument::*;

/// Commands with their arguments.
const COMMANDS: &[(&str, &[Argument])] = &[
    ("GET", &[Key]),
    ("SET", &[Key, Value]),
    ("SET", &[Key, Value, OneOf("NX XX _"), OneOf("GET _ _"), OneOf("KEEPTTL _ _")]),
    ("SET", &[Key, Value, Word("PX"), Milliseconds, OneOf("NX XX GET KEEPTTL _ _ _")]),
    ("SET", &[Key, Value, Word("EX"), Seconds]),
    ("SET", &[Key, Value, OneOf("PXAT pxat"), UnixMilliseconds]),
    ("SET", &[Key, Value, Word("EXAT"), UnixSeconds]),
    ("SETRANGE", &[Key, Integer, Value]),
    ("GETRANGE", &[Key, Integer, Integer]),
    ("GETRANGE", &[Key, OneOf("-1 -3 -9 -8 0 2"), OneOf("-2 -9 -10 -1 1 9")]),
    ("STRLEN", &[Key]),
    ("INCRBY", &[Key, Integer]),
    ("EXPIRE", &[Key, Seconds]),
    ("PEXPIRE", &[Key, Milliseconds]),
    ("PEXPIREAT", &[Key, UnixMilliseconds]),
    ("TTL", &[Key]),
    ("PTTL", &[Key]),
    ("PERSIST", &[Key]),
    ("DEL", &[Repeated(3), Key]),
    ("UNLINK", &[Repeated(3), Key]),
    ("EXISTS", &[Repeated(3), Key]),
    ("TYPE", &[Key]),
    ("SCAN", &[Word("0"), OneOf("COUNT _"), Integer]),
    ("SCAN", &[Word("0"), Word("COUNT"), OneOf("1 2 1000")]),
    ("SCAN", &[Word("0"), Word("MATCH"), Pattern]),
    ("SCAN", &[Word("0"), Word("TYPE"), OneOf("string list hash zset stream other")]),
    ("KEYS", &[Pattern]),
    ("DBSIZE", &[]),
    ("HSET", &[Key, Repeated(3), Field, Value]),
    ("HSET", &[Key, Field, Value, Field]),
    ("HSET", &[Key, Field, Value, Field, Value, Field, Value]),
    ("HGET", &[Key, Field]),
    ("HMGET", &[Key, Repeated(3), Field]),
    ("HDEL", &[Key, Repeated(3), Field]),
    ("HLEN", &[Key]),
    ("HEXISTS", &[Key, Field]),
    ("HSCAN", &[Key, OneOf("0 0 0 x"), OneOf("COUNT MATCH"), OneOf("1 2 * f? x")]),
    ("HGETALL", &[Key]),
    ("RPUSH", &[Key, Repeated(4), Value]),
    ("RPUSH", &[Key, Value, Value, Value]),
    ("LRANGE", &[Key, Integer, Integer]),
    ("LLEN", &[Key]),
    ("LINDEX", &[Key, Integer]),
    ("LSET", &[Key, Integer, Value]),
    ("LTRIM", &[Key, Integer, Integer]),
    ("ZADD", &[Key, Repeated(3), Score, Field]),
    ("ZADD", &[Key, OneOf("0 1 2 3"), Field, OneOf("1 3 4 5"), Field, OneOf("2 2.5 3"), Field]),
    ("ZADD", &[Key, OneOf("0 1 2 3"), Field, OneOf("1 3 4 5"), Field, OneOf("2 2.5 3"), Field]),
    ("ZREM", &[Key, Repeated(2), Field]),
    ("ZSCORE", &[Key, Field]),
    ("ZREVRANGEBYSCORE", &[Key, ScoreBound, ScoreBound, OneOf("WITHSCORES _"), Word("LIMIT"), Integer, Integer]),
    ("ZREVRANGEBYSCORE", &[Key, Word("+inf"), ScoreBound]),
    ("ZREMRANGEBYSCORE", &[Key, ScoreBound, ScoreBound]),
    ("ZREMRANGEBYRANK", &[Key, Integer, Integer]),
    ("XADD", &[Key, NewStreamId, Repeated(2), Field, Value]),
    ("XADD", &[Key, Word("*"), Field, Value]),
    ("XADD", &[Key, Word("MAXLEN"), OneOf("~ = _"), Integer, Word("*"), Field, Value]),
    ("XLEN", &[Key]),
    ("XTRIM", &[Key, OneOf("MAXLEN maxlen"), OneOf("~ = _"), Integer]),
    ("XRANGE", &[Key, StreamId, StreamId, OneOf("COUNT _"), OneOf("1 2 0 -1")]),
    ("XRANGE", &[Key, Word("-"), Word("+")]),
    ("XREVRANGE", &[Key, Word("+"), StreamId, Word("COUNT"), Integer]),
    ("XREAD", &[Word("COUNT"), Integer, Word("STREAMS"), Key, Key, StreamId, StreamId]),
    ("XREAD", &[OneOf("STREAMS streams"), Key, OneOf("$ 0-0")]),
    // A read that waits would not end: the clock stands still.
    ("XREAD", &[Word("BLOCK"), OneOf("x -1 1.5"), Word("STREAMS"), Key, Word("0")]),
    ("HSET", &[Word("large"), Repeated(40), AnyField, Value]),
    ("HDEL", &[Word("large"), Repeated(20), AnyField]),
    ("HSCAN", &[Word("large"), Word("0"), Word("COUNT"), OneOf("5 30 1000")]),
    ("HSCAN", &[Word("large"), Word("0"), Word("MATCH"), OneOf("f1* f?5 *")]),
    ("HGETALL", &[Word("large")]),
    ("XADD", &[Word("long"), Word("*"), Field, Count]),
    ("XADD", &[Word("long"), Word("*"), Field, Count]),
    ("XTRIM", &[Word("long"), Word("MAXLEN"), OneOf("~ ~ ="), Count]),
    ("XADD", &[Word("long"), Word("MAXLEN"), Word("~"), Count, Word("*"), Field, Count]),
    ("XRANGE", &[Word("long"), Word("-"), Word("+"), Word("COUNT"), Count]),
    ("TIME", &[]),
    ("PING", &[OneOf("_ hello")]),
    ("ECHO", &[Value]),
    ("SELECT", &[OneOf("0 16 x -1")]),
    ("AUTH", &[Value]),
    ("ASKING", &[]),
    ("READONLY", &[]),
    ("CLUSTER", &[OneOf("SLOTS KEYSLOT what")]),
    ("WAIT", &[Word("0"), OneOf("1 -1 x")]),
    ("SCRIPT", &[OneOf("LOAD EXISTS what"), OneOf("_ x")]),
    ("EVAL", &[OneOf("return return(1) x+"), Integer]),
    ("EVALSHA", &[Value, OneOf("0 1 -1 x")]),
    ("NOSUCH", &[Repeated(3), Value]),
];

/// Returns a random command at a time in milliseconds since 1970.
pub(crate) fn command(chance: &mut Chance, now_ms: u64) -> Vec<Bytes> {
    let (name, arguments) = COMMANDS[chance.place(COMMANDS.len())];
    let mut generator = Generator { chance, now_ms, name };
    let mut words = vec![Bytes::from_static(name.as_bytes())];
    let mut arguments = arguments;
    while let [argument, rest @ ..] = arguments {
        arguments = rest;
        if let Repeated(most) = argument {
            for _ in 0..generator.chance.between(1, *most) {
                rest.iter().for_each(|argument| generator.add_argument(&mut words, *argument));
            }
            break;
        }
        generator.add_argument(&mut words, *argument);
    }
    if chance.one_in(100) {
        words.pop();
    } else if chance.one_in(100) {
        words.push(value(chance));
    }
    if words.is_empty() { vec![Bytes::from_static(name.as_bytes())] } else { words }
}

/// Source of arguments.
struct Generator<'c> {
    chance: &'c mut Chance,
    now_ms: u64,
    /// Name of the command.
    name: &'static str,
}

impl Generator<'_> {
    /// Name of a key: mostly one that has the type of the command.
    fn key(&mut self) -> String {
        let own = match self.name.as_bytes()[0] {
            kind @ (b'H' | b'L' | b'X' | b'Z') => kind,
            b'R' => b'L',
            _ => b'S',
        };
        let kind = if self.chance.one_in(12) { self.chance.pick(b"HLXZS") } else { own };
        format!("{}{}", char::from(kind.to_ascii_lowercase()), self.chance.below(2))
    }

    fn add_argument(&mut self, words: &mut Vec<Bytes>, argument: Argument) {
        let (chance, now_ms) = (&mut *self.chance, self.now_ms);
        let text = match argument {
            Word(word) => word.to_owned(),
            OneOf(list) => {
                let list: Vec<&str> = list.split(' ').collect();
                match list[chance.place(list.len())] {
                    "_" => return,
                    word => word.to_owned(),
                }
            }
            Key => self.key(),
            Field => format!("f{}", chance.below(5)),
            AnyField => format!("f{}", chance.below(200)),
            Count => chance.below(400).to_string(),
            Value => return words.push(value(chance)),
            Integer => integer(chance),
            Milliseconds => time(chance, 1),
            Seconds => time(chance, 1000),
            UnixMilliseconds => (now_ms + chance.pick(&[3, 100_000]) - chance.below(5)).to_string(),
            UnixSeconds => (now_ms / 1000 + chance.pick(&[1, 100]) - chance.below(3)).to_string(),
            Score => score(chance),
            ScoreBound => {
                let prefix = if chance.one_in(3) { "(" } else { "" };
                format!("{prefix}{}", if chance.one_in(4) { "-inf".to_owned() } else { score(chance) })
            }
            StreamId => stream_id(chance),
            NewStreamId => {
                if chance.one_in(2) {
                    "*".to_owned()
                } else {
                    stream_id(chance)
                }
            }
            Pattern => chance
                .pick(&["*", "z?", "?[0-3]", "h[^0-3]", "?1", "s\\1", "s", "", "*1*", "[xl]*", "?[12]"])
                .to_owned(),
            Repeated(_) => return,
        };
        words.push(text.into());
    }
}

fn value(chance: &mut Chance) -> Bytes {
    match chance.below(8) {
        0 => Bytes::new(),
        1 => integer(chance).into(),
        2 => Bytes::from_static(b"\x00\xff\r\n"),
        3 => "long ".repeat(30).into(),
        _ => format!("v{}", chance.below(100)).into(),
    }
}

fn integer(chance: &mut Chance) -> String {
    match chance.below(12) {
        0 => chance.pick(&["", "x", "1.5", " 1", "+1", "01", "-0", "9223372036854775808"]).to_owned(),
        1 => chance.pick(&["9223372036854775807", "-9223372036854775808", "536870912", "4294967296"]).to_owned(),
        2..=4 => format!("-{}", chance.between(1, 8)),
        _ => chance.below(8).to_string(),
    }
}

fn time(chance: &mut Chance, per_unit: u64) -> String {
    match chance.below(10) {
        0 => integer(chance),
        _ => chance.between(1, 200_000 / per_unit).to_string(),
    }
}

fn score(chance: &mut Chance) -> String {
    match chance.below(8) {
        0 => chance.pick(&["x", "", "nan", "1e3", "-inf", "+inf", "0.1", "-0", "1e300", "3.0"]).to_owned(),
        1 => format!("-{}", chance.below(5)),
        2 => format!("{}.5", chance.below(5)),
        3 => (1_700_000_000_000_000 + chance.below(100)).to_string(),
        _ => chance.below(6).to_string(),
    }
}

fn stream_id(chance: &mut Chance) -> String {
    match chance.below(8) {
        0 => chance.pick(&["x", "", "-", "+", "1-", "-1", "1-x", "0-0", "(1-1"]).to_owned(),
        1 => chance.pick(&["18446744073709551615-18446744073709551615", "18446744073709551616", "0", "0-1"]).to_owned(),
        2..=3 => format!("{}-{}", 1_700_000_000_000 + chance.below(100_000), chance.below(3)),
        4 => format!("(1700000{:06}-0", chance.below(100_000)),
        5 => format!("{}-{}", chance.below(4), chance.below(4)),
        _ => (1_700_000_000_000 + chance.below(100_000)).to_string(),
    }
}

/// Lets time pass, by microseconds up to seconds or to the end of a key's life, rarely backwards.
pub(crate) fn pass_time(pair: &mut ServerPair, chance: &mut Chance) {
    if chance.one_in(3) && pair.pass_time_to_expiry(chance) {
        return;
    }
    let now_us = pair.now_us();
    let longest_us = chance.pick(&[10, 1000, 1_000_000, 60_000_000]);
    let by_us = chance.below(longest_us);
    pair.set_time(if chance.one_in(10) { now_us.saturating_sub(by_us) } else { now_us + by_us });
}
