//! Results of charges, as every store reports them.

use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::limit::charge::ChargeResult;

/// Results of a descriptor's limits, in their order.
pub type ChargeResults = SmallVec<[ChargeResult; 1]>;

/// For each limit of a descriptor, in their order: true if it would admit the hits.
pub type LimitAdmissions = SmallVec<[bool; 4]>;

/// Outcome of the charge of one descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOutcome {
    /// Results of its limits, in their order.
    pub results: ChargeResults,
    /// Decided by the store, or locally on its behalf.
    pub decided_by: DecidedBy,
    /// Time that the counters worked at: that of Redis, if Redis decided.
    pub now: Time,
}

/// Part of the store that decided a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The counters themselves.
    Store,
    /// The over-limit cache: Redis has just rejected such a charge.
    KnownOver,
    /// This process's free share of an eventual limit; its hits are never charged to Redis.
    Share,
    /// A lease: its hits were charged to Redis beforehand.
    Lease,
}

impl StoreOutcome {
    /// An outcome that the counters decided.
    pub const fn by_store(results: ChargeResults, now: Time) -> Self {
        Self { results, decided_by: DecidedBy::Store, now }
    }
}
