//! One consumer of a consumer group.
//!
//! Redis remembers which consumer an entry was delivered to, until it is acknowledged: the entry is *pending*. Pending
//! entries of a consumer that died are claimed by another. The commands are those of Redis 5, so entries are claimed
//! with XPENDING and XCLAIM in place of XAUTOCLAIM. A reply of XCLAIM leaves out entries that were trimmed from the
//! stream; from Redis 7 on it also stops them from being pending, before that the caller does.
//!
//! Decides: reading a stream as a consumer of a group.

use std::sync::Arc;
use std::time::Duration;

use super::{EntryId, StreamEntry, UnusableRecord, format_json_line, parse_entries};
use crate::settings::decision_log::RedisStreamSettings;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::key_connection::{KeyCommandError, KeyOwnerConnection};
use crate::store::client::redis::resp::{Reply, reply_integer, reply_text};

/// Maximum number of entries of a command.
pub const MAX_ENTRIES_PER_COMMAND: usize = 100;
/// Upper bound on a command, in addition to the time that it may block.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);

/// Name of a consumer and of its group.
#[derive(Clone, Debug)]
pub struct ConsumerName {
    /// Group.
    pub group: String,
    /// Consumer in the group.
    pub consumer: String,
}

/// Connection of a consumer.
#[derive(Debug)]
pub struct GroupConsumer {
    stream: Arc<str>,
    name: Arc<ConsumerName>,
    connection: KeyOwnerConnection,
}

/// Entry that was delivered to a consumer and is not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingEntry {
    /// Its id in the stream.
    pub id: EntryId,
    /// Name of the consumer.
    pub consumer: String,
    /// Time since it was delivered.
    pub idle: Duration,
    /// Number of times that it was delivered.
    pub deliveries: u64,
}

/// Entry with its record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveredEntry {
    /// Its id in the stream.
    pub id: EntryId,
    /// Number of times that it was delivered, from 1.
    pub deliveries: u64,
    /// Line of its record.
    pub line: Result<String, UnusableRecord>,
}

impl DeliveredEntry {
    fn new(entry: &StreamEntry<'_>, deliveries: u64) -> Self {
        Self { id: entry.id, deliveries, line: format_json_line(entry.record) }
    }
}

/// Result of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimedEntries {
    /// Entries that now belong to the consumer.
    pub entries: Vec<DeliveredEntry>,
    /// Entries that are no longer in the stream.
    pub trimmed: Vec<EntryId>,
}

impl GroupConsumer {
    /// Creates a consumer; it connects with its first command. Needs a tokio runtime.
    pub fn start(settings: &RedisStreamSettings, name: ConsumerName) -> Self {
        let connection = KeyOwnerConnection::start(&settings.deployment, settings.key.as_bytes());
        Self { stream: settings.key.as_str().into(), name: Arc::new(name), connection }
    }

    /// Creates another connection of the same consumer.
    pub fn open_another_connection(&self) -> Self {
        let (stream, name) = (Arc::clone(&self.stream), Arc::clone(&self.name));
        Self { stream, name, connection: self.connection.new_connection() }
    }

    /// Creates the group at the start of the stream; `creates_stream` creates an empty stream if it is missing.
    pub async fn create_group(&mut self, creates_stream: bool) -> Result<(), KeyCommandError> {
        let name = Arc::clone(&self.name);
        let stream = Arc::clone(&self.stream);
        let mut words = vec!["XGROUP", "CREATE", &stream, &name.group, "0"];
        words.extend(creates_stream.then_some("MKSTREAM"));
        match self.send_command(&words, COMMAND_TIMEOUT).await {
            // Another consumer created it meanwhile.
            Err(error) if error.text.starts_with("BUSYGROUP") => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    /// Returns up to [`MAX_ENTRIES_PER_COMMAND`] pending entries of all consumers from `first` on.
    pub async fn list_pending(&mut self, first: EntryId) -> Result<Vec<PendingEntry>, KeyCommandError> {
        let (name, stream) = (Arc::clone(&self.name), Arc::clone(&self.stream));
        let [first, most] = [first.to_string(), MAX_ENTRIES_PER_COMMAND.to_string()];
        let reply = self.send_command(&["XPENDING", &stream, &name.group, &first, "+", &most], COMMAND_TIMEOUT).await?;
        let Reply::Array(rows) = reply else { return Err(invalid_reply_error()) };
        rows.iter().map(parse_pending_entry).collect::<Option<_>>().ok_or_else(invalid_reply_error)
    }

    /// Makes `pending` entries those of this consumer if they are idle for `min_idle` still, and reads them.
    pub async fn claim_entries(
        &mut self,
        pending: &[PendingEntry],
        min_idle: Duration,
    ) -> Result<ClaimedEntries, KeyCommandError> {
        let mut claimed = ClaimedEntries::default();
        let mut parts = vec![pending];
        while let Some(part) = parts.pop().filter(|part| !part.is_empty()) {
            match self.claim_part(part, min_idle).await {
                Ok(entries) => claimed.entries.extend(entries),
                Err(error) if error.is_too_large => match part {
                    [PendingEntry { id, deliveries, .. }] => claimed.entries.push(DeliveredEntry {
                        id: *id,
                        deliveries: *deliveries,
                        line: Err(UnusableRecord::TooLarge),
                    }),
                    _ => {
                        let (first, second) = part.split_at(part.len() / 2);
                        parts.extend([second, first]);
                    }
                },
                Err(error) => return Err(error),
            }
        }
        for PendingEntry { id, .. } in pending {
            if claimed.entries.iter().all(|entry| entry.id != *id) && self.is_entry_trimmed(*id).await? {
                claimed.trimmed.push(*id);
            }
        }
        Ok(claimed)
    }

    async fn claim_part(
        &mut self,
        part: &[PendingEntry],
        min_idle: Duration,
    ) -> Result<Vec<DeliveredEntry>, KeyCommandError> {
        let ids: Vec<EntryId> = part.iter().map(|entry| entry.id).collect();
        let reply = self.send_claim(&ids, min_idle, false).await?;
        let deliveries = |id: EntryId| {
            part.iter().find(|entry| entry.id == id).map_or(1, |entry| entry.deliveries.saturating_add(1))
        };
        let delivered = parse_entries(&reply).ok_or_else(invalid_reply_error)?;
        Ok(delivered.iter().map(|entry| DeliveredEntry::new(entry, deliveries(entry.id))).collect())
    }

    /// Sets the idle time of entries of this consumer to zero, so that no other claims them.
    pub async fn reset_idle_times(&mut self, ids: &[EntryId]) -> Result<(), KeyCommandError> {
        for part in ids.chunks(MAX_ENTRIES_PER_COMMAND) {
            self.send_claim(part, Duration::ZERO, true).await?;
        }
        Ok(())
    }

    async fn send_claim(
        &mut self,
        ids: &[EntryId],
        min_idle: Duration,
        only_ids: bool,
    ) -> Result<Reply, KeyCommandError> {
        let (name, stream) = (Arc::clone(&self.name), Arc::clone(&self.stream));
        let idle = min_idle.as_millis().to_string();
        let ids: Vec<String> = ids.iter().map(EntryId::to_string).collect();
        let mut words = vec!["XCLAIM", &stream, &name.group, &name.consumer, &idle];
        words.extend(ids.iter().map(String::as_str));
        words.extend(only_ids.then_some("JUSTID"));
        self.send_command(&words, COMMAND_TIMEOUT).await
    }

    async fn is_entry_trimmed(&mut self, id: EntryId) -> Result<bool, KeyCommandError> {
        let stream = Arc::clone(&self.stream);
        let id = id.to_string();
        match self.send_command(&["XRANGE", &stream, &id, &id], COMMAND_TIMEOUT).await {
            Ok(Reply::Array(entries)) => Ok(entries.is_empty()),
            Ok(_) => Err(invalid_reply_error()),
            Err(error) if error.is_too_large => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads up to `count` entries that no consumer has read; waits up to `block` for the first.
    pub async fn read_new_entries(
        &mut self,
        count: usize,
        block: Option<Duration>,
    ) -> Result<Vec<DeliveredEntry>, KeyCommandError> {
        let (name, stream) = (Arc::clone(&self.name), Arc::clone(&self.stream));
        let most = count.min(MAX_ENTRIES_PER_COMMAND).to_string();
        let mut words = vec!["XREADGROUP", "GROUP", &name.group, &name.consumer, "COUNT", &most];
        // 0 would block without a bound.
        let block_ms = block.map(|block| block.as_millis().max(1).to_string());
        words.extend(block_ms.as_deref().into_iter().flat_map(|ms| ["BLOCK", ms]));
        words.extend(["STREAMS", &*stream, ">"]);
        match self.send_command(&words, COMMAND_TIMEOUT + block.unwrap_or_default()).await? {
            Reply::Null => Ok(Vec::new()),
            Reply::Array(streams) => {
                let Some(Reply::Array(stream)) = streams.first() else { return Err(invalid_reply_error()) };
                let found = stream.get(1).and_then(parse_entries).ok_or_else(invalid_reply_error)?;
                Ok(found.iter().map(|entry| DeliveredEntry::new(entry, 1)).collect())
            }
            _ => Err(invalid_reply_error()),
        }
    }

    /// Acknowledges entries, which are then no longer pending. Repeating it is harmless.
    pub async fn acknowledge(&mut self, ids: &[EntryId]) -> Result<(), KeyCommandError> {
        let (name, stream) = (Arc::clone(&self.name), Arc::clone(&self.stream));
        for part in ids.chunks(MAX_ENTRIES_PER_COMMAND) {
            let ids: Vec<String> = part.iter().map(EntryId::to_string).collect();
            let words: Vec<&str> =
                ["XACK", &stream, &name.group].into_iter().chain(ids.iter().map(String::as_str)).collect();
            self.send_command(&words, COMMAND_TIMEOUT).await?;
        }
        Ok(())
    }

    async fn send_command(&mut self, words: &[&str], limit: Duration) -> Result<Reply, KeyCommandError> {
        let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
        self.connection.call(&words, limit).await
    }
}

fn parse_pending_entry(row: &Reply) -> Option<PendingEntry> {
    let Reply::Array(parts) = row else { return None };
    let [id, consumer, idle, deliveries] = &**parts else { return None };
    Some(PendingEntry {
        id: reply_text(id)?.parse().ok()?,
        consumer: reply_text(consumer).unwrap_or_default().to_owned(),
        idle: Duration::from_millis(u64::try_from(reply_integer(idle)?).unwrap_or(0)),
        deliveries: u64::try_from(reply_integer(deliveries)?).unwrap_or(0),
    })
}

fn invalid_reply_error() -> KeyCommandError {
    let text = "an invalid reply (is it Redis 5.0 or newer, or Valkey?)".to_owned();
    KeyCommandError { kind: RedisError::BadReply, text, is_too_large: false }
}
