//! Outcomes of charges that no answer waits for.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use futures_util::FutureExt;
use smallvec::SmallVec;

use super::error::ChargeError;
use super::outcome::StoreOutcome;
use crate::store::client::redis::error::RedisError;

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
