//! Reasons why a store did not decide a charge, or did not run an operator's command.

use super::memory::usage::MemoryFull;
use crate::redis::error::RedisError;

/// Failure of one charge. The rule's failure policy decides instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChargeError {
    /// The memory store has no room for the counter.
    #[error(transparent)]
    Full(#[from] MemoryFull),
    /// Redis did not decide.
    #[error(transparent)]
    Redis(#[from] RedisError),
}

impl ChargeError {
    /// Number of kinds.
    pub const KINDS: usize = 1 + RedisError::ALL.len();

    /// All kinds, in the order of [`ChargeError::index`].
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Full(MemoryFull)).chain(RedisError::ALL.into_iter().map(Self::Redis))
    }

    /// Index of the kind, below [`ChargeError::KINDS`].
    pub fn index(self) -> usize {
        match self {
            Self::Full(MemoryFull) => 0,
            Self::Redis(error) => 1 + RedisError::ALL.iter().position(|kind| *kind == error).unwrap_or(0),
        }
    }

    /// Name of the kind, as in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full(MemoryFull) => "memory_full",
            Self::Redis(error) => error.name(),
        }
    }

    /// Advice for the operator: the setting to check.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Full(MemoryFull) => "raise TOLLKEEPER_MEMORY_BYTES",
            Self::Redis(error) => error.advice(),
        }
    }
}

/// Failure to list or to reset counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("redis: {0}; the user needs +scan and +unlink for this")]
pub struct AdminError(pub RedisError);
