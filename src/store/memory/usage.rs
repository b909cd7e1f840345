//! Size of the memory store, and the error of a full one.

/// Counters and bytes in the memory store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Counters.
    pub counters: u64,
    /// Bytes that they use, index and logs included.
    pub bytes: u64,
    /// Counters evicted to make room for others since the start.
    pub evicted: u64,
    /// Upper bound of `bytes`.
    pub capacity_bytes: u64,
}

/// Error of a charge whose counter could not be added: every counter that was sampled for eviction is over its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory store is full of counters that are over their limits")]
pub struct MemoryFull;
