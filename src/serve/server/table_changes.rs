//! Follows the changes of tables in Redis, over a connection of its own for each table.
//!
//! Whoever changes a row adds its value to a stream; this process reads the stream with XREAD BLOCK and looks the row
//! up again before it uses it. Invalidations of client-side caching name whole keys: one changed row of a hash would
//! invalidate a million. A message of PUBLISH is lost while the connection is. A stream is read in plain commands.
//! After a lost connection all rows count as changed, because the stream may have been trimmed.
//!
//! Decides: how announced changes of a table in Redis arrive, also after a lost connection.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::base::clock::Clock;
use crate::rules::plan_table::row_cache::RowCache;
use crate::settings::redis::RedisSettings;
use crate::store::client::redis::key_connection::{KeyCommandError, KeyOwnerConnection};
use crate::store::client::redis::resp::{Reply, reply_bytes};
use crate::store::redis::table_rows::TableKeys;
use crate::telemetry::log_throttle::LogThrottle;

/// Time for which Redis holds a read while there are no changes.
const XREAD_BLOCK_TIME: Duration = Duration::from_secs(5);
/// Upper bound on the wait for a reply after [`XREAD_BLOCK_TIME`] has passed.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a failure.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Followers of the tables of the loaded rules.
#[derive(Debug)]
pub(super) struct TableFollowers {
    redis: RedisSettings,
    running: Vec<Follower>,
}

#[derive(Debug)]
struct Follower {
    cache: Arc<RowCache>,
    task: AbortHandle,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TableFollowers {
    /// Followers of no table.
    pub(super) const fn new(redis: RedisSettings) -> Self {
        Self { redis, running: Vec::new() }
    }

    /// Follows these tables from now on, and no others. Needs a tokio runtime.
    pub(super) fn follow_only(&mut self, caches: &[Arc<RowCache>]) {
        self.running.retain(|follower| caches.iter().any(|cache| Arc::ptr_eq(cache, &follower.cache)));
        for cache in caches {
            if !self.running.iter().any(|follower| Arc::ptr_eq(cache, &follower.cache)) {
                let keys = TableKeys::new(&self.redis.key_prefix, &cache.table);
                let connection = KeyOwnerConnection::start(&self.redis.main, &keys.changes);
                let reader = TableChangeReader { connection, keys, cache: Arc::clone(cache) };
                let task = tokio::spawn(reader.follow_changes()).abort_handle();
                self.running.push(Follower { cache: Arc::clone(cache), task });
            }
        }
    }
}

/// Reads the changes of one table.
struct TableChangeReader {
    connection: KeyOwnerConnection,
    keys: TableKeys,
    cache: Arc<RowCache>,
}

impl TableChangeReader {
    /// Follows the changes for ever.
    async fn follow_changes(mut self) {
        let failure_log = LogThrottle::every(LOG_INTERVAL);
        loop {
            let Err(error) = self.follow_from_end().await;
            if let Some(suppressed) = failure_log.allow(Clock::System.now()) {
                let (table, keep) = (&*self.cache.table, self.cache.keep);
                let fix = error.advice("check Redis, and that its user may run XREAD and XREVRANGE (docs/redis.md)");
                tracing::warn!(table, %error, fix, suppressed, "cannot follow a table: changes wait {keep:?}");
            }
            sleep(RETRY_INTERVAL).await;
        }
    }

    /// Follows the changes until Redis fails.
    async fn follow_from_end(&mut self) -> Result<std::convert::Infallible, KeyCommandError> {
        let words: [&[u8]; 6] = [b"XREVRANGE", &self.keys.changes, b"+", b"-", b"COUNT", b"1"];
        let reply = self.connection.call(&words, REPLY_TIMEOUT).await?;
        let newest = parse_stream_entries(&reply).next().map(|(id, _)| id.to_vec());
        let mut last = newest.unwrap_or_else(|| b"0-0".to_vec());
        // After the end of the stream is known, so that no change is between.
        self.cache.mark_all_changed();
        let block = XREAD_BLOCK_TIME.as_millis().to_string();
        loop {
            let words: [&[u8]; 8] =
                [b"XREAD", b"COUNT", b"1000", b"BLOCK", block.as_bytes(), b"STREAMS", &self.keys.changes, &last];
            let reply = self.connection.call(&words, XREAD_BLOCK_TIME + REPLY_TIMEOUT).await?;
            // One stream: its key, and its entries.
            let streams = as_array(&reply).unwrap_or_default();
            let Some(entries) = streams.first().and_then(|stream| as_array(stream)?.get(1)) else { continue };
            for (id, value) in parse_stream_entries(entries) {
                self.cache.mark_changed(value);
                last = id.to_vec();
            }
        }
    }
}

/// Ids of the entries of a stream, each with the first value of its fields.
fn parse_stream_entries(reply: &Reply) -> impl Iterator<Item = (&[u8], &[u8])> {
    as_array(reply).unwrap_or_default().iter().filter_map(|entry| {
        let [id, fields] = as_array(entry)? else { return None };
        let value = as_array(fields).and_then(|fields| reply_bytes(fields.get(1)?)).unwrap_or_default();
        Some((reply_bytes(id)?, value))
    })
}

fn as_array(reply: &Reply) -> Option<&[Reply]> {
    if let Reply::Array(parts) = reply { Some(parts) } else { None }
}
