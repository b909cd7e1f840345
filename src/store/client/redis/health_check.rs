//! Health check of a server: writes that it must accept before calls are sent to it.
//!
//! A PING only proves that a server is alive: a replica, a server without memory and a user without permissions answer
//! it too. So a check consists of commands like those of real calls. The owner of a deployment defines them with the
//! [`HealthCheck`] trait; this module sends them and classifies the replies.
//!
//! Decides: what a Redis server must accept before it is used, and how old it may be.
//! Decides: how the eviction policy is read (`maxmemory-policy`).

use std::fmt;

use bytes::Bytes;
use futures_util::future::join_all;
use smallvec::SmallVec;

use super::connection::{Connection, send_with_error_text};
use super::error::{RedisConnectError, RedisError, ReplyError};
use super::hash_slot::{TAGS_OF_FIRST_AND_LAST_SLOT, hash_tag_for_slot};
use super::resp::{reply_integer, reply_text};

/// Words of a command.
pub type CommandWords = Vec<Bytes>;

/// Definition of the commands that a server must accept.
pub trait HealthCheck: fmt::Debug + Send + Sync + 'static {
    /// Returns the commands to send; all keys contain `{hash_tag}`, so that they hash to one slot, and expire.
    fn commands(&self, hash_tag: u32) -> Vec<CommandWords>;

    /// Returns keys that expire and hash to many slots, for the check that one script sees them all; empty: no call has
    /// several keys.
    fn keys_for_merge_check(&self) -> Vec<Bytes> {
        Vec::new()
    }

    /// Explains to an operator what an error reply means and what to do; `text` is the reply.
    fn advice(&self, error: RedisError, text: &str) -> String;
}

/// Commands that a server may reject while it still serves all others.
#[derive(Debug)]
pub struct OptionalCommands {
    /// Bytes that the names of these commands start with.
    pub(crate) prefix: &'static [u8],
    /// Log text: what does not work without the commands.
    pub(crate) consequence: &'static str,
    /// Permissions or versions that the commands need.
    pub(crate) advice: String,
}

/// Runs `check` once over `connection`: in `slot` of a cluster node, in the first and last slot of a single server.
pub(crate) async fn run_health_check(
    check: &dyn HealthCheck,
    connection: &Connection,
    slot: Option<u16>,
) -> Result<(), RedisConnectError> {
    match slot {
        Some(slot) => run_check_in_slot(check, connection, hash_tag_for_slot(slot), true).await,
        None => {
            // A cluster node accepts both only if it owns all slots.
            let [first, last] = TAGS_OF_FIRST_AND_LAST_SLOT;
            let first = run_check_in_slot(check, connection, first, false);
            let last = run_check_in_slot(check, connection, last, false);
            tokio::try_join!(first, last).map(|_| ())
        }
    }
}

/// Sends the commands of `check` with keys of hash tag `tag`, and returns the first error.
async fn run_check_in_slot(
    check: &dyn HealthCheck,
    connection: &Connection,
    tag: u32,
    is_cluster: bool,
) -> Result<(), RedisConnectError> {
    let commands = check.commands(tag);
    // Sent together, as calls are.
    let outcomes = join_all(commands.iter().map(|command| async move {
        let words: SmallVec<[&[u8]; 8]> = command.iter().map(|word| &**word).collect();
        send_with_error_text(connection, &words).await
    }))
    .await;
    match outcomes.into_iter().find_map(Result::err) {
        None => Ok(()),
        Some((error, text)) => accept_harmless_error(check, &error, text, is_cluster),
    }
}

fn accept_harmless_error(
    check: &dyn HealthCheck,
    error: &ReplyError,
    text: String,
    is_cluster: bool,
) -> Result<(), RedisConnectError> {
    match error {
        ReplyError::NoScript | ReplyError::Failed(RedisError::WrongType) => Ok(()),
        // The slot moved to another node; this node still serves its other slots.
        ReplyError::Moved(_) | ReplyError::Ask(_) if is_cluster => Ok(()),
        ReplyError::Moved(_) | ReplyError::Ask(_) | ReplyError::Failed(RedisError::SlotDown) if !is_cluster => {
            let text = "the server is a node of a cluster: set REDIS_TYPE=cluster".to_owned();
            Err(RedisConnectError { kind: RedisError::Misconfigured, text })
        }
        ReplyError::Moved(_) | ReplyError::Ask(_) => Err(RedisConnectError { kind: RedisError::BadReply, text }),
        ReplyError::Failed(kind) => Err(RedisConnectError { kind: *kind, text: check.advice(*kind, &text) }),
    }
}

/// Returns the server's `maxmemory-policy` if the policy can evict keys; `None` if not, or if INFO fails.
pub(crate) async fn read_policy_if_evicting(connection: &Connection) -> Option<String> {
    let info = send_with_error_text(connection, &[b"INFO", b"memory"]).await.ok()?;
    let policy = reply_text(&info)?.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"))?.trim();
    (policy != "noeviction").then(|| policy.to_owned())
}

/// Lifetime of the keys of the merge check in milliseconds. Their values never change, so several replicas may check at
/// once.
const MERGE_CHECK_KEY_LIFETIME_MS: &[u8] = b"10000";
/// Counts the keys that it sees.
const COUNT_VISIBLE_KEYS_SCRIPT: &[u8] = b"local found = 0
for _, key in ipairs(KEYS) do if redis.call('GET', key) == '1' then found = found + 1 end end
return found";

/// Returns true if calls on several keys may share a command: a script over `connection` sees all of these keys.
///
/// Behind a proxy that divides keys over servers, a script with several keys would run on the server of the first one,
/// and create the others there. So the check writes keys one by one, and a script must then see all of them.
pub(crate) async fn script_sees_all_keys(connection: &Connection, keys: &[Bytes]) -> bool {
    let set = |key| async move {
        connection.call(&[b"SET", key, b"1", b"PX", MERGE_CHECK_KEY_LIFETIME_MS], false, None).await
    };
    join_all(keys.iter().map(|key| set(&**key))).await;
    let key_count = keys.len().to_string();
    let mut words: Vec<&[u8]> = vec![b"EVAL", COUNT_VISIBLE_KEYS_SCRIPT, key_count.as_bytes()];
    words.extend(keys.iter().map(|key| &**key));
    let found = connection.call(&words, false, None).await;
    !keys.is_empty() && found.ok().and_then(|found| reply_integer(&found)) == i64::try_from(keys.len()).ok()
}
