//! Follows the changes of tables in Redis, over a connection of its own for each table.
//!
//! Whoever changes a row adds its value to a stream; this process reads the stream with XREAD BLOCK and looks the row
//! up again before it uses it. Invalidations of client-side caching name whole keys: one changed row of a hash would
//! invalidate a million. A message of PUBLISH is lost while the connection is. A stream is read in plain commands.
//! After a lost connection all rows count as changed, because the stream may have been trimmed.
//!
//! Decides: how announced changes of a table in Redis arrive, also after a lost connection.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::base::clock::Clock;
use crate::rules::plan_table::row_cache::RowCache;
use crate::serve::redis_stream::StreamReader;
use crate::settings::redis::RedisSettings;
use crate::store::client::redis::key_connection::KeyCommandError;
use crate::store::redis::table_rows::TableKeys;
use crate::telemetry::log_throttle::LogThrottle;

/// Maximum number of changes that one command reads.
const MAX_CHANGES_PER_READ: usize = 1000;
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
                let reader = StreamReader::start(&self.redis.main, keys.changes);
                let changes = TableChanges { reader, cache: Arc::clone(cache) };
                let task = tokio::spawn(changes.follow_changes()).abort_handle();
                self.running.push(Follower { cache: Arc::clone(cache), task });
            }
        }
    }
}

/// The changes of one table.
struct TableChanges {
    reader: StreamReader,
    cache: Arc<RowCache>,
}

impl TableChanges {
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
    async fn follow_from_end(&mut self) -> Result<Infallible, KeyCommandError> {
        let mut last = self.reader.read_newest_id().await?;
        // After the end of the stream is known, so that no change is between.
        self.cache.mark_all_changed();
        loop {
            for entry in self.reader.read_after(&last, MAX_CHANGES_PER_READ).await? {
                self.cache.mark_changed(&entry.value);
                last = entry.id;
            }
        }
    }
}
