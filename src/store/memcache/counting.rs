//! Counting of hits with the commands of memcached.
//!
//! The number that an increment returns decides, so concurrent charges are exact. A missing key is added; if another
//! charge added it first, this one increments it. A command without a reply is never repeated, because it may have run.

use std::sync::Arc;
use std::time::Instant;

use super::command_stats::CommandStats;
use super::counter_key::CounterKey;
use crate::base::clock::Clock;
use crate::limit::charge::MAX_COUNT;
use crate::limit::request::Hits;
use crate::store::client::memcache::error::MemcacheError;
use crate::store::client::memcache::reply::{MemcacheReply, parse_number};
use crate::store::client::memcache::server::MemcacheServer;

/// Number of times that a missing key is added; more are needed only if the server drops what it stores.
const MAX_ADD_ATTEMPTS: usize = 3;

/// A counter at its server.
pub(super) struct MemcacheCounter<'a> {
    pub(super) server: Arc<MemcacheServer>,
    pub(super) key: &'a CounterKey,
    pub(super) deadline: Instant,
    pub(super) stats: &'a CommandStats,
}

impl MemcacheCounter<'_> {
    /// Counts hits, or reads the count for a peek; returns the count before.
    ///
    /// # Errors
    /// The server failed, or the value is not a number.
    pub(super) async fn count_hits(&self, hits: Hits) -> Result<u64, MemcacheError> {
        match hits {
            Hits::Peek | Hits::Charge(0) | Hits::Refund(0) => self.read_count().await,
            Hits::Charge(hits) => Ok(count_before(self.charge_hits(hits).await?, hits)),
            Hits::Refund(hits) => self.refund_hits(hits).await,
        }
    }

    async fn read_count(&self) -> Result<u64, MemcacheError> {
        let outcome = self.server.call(&[b"get", &self.key.bytes], self.deadline).await;
        self.stats.record_get(&outcome);
        match outcome? {
            MemcacheReply::Missing => Ok(0),
            MemcacheReply::Value(value) => parse_number(&value).ok_or(MemcacheError::WrongType),
            _ => Err(MemcacheError::BadReply),
        }
    }

    /// Returns the count after the charge.
    async fn charge_hits(&self, hits: u64) -> Result<u64, MemcacheError> {
        for _ in 0..MAX_ADD_ATTEMPTS {
            if let Some(after) = self.send_incr_or_decr(b"incr", hits).await? {
                self.trim_to_max(after, hits).await;
                return Ok(after);
            }
            if self.add_key(hits).await? {
                return Ok(hits);
            }
        }
        Err(MemcacheError::NoWrites)
    }

    /// Lowers a count above its maximum, by this charge's hits at most. All charges together so leave the maximum: a
    /// count never wraps, and envoyproxy/ratelimit can read it.
    async fn trim_to_max(&self, after: u64, hits: u64) {
        let excess = after.saturating_sub(self.key.max_count).min(hits);
        if excess > 0 {
            // The charge is counted; if this fails, a later one lowers the count.
            let _untrimmed = self.send_incr_or_decr(b"decr", excess).await;
        }
    }

    /// Returns the count before the refund, as far as the reply tells: a decrement stops at 0.
    async fn refund_hits(&self, hits: u64) -> Result<u64, MemcacheError> {
        Ok(match self.send_incr_or_decr(b"decr", hits).await? {
            None => 0,
            Some(after) => after.saturating_add(hits),
        })
    }

    /// Returns the count after `incr` or `decr`; `None` if the key is missing.
    async fn send_incr_or_decr(&self, verb: &[u8], hits: u64) -> Result<Option<u64>, MemcacheError> {
        let hits = hits.to_string();
        let outcome = self.server.call(&[verb, &self.key.bytes, hits.as_bytes()], self.deadline).await;
        self.stats.record_increment_or_decrement(&outcome);
        match outcome? {
            MemcacheReply::Missing => Ok(None),
            MemcacheReply::Number(after) => Ok(Some(after)),
            _ => Err(MemcacheError::BadReply),
        }
    }

    /// Adds the key; returns false if it exists.
    async fn add_key(&self, hits: u64) -> Result<bool, MemcacheError> {
        let value = hits.min(self.key.max_count).to_string();
        let expiration = self.key.expiration_s(Clock::System.now().as_micros() / 1_000_000).to_string();
        let length = value.len().to_string();
        let words: [&[u8]; 6] =
            [b"add", &self.key.bytes, b"0", expiration.as_bytes(), length.as_bytes(), value.as_bytes()];
        let outcome = self.server.call(&words, self.deadline).await;
        self.stats.record_add(&outcome);
        match outcome? {
            MemcacheReply::Stored => Ok(true),
            MemcacheReply::NotStored => Ok(false),
            _ => Err(MemcacheError::BadReply),
        }
    }
}

/// Returns the count before an increment. A count that wrapped counts as the maximum: it was far above any limit.
const fn count_before(after: u64, hits: u64) -> u64 {
    match after.checked_sub(hits) {
        Some(before) if before < MAX_COUNT => before,
        _ => MAX_COUNT,
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_COUNT, count_before};

    #[test]
    fn wrapped_count_is_the_maximum() {
        assert_eq!([count_before(3, 3), count_before(10, 3)], [0, 7]);
        assert_eq!([count_before(2, 3), count_before(0, 1), count_before(u64::MAX, 1)], [MAX_COUNT; 3]);
    }
}
