//! A redis-server and a simulated one that get the same commands at the same times.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;

use bytes::{Bytes, BytesMut};
use kit::redis::{REPLY_TIMEOUT, Server, options};
use kit::seeded_random::Chance;
use simulated_redis::keyspace::{Entry, Value};
use simulated_redis::numbers::format_double;
use simulated_redis::server::{self, Connection, Outcome};

/// Time at which both servers start, in microseconds since 1970.
const START_US: u64 = 1_700_000_000_000_000;
/// Number of commands that a failure shows.
const SHOWN_COMMANDS: usize = 20;

/// Version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Resp2,
    Resp3,
}

/// Decoded reply.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Frame {
    /// Everything but strings and collections: the line with its kind.
    Line(Bytes),
    /// String of bytes.
    Bulk(Bytes),
    /// Collection: its kind and its elements, twice as many as its length says for a map.
    Collection(u8, Vec<Self>),
}

impl Frame {
    /// Decodes the reply at the start of `input`, and returns the bytes after it; `None` while it is incomplete.
    pub(crate) fn decode(input: &[u8]) -> Option<(Self, &[u8])> {
        let end = input.windows(2).position(|pair| pair == b"\r\n")?;
        let (line, mut rest) = (&input[..end], &input[end + 2..]);
        let length = || std::str::from_utf8(&line[1..]).ok()?.parse::<usize>().ok();
        match (line[0], length()) {
            (b'$', Some(length)) => {
                let bytes = rest.get(..length)?;
                Some((Self::Bulk(Bytes::copy_from_slice(bytes)), rest.get(length + 2..)?))
            }
            (kind @ (b'*' | b'%' | b'~'), Some(length)) => {
                let count = if kind == b'%' { 2 * length } else { length };
                let mut elements = Vec::with_capacity(count);
                for _ in 0..count {
                    let (element, after) = Self::decode(rest)?;
                    elements.push(element);
                    rest = after;
                }
                Some((Self::Collection(kind, elements), rest))
            }
            _ => Some((Self::Line(Bytes::copy_from_slice(line)), rest)),
        }
    }

    /// Elements of a collection.
    pub(crate) fn elements(&self) -> &[Self] {
        if let Self::Collection(_, elements) = self { elements } else { &[] }
    }

    /// Bytes of a string.
    pub(crate) fn bytes(&self) -> Option<&Bytes> {
        if let Self::Bulk(bytes) = self { Some(bytes) } else { None }
    }

    /// Sorts the elements, in groups of `group`.
    fn sorted(self, group: usize) -> Self {
        let Self::Collection(kind, elements) = self else { return self };
        let mut groups: Vec<&[Self]> = elements.chunks(group).collect();
        groups.sort();
        Self::Collection(kind, groups.concat())
    }
}

/// Both servers, and a connection to each.
pub(crate) struct ServerPair {
    /// The redis-server, if only this pair has it.
    real: Option<Server>,
    stream: TcpStream,
    received: Vec<u8>,
    pub(crate) simulated: server::Server,
    connection: Connection,
    now_us: u64,
    history: VecDeque<String>,
    /// Number of commands that were compared.
    pub(crate) compared: u64,
}

impl ServerPair {
    /// Starts both at the same time.
    pub(crate) fn start() -> Self {
        let real = options()
            .frozen_clock(START_US)
            .with(&[("enable-debug-command", "yes"), ("enable-protected-configs", "yes")])
            .start();
        // The simulated server removes keys only when it meets them.
        real.query::<()>(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]);
        let port = real.port();
        Self { real: Some(real), ..Self::with(port, server::Server::new(server::Options::default())) }
    }

    /// Pairs the redis-server at a port with a simulated one.
    pub(crate) fn with(port: u16, simulated: server::Server) -> Self {
        Self {
            real: None,
            stream: connect(port),
            received: Vec::new(),
            simulated,
            connection: Connection::new(),
            now_us: START_US,
            history: VecDeque::new(),
            compared: 0,
        }
    }

    /// The redis-server, which only this pair has.
    pub(crate) fn real(&self) -> &Server {
        self.real.as_ref().expect("the pair started the server")
    }

    /// Opens new connections to both.
    pub(crate) fn reconnect(&mut self) {
        self.stream = connect(self.real().port());
        self.connection = Connection::new();
    }

    /// Changes the protocol of both connections.
    pub(crate) fn select_protocol(&mut self, protocol: Protocol) {
        let version = if protocol == Protocol::Resp3 { b"3" } else { b"2" };
        let words = [Bytes::from_static(b"HELLO"), Bytes::from_static(version)];
        self.call_real(&words);
        self.call_simulated(&words);
    }

    /// Time of both servers in microseconds since 1970.
    pub(crate) const fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Sets the clocks of both.
    pub(crate) fn set_time(&mut self, now_us: u64) {
        self.now_us = now_us;
        self.real().set_frozen_clock(now_us);
        self.record(format!("-- time {now_us}"));
    }

    /// Sets the clocks to the last microseconds in which some key is there, or the first in which it is not; false if
    /// no key expires within a minute.
    pub(crate) fn pass_time_to_expiry(&mut self, chance: &mut Chance) -> bool {
        let latest_ms = i64::try_from(self.now_us / 1000).expect("a time of this century") + 60_000;
        let entries = self.simulated.live_keys(self.now_us).into_iter();
        let expiries: Vec<i64> =
            entries.filter_map(|(_, entry)| entry.expires_at_ms.filter(|at_ms| *at_ms <= latest_ms)).collect();
        let Some(at_ms) = expiries.get(chance.place(expiries.len().max(1))) else { return false };
        let at_us = u64::try_from(*at_ms).expect("a key that is there expires later") * 1000;
        self.set_time(at_us + chance.pick(&[0, 999, 1000]));
        true
    }

    fn record(&mut self, line: String) {
        if self.history.len() == SHOWN_COMMANDS {
            self.history.pop_front();
        }
        self.history.push_back(line);
    }

    /// Sends a command to the redis-server.
    pub(crate) fn call_real(&mut self, words: &[Bytes]) -> Frame {
        self.call_real_pipelined(&[words.to_vec()]).remove(0)
    }

    /// Sends commands to the redis-server at once.
    fn call_real_pipelined(&mut self, commands: &[Vec<Bytes>]) -> Vec<Frame> {
        let mut sent = Vec::new();
        for words in commands {
            sent.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
            for word in words {
                sent.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
                sent.extend_from_slice(word);
                sent.extend_from_slice(b"\r\n");
            }
        }
        self.stream.write_all(&sent).expect("the server reads");
        let mut replies = Vec::with_capacity(commands.len());
        self.received.clear();
        loop {
            let mut bytes = [0; 16 << 10];
            let count = self.stream.read(&mut bytes).unwrap_or_else(|error| self.fail(&error.to_string()));
            assert!(count > 0, "the server closed the connection after {commands:?}");
            self.received.extend_from_slice(&bytes[..count]);
            let mut used = 0;
            while let Some((frame, rest)) = Frame::decode(&self.received[used..]) {
                used = self.received.len() - rest.len();
                replies.push(frame);
            }
            self.received.drain(..used);
            assert!(replies.len() <= commands.len(), "more than one reply to a command of {commands:?}");
            if replies.len() == commands.len() {
                return replies;
            }
        }
    }

    /// Sends a command to the simulated server.
    pub(crate) fn call_simulated(&mut self, words: &[Bytes]) -> Frame {
        let mut reply = BytesMut::new();
        match self.simulated.execute(&mut self.connection, self.now_us, words, &mut reply) {
            Outcome::Replied | Outcome::RepliedAfter(_) => {}
            Outcome::Blocked(_) => self.connection.end_blocked_read(&mut reply),
        }
        let (frame, rest) = Frame::decode(&reply).unwrap_or_else(|| panic!("incomplete reply {reply:?} to {words:?}"));
        assert!(rest.is_empty(), "more than one reply to {words:?}: {reply:?}");
        frame
    }

    /// Sends a command to both, compares the replies, and returns that of the redis-server. Elements without an order
    /// are sorted, and walks are made to their end.
    pub(crate) fn compare_replies(&mut self, words: &[Bytes]) -> Frame {
        self.record(format!("{words:?}"));
        self.compared += 1;
        let name = words[0].to_ascii_uppercase();
        let (real, simulated) = match &*name {
            b"SCAN" if words.len() > 1 => {
                (self.walk(words, 1, Self::call_real), self.walk(words, 1, Self::call_simulated))
            }
            b"HSCAN" if words.len() > 2 => {
                (self.walk(words, 2, Self::call_real), self.walk(words, 2, Self::call_simulated))
            }
            b"HGETALL" => (self.call_real(words).sorted(2), self.call_simulated(words).sorted(2)),
            b"KEYS" => (self.call_real(words).sorted(1), self.call_simulated(words).sorted(1)),
            _ => (self.call_real(words), self.call_simulated(words)),
        };
        self.assert_equal(&real, &simulated);
        real
    }

    /// Compares a value, and shows the last commands if it differs.
    #[track_caller]
    pub(crate) fn assert_equal<T: PartialEq + std::fmt::Debug>(&self, real: &T, simulated: &T) {
        if real != simulated {
            self.fail(&format!("redis-server: {real:?}\nsimulated:    {simulated:?}"));
        }
    }

    /// Fails, and shows the last commands.
    #[track_caller]
    fn fail(&self, what: &str) -> ! {
        let history = self.history.iter().cloned().collect::<Vec<_>>().join("\n");
        panic!("{history}\n{what}");
    }

    /// Walks from cursor 0 to the end and returns all names found, or the error. The word at `cursor` is the cursor.
    fn walk(&mut self, words: &[Bytes], cursor: usize, call: impl Fn(&mut Self, &[Bytes]) -> Frame) -> Frame {
        let (mut words, mut found) = (words.to_vec(), Vec::new());
        let group = cursor;
        loop {
            let reply = call(self, &words);
            let [next, page] = reply.elements() else { return reply };
            found.extend(page.elements().chunks(group).map(<[Frame]>::to_vec));
            let next = next.bytes().expect("a cursor is a string").clone();
            if *next == *b"0" {
                break;
            }
            words[cursor] = next;
        }
        found.sort();
        found.dedup();
        Frame::Collection(b'*', found.concat())
    }

    /// Compares all keys with their types, expiries and values.
    pub(crate) fn compare_keys(&mut self) {
        let word = Bytes::from_static;
        let names = self.call_real(&[word(b"KEYS"), word(b"*")]).sorted(1);
        let names: Vec<Bytes> = names.elements().iter().filter_map(Frame::bytes).cloned().collect();
        let entries = self.simulated.live_keys(self.now_us).into_iter();
        let entries: Vec<(Bytes, Entry)> = entries.map(|(name, entry)| (name.clone(), entry.clone())).collect();
        self.assert_equal(&names, &entries.iter().map(|(name, _)| name.clone()).collect());
        let reads = entries.iter().flat_map(|(name, entry)| {
            let encoding = vec![word(b"OBJECT"), word(b"ENCODING"), name.clone()];
            [vec![word(b"PEXPIRETIME"), name.clone()], encoding, words_of_read(name, &entry.value)]
        });
        let replies =
            if entries.is_empty() { Vec::new() } else { self.call_real_pipelined(&reads.collect::<Vec<_>>()) };
        for ((name, entry), replies) in entries.iter().zip(replies.chunks_exact(3)) {
            let expiry = Frame::Line(format!(":{}", entry.expires_at_ms.unwrap_or(-1)).into());
            // Only a small hash has an order.
            let has_order = **replies[1].bytes().expect("an encoding is a string") != *b"hashtable";
            let value = if has_order { replies[2].clone() } else { replies[2].clone().sorted(2) };
            let mut strings = Vec::new();
            collect_strings(&value, &mut strings);
            let simulated = (name, expiry, Self::describe(&entry.value, has_order));
            self.assert_equal(&(name, replies[0].clone(), strings), &simulated);
        }
    }

    /// Returns the strings of a value of the simulated server.
    fn describe(value: &Value, has_order: bool) -> Vec<Bytes> {
        match value {
            Value::String(bytes) => vec![bytes.clone()],
            Value::List(list) => list.iter().cloned().collect(),
            Value::Hash(hash) => {
                let mut pairs: Vec<[Bytes; 2]> =
                    hash.iter().map(|(field, value)| [field.clone(), value.clone()]).collect();
                if !has_order {
                    pairs.sort();
                }
                pairs.concat()
            }
            Value::SortedSet(set) => {
                set.iter().flat_map(|(member, score)| [member.clone(), format_double(score).into()]).collect()
            }
            Value::Stream(stream) => {
                let entry = |(id, fields): (&simulated_redis::streams::StreamId, &Vec<Bytes>)| {
                    let mut strings = vec![Bytes::from(id.to_string())];
                    strings.extend(fields.iter().cloned());
                    strings
                };
                stream.entries().iter().flat_map(entry).collect()
            }
        }
    }
}

/// Returns the command that reads a value of this type.
fn words_of_read(name: &Bytes, value: &Value) -> Vec<Bytes> {
    let words: &[&'static [u8]] = match value {
        Value::String(_) => &[b"GET"],
        Value::List(_) => &[b"LRANGE", b"0", b"-1"],
        Value::Hash(_) => &[b"HGETALL"],
        Value::SortedSet(_) => &[b"ZRANGE", b"0", b"-1", b"WITHSCORES"],
        Value::Stream(_) => &[b"XRANGE", b"-", b"+"],
    };
    let mut words: Vec<Bytes> = words.iter().copied().map(Bytes::from_static).collect();
    words.insert(1, name.clone());
    words
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("the server accepts");
    stream.set_nodelay(true).expect("the option is there");
    stream.set_read_timeout(Some(REPLY_TIMEOUT)).expect("the option is there");
    stream
}

/// Adds all strings of a reply, and the numbers of RESP3.
fn collect_strings(frame: &Frame, strings: &mut Vec<Bytes>) {
    match frame {
        Frame::Line(line) => strings.push(line.slice(1..)),
        Frame::Bulk(bytes) => strings.push(bytes.clone()),
        Frame::Collection(_, elements) => elements.iter().for_each(|element| collect_strings(element, strings)),
    }
}
