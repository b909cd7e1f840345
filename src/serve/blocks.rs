//! Blocks of values, shared by all replicas through Redis.
//!
//! A hash in Redis has the blocks, and a second key a version that each change replaces. Every replica reads the
//! version several times a second over a connection of its own, and the hash after a change; so a block is in force
//! everywhere within a second, and a restart keeps it. A replica that loses Redis keeps the blocks that it knows until
//! they end, and writes them back if Redis lost its data. With counters in memory or memcached, blocks are of this
//! process only.
//!
//! Decides: a value blocked again with another end (the later call wins).
//! Decides: how replicas share blocks, when one is too many; blocks while Redis is away.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::timeout;

use crate::base::clock::{Clock, Time};
use crate::base::random::random_u64_pair;
use crate::decide::blocks::{Block, MAX_BLOCKS};
use crate::decide::log::record::encode_text_or_base64;
use crate::serve::grpc::service::RateLimitService;
use crate::settings::store::StoreSettings;
use crate::store::client::redis::key_connection::{KeyCommandError, KeyOwnerConnection};
use crate::store::client::redis::resp::{Reply, reply_bytes};
use crate::telemetry::log_throttle::LogThrottle;

/// Interval at which the version is read.
const POLL_INTERVAL: Duration = Duration::from_millis(300);
/// Upper bound on the wait for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Upper bound on the wait for the first blocks at the start.
const FIRST_LOAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Time after its end at which a block is removed from Redis, in microseconds: clocks of replicas differ.
const REMOVAL_DELAY_US: u64 = 60_000_000;
/// Entries of the hash that are read at a time.
const ENTRIES_PER_READ: &[u8] = b"200";
/// Maximum length of a block in Redis, in bytes.
const MAX_BLOCK_RECORD_BYTES: usize = 16 << 10;

/// Blocks of this process, and their exchange with other replicas.
#[derive(Debug)]
pub struct SharedBlocks {
    service: Arc<RateLimitService>,
    /// `None`: blocks are of this process only.
    redis: Option<RedisBlocks>,
    /// Held while the blocks of this process change.
    changing: Mutex<()>,
}

/// Blocks in Redis.
#[derive(Debug)]
struct RedisBlocks {
    writer: Mutex<KeyOwnerConnection>,
    list: Bytes,
    version: Bytes,
    changed: Notify,
    /// True once the blocks were read, or could not be read.
    tried: watch::Sender<bool>,
}

/// Block as Redis has it. Versions that know no base64 ignore a block whose key or value is not UTF-8.
#[derive(Debug, Serialize, Deserialize)]
struct StoredBlock {
    domain: String,
    #[serde(flatten)]
    entry: BlockedEntry,
    until_us: u64,
    reason: String,
}

/// Entry of descriptors in JSON: a key or value that is not UTF-8 is in base64, in a field of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct BlockedEntry {
    /// Key, if it is UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Bytes of any key, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_base64: Option<String>,
    /// Value, if it is UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Bytes of any value, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_base64: Option<String>,
}

/// Key and value of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryBytes<'a> {
    /// Key.
    pub(crate) key: &'a [u8],
    /// Value.
    pub(crate) value: &'a [u8],
}

impl BlockedEntry {
    /// Entry of a block.
    pub(crate) fn of_block(block: &Block) -> Self {
        let (key, key_base64) = encode_text_or_base64(&block.key);
        let (value, value_base64) = encode_text_or_base64(&block.value);
        Self { key, key_base64, value, value_base64 }
    }

    /// Returns the bytes of the key and of the value. The error names the field and the fix.
    pub(crate) fn decode(&self) -> Result<(Vec<u8>, Vec<u8>), String> {
        let key = decode_bytes("key", self.key.as_ref(), self.key_base64.as_ref())?;
        Ok((key, decode_bytes("value", self.value.as_ref(), self.value_base64.as_ref())?))
    }
}

/// Returns the bytes of a text or of base64; exactly one of them must be there. The error names the field.
fn decode_bytes(name: &str, text: Option<&String>, base64: Option<&String>) -> Result<Vec<u8>, String> {
    match (text, base64) {
        (Some(text), None) => Ok(text.clone().into_bytes()),
        (None, Some(base64)) => {
            BASE64_STANDARD.decode(base64).map_err(|_| format!("`entry.{name}_base64` must be base64, such as /w=="))
        }
        (None, None) | (Some(_), Some(_)) => {
            Err(format!("write either `entry.{name}`, or `entry.{name}_base64` for bytes that are not UTF-8"))
        }
    }
}

/// Reason why blocks cannot be changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeBlocksError {
    /// There are as many as there may be.
    #[error("there are {MAX_BLOCKS} blocks already (DELETE /block removes one, GET /blocks lists them)")]
    TooMany,
    /// Redis failed, and nothing changed for certain.
    #[error("Redis failed, so the change may not hold: {0} (retry)")]
    Redis(#[from] KeyCommandError),
}

impl From<&Block> for StoredBlock {
    fn from(block: &Block) -> Self {
        let (domain, reason) = (block.domain.clone(), block.reason.clone());
        Self { domain, entry: BlockedEntry::of_block(block), until_us: block.until.as_micros(), reason }
    }
}

impl StoredBlock {
    /// Returns the block in a record; `None` if it is none.
    fn parse(record: &[u8]) -> Option<Block> {
        let Self { domain, entry, until_us, reason } = serde_json::from_slice(record).ok()?;
        let (key, value) = entry.decode().ok()?;
        Some(Block { domain, key, value, until: Time::from_micros(until_us), reason })
    }
}

/// Name of a block in the hash: a hash of domain, key and value, each preceded by its length.
fn hash_field_of_entry(domain: &str, entry: EntryBytes<'_>) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    for part in [domain.as_bytes(), entry.key, entry.value] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    hasher.finalize().to_hex()[..32].as_bytes().to_vec()
}

/// Name of a block in the hash.
fn block_field_name(block: &Block) -> Vec<u8> {
    hash_field_of_entry(&block.domain, EntryBytes { key: &block.key, value: &block.value })
}

/// New version, other than all before.
fn new_unique_version() -> Vec<u8> {
    let (high, low) = random_u64_pair();
    format!("{high:016x}{low:016x}").into_bytes()
}

impl SharedBlocks {
    /// Starts to follow the blocks in Redis, if counters are there, and waits for the first ones: up to 2 s, or until
    /// Redis fails.
    pub async fn start(service: Arc<RateLimitService>, store: &StoreSettings) -> Arc<Self> {
        let StoreSettings::Redis(settings) = store else {
            return Arc::new(Self { service, redis: None, changing: Mutex::default() });
        };
        let key = |name: &str| Bytes::from(format!("{}tk1:{{blocks}}:{name}", settings.key_prefix));
        let list = key("list");
        let writer = KeyOwnerConnection::start(&settings.main, &list);
        let reader = writer.new_connection();
        let (tried, mut is_tried) = watch::channel(false);
        let redis =
            RedisBlocks { writer: Mutex::new(writer), list, version: key("version"), changed: Notify::new(), tried };
        let blocks = Arc::new(Self { service, redis: Some(redis), changing: Mutex::default() });
        tokio::spawn(Arc::clone(&blocks).follow_redis(reader));
        // Without an answer of Redis the process starts all the same.
        let _ = timeout(FIRST_LOAD_TIMEOUT, is_tried.wait_for(|tried| *tried)).await;
        blocks
    }

    /// True if all replicas share the blocks.
    pub const fn is_shared(&self) -> bool {
        self.redis.is_some()
    }

    /// Adds a block, or replaces the one of the same domain, key and value.
    ///
    /// # Errors
    /// There are too many, or Redis failed.
    pub(crate) async fn add(&self, block: Block) -> Result<(), ChangeBlocksError> {
        let _changing = self.changing.lock().await;
        let mut blocks = self.list_blocks_except(&block.domain, EntryBytes { key: &block.key, value: &block.value });
        if let Some(redis) = &self.redis {
            redis.add(&block).await?;
        } else if blocks.len() >= MAX_BLOCKS {
            return Err(ChangeBlocksError::TooMany);
        }
        blocks.push(block);
        self.service.decider.blocks.replace_all(blocks);
        self.wake_redis_follower();
        Ok(())
    }

    /// Removes a block; returns false if there was none.
    ///
    /// # Errors
    /// Redis failed.
    pub(crate) async fn remove(&self, domain: &str, entry: EntryBytes<'_>) -> Result<bool, ChangeBlocksError> {
        let _changing = self.changing.lock().await;
        let now = self.service.clock.now();
        let mut existed =
            self.service.decider.blocks.find_block_of_entry(domain, entry.key, entry.value, now).is_some();
        if let Some(redis) = &self.redis {
            existed |= redis.remove(&[hash_field_of_entry(domain, entry)]).await?;
        }
        self.service.decider.blocks.replace_all(self.list_blocks_except(domain, entry));
        self.wake_redis_follower();
        Ok(existed)
    }

    /// Blocks of this process but that of an entry.
    fn list_blocks_except(&self, domain: &str, entry: EntryBytes<'_>) -> Vec<Block> {
        let blocks = self.service.decider.blocks.list(self.service.clock.now());
        let is_other = |block: &&Arc<Block>| {
            block.domain != domain || EntryBytes { key: &block.key, value: &block.value } != entry
        };
        blocks.iter().filter(is_other).map(|block| Block::clone(block)).collect()
    }

    fn wake_redis_follower(&self) {
        if let Some(redis) = &self.redis {
            redis.changed.notify_one();
        }
    }

    /// Follows the blocks in Redis, for ever.
    async fn follow_redis(self: Arc<Self>, mut reader: KeyOwnerConnection) {
        let Some(redis) = &self.redis else { return };
        let failure_log = LogThrottle::every(LOG_INTERVAL);
        let mut known = None;
        loop {
            match self.reload_if_changed(redis, &mut reader, &mut known).await {
                Ok(()) => drop(redis.tried.send_replace(true)),
                Err(error) => {
                    redis.tried.send_replace(true);
                    if let Some(suppressed) = failure_log.allow(Clock::System.now()) {
                        tracing::warn!(%error, suppressed, "cannot read blocked values: those known stay blocked");
                    }
                }
            }
            let _elapsed = timeout(POLL_INTERVAL, redis.changed.notified()).await;
        }
    }

    /// Reads the blocks if their version is not the one in `known`; writes them back if Redis lost its data.
    async fn reload_if_changed(
        &self,
        redis: &RedisBlocks,
        reader: &mut KeyOwnerConnection,
        known: &mut Option<Vec<u8>>,
    ) -> Result<(), KeyCommandError> {
        let reply = reader.call(&[b"GET", &redis.version], REPLY_TIMEOUT).await?;
        let version = reply_bytes(&reply).map(<[u8]>::to_vec);
        if version.is_some() && version == *known {
            return Ok(());
        }
        let now = self.service.clock.now();
        if version.is_none() {
            // Nothing was ever blocked, or Redis lost its data.
            let held = self.service.decider.blocks.list(now);
            for block in &held {
                redis.write_block(reader, block).await?;
            }
            if held.is_empty() {
                return Ok(());
            }
            return redis.write_version(reader).await;
        }
        let blocks = redis.read_all(reader).await?;
        let _changing = self.changing.lock().await;
        let is_outdated = |block: &&Block| block.until.plus_us(REMOVAL_DELAY_US) <= now;
        let outdated: Vec<_> = blocks.iter().filter(is_outdated).map(block_field_name).collect();
        self.service.decider.blocks.replace_all(blocks.into_iter().filter(|block| block.until > now).collect());
        *known = version;
        if !outdated.is_empty() {
            let words: Vec<&[u8]> =
                [b"HDEL".as_slice(), &redis.list].into_iter().chain(outdated.iter().map(Vec::as_slice)).collect();
            reader.call(&words, REPLY_TIMEOUT).await?;
        }
        Ok(())
    }
}

impl RedisBlocks {
    async fn add(&self, block: &Block) -> Result<(), ChangeBlocksError> {
        let mut writer = self.writer.lock().await;
        let field = block_field_name(block);
        let count = reply_integer_or_zero(&writer.call(&[b"HLEN", &self.list], REPLY_TIMEOUT).await?);
        if count >= MAX_BLOCKS as u64
            && reply_integer_or_zero(&writer.call(&[b"HEXISTS", &self.list, &field], REPLY_TIMEOUT).await?) == 0
        {
            return Err(ChangeBlocksError::TooMany);
        }
        self.write_block(&mut writer, block).await?;
        Ok(self.write_version(&mut writer).await?)
    }

    /// Removes blocks; returns true if there was one.
    async fn remove(&self, fields: &[Vec<u8>]) -> Result<bool, KeyCommandError> {
        let mut writer = self.writer.lock().await;
        let words: Vec<&[u8]> =
            [b"HDEL".as_slice(), &self.list].into_iter().chain(fields.iter().map(Vec::as_slice)).collect();
        let removed = reply_integer_or_zero(&writer.call(&words, REPLY_TIMEOUT).await?);
        self.write_version(&mut writer).await?;
        Ok(removed > 0)
    }

    async fn write_block(&self, connection: &mut KeyOwnerConnection, block: &Block) -> Result<(), KeyCommandError> {
        let field = block_field_name(block);
        let record = serde_json::to_vec(&StoredBlock::from(block)).unwrap_or_default();
        connection.call(&[b"HSET", &self.list, &field, &record], REPLY_TIMEOUT).await?;
        Ok(())
    }

    async fn write_version(&self, connection: &mut KeyOwnerConnection) -> Result<(), KeyCommandError> {
        connection.call(&[b"SET", &self.version, &new_unique_version()], REPLY_TIMEOUT).await?;
        Ok(())
    }

    /// Reads all blocks, those that have ended too; leaves out what is no block.
    async fn read_all(&self, reader: &mut KeyOwnerConnection) -> Result<Vec<Block>, KeyCommandError> {
        let mut blocks = Vec::new();
        let mut cursor = b"0".to_vec();
        loop {
            let words: [&[u8]; 5] = [b"HSCAN", &self.list, &cursor, b"COUNT", ENTRIES_PER_READ];
            let reply = reader.call(&words, REPLY_TIMEOUT).await?;
            let Reply::Array(parts) = &reply else { return Ok(blocks) };
            let (next, entries) = (parts.first().and_then(reply_bytes), parts.get(1));
            if let Some(Reply::Array(entries)) = entries {
                let records = entries.chunks_exact(2).filter_map(|entry| reply_bytes(&entry[1]));
                let records = records.filter(|record| record.len() <= MAX_BLOCK_RECORD_BYTES);
                blocks.extend(records.filter_map(StoredBlock::parse));
            }
            match next {
                Some(next) if next != b"0" && blocks.len() < MAX_BLOCKS => cursor = next.to_vec(),
                _ => return Ok(blocks),
            }
        }
    }
}

/// Number in a reply; 0 if it is none.
fn reply_integer_or_zero(reply: &Reply) -> u64 {
    if let Reply::Integer(count) = reply { u64::try_from(*count).unwrap_or(0) } else { 0 }
}
