//! Reader of a Redis stream that others add to, over a connection of its own.
//!
//! XREAD BLOCK waits at the server, so an entry arrives at once, and an idle stream costs one command in
//! [`XREAD_BLOCK_TIME`]. The reader keeps no position: its user says after which entry it goes on, and begins anew after
//! an error.
//!
//! Decides: how long Redis holds a read of a stream (tables, resets of other replicas).

use std::time::Duration;

use bytes::Bytes;

use crate::settings::redis::deployment::DeploymentSettings;
use crate::store::client::redis::key_connection::{KeyCommandError, KeyOwnerConnection};
use crate::store::client::redis::resp::{Reply, reply_bytes, time_in_reply};

/// Time for which Redis holds a read while there are no entries.
const XREAD_BLOCK_TIME: Duration = Duration::from_secs(5);
/// Upper bound on the wait for a reply, beyond the time for which Redis holds the command.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Reader of one stream.
#[derive(Debug)]
pub(super) struct StreamReader {
    connection: KeyOwnerConnection,
    key: Bytes,
}

/// Entry of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StreamEntry {
    /// Its id.
    pub(super) id: Vec<u8>,
    /// Value of its first field.
    pub(super) value: Vec<u8>,
}

impl StreamReader {
    /// Starts to look for the server; connects with the first command. Needs a tokio runtime.
    pub(super) fn start(settings: &DeploymentSettings, key: Bytes) -> Self {
        Self { connection: KeyOwnerConnection::start(settings, &key), key }
    }

    /// Id of the newest entry; one before all entries if there is none.
    ///
    /// # Errors
    /// The command failed.
    pub(super) async fn read_newest_id(&mut self) -> Result<Vec<u8>, KeyCommandError> {
        let words: [&[u8]; 6] = [b"XREVRANGE", &self.key, b"+", b"-", b"COUNT", b"1"];
        let reply = self.connection.call(&words, REPLY_TIMEOUT).await?;
        Ok(parse_entries(&reply).into_iter().next().map_or_else(|| b"0-0".to_vec(), |entry| entry.id))
    }

    /// Id for [`Self::read_after`] to get the entries of the last `overlap`, by the clock of the server.
    ///
    /// # Errors
    /// The command failed.
    pub(super) async fn read_start_id(&mut self, overlap: Duration) -> Result<Vec<u8>, KeyCommandError> {
        let reply = self.connection.call(&[b"TIME"], REPLY_TIMEOUT).await?;
        let milliseconds = u128::from(time_in_reply(&reply).unwrap_or_default().as_micros() / 1000);
        Ok(format!("{}-0", milliseconds.saturating_sub(overlap.as_millis())).into_bytes())
    }

    /// Waits up to [`XREAD_BLOCK_TIME`] for entries after `last`; returns at most `max_entries`, in their order.
    ///
    /// # Errors
    /// The command failed.
    pub(super) async fn read_after(
        &mut self,
        last: &[u8],
        max_entries: usize,
    ) -> Result<Vec<StreamEntry>, KeyCommandError> {
        let (count, block) = (max_entries.to_string(), XREAD_BLOCK_TIME.as_millis().to_string());
        let words: [&[u8]; 8] =
            [b"XREAD", b"COUNT", count.as_bytes(), b"BLOCK", block.as_bytes(), b"STREAMS", &self.key, last];
        let reply = self.connection.call(&words, XREAD_BLOCK_TIME + REPLY_TIMEOUT).await?;
        // One stream: its key, and its entries.
        let streams = as_array(&reply).unwrap_or_default();
        Ok(streams.first().and_then(|stream| as_array(stream)?.get(1)).map(parse_entries).unwrap_or_default())
    }
}

/// Entries of a reply, each an id and a list of names and values.
fn parse_entries(reply: &Reply) -> Vec<StreamEntry> {
    let parse = |entry: &Reply| {
        let [id, fields] = as_array(entry)? else { return None };
        let value = as_array(fields).and_then(|fields| reply_bytes(fields.get(1)?)).unwrap_or_default().to_vec();
        Some(StreamEntry { id: reply_bytes(id)?.to_vec(), value })
    };
    as_array(reply).unwrap_or_default().iter().filter_map(parse).collect()
}

fn as_array(reply: &Reply) -> Option<&[Reply]> {
    if let Reply::Array(parts) = reply { Some(parts) } else { None }
}
