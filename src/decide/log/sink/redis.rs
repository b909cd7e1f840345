//! Sink that appends to a stream in Redis.
//!
//! Each line is one entry with the field `record`. The connections and their thread belong to the sink alone. A command
//! is sent once, so an entry is in the stream at most once; one without an answer counts as failed.
//!
//! Trimming removes the oldest entries, headers among them, and readers need the rules of the decisions that remain. So
//! a header is appended again once it is trimmed away. If the user may not read the stream, that is guessed from the
//! number of entries written.
//!
//! Decides: how long a stream of the decision log is, how long a write may take, which rights it needs.
//! Decides: how a trimmed stream keeps its header.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use crate::base::clock::Clock;
use crate::base::threads;
use crate::decide::log::header::{HeaderReason, HeaderRecord};
use crate::decide::log::queue::LostRecords;
use crate::decide::log::redis_stream::{EntryId, parse_entries};
use crate::settings::decision_log::RedisStreamSettings;
use crate::store::client::redis::connect::ConnectOptions;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::deployment_context::DeploymentOptions;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::health_check::{CommandWords, HealthCheck};
use crate::store::client::redis::resp::reply_text;

/// Upper bound on a write, on a look at the oldest entry, and on a health check. Nothing but the sink waits for them.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time between two looks at the oldest entry of the stream.
const HEADER_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of headers per maximum length of a stream that the user may not read.
const HEADERS_PER_UNREADABLE_STREAM: u64 = 8;
/// Maximum number of headers with earlier rules that are kept in the stream.
const MAX_EARLIER_HEADERS: usize = 4;

/// Writer of a stream.
#[derive(Debug)]
pub(crate) struct RedisSink {
    stream: Arc<StreamKey>,
    client: Deployment,
    /// Header of the current rules.
    header: Option<WrittenHeader>,
    /// Headers of earlier rules, whose decisions may still be in the stream.
    earlier: VecDeque<SupersededLogHeader>,
    /// Entries since the last header.
    lines_since_header: u64,
    checked_at: Instant,
    /// The user may read the stream.
    can_read: bool,
    /// Thread of the connections.
    runtime: Runtime,
}

/// A header and its entry.
#[derive(Clone, Debug)]
struct WrittenHeader {
    header: Arc<HeaderRecord>,
    /// `None` until it is known to be in the stream.
    id: Option<EntryId>,
}

/// Header of the log that a later one replaced, kept while the stream may have decisions under its rules.
#[derive(Clone, Debug)]
struct SupersededLogHeader {
    written: WrittenHeader,
    /// Entry after which no decision has its rules.
    last: EntryId,
}

/// Key of a stream, and its length.
#[derive(Debug)]
struct StreamKey {
    key: Bytes,
    max_length: Bytes,
    max_entries: u64,
    auth_setting: &'static str,
}

impl RedisSink {
    /// Starts to connect.
    ///
    /// # Errors
    /// The thread of the connections cannot be started.
    pub(super) fn start(settings: &RedisStreamSettings) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("decision-log")
            .on_thread_start(threads::lower_thread_priority)
            .enable_all()
            .build()?;
        let connect = ConnectOptions::for_noncritical_servers(&settings.deployment, "records of decisions are lost");
        let stream = Arc::new(StreamKey {
            key: settings.key.clone().into(),
            max_length: settings.max_length.to_string().into(),
            max_entries: settings.max_length,
            auth_setting: connect.auth_setting(),
        });
        let options = DeploymentOptions {
            connections: 1,
            call_timeout: WRITE_TIMEOUT,
            optional_commands: None,
            health_check: Box::new(StreamHealthCheck(Arc::clone(&stream))),
            connect,
        };
        let client = {
            let _within = runtime.enter();
            Deployment::start(settings.deployment.topology.clone(), options)
        };
        Ok(Self {
            stream,
            client,
            header: None,
            earlier: VecDeque::new(),
            lines_since_header: 0,
            checked_at: Instant::now(),
            can_read: true,
            runtime,
        })
    }

    /// Appends a header, and keeps it in the stream.
    ///
    /// # Errors
    /// It is not known to be written; it is appended again before later entries.
    pub(super) fn write_header(&mut self, header: &Arc<HeaderRecord>) -> Result<(), LostRecords> {
        let before = self.header.replace(WrittenHeader { header: Arc::clone(header), id: None });
        let id = self.append_header(header, header.event)?;
        if let Some(written) = before.filter(|before| before.id.is_some()) {
            self.earlier.push_back(SupersededLogHeader { written, last: id });
            if self.earlier.len() > MAX_EARLIER_HEADERS {
                self.earlier.pop_front();
            }
        }
        self.header = Some(WrittenHeader { header: Arc::clone(header), id: Some(id) });
        Ok(())
    }

    /// Appends headers again that were trimmed away, before entries that need them.
    ///
    /// # Errors
    /// A header is not known to be written.
    fn append_trimmed_headers_again(&mut self) -> Result<(), LostRecords> {
        let Some(current) = self.header.clone() else { return Ok(()) };
        let is_due = match self.can_read || current.id.is_none() {
            true => self.checked_at.elapsed() >= HEADER_CHECK_INTERVAL,
            false => self.lines_since_header >= self.stream.max_entries / HEADERS_PER_UNREADABLE_STREAM,
        };
        if !is_due {
            return Ok(());
        }
        self.checked_at = Instant::now();
        let first = match self.can_read.then(|| self.find_oldest_entry_id()) {
            // Without a permission, each try would be an entry in the server's log of such tries.
            Some(Err(RedisError::Misconfigured)) => {
                self.can_read = false;
                return Ok(());
            }
            Some(Err(_)) => return Ok(()),
            Some(Ok(first)) => first,
            None => EntryId::MAX,
        };
        if current.id.is_none_or(|id| id < first) {
            let event = if current.id.is_none() { current.header.event } else { HeaderReason::Rotation };
            let id = self.append_header(&current.header, event)?;
            self.header = Some(WrittenHeader { id: Some(id), ..current });
        }
        self.earlier.retain(|earlier| earlier.last >= first);
        for index in 0..self.earlier.len() {
            let SupersededLogHeader { written, .. } = self.earlier[index].clone();
            if written.id.is_some_and(|id| id < first) {
                let id = self.append_header(&written.header, HeaderReason::Rotation)?;
                self.earlier[index].written.id = Some(id);
            }
        }
        Ok(())
    }

    fn append_header(&mut self, header: &HeaderRecord, event: HeaderReason) -> Result<EntryId, LostRecords> {
        let line = match event {
            HeaderReason::Rotation => {
                let time_us = Clock::System.now().as_micros();
                HeaderRecord { event, time_us, ..header.clone() }.to_line()
            }
            HeaderReason::Start | HeaderReason::Reload => header.to_line(),
        };
        let appended = self.runtime.block_on(self.append_entry(line.trim_ascii_end(), Instant::now() + WRITE_TIMEOUT));
        self.lines_since_header = 0;
        appended.map_err(|error| LostRecords { count: 1, error: self.describe_error(error) })
    }

    /// Finds the id of the oldest entry; the greatest id in an empty stream.
    fn find_oldest_entry_id(&self) -> Result<EntryId, RedisError> {
        let key = &self.stream.key;
        let words: [&[u8]; 6] = [b"XRANGE", key, b"-", b"+", b"COUNT", b"1"];
        let call = self.client.call_key_unrecorded(key, &words, Instant::now() + WRITE_TIMEOUT);
        let reply = self.runtime.block_on(call)?;
        let entries = parse_entries(&reply).ok_or(RedisError::BadReply)?;
        Ok(entries.first().map_or(EntryId::MAX, |entry| entry.id))
    }

    /// Appends an entry for each line, in their order.
    ///
    /// # Errors
    /// Not all entries are known to be written.
    pub(super) fn write_lines(&mut self, lines: &[u8]) -> Result<(), LostRecords> {
        // A header that cannot be written is tried again; its failure is that of the lines too.
        let _ = self.append_trimmed_headers_again();
        self.lines_since_header += memchr::memchr_iter(b'\n', lines).count() as u64;
        let deadline = Instant::now() + WRITE_TIMEOUT;
        let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let outcomes = self.runtime.block_on(join_all(lines.map(|line| self.append_entry(line, deadline))));
        let mut failed = outcomes.into_iter().filter_map(Result::err);
        let Some(first) = failed.next() else { return Ok(()) };
        Err(LostRecords { count: 1 + failed.count() as u64, error: self.describe_error(first) })
    }

    fn describe_error(&self, error: RedisError) -> io::Error {
        let key = String::from_utf8_lossy(&self.stream.key);
        let advice = self.stream.advice(error);
        let cause = match (self.client.misconfiguration(), error) {
            // A connection error comes with its own text.
            (Some(text), RedisError::Unreachable | RedisError::Broken | RedisError::Timeout) => text.to_string(),
            _ => advice,
        };
        io::Error::other(format!("redis:{key}: {error}: {cause}"))
    }

    /// Appends an entry; returns its id.
    async fn append_entry(&self, line: &[u8], deadline: Instant) -> Result<EntryId, RedisError> {
        let StreamKey { key, max_length, .. } = &*self.stream;
        let words: [&[u8]; 8] = [b"XADD", key, b"MAXLEN", b"~", max_length, b"*", b"record", line];
        let reply = self.client.call_key(key, &words, deadline).await?;
        reply_text(&reply).and_then(|id| id.parse().ok()).ok_or(RedisError::BadReply)
    }
}

impl StreamKey {
    /// Setting or server property that an operator should check.
    fn advice(&self, error: RedisError) -> String {
        let key = String::from_utf8_lossy(&self.key);
        match error {
            RedisError::Timeout => format!("the server takes longer than {WRITE_TIMEOUT:?}"),
            RedisError::WrongType => format!("TOLLKEEPER_DECISION_LOG must name a key that no other program uses, not {key}"),
            RedisError::Unauthenticated => format!("check {}", self.auth_setting),
            RedisError::Misconfigured => {
                format!("give +xadd +xtrim ~{key} to the user of {}; Redis must be 5.0 or newer", self.auth_setting)
            }
            RedisError::NoWrites => {
                "its memory (maxmemory) or its disk may be full; TOLLKEEPER_DECISION_LOG_STREAM_LENGTH bounds the stream".to_owned()
            }
            _ => error.advice().to_owned(),
        }
    }
}

/// Health check that writes to the stream, but changes only what an append changes too.
#[derive(Debug)]
struct StreamHealthCheck(Arc<StreamKey>);

impl HealthCheck for StreamHealthCheck {
    /// Other nodes of a cluster redirect the command, which is an answer too.
    fn commands(&self, _hash_tag: u32) -> Vec<CommandWords> {
        let StreamKey { key, max_length, .. } = &*self.0;
        let word = Bytes::from_static;
        vec![vec![word(b"XTRIM"), key.clone(), word(b"MAXLEN"), word(b"~"), max_length.clone()]]
    }

    fn advice(&self, error: RedisError, text: &str) -> String {
        format!("{text} ({})", self.0.advice(error))
    }
}
