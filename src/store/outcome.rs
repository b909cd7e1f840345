//! Results of the operations of a store: outcomes of charges, at once or later, and lists of counters.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use futures_util::FutureExt;
use smallvec::SmallVec;

use super::client::redis::error::RedisError;
use super::error::ChargeError;
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

/// Outcomes of charges, in their order.
pub type StoreOutcomes = Vec<Result<StoreOutcome, ChargeError>>;

/// Outcomes that are not known yet. The future must be polled to its end, or charges may be left out.
pub type PendingOutcomes = Pin<Box<dyn Future<Output = StoreOutcomes> + Send>>;

/// Outcomes of charges that no answer waits for.
pub enum DeferredOutcomes {
    /// The store has decided.
    Ready(StoreOutcomes),
    /// The charges are on their way.
    Pending(PendingOutcomes),
}

impl fmt::Debug for DeferredOutcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready(outcomes) => f.debug_tuple("Ready").field(outcomes).finish(),
            Self::Pending(_) => f.write_str("Pending"),
        }
    }
}

impl DeferredOutcomes {
    /// Polls charges in Redis once, so that their calls are sent.
    pub(super) fn begin(
        charges: impl Future<Output = SmallVec<[Result<StoreOutcome, RedisError>; 2]>> + Send + 'static,
    ) -> Self {
        let outcomes = charges.map(|outcomes| outcomes.into_iter().map(|it| it.map_err(ChargeError::from)).collect());
        Self::Pending(Box::pin(outcomes)).poll()
    }

    /// Takes up outcomes that have arrived.
    #[must_use]
    pub fn poll(self) -> Self {
        match self {
            Self::Pending(mut pending) => match (&mut pending).now_or_never() {
                Some(outcomes) => Self::Ready(outcomes),
                None => Self::Pending(pending),
            },
            Self::Ready(outcomes) => Self::Ready(outcomes),
        }
    }
}

/// Waits for outcomes in a task, and passes them to `each`. Must be called within a tokio runtime.
pub fn spawn_on_outcomes(pending: PendingOutcomes, each: impl FnOnce(StoreOutcomes) + Send + 'static) {
    tokio::spawn(pending.map(each));
}

/// Path of counters: a domain and its entries.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CounterPath {
    /// The domain.
    pub domain: Vec<u8>,
    /// Key and value of each entry.
    pub entries: Vec<[Vec<u8>; 2]>,
    /// Indices of the entries whose value is a pattern that several values share.
    pub shared: Vec<usize>,
}

/// Result of a scan.
#[derive(Debug, Default)]
pub struct KeyScan {
    /// Paths that have counters, each once.
    pub paths: Vec<CounterPath>,
    /// True if all keys were visited.
    pub complete: bool,
    /// Number of keys of the domain whose path is truncated.
    pub truncated: usize,
}
