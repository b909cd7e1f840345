//! Sink that appends to a stream in Redis.
//!
//! Each line is one entry with the field `record`. The connections and their thread belong to the sink alone. A command
//! is sent once, so an entry is in the stream at most once; one without an answer counts as failed.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::runtime::{Builder, Runtime};

use crate::base::threads;
use crate::decide::log::queue::LostRecords;
use crate::settings::decision_log::StreamSettings;
use crate::store::client::redis::connect_options::ConnectOptions;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::deployment_context::DeploymentOptions;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::health_check::{CommandWords, HealthCheck};

/// Upper bound on a write and on a health check. Nothing but the sink waits for it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Writer of a stream.
#[derive(Debug)]
pub(crate) struct RedisSink {
    stream: Arc<StreamKey>,
    client: Deployment,
    /// Thread of the connections.
    runtime: Runtime,
}

/// Key of a stream, and its length.
#[derive(Debug)]
struct StreamKey {
    key: Bytes,
    max_length: Bytes,
    auth_setting: &'static str,
}

impl RedisSink {
    /// Starts to connect.
    ///
    /// # Errors
    /// The thread of the connections cannot be started.
    pub(super) fn start(settings: &StreamSettings) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("decision-log")
            .on_thread_start(threads::lower_thread_priority)
            .enable_all()
            .build()?;
        let connect = ConnectOptions::beside_decisions(&settings.deployment, "records of decisions are lost");
        let stream = Arc::new(StreamKey {
            key: settings.key.clone().into(),
            max_length: settings.max_length.to_string().into(),
            auth_setting: connect.auth_setting(),
        });
        let options = DeploymentOptions {
            connections: 1,
            call_timeout: WRITE_TIMEOUT,
            optional_commands: None,
            clock_jumps: Arc::default(),
            health_check: Box::new(StreamHealthCheck(Arc::clone(&stream))),
            connect,
        };
        let client = {
            let _within = runtime.enter();
            Deployment::start(settings.deployment.topology.clone(), options)
        };
        Ok(Self { stream, client, runtime })
    }

    /// Appends an entry for each line, in their order.
    ///
    /// # Errors
    /// Not all entries are known to be written.
    pub(super) fn write_lines(&self, lines: &[u8]) -> Result<(), LostRecords> {
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
        let cause = match (self.client.misconfigured(), error) {
            // A connection error comes with its own text.
            (Some(text), RedisError::Unreachable | RedisError::Broken | RedisError::Timeout) => text.to_string(),
            _ => advice,
        };
        io::Error::other(format!("redis:{key}: {error}: {cause}"))
    }

    async fn append_entry(&self, line: &[u8], deadline: Instant) -> Result<(), RedisError> {
        let StreamKey { key, max_length, .. } = &*self.stream;
        let words: [&[u8]; 8] = [b"XADD", key, b"MAXLEN", b"~", max_length, b"*", b"record", line];
        self.client.call_key(key, &words, deadline).await.map(drop)
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

/// Write of the stream that changes nothing that an append does not change.
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
