//! Charges that were submitted, and the wait for their outcomes.

use std::future::Future;
use std::time::Instant;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::coalescer::{CallReply, CallResults, ChargeOutcome};
use crate::redis::error::RedisError;
use crate::store::detach_on_drop::DetachOnDrop;
use crate::store::outcome::StoreOutcome;
use crate::store_client::deadline::timeout_with_grace;

/// Charges of a request on one counter.
pub(super) struct PendingCharges {
    pub(super) kind: PendingKind,
    /// Latest time for the outcomes; `None`: the call itself ends in time.
    pub(super) until: Option<Instant>,
}

/// Submitted charges of a request, in groups.
#[derive(Default)]
pub(super) struct PendingGroups {
    /// Index of each charge in the request, group by group.
    pub(super) indices: SmallVec<[usize; 2]>,
    pub(super) pending: SmallVec<[PendingCharges; 2]>,
}

/// Progress of submitted charges.
pub(super) enum PendingKind {
    /// Decided without a call: this many charges have the same outcome.
    Known { charges: usize, outcome: StoreOutcome },
    /// Sent by a call that this request leads.
    Leading { charges: usize, call: DetachOnDrop<CallResults> },
    /// Waiting for a call that another request started.
    Following(SmallVec<[oneshot::Receiver<ChargeOutcome>; 1]>),
}

impl PendingCharges {
    /// Charges that were decided without a call.
    pub(super) const fn known(charges: usize, outcome: StoreOutcome) -> Self {
        Self { kind: PendingKind::Known { charges, outcome }, until: None }
    }

    /// Waits for the outcomes, in the order of the charges. An outcome that is late is a timeout.
    pub(super) async fn outcomes(self) -> SmallVec<[ChargeOutcome; 1]> {
        match self.kind {
            PendingKind::Known { charges, outcome } => (0..charges).map(|_| Ok(outcome.clone())).collect(),
            PendingKind::Leading { charges, call } => {
                match within(call, self.until).await.unwrap_or(Err(RedisError::Timeout)) {
                    Ok(CallReply { results, now }) => {
                        results.into_iter().map(|results| Ok(StoreOutcome::by_store(results, now))).collect()
                    }
                    Err(error) => (0..charges).map(|_| Err(error)).collect(),
                }
            }
            PendingKind::Following(receivers) => {
                let mut outcomes = SmallVec::with_capacity(receivers.len());
                for receiver in receivers {
                    outcomes.push(match within(receiver, self.until).await {
                        Some(Ok(outcome)) => outcome,
                        Some(Err(_aborted)) => Err(RedisError::Broken),
                        None => Err(RedisError::Timeout),
                    });
                }
                outcomes
            }
        }
    }
}

impl PendingGroups {
    /// Waits for all outcomes, in the order of the request's charges.
    pub(super) async fn outcomes(self) -> SmallVec<[ChargeOutcome; 2]> {
        let Self { indices, pending } = self;
        let completed = join_all(pending.into_iter().map(PendingCharges::outcomes)).await;
        let mut outcomes: SmallVec<[ChargeOutcome; 2]> = indices.iter().map(|_| Err(RedisError::Broken)).collect();
        for (index, outcome) in indices.into_iter().zip(completed.into_iter().flatten()) {
            outcomes[index] = outcome;
        }
        outcomes
    }
}

async fn within<F: Future>(work: F, until: Option<Instant>) -> Option<F::Output> {
    match until {
        Some(until) => timeout_with_grace(work, until).await,
        None => Some(work.await),
    }
}
