//! Lua as scripts see it: values in both directions, the library `struct`, and texts of errors.

use bytes::Bytes;
use kit::seeded_random::Chance;

use super::server_pair::ServerPair;

/// Scripts without keys.
const SCRIPTS: &[&str] = &[
    "return nil",
    "return 1, 2",
    "return {1, 2, nil, 3}",
    "return {1, 2.99, -2.99, 'text', true, false, {ok = 'fine'}, {err = 'MY error'}, {}}",
    "return {1e18, -1e19, 1e300, 0/0, 1/0, -1/0, 2^53 + 1, -0}",
    "return {err = 'MY error'}",
    "return {ok = 'MY status'}",
    "return redis.error_reply('MY error')",
    "return redis.error_reply('-MY error')",
    "return redis.error_reply('-MY')",
    "return redis.status_reply('MY status')",
    "return redis.sha1hex('')",
    "return redis.sha1hex(ARGV[1])",
    "return {KEYS[1], ARGV[1], ARGV[2], #KEYS, #ARGV}",
    "return redis.call('GET')",
    "return redis.pcall('GET')",
    "return redis.pcall('GET').err",
    "return redis.call('NOSUCH')",
    "return redis.pcall('NOSUCH')",
    "return redis.call()",
    "return redis.call({})",
    "return redis.call('ECHO', true)",
    "return redis.call('EVAL', 'return 1', '0')",
    "return redis.call('SCRIPT', 'FLUSH')",
    "return redis.call('ECHO', 12345678901234567890)",
    "return {redis.call('ECHO', 0.1), redis.call('ECHO', 1e16), redis.call('ECHO', 1e17), redis.call('ECHO', -2^62)}",
    "return {redis.call('ECHO', 1e-5), redis.call('ECHO', 1/3), redis.call('ECHO', 123456.789), redis.call('ECHO', 2^80)}",
    "return redis.call('TIME')",
    "return {redis.call('PING'), redis.call('SET', 'k', 'v', 'PX', 100), redis.call('GET', 'k'), redis.call('GET', 'no')}",
    "return redis.call('PTTL', 'k')",
    "redis.call('ZADD', 'z', 1.5, 'a', 2, 'b') return redis.call('ZREVRANGEBYSCORE', 'z', '+inf', 0, 'WITHSCORES')",
    "return {redis.call('ZSCORE', 'z', 'a'), redis.call('DEL', 'z'), redis.call('DEL', 'k')}",
    "redis.call('RPUSH', 'l', 'a', 'b') return {redis.call('LINDEX', 'l', -1), redis.call('LLEN', 'l'), redis.call('DEL', 'l')}",
    "redis.call('HSET', 'h', 'f', 'v') return {redis.call('HGETALL', 'h'), redis.call('HMGET', 'h', 'f', 'g'), redis.call('DEL', 'h')}",
    "redis.call('SET', 'k', 'v')\nlocal a = redis.call('INCRBY', 'k', 1)\nreturn a",
    "redis.call('SET', 'k', 'v')\nlocal ok, e = pcall(redis.call, 'INCRBY', 'k', 1)\nreturn {tostring(ok), e}",
    "redis.call('SET', 'k', 'v') return redis.pcall('LLEN', 'k')",
    "return type(redis.pcall('SET', 'k', 'v')) .. type(redis.call('GET', 'none'))",
    "return {select(2, pcall(error, 'text')), select(2, pcall(error, {err = 'MY error'})), (pcall(error, {}))}",
    "error('text')",
    "error('text', 0)",
    "error({err = 'MY error'})",
    "local t = nil\nreturn t.x",
    "return 1 + {}",
    "return undefined",
    "undefined = 1",
    "KEYS = nil return KEYS",
    "syntax error",
    "return 'unfinished",
    "return tostring(1e15) .. tostring(123456789012345678) .. tostring(0.1) .. tostring(-0)",
    "return string.format('%.0f %5.2f %d %x', 1e17, 1/3, 42, 255)",
    "return table.concat({1, 2.5, 1e15, 1e14}, ',')",
    "return {tonumber('12'), tonumber('1e3'), tonumber(' 7 '), tostring(tonumber('x')), tonumber('0x10')}",
    "return {math.floor(-1.5), math.ceil(1.2), math.max(1, 2), math.min(1, 2), 7 % 3, -7 % 3, 5.5 % 2}",
    "return {string.byte('a'), string.rep('ab', 3), string.sub('hello', 2, -2), string.find('hello', 'l')}",
    "return {select(2, 'a', 'b', 'c')}",
    "local s = 0 for _, v in ipairs({1, 2, 3}) do s = s + v end return s",
    "return struct.pack('<i8', 'x')",
    "return struct.pack('<i8')",
    "return struct.pack('=i8', 1)",
    "return struct.unpack('<z', '')",
    "return struct.pack('<c4', 'abc')",
    "return struct.unpack('<i8', 'short')",
    "return struct.unpack('<c0', 'text')",
    "return struct.unpack('<Bc0', '\\5abc')",
    "return struct.unpack('<B', 'abc', 0)",
    "return struct.unpack('<B', 'abc', 4)",
    "return {struct.unpack('<BBB', 'abc', 2)}",
    "return struct.pack('<I8I8i8i4', 2^53, -1, -2^62, 2^40 + 7)",
    "return {struct.unpack('<I2i3bB', string.rep('\\254\\3', 20))}",
    "return {struct.unpack('<Bc0c2', '\\3abcdef\\0\\1')}",
    "return struct.pack('<I2bBi3d', 258, -1, 255, -3, 0.5)",
    "return struct.pack('<Bc0', 3, 'abcdef')",
    "return tostring(struct.unpack('<d', struct.pack('<d', 0.1)))",
];

/// Compares all scripts.
pub(crate) fn compare_scripts(pair: &mut ServerPair) {
    for text in SCRIPTS {
        let words: [&'static [u8]; 6] = [b"EVAL", text.as_bytes(), b"1", b"{k}ey", b"argument", b"\0\xff"];
        pair.compare_replies(&words.map(Bytes::from_static));
    }
    pair.compare_keys();
}

/// Compares a random format of `struct` with random numbers.
pub(crate) fn compare_struct(pair: &mut ServerPair, chance: &mut Chance) {
    const SCRIPT: &[u8] = b"local n = {} for i = 2, #ARGV do n[i - 1] = tonumber(ARGV[i]) or ARGV[i] end
local packed = struct.pack(ARGV[1], unpack(n))
local found = {struct.unpack(ARGV[1], packed)}
for i, value in ipairs(found) do if type(value) == 'number' then found[i] = string.format('%.17g', value) end end
return {packed, found}";
    let mut format = "<".to_owned();
    let mut words = [&b"EVAL"[..], SCRIPT, b"0", b""].map(Bytes::from_static).to_vec();
    for _ in 0..chance.between(1, 6) {
        let item = chance.pick(&["i8", "I8", "i4", "I4", "i2", "B", "b", "d", "c3", "i3", "I7"]);
        format += item;
        words.push(match item {
            "c3" => Bytes::from_static(b"a\0c"),
            _ => number(chance).into(),
        });
    }
    words[3] = format.into();
    pair.compare_replies(&words);
}

fn number(chance: &mut Chance) -> String {
    let number = chance.next() >> chance.below(64);
    let number = number.min(1 << 62);
    match chance.below(4) {
        0 => format!("-{number}"),
        1 => format!("{}.75", number >> 20),
        _ => number.to_string(),
    }
}
