//! Calls of the product's scripts on both servers, as the store makes them: by hash, then by text.

use std::collections::BTreeMap;

use bytes::Bytes;
use kit::seeded_random::Chance;
use tollkeeper::base::clock::Time;
use tollkeeper::store::client::redis::connection::Script;

use super::server_pair::{Frame, ServerPair};

/// Both servers, random numbers, and the calls so far.
pub(crate) struct ScriptCalls {
    pub(crate) pair: ServerPair,
    pub(crate) chance: Chance,
    /// Calls with a result by name of what was called, and calls with an error.
    pub(crate) done: BTreeMap<&'static str, u64>,
    pub(crate) failed: BTreeMap<(&'static str, Bytes), u64>,
}

impl ScriptCalls {
    pub(crate) fn new(pair: ServerPair, chance: Chance) -> Self {
        Self { pair, chance, done: BTreeMap::new(), failed: BTreeMap::new() }
    }

    /// Calls a script on both servers, and compares the replies; returns the reply.
    pub(crate) fn call(&mut self, name: &'static str, script: &Script, keys: &[Bytes], arguments: &[Bytes]) -> Frame {
        let copy = |text: &str| Bytes::copy_from_slice(text.as_bytes());
        let mut words = vec![copy("EVALSHA"), copy(&script.sha1), copy(&keys.len().to_string())];
        words.extend(keys.iter().chain(arguments).cloned());
        let mut reply = self.pair.compare_replies(&words);
        if matches!(&reply, Frame::Line(line) if line.starts_with(b"-NOSCRIPT")) {
            (words[0], words[1]) = (copy("EVAL"), copy(&script.text));
            reply = self.pair.compare_replies(&words);
        }
        match &reply {
            Frame::Line(line) if line.starts_with(b"-") => {
                *self.failed.entry((name, line.clone())).or_default() += 1;
            }
            _ => *self.done.entry(name).or_default() += 1,
        }
        reply
    }

    /// Sends a command to both servers.
    pub(crate) fn command(&mut self, words: &[&[u8]]) -> Frame {
        let words: Vec<Bytes> = words.iter().map(|word| Bytes::copy_from_slice(word)).collect();
        self.pair.compare_replies(&words)
    }

    /// Numbers of 8 bytes in a string of the simulated server; none if the key is absent or of another type.
    pub(crate) fn numbers(&self, key: &Bytes) -> Vec<u64> {
        let entries = self.pair.simulated.live_keys(self.pair.now_us());
        let value = entries.into_iter().find(|(name, _)| *name == key).map(|(_, entry)| &entry.value);
        let Some(simulated_redis::keyspace::Value::String(bytes)) = value else { return Vec::new() };
        bytes.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number)).collect()
    }

    /// Time of both servers.
    pub(crate) fn now(&self) -> Time {
        Time::from_micros(self.pair.now_us())
    }

    /// Time of a call: that of the server, or one near it.
    pub(crate) fn given_time(&mut self) -> Option<Time> {
        let near_us = self.chance.pick(&[0, 10, 10_000_000]);
        self.chance.one_in(3).then(|| self.time_within(near_us))
    }

    /// A time at most so many microseconds before or after now.
    pub(crate) fn time_within(&mut self, most_us: u64) -> Time {
        Time::from_micros((self.pair.now_us() + self.chance.below(2 * most_us + 1)).saturating_sub(most_us).max(1))
    }

    /// Lets time pass, by microseconds up to days or to the end of a key's life, rarely backwards.
    pub(crate) fn pass_time(&mut self) {
        if self.chance.one_in(4) && self.pair.pass_time_to_expiry(&mut self.chance) {
            return;
        }
        let longest_us = self.chance.pick(&[10, 1000, 1_000_000, 1_000_000, 60_000_000, 3_600_000_000, 90_000_000_000]);
        let (now_us, by_us) = (self.pair.now_us(), self.chance.below(longest_us));
        self.pair.set_time(if self.chance.one_in(10) { now_us.saturating_sub(by_us) } else { now_us + by_us });
    }

    /// Writes what no script wrote under a key, or removes it.
    pub(crate) fn spoil(&mut self, key: &Bytes) {
        self.command(&[b"DEL", key]);
        match self.chance.below(6) {
            0 => self.command(&[b"SET", key, b"foreign"]),
            1 => self.command(&[b"RPUSH", key, b"foreign"]),
            2 => self.command(&[b"HSET", key, b"", b"foreign"]),
            3 => self.command(&[b"SET", key, &[0xff; 24]]),
            _ => return,
        };
    }
}
