//! Rows of tables that choose plans, in Redis.
//!
//! A table is a hash from values to plans or limits, and a stream of the values whose rows changed. Both are in one
//! hash slot. Operators write them; this process only reads. No counter has such a key, because the hash tag of a
//! counter contains `|`.
//!
//! Decides: how rows of a table in Redis are read.

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::Instant;

use super::Redis;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::{Reply, reply_bytes};

/// Maximum length of a row, in bytes: the name of a plan or a limit.
const MAX_ROW_BYTES: usize = 256;

/// Keys of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableKeys {
    /// The hash of rows.
    pub rows: Bytes,
    /// The stream of changes.
    pub changes: Bytes,
}

impl TableKeys {
    /// Keys of a table under `CACHE_KEY_PREFIX`.
    pub fn new(prefix: &str, table: &str) -> Self {
        let key = |part: &str| Bytes::from(format!("{prefix}tk1:{{table:{table}}}:{part}"));
        Self { rows: key("rows"), changes: key("changes") }
    }
}

impl Redis {
    /// Reads the rows of values by `deadline`, one result for each; `None` if there is none.
    ///
    /// A failure does not count for the breaker: the user of Redis may lack HGET. One who lacks HMGET has the values
    /// read one by one.
    ///
    /// # Errors
    /// Redis failed, or its user may not run HGET.
    pub async fn read_table_rows(
        &self,
        table: &str,
        values: &[&[u8]],
        deadline: Instant,
    ) -> Vec<Result<Option<Bytes>, RedisError>> {
        let keys = TableKeys::new(self.keys.prefix(), table);
        let client = &self.deployments.main.client;
        if values.len() > 1 {
            let words: Vec<&[u8]> = [&b"HMGET"[..], &keys.rows].into_iter().chain(values.iter().copied()).collect();
            match client.call_key_unrecorded(&keys.rows, &words, deadline).await {
                Ok(Reply::Array(rows)) if rows.len() == values.len() => return rows.iter().map(read_row).collect(),
                Ok(_) => return vec![Err(RedisError::BadReply); values.len()],
                Err(RedisError::Misconfigured) => {}
                Err(error) => return vec![Err(error); values.len()],
            }
        }
        let rows = &keys.rows;
        join_all(values.iter().map(|value| async move {
            read_row(&client.call_key_unrecorded(rows, &[b"HGET", rows, value], deadline).await?)
        }))
        .await
    }
}

fn read_row(reply: &Reply) -> Result<Option<Bytes>, RedisError> {
    match (reply, reply_bytes(reply)) {
        (Reply::Null, _) => Ok(None),
        (_, Some(row)) if row.len() <= MAX_ROW_BYTES => Ok(Some(Bytes::copy_from_slice(row))),
        (_, _) => Err(RedisError::BadReply),
    }
}
