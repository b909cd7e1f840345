//! Where counters live: in this process, or in Redis with this process to fall back on.
//!
//! An enum and not a trait: there are two, and whoever decides must know which, because one answers at once and the
//! other makes it wait.

pub mod health;
pub mod fallback;
pub mod memory;
pub mod redis;

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::timeout;

use self::memory::{Full, Memory};
use self::redis::Redis;
use crate::algorithm::ChargeResult;
use crate::clock::Time;
use crate::redis::error::RedisError;

/// How long giving back what was leased may take.
const GIVE_BACK: Duration = Duration::from_secs(1);

/// The counters.
#[derive(Debug)]
pub enum Store {
    /// In this process: every replica counts for itself.
    Memory(Memory),
    /// In Redis, shared by all replicas.
    Redis(Box<Redis>),
}

impl Store {
    /// Drops what has expired from a share of the counters in this process: the `turn`th of `turns`.
    pub fn sweep(&self, now: Time, turn: usize, turns: usize) {
        match self {
            Self::Memory(memory) => memory.sweep(now, turn, turns),
            Self::Redis(redis) => redis.sweep(now, turn, turns),
        }
    }

    /// Gives back what this process has leased, and tells the others that it ends; takes a second and a half at most.
    pub async fn leave(&self) {
        let Self::Redis(redis) = self else { return };
        if timeout(GIVE_BACK, redis.give_back()).await.is_err() {
            tracing::warn!("hits that were leased from redis were not all given back in time: they stay charged");
        }
        redis.give_up_slot().await;
    }
}

/// What a charge found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOutcome {
    /// Of each of its limits, in their order.
    pub levels: SmallVec<[ChargeResult; 1]>,
    /// Who decided it.
    pub decided_by: DecidedBy,
}

/// Who decided a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The store.
    Store,
    /// This process, by what Redis had just refused.
    KnownOver,
    /// This process, from its share of an eventual limit: the hits are never charged.
    Share,
    /// This process, from hits that were charged before.
    Lease,
}

impl StoreOutcome {
    /// Decided by the store.
    pub const fn by_store(levels: SmallVec<[ChargeResult; 1]>) -> Self {
        Self { levels, decided_by: DecidedBy::Store }
    }
}

/// Why a charge was not decided by the store. What is answered then is the affair of the rule's policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChargeError {
    /// By memory.
    #[error(transparent)]
    Full(#[from] Full),
    /// By Redis.
    #[error(transparent)]
    Redis(#[from] RedisError),
}

impl ChargeError {
    /// How many kinds there are.
    pub const KINDS: usize = 1 + RedisError::ALL.len();

    /// All kinds, in the order of [`ChargeError::place`].
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Full(Full)).chain(RedisError::ALL.into_iter().map(Self::Redis))
    }

    /// The place of its kind among all, below [`ChargeError::KINDS`].
    pub fn place(self) -> usize {
        match self {
            Self::Full(Full) => 0,
            Self::Redis(error) => 1 + RedisError::ALL.iter().position(|kind| *kind == error).unwrap_or(0),
        }
    }

    /// The name of its kind.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full(Full) => "memory_full",
            Self::Redis(error) => error.name(),
        }
    }

    /// What an operator might set to mend it.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Full(Full) => "TOLLKEEPER_MEMORY_BYTES makes more room",
            Self::Redis(error) => error.advice(),
        }
    }
}
