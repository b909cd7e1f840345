//! A server: its data, its state, and the faults that a simulation gives it.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::arguments::shown;
use crate::cluster::{Address, NodeState, SlotMap};
use crate::commands::{self, NO_AUTH, Properties, WRITE};
use crate::data_commands::DATA_COMMANDS;
use crate::keyspace::{Entry, Keyspace, Value};
use crate::refusals::{NO_LOGIN, READ_ONLY, Refusal};
use crate::reply::{CommandResult, Failure, Protocol, Reply, write_error};
use crate::server_commands::SERVER_COMMANDS;
use crate::statistics::Statistics;
use crate::stream_commands::ReadOptions;

/// Kind of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Server of its own, or primary or replica of a deployment with sentinels.
    #[default]
    Single,
    /// Node of a cluster.
    Cluster,
    /// Sentinel.
    Sentinel,
}

/// Options of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Kind of the server.
    pub kind: Kind,
    /// Password of the default user; `None`: connections need no login.
    pub password: Option<String>,
    /// What the server does when its memory is full, as INFO tells it.
    pub maxmemory_policy: String,
    /// Version that INFO and HELLO tell.
    pub version: String,
}

impl Default for Options {
    fn default() -> Self {
        let (maxmemory_policy, version) = ("noeviction".to_owned(), "7.0.15".to_owned());
        Self { kind: Kind::Single, password: None, maxmemory_policy, version }
    }
}

/// Role of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Accepts writes.
    #[default]
    Primary,
    /// Refuses writes.
    Replica {
        /// Address of its primary.
        primary: Address,
        /// It is connected to its primary.
        is_connected: bool,
    },
}

/// State of a client's connection.
#[derive(Clone, Debug, Default)]
pub struct Connection {
    pub(crate) protocol: Protocol,
    pub(crate) is_logged_in: bool,
    pub(crate) is_asking: bool,
    pub(crate) name: Bytes,
}

impl Connection {
    /// Creates the state of a new connection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends the reply to a read that waited without success.
    pub fn end_blocked_read(&self, reply: &mut BytesMut) {
        Reply::NullArray.encode(self.protocol, reply);
    }
}

/// When the reply to a command is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// At once.
    Replied,
    /// So many milliseconds later, 0: never. The server runs no other command of the connection before (WAIT).
    RepliedAfter(u64),
    /// Not yet: the command waits for entries of a stream, at most so many milliseconds, 0: without end. The simulation
    /// executes it again after writes, and at the end calls [`Connection::end_blocked_read`]. Nothing was appended.
    Blocked(u64),
}

/// Copy of a server's data.
#[derive(Clone, Debug)]
pub struct Snapshot(Keyspace);

/// Redis server. A clone is an independent copy. A server may move to another thread.
#[derive(Clone, Debug, Default)]
pub struct Server {
    pub(crate) options: Options,
    pub(crate) keyspace: Keyspace,
    /// Texts of the scripts that EVALSHA knows, by SHA-1.
    pub(crate) scripts: BTreeMap<String, Bytes>,
    pub(crate) role: Role,
    pub(crate) refusal: Option<Refusal>,
    pub(crate) slots: Option<Arc<SlotMap>>,
    pub(crate) watched_primaries: BTreeMap<String, Address>,
    pub(crate) replicas_in_sync: u32,
    pub(crate) statistics: Statistics,
    /// The current command follows ASKING.
    pub(crate) is_asking: bool,
}

impl Server {
    /// Creates an empty server.
    pub fn new(options: Options) -> Self {
        Self { options, ..Self::default() }
    }

    /// Runs a command at the server's time `now_us`, in microseconds since 1970, and appends its reply.
    pub fn execute(
        &mut self,
        connection: &mut Connection,
        now_us: u64,
        words: &[Bytes],
        reply: &mut BytesMut,
    ) -> Outcome {
        if words.is_empty() {
            return Outcome::Replied;
        }
        self.keyspace.set_now_us(now_us);
        self.is_asking = mem::take(&mut connection.is_asking);
        // A connection needs no login if it was open before there was a password.
        connection.is_logged_in |= self.options.password.is_none();
        match self.run(connection, words) {
            Err(Failure(text)) => self.write_error(&text, reply),
            Ok(Reply::Error(text)) => self.write_error(&text, reply),
            Ok(result) => {
                let outcome = outcome(words, &result);
                if !matches!(outcome, Outcome::Blocked(_)) {
                    result.encode(connection.protocol, reply);
                }
                return outcome;
            }
        }
        Outcome::Replied
    }

    fn write_error(&mut self, text: &str, reply: &mut BytesMut) {
        self.statistics.count_error(text);
        write_error(text, reply);
    }

    fn run(&mut self, connection: &mut Connection, words: &[Bytes]) -> CommandResult {
        let data_command = commands::find(DATA_COMMANDS, &words[0]);
        let server_command = commands::find(SERVER_COMMANDS, &words[0]);
        let properties = match (data_command, server_command) {
            (Some(command), _) if self.has_command(command.properties.name) => command.properties,
            (_, Some(command)) if self.has_command(command.properties.name) => command.properties,
            _ => return Err(unknown_command(words)),
        };
        if !properties.allows_words(words.len()) {
            return Err(commands::wrong_word_count(properties.name));
        }
        self.check(connection, &properties, words)?;
        self.statistics.count_command(properties.name);
        match (data_command, server_command) {
            (Some(command), _) => (command.run)(&mut self.keyspace, words),
            (None, Some(command)) => (command.run)(self, connection, words),
            (None, None) => Err(unknown_command(words)),
        }
    }

    /// Returns true if a server of this kind has the command.
    fn has_command(&self, name: &str) -> bool {
        let is_sentinel = self.options.kind == Kind::Sentinel;
        match name {
            "sentinel" => is_sentinel,
            "ping" | "auth" | "hello" | "info" | "role" | "client" => true,
            _ => !is_sentinel,
        }
    }

    /// Checks that the server runs the command now, in the order of Redis.
    fn check(&mut self, connection: &Connection, command: &Properties, words: &[Bytes]) -> Result<(), Failure> {
        if !connection.is_logged_in && !command.has(NO_AUTH) {
            return Err(NO_LOGIN);
        }
        let keys = command.keys(words);
        if let Some(slots) = &self.slots {
            let state = NodeState { is_asking: self.is_asking, is_down: self.refusal == Some(Refusal::ClusterDown) };
            slots.check(keys, state, &mut self.keyspace)?;
        }
        if command.has(WRITE) && self.is_replica() {
            return Err(READ_ONLY);
        }
        let refusal = self.refusal.filter(|refusal| refusal.concerns(command, !keys.is_empty()));
        refusal.map_or(Ok(()), |refusal| Err(refusal.failure()))
    }

    pub(crate) const fn is_replica(&self) -> bool {
        matches!(self.role, Role::Replica { .. })
    }

    /// Counts of what happened.
    pub const fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Number of keys that were removed because they had expired.
    pub const fn expired_keys(&self) -> u64 {
        self.keyspace.expired_keys
    }

    /// Keys that have not expired at `now_us`, in the order of their names.
    pub fn live_keys(&self, now_us: u64) -> Vec<(&Bytes, &Entry)> {
        self.keyspace.live_entries(now_us)
    }

    /// Value of a key that has not expired at `now_us`.
    pub fn live_value(&self, key: &Bytes, now_us: u64) -> Option<&Value> {
        self.keyspace.live_value(key, now_us)
    }

    /// Number of keys, including those that have expired and were not met since.
    pub fn key_count(&self) -> usize {
        self.keyspace.len()
    }

    /// Estimate of the memory that the keys need, in bytes.
    pub fn memory_estimate(&self) -> usize {
        self.keyspace.bytes()
    }
}

/// Faults.
impl Server {
    /// Loses all data and scripts, as a crash of a server without persistence does. The simulation closes connections.
    pub fn crash(&mut self) {
        self.keyspace.clear();
        self.scripts.clear();
    }

    /// Copies the data.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot(self.keyspace.clone())
    }

    /// Replaces the data by a copy, as a restart from disk or a failover to a replica does. Scripts are forgotten.
    pub fn restore(&mut self, snapshot: &Snapshot) {
        let expired_keys = self.keyspace.expired_keys;
        self.keyspace = snapshot.0.clone();
        self.keyspace.expired_keys = expired_keys;
        self.scripts.clear();
    }

    /// Removes a key, as a server does whose memory is full; returns true if it was there.
    pub fn evict(&mut self, key: &Bytes) -> bool {
        let is_evicted = self.keyspace.remove(key);
        self.statistics.evicted_keys += u64::from(is_evicted);
        is_evicted
    }

    /// Sets or ends a state in which the server refuses commands.
    pub const fn set_refusal(&mut self, refusal: Option<Refusal>) {
        self.refusal = refusal;
    }

    /// Sets the role.
    pub fn set_role(&mut self, role: Role) {
        self.role = role;
    }

    /// Sets the slots that a node of a cluster knows.
    pub fn set_slots(&mut self, slots: SlotMap) {
        self.slots = Some(Arc::new(slots));
    }

    /// Sets the number of replicas that have all writes, which WAIT returns.
    pub const fn set_replicas_in_sync(&mut self, replicas: u32) {
        self.replicas_in_sync = replicas;
    }

    /// Sets the address of a primary that a sentinel watches, by its name; `None`: the sentinel does not know it.
    pub fn set_watched_primary(&mut self, name: &str, primary: Option<Address>) {
        match primary {
            Some(primary) => drop(self.watched_primaries.insert(name.to_owned(), primary)),
            None => drop(self.watched_primaries.remove(name)),
        }
    }

    /// Sets the password of the default user; open connections stay logged in.
    pub fn set_password(&mut self, password: Option<String>) {
        self.options.password = password;
    }
}

/// Returns when the reply is sent.
fn outcome(words: &[Bytes], reply: &Reply) -> Outcome {
    let is_command = |name: &str| words[0].eq_ignore_ascii_case(name.as_bytes());
    match reply {
        Reply::NullArray if is_command("xread") => {
            let wait_ms = ReadOptions::parse(words).ok().and_then(|options| options.block_ms);
            wait_ms.map_or(Outcome::Replied, Outcome::Blocked)
        }
        Reply::Integer(replicas) if is_command("wait") => {
            let number = |word: &Bytes| crate::numbers::parse_integer(word).unwrap_or_default();
            let (wanted, wait_ms) = (number(&words[1]), u64::try_from(number(&words[2])).unwrap_or_default());
            if *replicas < wanted { Outcome::RepliedAfter(wait_ms) } else { Outcome::Replied }
        }
        _ => Outcome::Replied,
    }
}

/// Maximum number of bytes of arguments that an error about an unknown command shows.
const MAX_SHOWN_ARGUMENT_BYTES: usize = 128;

fn unknown_command(words: &[Bytes]) -> Failure {
    let mut arguments = String::new();
    for word in &words[1..] {
        if arguments.len() >= MAX_SHOWN_ARGUMENT_BYTES {
            break;
        }
        arguments += &format!("'{}' ", shown(word, MAX_SHOWN_ARGUMENT_BYTES - arguments.len()));
    }
    let name = shown(&words[0], MAX_SHOWN_ARGUMENT_BYTES);
    Failure::new(format!("ERR unknown command '{name}', with args beginning with: {arguments}"))
}
