//! Calls of scripts on one key, outside of decisions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::{RedisError, ReplyError};
use crate::store::client::redis::node::Node;
use crate::store::client::redis::reply::Reply;
use crate::store::client::redis::script::Script;
use crate::store::client::redis::server_clock::InstantRange;

/// Upper bound on the wait for replicas, which delays all calls of the same connection.
const REPLICA_TIMEOUT: Duration = Duration::from_millis(500);

/// Script on one key.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyScript<'c> {
    pub(super) script: &'static Script,
    pub(super) key: &'c [u8],
    pub(super) argument: &'c [u8],
    /// Arguments after it.
    pub(super) more: &'c [&'c [u8]],
}

/// Importance of a call for the breaker of its server, and of its writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// A failure opens no breaker: decisions need the server too.
    Unrecorded,
    /// A failure counts for the breaker, which finds a server that is back.
    Recorded,
    /// As recorded, and at least this many replicas must have the writes before the call succeeds.
    Replicated(u32),
}

/// Reply of a script, with what a reading of the server's clock needs.
#[derive(Debug)]
pub(super) struct ScriptReply {
    pub(super) reply: Reply,
    pub(super) node: Arc<Node>,
    /// Time before the command was sent and time after its reply was received.
    pub(super) within: InstantRange,
}

impl KeyScript<'_> {
    /// Sends the script to the node that has its key, until `deadline`.
    ///
    /// # Errors
    /// The script may not have run. [`RedisError::NoWrites`] if too few replicas have its writes.
    pub(super) async fn run(
        &self,
        deployment: &Deployment,
        kind: CallKind,
        deadline: Instant,
    ) -> Result<ScriptReply, RedisError> {
        let by_hash: [&[u8]; 5] = [b"EVALSHA", self.script.sha1.as_bytes(), b"1", self.key, self.argument];
        let mut words: SmallVec<[&[u8]; 7]> = SmallVec::from_slice(&by_hash);
        words.extend_from_slice(self.more);
        let mut target = deployment.target(self.key, deadline).await?;
        loop {
            let from = Instant::now();
            let options = SendOptions { kind, asking: target.asking, deadline };
            match send(&target.node, &words, options).await {
                Ok(reply) => {
                    let within = InstantRange { from, until: Instant::now() };
                    return Ok(ScriptReply { reply, node: target.node, within });
                }
                Err(ReplyError::NoScript) => (words[0], words[1]) = (b"EVAL", self.script.text.as_bytes()),
                Err(error) => target.follow(error)?,
            }
        }
    }
}

/// Options of one attempt.
#[derive(Clone, Copy)]
struct SendOptions {
    kind: CallKind,
    asking: bool,
    deadline: Instant,
}

async fn send(node: &Node, words: &[&[u8]], options: SendOptions) -> Result<Reply, ReplyError> {
    let SendOptions { kind, asking, deadline } = options;
    match kind {
        CallKind::Unrecorded => node.call_unrecorded(words, asking, deadline).await,
        CallKind::Recorded | CallKind::Replicated(0) => node.call(words, asking, deadline).await,
        CallKind::Replicated(replicas) => {
            let replicated = node.call_and_wait(words, asking, REPLICA_TIMEOUT, deadline).await?;
            let is_replicated = replicated.replicas >= replicas;
            if is_replicated { Ok(replicated.reply) } else { Err(ReplyError::Failed(RedisError::NoWrites)) }
        }
    }
}
