//! Reasons why a store did not decide a charge, or did not run an operator's command.
//!
//! Decides: kinds of store failures, and what a line `store failed` advises for each.

use super::client::memcache::protocol::MemcacheError;
use crate::store::client::redis::error::RedisError;

/// Error of a charge whose counter could not be added: every counter that was sampled for eviction is over its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory store is full of slots in use, or of counters that are over their limits")]
pub struct MemoryFull;

/// Failure of one charge. The rule's failure policy decides instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChargeError {
    /// The memory store has no room for the counter.
    #[error(transparent)]
    Full(#[from] MemoryFull),
    /// Redis did not decide.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// Memcached did not decide.
    #[error(transparent)]
    Memcache(#[from] MemcacheError),
}

impl ChargeError {
    /// Upper bound on the number of kinds.
    pub const MAX_KINDS: usize = 1 + RedisError::ALL.len() + MemcacheError::ALL.len();

    /// All kinds, in the order of [`ChargeError::kind_index`]. Stores share kinds of one name.
    pub fn all_kinds() -> impl Iterator<Item = Self> {
        let is_only_of_memcache =
            |error: &MemcacheError| RedisError::ALL.iter().all(|kind| kind.name() != error.name());
        let of_memcache = MemcacheError::ALL.into_iter().filter(is_only_of_memcache).map(Self::Memcache);
        std::iter::once(Self::Full(MemoryFull)).chain(RedisError::ALL.into_iter().map(Self::Redis)).chain(of_memcache)
    }

    /// Index of the kind, below [`ChargeError::MAX_KINDS`].
    pub fn kind_index(self) -> usize {
        Self::all_kinds().position(|kind| kind.name() == self.name()).unwrap_or(0)
    }

    /// Name of the kind, as in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full(MemoryFull) => "memory_full",
            Self::Redis(error) => error.name(),
            Self::Memcache(error) => error.name(),
        }
    }

    /// Returns `true` if the server did not answer in time.
    pub fn is_timeout(self) -> bool {
        matches!(self, Self::Redis(RedisError::Timeout) | Self::Memcache(MemcacheError::Timeout))
    }

    /// Returns `true` if no server could be asked.
    pub const fn is_unreachable(self) -> bool {
        matches!(
            self,
            Self::Redis(RedisError::Unreachable | RedisError::BreakerOpen)
                | Self::Memcache(MemcacheError::Unreachable | MemcacheError::BreakerOpen)
        )
    }

    /// Returns `true` if the server may have made the charge.
    pub const fn may_have_charged(self) -> bool {
        matches!(self, Self::Redis(RedisError::Timeout | RedisError::Broken))
    }

    /// Advice for the operator: the setting to check.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Full(MemoryFull) => "raise TOLLKEEPER_MEMORY_BYTES",
            Self::Redis(error) => error.advice(),
            Self::Memcache(error) => error.advice(),
        }
    }
}

/// Failure to list or to reset counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CounterCommandError {
    /// Redis failed.
    #[error("redis: {0}{advice}", advice = permission_advice(*.0))]
    Redis(#[from] RedisError),
    /// The global Redis failed, so that limits of all regions were not reset.
    #[error("global redis: {0}; limits with `scope: global` can only be reset there (see `regions` in /store)")]
    GlobalRedis(RedisError),
    /// Memcached failed.
    #[error("memcache: {0}")]
    Memcache(#[from] MemcacheError),
}

/// Returns the permissions of an operator's commands, if Redis refused one.
const fn permission_advice(error: RedisError) -> &'static str {
    if matches!(error, RedisError::Misconfigured) { "; the user needs +scan and +unlink for this" } else { "" }
}
