//! Coalescing of charges: charges that arrive while a call on their counters is in flight wait and share the next call.
//!
//! A counter is in the table only while a call on it is in flight. The charge that finds no call becomes the leader and
//! sends one at once; later ones are followers and leave their charge and a channel for the outcome. When the call
//! ends, all followers are taken as one batch, in order of arrival, without those whose caller has given up. Charges of
//! one request on one counter stay in one batch. No lock is held across an await.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::time::Instant;

use smallvec::SmallVec;
use tokio::sync::oneshot;

use crate::base::clock::Time;
use crate::base::sharded::{DEFAULT_SHARDS, PrehashedMap, Sharded, upper_half};
use crate::store::charge::{ChargeBatch, ChargeContext, MAX_CHARGES_PER_CALL, OwnedCharge};
use crate::store::client::deadline::timeout_with_grace;
use crate::store::client::redis::error::RedisError;
use crate::store::outcome::{ChargeResults, StoreOutcome};
use crate::telemetry::traces::{MAX_LINKS, SpanRef};

/// Upper bound on the charges that wait for one counter; further charges fail at once.
const MAX_WAITING: usize = 32 * MAX_CHARGES_PER_CALL;

/// Outcome of one charge.
pub(super) type ChargeOutcome = Result<StoreOutcome, RedisError>;

/// Reply to a call.
#[derive(Debug, Default)]
pub(super) struct CallReply {
    /// Results of each charge.
    pub(super) results: Vec<ChargeResults>,
    /// Time at which the charges were made.
    pub(super) now: Time,
}

/// Reply to a call, or its failure.
pub(super) type CallResults = Result<CallReply, RedisError>;

/// Counters with a call in flight, by the hash of their keys, and the charges that wait for it.
#[derive(Debug)]
pub(super) struct Coalescer(Sharded<WaitQueues>);

type WaitQueues = PrehashedMap<VecDeque<WaitingCharge>>;

/// Charge of a follower.
#[derive(Debug)]
struct WaitingCharge {
    charge: OwnedCharge,
    outcome: oneshot::Sender<ChargeOutcome>,
    /// Latest time for its outcome.
    until: Instant,
    /// Time of the charge, by the clock of this process.
    now: Time,
    /// True if it belongs to the same request as the charge before it.
    joined: bool,
    /// Parent of the call's span; `None` if the charge is joined or not sampled.
    span_ref: Option<SpanRef>,
}

/// Role of a request in the calls on a counter.
#[derive(Debug)]
pub(super) enum Role {
    /// Sends these charges now, then calls [`Coalescer::next_batch`].
    Leader(ChargeBatch),
    /// Waits for the outcomes, in the order of its charges.
    Follower {
        outcomes: SmallVec<[oneshot::Receiver<ChargeOutcome>; 1]>,
        /// True if the next call will be full without these charges; the follower must then watch its own deadline.
        beyond_next_call: bool,
    },
}

/// Charges of followers, taken to be sent as one call.
#[derive(Debug, Default)]
pub(super) struct FollowerBatch {
    pub(super) charges: ChargeBatch,
    /// Latest time of the charges.
    pub(super) now: Time,
    /// Parents of the call's span, as many as a span can link to.
    pub(super) span_refs: Vec<SpanRef>,
    /// One for each charge; `None` once it has its outcome.
    waiters: Vec<Option<Waiter>>,
}

/// Receiver of one outcome.
#[derive(Debug)]
struct Waiter {
    outcome: oneshot::Sender<ChargeOutcome>,
    until: Instant,
}

impl Waiter {
    fn send(self, outcome: ChargeOutcome) {
        // A caller that gave up has dropped its receiver.
        let _dropped = self.outcome.send(outcome);
    }
}

impl Default for Coalescer {
    fn default() -> Self {
        Self(Sharded::new(DEFAULT_SHARDS, WaitQueues::default))
    }
}

impl Coalescer {
    /// Adds the charges of one request on one counter, at most [`MAX_CHARGES_PER_CALL`].
    pub(super) fn join(&self, id: u128, charges: ChargeBatch, context: ChargeContext<'_>) -> Role {
        let ChargeContext { now, until, span_ref } = context;
        let mut shard = self.0.lock_shard(upper_half(id));
        let Some(waiting) = shard.get_mut(&id) else {
            shard.insert(id, VecDeque::new());
            return Role::Leader(charges);
        };
        let is_full = waiting.len() >= MAX_WAITING;
        let mut joined = false;
        let wait = |charge| {
            let (outcome, receiver) = oneshot::channel();
            if is_full {
                let _dropped = outcome.send(Err(RedisError::Overloaded));
            } else {
                let span_ref = span_ref.filter(|_| !joined).cloned();
                waiting.push_back(WaitingCharge { charge, outcome, until, now, joined, span_ref });
                joined = true;
            }
            receiver
        };
        let outcomes = charges.into_iter().map(wait).collect();
        Role::Follower { outcomes, beyond_next_call: waiting.len() > MAX_CHARGES_PER_CALL }
    }

    /// Takes the followers of a call that has ended. Returns `None`, and forgets the counter, if there are none.
    pub(super) fn next_batch(&self, id: u128) -> Option<FollowerBatch> {
        let mut shard = self.0.lock_shard(upper_half(id));
        let waiting = shard.get_mut(&id)?;
        let mut batch = FollowerBatch::default();
        while let Some(first) = waiting.front() {
            let given_up = first.outcome.is_closed();
            let in_request = 1 + waiting.iter().skip(1).take_while(|next| next.joined).count();
            if given_up {
                // A request drops its receivers one by one; once the first is gone, send none of its charges.
                for WaitingCharge { outcome, .. } in waiting.drain(..in_request) {
                    let _dropped = outcome.send(Err(RedisError::Timeout));
                }
                continue;
            }
            if !batch.charges.is_empty() && batch.charges.len() + in_request > MAX_CHARGES_PER_CALL {
                break;
            }
            for WaitingCharge { charge, outcome, until, now, span_ref, .. } in waiting.drain(..in_request) {
                batch.now = batch.now.max(now);
                batch.span_refs.extend(span_ref.filter(|_| batch.span_refs.len() <= MAX_LINKS));
                batch.charges.push(charge);
                batch.waiters.push(Some(Waiter { outcome, until }));
            }
        }
        if batch.charges.is_empty() {
            shard.remove(&id);
            return None;
        }
        Some(batch)
    }
}

impl FollowerBatch {
    /// Waits for the batch's call, and fails each charge whose time is up meanwhile. One timer serves all followers.
    pub(super) async fn wait_for(&mut self, call: impl Future<Output = CallResults>) -> CallResults {
        let mut call = pin!(call);
        loop {
            let next_deadline = self.waiters.iter().flatten().map(|waiter| waiter.until).min();
            let Some(until) = next_deadline else { return call.await };
            if let Some(results) = timeout_with_grace(&mut call, until).await {
                return results;
            }
            self.fail_expired(Instant::now());
        }
    }

    /// Removes the charges that `decide` decides, and sends their outcomes.
    pub(super) fn answer_locally(&mut self, decide: impl Fn(&OwnedCharge) -> Option<StoreOutcome>) {
        let charges = std::mem::take(&mut self.charges);
        let waiters = std::mem::take(&mut self.waiters);
        for (charge, waiter) in charges.into_iter().zip(waiters) {
            match (decide(&charge), waiter) {
                (Some(outcome), Some(waiter)) => waiter.send(Ok(outcome)),
                (_, waiter) => {
                    self.charges.push(charge);
                    self.waiters.push(waiter);
                }
            }
        }
    }

    /// Sends all outcomes that are still missing.
    pub(super) fn answer(self, results: CallResults) {
        let mut results = results.map(|reply| (reply.results.into_iter(), reply.now));
        for waiter in self.waiters {
            // Consume the results of charges that already have an outcome too, to keep the order.
            let outcome = match &mut results {
                Ok((results, now)) => {
                    let results = results.next().ok_or(RedisError::BadReply);
                    results.map(|results| StoreOutcome::by_store(results, *now))
                }
                Err(error) => Err(*error),
            };
            if let Some(waiter) = waiter {
                waiter.send(outcome);
            }
        }
    }

    fn fail_expired(&mut self, now: Instant) {
        for waiter in &mut self.waiters {
            if let Some(waiter) = waiter.take_if(|waiter| waiter.until <= now) {
                waiter.send(Err(RedisError::Timeout));
            }
        }
    }
}
