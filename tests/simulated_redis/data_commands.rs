//! Table of the commands that need keys and time only. Scripts may call them.

use bytes::Bytes;

use crate::commands::{Command, DENY_OOM, KeyPositions, LOADING, Properties, STALE, WRITE};
use crate::keyspace::Keyspace;
use crate::reply::{CommandResult, Reply};
use crate::{hashes, keys, lists, sorted_set_commands, stream_commands, strings};

/// Function of a command: the keys, and all words with the name.
pub(crate) type DataFunction = fn(&mut Keyspace, &[Bytes]) -> CommandResult;

const fn on_key(name: &'static str, arity: i32, flags: u8, run: DataFunction) -> Command<DataFunction> {
    Command { properties: Properties { name, arity, flags, keys: KeyPositions::First }, run }
}

const fn on(keys: KeyPositions, name: &'static str, arity: i32, flags: u8, run: DataFunction) -> Command<DataFunction> {
    Command { properties: Properties { name, arity, flags, keys }, run }
}

/// A write that needs memory.
const GROWS: u8 = WRITE | DENY_OOM;

/// The commands, with the flags of Redis 7.0.
pub(crate) const DATA_COMMANDS: &[Command<DataFunction>] = &[
    on_key("get", 2, 0, strings::get),
    on_key("set", -3, GROWS, strings::set),
    on_key("setrange", 4, GROWS, strings::setrange),
    on_key("pttl", 2, 0, keys::pttl),
    on_key("pexpire", -3, WRITE, keys::pexpire),
    on(KeyPositions::None, "time", 1, LOADING | STALE, time),
    on(KeyPositions::None, "ping", -1, 0, ping),
    on(KeyPositions::None, "echo", 2, LOADING | STALE, echo),
    on_key("getrange", 4, 0, strings::getrange),
    on_key("strlen", 2, 0, strings::strlen),
    on_key("incrby", 3, GROWS, strings::incrby),
    on_key("expire", -3, WRITE, keys::expire),
    on_key("pexpireat", -3, WRITE, keys::pexpireat),
    on_key("ttl", 2, 0, keys::ttl),
    on_key("persist", 2, WRITE, keys::persist),
    on(KeyPositions::All, "del", -2, WRITE, keys::del),
    on(KeyPositions::All, "unlink", -2, WRITE, keys::del),
    on(KeyPositions::All, "exists", -2, 0, keys::exists),
    on_key("type", 2, 0, keys::type_of),
    on(KeyPositions::None, "scan", -2, 0, keys::scan),
    on(KeyPositions::None, "keys", 2, 0, keys::keys),
    on(KeyPositions::None, "dbsize", 1, 0, keys::dbsize),
    on(KeyPositions::None, "flushall", -1, WRITE, keys::flushall),
    on(KeyPositions::None, "flushdb", -1, WRITE, keys::flushall),
    on_key("hset", -4, GROWS, hashes::hset),
    on_key("hget", 3, 0, hashes::hget),
    on_key("hmget", -3, 0, hashes::hmget),
    on_key("hdel", -3, WRITE, hashes::hdel),
    on_key("hlen", 2, 0, hashes::hlen),
    on_key("hexists", 3, 0, hashes::hexists),
    on_key("hscan", -3, 0, hashes::hscan),
    on_key("hgetall", 2, 0, hashes::hgetall),
    on_key("lrange", 4, 0, lists::lrange),
    on_key("llen", 2, 0, lists::llen),
    on_key("lindex", 3, 0, lists::lindex),
    on_key("ltrim", 4, WRITE, lists::ltrim),
    on_key("lset", 4, GROWS, lists::lset),
    on_key("rpush", -3, GROWS, lists::rpush),
    on_key("zadd", -4, GROWS, sorted_set_commands::zadd),
    on_key("zrem", -3, WRITE, sorted_set_commands::zrem),
    on_key("zscore", 3, 0, sorted_set_commands::zscore),
    on_key("zrevrangebyscore", -4, 0, sorted_set_commands::zrevrangebyscore),
    on_key("zremrangebyscore", 4, WRITE, sorted_set_commands::zremrangebyscore),
    on_key("zremrangebyrank", 4, WRITE, sorted_set_commands::zremrangebyrank),
    on_key("xadd", -5, GROWS, stream_commands::xadd),
    on_key("xlen", 2, 0, stream_commands::xlen),
    on_key("xtrim", -4, WRITE, stream_commands::xtrim),
    on_key("xrange", -4, 0, stream_commands::xrange),
    on_key("xrevrange", -4, 0, stream_commands::xrevrange),
    on(KeyPositions::Streams, "xread", -4, 0, stream_commands::xread),
];

/// TIME.
fn time(keyspace: &mut Keyspace, _words: &[Bytes]) -> CommandResult {
    let text = |number: u64| Reply::Bulk(number.to_string().into());
    Ok(Reply::Array(vec![text(keyspace.now_us() / 1_000_000), text(keyspace.now_us() % 1_000_000)]))
}

/// PING.
fn ping(_keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    match words {
        [_] => Ok(Reply::Status(Bytes::from_static(b"PONG"))),
        [_, text] => Ok(Reply::Bulk(text.clone())),
        _ => Err(crate::commands::wrong_word_count("ping")),
    }
}

/// ECHO.
fn echo(_keyspace: &mut Keyspace, words: &[Bytes]) -> CommandResult {
    Ok(Reply::Bulk(words[1].clone()))
}
