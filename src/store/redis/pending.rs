//! Charges that were submitted, and the wait for their outcomes.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::task::coop::has_budget_remaining;

use super::coalescer::{CallReply, CallResults, ChargeOutcome};
use crate::base::write_coalescing::run_deferring_wakes;
use crate::store::client::deadline::timeout_with_grace;
use crate::store::client::redis::error::RedisError;
use crate::store::outcome::StoreOutcome;
use crate::store::remote_call::DetachOnDrop;

/// Charges of a request on one counter.
pub(super) struct PendingCharges {
    pub(super) kind: PendingKind,
    /// Time until which the caller waits, equal for all charges of a request; `None`: the call itself ends in time.
    pub(super) caller_deadline: Option<Instant>,
    /// Index of each charge in the request.
    pub(super) indices: SmallVec<[usize; 1]>,
}

/// Submitted charges of a request, in groups.
#[derive(Default)]
pub(super) struct PendingGroups {
    groups: SmallVec<[PendingCharges; 1]>,
    /// Number of groups at the start of `groups` that have their outcomes.
    decided: usize,
    outcomes: SmallVec<[ChargeOutcome; 2]>,
}

/// Progress of submitted charges.
pub(super) enum PendingKind {
    /// Sent by a call that this request leads.
    Leading(DetachOnDrop<CallResults>),
    /// Waiting for a call that another request started, with one receiver for each charge.
    Following(SmallVec<[oneshot::Receiver<ChargeOutcome>; 1]>),
    /// The outcomes are written.
    Decided,
}

impl PendingCharges {
    /// Writes the outcomes that are known by now to their indices; ready once all are written.
    fn poll(&mut self, context: &mut Context<'_>, outcomes: &mut [ChargeOutcome]) -> Poll<()> {
        match &mut self.kind {
            PendingKind::Leading(call) => match ready!(Pin::new(call).poll(context)) {
                Ok(CallReply { results, now }) => {
                    for (&index, results) in self.indices.iter().zip(results) {
                        outcomes[index] = Ok(StoreOutcome::by_store(results, now));
                    }
                }
                Err(error) => self.fail(error, outcomes),
            },
            PendingKind::Following(receivers) => {
                let waiting = self.indices.iter().zip(receivers).filter(|(_, receiver)| !receiver.is_terminated());
                for (&index, receiver) in waiting {
                    // Without a sender, the call was aborted.
                    outcomes[index] = ready!(Pin::new(receiver).poll(context)).unwrap_or(Err(RedisError::Broken));
                }
            }
            PendingKind::Decided => {}
        }
        self.kind = PendingKind::Decided;
        Poll::Ready(())
    }

    /// Writes an error for all charges that have no outcome.
    fn fail(&self, error: RedisError, outcomes: &mut [ChargeOutcome]) {
        let receivers = if let PendingKind::Following(receivers) = &self.kind { &receivers[..] } else { &[] };
        let has_outcome = |place: usize| receivers.get(place).is_some_and(oneshot::Receiver::is_terminated);
        for (_, &index) in self.indices.iter().enumerate().filter(|(place, _)| !has_outcome(*place)) {
            outcomes[index] = Err(error);
        }
    }
}

impl PendingGroups {
    /// Creates the state of a request without charges, with room for this number of them.
    pub(super) fn with_capacity(charges: usize) -> Self {
        Self {
            groups: SmallVec::with_capacity(charges),
            decided: 0,
            outcomes: (0..charges).map(|_| Err(RedisError::Broken)).collect(),
        }
    }

    /// Adds a group.
    pub(super) fn push(&mut self, group: PendingCharges) {
        self.groups.push(group);
    }

    /// Sets the outcome of charges that are decided without a call.
    pub(super) fn decide(&mut self, indices: &[usize], outcome: StoreOutcome) {
        let Some((last, others)) = indices.split_last() else { return };
        for &index in others {
            self.outcomes[index] = Ok(outcome.clone());
        }
        self.outcomes[*last] = Ok(outcome);
    }

    /// Waits for all outcomes, in the order of the request's charges. An outcome that is late is a timeout.
    pub(super) async fn outcomes(mut self) -> SmallVec<[ChargeOutcome; 2]> {
        let until = self.groups.iter().find_map(|group| group.caller_deadline);
        if let Some(until) = until
            && timeout_with_grace(poll_fn(|context| run_deferring_wakes(|| self.poll(context))), until).await.is_none()
        {
            self.fail_late();
        }
        poll_fn(|context| run_deferring_wakes(|| self.poll(context))).await;
        self.outcomes
    }

    /// Polls all groups without outcomes: all calls are queued before the first one is written.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut result = Poll::Ready(());
        for index in self.decided..self.groups.len() {
            if self.groups[index].poll(context, &mut self.outcomes).is_pending() {
                result = Poll::Pending;
                // The other groups would be pending too; the task is polled again at once.
                if !has_budget_remaining() {
                    break;
                }
            } else if result.is_ready() {
                self.decided = index + 1;
            }
        }
        result
    }

    /// Fails the charges whose time is up. Their calls continue without them.
    fn fail_late(&mut self) {
        for group in &mut self.groups[self.decided..] {
            if group.caller_deadline.is_some() && !matches!(group.kind, PendingKind::Decided) {
                group.fail(RedisError::Timeout, &mut self.outcomes);
                group.kind = PendingKind::Decided;
            }
        }
    }
}
