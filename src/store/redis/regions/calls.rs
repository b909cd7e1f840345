//! Calls of scripts on the Redis of the region and on the global one, outside of decisions.
//!
//! Decides: when a grant is used that a copy may lack (`TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS`).
//! Decides: how long an answer of the global Redis may take.

use std::time::Duration;

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::store::client::redis::connection::Script;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::{RedisError, ReplyError};
use crate::store::client::redis::health_check::{CommandWords, HealthCheck};
use crate::store::client::redis::node::Node;
use crate::store::client::redis::resp::Reply;
use crate::store::redis::key;
use crate::store::redis::script::global_probe_script;

/// Upper bound on the wait for a reply of the region's Redis.
pub(super) const REGION_REDIS_TIMEOUT: Duration = Duration::from_millis(500);
/// Upper bound on the wait for a reply of the global Redis.
pub(super) const GLOBAL_REDIS_TIMEOUT: Duration = Duration::from_secs(2);
/// Upper bound on the wait until replicas of the global Redis have the writes; it delays all calls of a connection.
const REPLICATION_TIMEOUT: Duration = Duration::from_millis(500);
/// Script on keys in one slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScriptOnKeys<'c> {
    pub(super) script: &'static Script,
    /// At least one.
    pub(super) keys: &'c [Bytes],
    pub(super) argument: &'c [u8],
}

/// How a failed call counts for the breaker of its server, and how many replicas must have its writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BreakerRecording {
    /// A failure opens no breaker: decisions need the server too.
    Unrecorded,
    /// A failure counts for the breaker, which finds a server that is back, and at least this many replicas must have the
    /// writes before the call succeeds.
    Replicated(u32),
}

impl ScriptOnKeys<'_> {
    /// Sends the script to the node that has its keys, until `deadline`.
    ///
    /// # Errors
    /// The script may not have run. [`RedisError::NoWrites`] if too few replicas have its writes.
    pub(super) async fn run(
        &self,
        deployment: &Deployment,
        kind: BreakerRecording,
        deadline: Instant,
    ) -> Result<Reply, RedisError> {
        let key_count = self.keys.len().to_string();
        let mut words: SmallVec<[&[u8]; 6]> =
            SmallVec::from_slice(&[b"EVALSHA", self.script.sha1.as_bytes(), key_count.as_bytes()]);
        words.extend(self.keys.iter().map(|key| &**key));
        words.push(self.argument);
        let mut target = deployment.target_node(&self.keys[0], deadline).await?;
        loop {
            let options = SendOptions { kind, asking: target.asking, deadline };
            match send(&target.node, &words, options).await {
                Ok(reply) => return Ok(reply),
                Err(ReplyError::NoScript) => (words[0], words[1]) = (b"EVAL", self.script.text.as_bytes()),
                Err(error) => target.follow_redirection(error)?,
            }
        }
    }
}

/// Options of one attempt.
#[derive(Clone, Copy)]
struct SendOptions {
    kind: BreakerRecording,
    asking: bool,
    deadline: Instant,
}

async fn send(node: &Node, words: &[&[u8]], options: SendOptions) -> Result<Reply, ReplyError> {
    let SendOptions { kind, asking, deadline } = options;
    match kind {
        BreakerRecording::Unrecorded => node.call_unrecorded(words, asking, deadline).await,
        BreakerRecording::Replicated(0) => node.call(words, asking, deadline).await,
        BreakerRecording::Replicated(replicas) => {
            let replicated = node.call_and_wait_for_replica(words, asking, REPLICATION_TIMEOUT, deadline).await?;
            let is_replicated = replicated.replicas >= replicas;
            if is_replicated { Ok(replicated.reply) } else { Err(ReplyError::Failed(RedisError::NoWrites)) }
        }
    }
}

/// Health check that runs a script as requests do.
#[derive(Debug)]
pub(super) struct GlobalRedisHealthCheck {
    pub(super) prefix: String,
    /// Settings that hold the credentials, for messages.
    pub(super) auth_setting: &'static str,
    /// True if answers wait for replicas.
    pub(super) waits_for_replicas: bool,
}

impl GlobalRedisHealthCheck {
    fn describe_requirements(&self) -> String {
        let wait = if self.waits_for_replicas { " +wait" } else { "" };
        format!(
            "the user ({}) needs `+eval +evalsha +time +get +set{wait}` on all keys that begin with `{}tk1:`, and the \
             server must be Redis 5.0 or newer, or Valkey",
            self.auth_setting, self.prefix
        )
    }
}

impl HealthCheck for GlobalRedisHealthCheck {
    fn commands(&self, hash_tag: u32) -> Vec<CommandWords> {
        let word = Bytes::from_static;
        let mut key = key::key_head(&self.prefix);
        key.extend_from_slice(format!("{hash_tag}}}:global_probe").as_bytes());
        let text = Bytes::from_static(global_probe_script().text.as_bytes());
        let script = vec![word(b"EVAL"), text, word(b"1"), key.freeze(), Bytes::new()];
        // Waits for nothing.
        let wait = vec![word(b"WAIT"), word(b"0"), word(b"1")];
        if self.waits_for_replicas { vec![script, wait] } else { vec![script] }
    }

    fn advice(&self, error: RedisError, text: &str) -> String {
        match error {
            RedisError::Misconfigured => format!("{text}: {}", self.describe_requirements()),
            RedisError::Unauthenticated => format!("{text}; look at {}", self.auth_setting),
            RedisError::Timeout | RedisError::Broken => error.to_string(),
            _ => format!("{error}: {text}"),
        }
    }
}
