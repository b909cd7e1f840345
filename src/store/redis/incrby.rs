//! Strict fixed windows with INCRBY and EXPIRE, on the keys of envoyproxy/ratelimit; their refunds by a script.
//!
//! Both programs can so share one Redis during a migration, and a Redis or a user without scripts can be used. The key
//! holds the start of the window by this process's clock, in whole seconds, and nothing of the limit. The charges of a
//! call are one INCRBY of their sum: rejected hits count, so their order does not change the count, and the result of
//! each charge is computed here.
//!
//! Refunds: a call with refunds is one script, which lowers the count to 0 at most. Where a user or a proxy rejects
//! scripts, only the charges of the call are counted; its refunds are dropped.
//!
//! Redirections: work that is done is not repeated at the next node, so nothing is counted twice.
//!
//! Decides: counting without scripts on keys of envoyproxy/ratelimit; which refunds are dropped (`DroppedRefunds`).

use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::script::{PoolEffects, ScriptOutcome, window_charges_script};
use crate::base::clock::Time;
use crate::limit::algorithm::joint_charge::charge_together;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::{Algorithm, fixed_window};
use crate::limit::charge::{ChargeRequest, ChargeResult, MAX_COUNT};
use crate::limit::request::Hits;
use crate::store::charge::OwnedCharge;
use crate::store::client::redis::deployment::TargetNode;
use crate::store::client::redis::error::{RedisError, ReplyError};
use crate::store::client::redis::node::Node;
use crate::store::client::redis::resp::{Reply, reply_integer};
use crate::store::window_key::EnvoyRatelimitKey;

/// Progress of a batch of charges.
pub(super) struct WindowChargeBatch<'a> {
    window: &'a EnvoyRatelimitKey,
    now: Time,
    charges: &'a [OwnedCharge],
    dropped_refunds: &'a DroppedRefunds,
    step: BatchStep,
    states: [State; 1],
    /// Results of the charges, in their order; empty before they are counted.
    results: Vec<SmallVec<[ChargeResult; 1]>>,
    /// True if hits were counted, but EXPIRE was redirected.
    expire_pending: bool,
}

/// Next step of a batch.
#[derive(Clone, Copy)]
enum BatchStep {
    /// Counts all charges and refunds by a script.
    Script,
    /// Counts the charges, and drops the refunds.
    Charge,
    Done,
}

/// Node to send to, and the deadline.
#[derive(Clone, Copy)]
struct Destination<'n> {
    node: &'n Arc<Node>,
    asking: bool,
    deadline: Instant,
}

/// Outcome of INCRBY and the EXPIRE after it.
struct IncrOutcome {
    /// Count after INCRBY.
    after: i64,
    expire: Result<(), ReplyError>,
}

impl<'a> WindowChargeBatch<'a> {
    /// Creates a batch of which nothing is counted. `now` is this process's time, within the window.
    pub(super) fn new(
        window: &'a EnvoyRatelimitKey,
        charges: &'a [OwnedCharge],
        now: Time,
        dropped_refunds: &'a DroppedRefunds,
    ) -> Self {
        Self {
            window,
            now,
            charges,
            dropped_refunds,
            step: if charges.iter().any(is_refund) { BatchStep::Script } else { BatchStep::Charge },
            states: [State::empty(Algorithm::FixedWindow)],
            results: vec![SmallVec::new(); charges.len()],
            expire_pending: false,
        }
    }

    /// Does the remaining steps. After a redirection, call it again with the next node in `target`.
    pub(super) async fn run_steps(
        &mut self,
        target: &mut TargetNode<'_>,
        deadline: Instant,
    ) -> Result<ScriptOutcome, ReplyError> {
        while self.expire_pending || !matches!(self.step, BatchStep::Done) {
            self.run_step(Destination { node: &target.node, asking: target.asking, deadline }).await?;
            target.end_asking();
        }
        Ok(ScriptOutcome {
            results: take(&mut self.results),
            states: SmallVec::from(self.states.clone()),
            now: self.now,
            pools: PoolEffects::default(),
            holds: SmallVec::new(),
        })
    }

    async fn run_step(&mut self, to: Destination<'_>) -> Result<(), ReplyError> {
        if self.expire_pending {
            let seconds = self.window.lifetime_s().to_string();
            to.node.call(&expire_words(self.window.key(), &seconds), to.asking, to.deadline).await?;
            self.expire_pending = false;
            return Ok(());
        }
        match self.step {
            BatchStep::Script => self.charge_by_script(to).await,
            BatchStep::Charge => self.charge_by_incrby(to).await,
            BatchStep::Done => Ok(()),
        }
    }

    /// Counts all charges and refunds in order, as one atomic step.
    async fn charge_by_script(&mut self, to: Destination<'_>) -> Result<(), ReplyError> {
        let hits: Vec<String> = self.charges.iter().map(|charge| signed_hits(charge).to_string()).collect();
        let seconds = self.window.lifetime_s().to_string();
        let script = window_charges_script();
        let mut words: Vec<&[u8]> =
            vec![b"EVALSHA", script.sha1.as_bytes(), b"1", self.window.key(), seconds.as_bytes()];
        words.extend(hits.iter().map(String::as_bytes));
        let mut outcome = to.node.call_tolerating_rejection(&words, to.asking, to.deadline).await;
        if matches!(outcome, Err(ReplyError::NoScript)) {
            (words[0], words[1]) = (b"EVAL", script.text.as_bytes());
            outcome = to.node.call_tolerating_rejection(&words, to.asking, to.deadline).await;
        }
        match outcome {
            Ok(before) => {
                self.set_count(integer_in_reply(&before)?);
                self.record_results(|hits, count| hits.min(count));
                self.step = BatchStep::Done;
                Ok(())
            }
            // The server rejects scripts: it did not run. Proxies have error texts of their own.
            Err(ReplyError::Failed(RedisError::Misconfigured | RedisError::BadReply)) => {
                self.step = BatchStep::Charge;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Counts all charges that are no refunds, and drops the refunds.
    async fn charge_by_incrby(&mut self, to: Destination<'_>) -> Result<(), ReplyError> {
        if self.charges.iter().all(|charge| charge.dry_run) {
            let count = to.node.call(&[b"GET", self.window.key()], to.asking, to.deadline).await?;
            self.set_count(count_in_reply(&count)?);
            self.record_results(|_, _| 0);
            self.step = BatchStep::Done;
            return Ok(());
        }
        let hits = self.charges.iter().filter(|charge| !is_refund(charge)).map(signed_hits).sum();
        let counted = send_incrby_and_expire(self.window, hits, to).await?;
        self.set_count(counted.after.checked_sub(hits).ok_or(ReplyError::Failed(RedisError::BadReply))?);
        self.record_results(|_, _| 0);
        self.dropped_refunds.record(self.charges.iter().filter(|charge| is_refund(charge)).count() as u64);
        self.step = BatchStep::Done;
        match counted.expire {
            // What was counted stays.
            Err(ReplyError::Moved(_) | ReplyError::Ask(_)) => self.expire_pending = true,
            outcome => outcome?,
        }
        Ok(())
    }

    /// Sets the count before the next charge. Other programs may have left a negative one; it counts as 0.
    fn set_count(&mut self, count: i64) {
        let count = u64::try_from(count).unwrap_or(0).min(MAX_COUNT);
        self.states = [State::FixedWindow(fixed_window::State { count, last: self.now })];
    }

    /// Computes the results of all charges from the count before them. `refunded` returns the hits by which a refund
    /// of that many lowers that count.
    fn record_results(&mut self, refunded: impl Fn(u64, u64) -> u64) {
        for (charge, result) in self.charges.iter().zip(&mut self.results) {
            let hits = match charge.request.hits {
                Hits::Refund(hits) if is_refund(charge) => {
                    let [State::FixedWindow(fixed_window::State { count, .. })] = self.states else { continue };
                    Hits::Refund(refunded(hits, count))
                }
                hits => hits,
            };
            let (limits, request) = (charge.joint_limits(), ChargeRequest { hits, ..charge.request });
            *result = match charge.dry_run {
                true => charge_together(&limits, &mut self.states.clone(), self.now, request),
                false => charge_together(&limits, &mut self.states, self.now, request),
            };
        }
    }
}

/// Returns true if the charge subtracts hits.
fn is_refund(charge: &OwnedCharge) -> bool {
    matches!(charge.request.hits, Hits::Refund(_)) && !charge.dry_run
}

/// Returns the hits that a charge adds; negative for a refund.
fn signed_hits(charge: &OwnedCharge) -> i64 {
    match charge.request.hits {
        Hits::Charge(hits) if !charge.dry_run => to_signed(hits),
        Hits::Refund(hits) if !charge.dry_run => -to_signed(hits),
        Hits::Charge(_) | Hits::Peek | Hits::Refund(_) => 0,
    }
}

/// Converts hits: a charge has at most 2^32, so the sum of a call fits too.
fn to_signed(hits: u64) -> i64 {
    i64::try_from(hits).unwrap_or(i64::MAX)
}

/// Sends INCRBY and EXPIRE for the key of the window.
async fn send_incrby_and_expire(
    window: &EnvoyRatelimitKey,
    hits: i64,
    to: Destination<'_>,
) -> Result<IncrOutcome, ReplyError> {
    let (key, hits, seconds) = (window.key(), hits.to_string(), window.lifetime_s().to_string());
    let incrby: [&[u8]; 3] = [b"INCRBY", key, hits.as_bytes()];
    let (count, expired) =
        to.node.call_two_commands(&incrby, &expire_words(key, &seconds), to.asking, to.deadline).await;
    Ok(IncrOutcome { after: integer_in_reply(&count?)?, expire: expired.map(|_| ()) })
}

/// Returns the words of EXPIRE.
fn expire_words<'w>(key: &'w [u8], seconds: &'w str) -> [&'w [u8]; 3] {
    [b"EXPIRE", key, seconds.as_bytes()]
}

/// Returns the count in the reply to GET.
fn count_in_reply(reply: &Reply) -> Result<i64, ReplyError> {
    if matches!(reply, Reply::Null) { Ok(0) } else { integer_in_reply(reply) }
}

fn integer_in_reply(reply: &Reply) -> Result<i64, ReplyError> {
    reply_integer(reply).ok_or(ReplyError::Failed(RedisError::WrongType))
}

/// Number of refunds that a deployment dropped because it rejects scripts.
#[derive(Debug, Default)]
pub(super) struct DroppedRefunds {
    total: AtomicU64,
}

impl DroppedRefunds {
    /// Counts dropped refunds; logs the first.
    fn record(&self, refunds: u64) {
        if refunds > 0 && self.total.fetch_add(refunds, Ordering::Relaxed) == 0 {
            tracing::warn!(
                "refunds are dropped, and counted in tollkeeper_refunds_dropped_total: redis rejects their script \
                 (grant `+eval +evalsha` to its user)"
            );
        }
    }

    /// Returns the number of dropped refunds.
    pub(super) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }
}
