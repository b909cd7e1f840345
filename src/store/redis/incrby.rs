//! Strict fixed windows with INCRBY and EXPIRE, on the keys of envoyproxy/ratelimit; their refunds, and whether a
//! server runs the script of refunds.
//!
//! Both programs can so share one Redis during a migration, and a Redis or a user without scripts can be used. The key
//! holds the start of the window by this process's clock, in whole seconds, and nothing of the limit. The charges of a
//! call are one INCRBY of their sum: rejected hits count, so their order does not change the count, and the result of
//! each charge is computed here.
//!
//! Refunds: no step may leave a count below 0, because the connection may break after any step. A call with refunds is
//! one script, which lowers the count to 0 at most. Where the server rejects scripts, all charges of the call are
//! counted first. Then its refunds reserve their hits in a second key, and only then read the count. Those that fit
//! into the count less all other reserved hits are subtracted, the others are dropped; then the reservation ends.
//! Proof: the refunds that are accepted but not subtracted yet are reserved; the last of them to reserve saw a count of
//! at least their sum. A reservation that never ends, because its connection broke, only drops refunds, until the
//! window ends. Other writers are excluded: without scripts, a `/reset` between reading and subtracting leaves a count
//! below 0.
//!
//! Whether scripts run: a user or a proxy may forbid them. The first refund learns it from the reply and later ones do
//! without, until the next attempt. A wrong guess is harmless: both ways keep counts at 0 or above, also if replicas
//! mix them.
//!
//! Redirections: work that is done is not repeated at the next node, so nothing is counted twice. While a slot
//! migrates, each key is at one node or the other, so each step begins at the owner of the slot.
//!
//! Decides: counting without scripts on keys of envoyproxy/ratelimit, refunds too.
//! Decides: when scripts are tried again that a proxy or user rejected (`RefundScriptSupport`).

use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::script::{RegionEffects, ScriptOutcome, window_charges_script};
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::algorithm::state::{State, charge_together};
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
    refunds: &'a RefundScriptSupport,
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
    /// Counts all charges and refunds by a script; `reads_reserved` is false if the second key is not at this node.
    Script {
        reads_reserved: bool,
    },
    /// Counts the charges.
    Charge,
    /// Reserves the hits of all refunds.
    Reserve,
    /// Reads the count, to select the refunds that fit; `reserved` are the reserved hits of all replicas.
    Select {
        reserved: i64,
    },
    /// Subtracts the hits of the selected refunds.
    Subtract {
        hits: i64,
    },
    /// Ends the reservation.
    Release,
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
        refunds: &'a RefundScriptSupport,
    ) -> Self {
        let by_script = charges.iter().any(is_refund) && refunds.may_use_script(Instant::now());
        Self {
            window,
            now,
            charges,
            refunds,
            step: if by_script { BatchStep::Script { reads_reserved: true } } else { BatchStep::Charge },
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
            region: RegionEffects::default(),
            holds: SmallVec::new(),
        })
    }

    async fn run_step(&mut self, to: Destination<'_>) -> Result<(), ReplyError> {
        let Destination { node, asking, deadline } = to;
        if self.expire_pending {
            let seconds = self.window.lifetime_s().to_string();
            node.call(&expire_words(self.window.key(), &seconds), asking, deadline).await?;
            self.expire_pending = false;
            return Ok(());
        }
        match self.step {
            BatchStep::Script { reads_reserved } => self.charge_by_script(reads_reserved, to).await?,
            BatchStep::Charge => self.charge_by_incrby(to).await?,
            BatchStep::Reserve => {
                let reserved =
                    send_incrby_and_expire(&self.window.reserved_refunds_key(), self.window, self.refunded_hits(), to)
                        .await?;
                self.step = BatchStep::Select { reserved: reserved.after };
            }
            BatchStep::Select { reserved } => {
                let count = to.node.call_tolerating_rejection(&[b"GET", self.window.key()], asking, deadline).await?;
                let hits = self.select_refunds(count_in_reply(&count)?, reserved);
                self.step = if hits == 0 { BatchStep::Release } else { BatchStep::Subtract { hits } };
            }
            BatchStep::Subtract { hits } => {
                let subtracted = send_incrby_and_expire(self.window.key(), self.window, -hits, to).await?;
                self.step = BatchStep::Release;
                self.record_expire_outcome(subtracted.expire)?;
            }
            BatchStep::Release => {
                let hits = self.refunded_hits();
                match send_incrby_and_expire(&self.window.reserved_refunds_key(), self.window, -hits, to).await {
                    Err(error @ (ReplyError::Moved(_) | ReplyError::Ask(_))) => return Err(error),
                    // All hits are counted; a reservation that stays is safe.
                    Ok(_) | Err(_) => self.step = BatchStep::Done,
                }
            }
            BatchStep::Done => {}
        }
        Ok(())
    }

    /// Counts all charges and refunds in order, as one atomic step.
    async fn charge_by_script(&mut self, reads_reserved: bool, to: Destination<'_>) -> Result<(), ReplyError> {
        let hits: Vec<String> = self.charges.iter().map(|charge| signed_hits(charge).to_string()).collect();
        let (seconds, reserved_refunds_key) =
            (self.window.lifetime_s().to_string(), self.window.reserved_refunds_key());
        let script = window_charges_script();
        let mut words: Vec<&[u8]> = vec![b"EVALSHA", script.sha1.as_bytes(), b"1", self.window.key()];
        if reads_reserved {
            words[2] = b"2";
            words.push(&reserved_refunds_key);
        }
        words.push(seconds.as_bytes());
        words.extend(hits.iter().map(String::as_bytes));
        let mut outcome = to.node.call_tolerating_rejection(&words, to.asking, to.deadline).await;
        if matches!(outcome, Err(ReplyError::NoScript)) {
            (words[0], words[1]) = (b"EVAL", script.text.as_bytes());
            outcome = to.node.call_tolerating_rejection(&words, to.asking, to.deadline).await;
        }
        match outcome {
            Ok(reply) => {
                self.refunds.record_script_ran();
                self.record_script_reply(&reply)?;
                self.step = BatchStep::Done;
            }
            // While a slot migrates, a node that has only one of two keys returns TRYAGAIN.
            Err(ReplyError::Failed(RedisError::SlotDown)) if reads_reserved => {
                self.step = BatchStep::Script { reads_reserved: false };
            }
            Err(error) if self.refunds.record_script_failed(&error, Instant::now()) => self.step = BatchStep::Charge,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Computes all results from the reply of the script.
    fn record_script_reply(&mut self, reply: &Reply) -> Result<(), ReplyError> {
        let Reply::Array(fields) = reply else { return Err(ReplyError::Failed(RedisError::BadReply)) };
        let [before, reserved] = &fields[..] else { return Err(ReplyError::Failed(RedisError::BadReply)) };
        let reserved = u64::try_from(integer_in_reply(reserved)?).unwrap_or(0);
        self.set_count(integer_in_reply(before)?);
        for index in 0..self.charges.len() {
            let room = self.counted_hits().saturating_sub(reserved);
            self.record_result(index, |hits| hits.min(room));
        }
        Ok(())
    }

    /// Counts all charges that are no refunds.
    async fn charge_by_incrby(&mut self, to: Destination<'_>) -> Result<(), ReplyError> {
        let refunds = self.charges.iter().filter(|charge| is_refund(charge)).count();
        let next = if refunds == 0 { BatchStep::Done } else { BatchStep::Reserve };
        if refunds == self.charges.len() {
            self.step = next;
            return Ok(());
        }
        if self.charges.iter().all(|charge| is_refund(charge) || charge.dry_run) {
            let count = to.node.call(&[b"GET", self.window.key()], to.asking, to.deadline).await?;
            self.set_count(count_in_reply(&count)?);
            self.record_charge_results();
            self.step = next;
            return Ok(());
        }
        let hits = self.charges.iter().filter(|charge| !is_refund(charge)).map(signed_hits).sum();
        let counted = send_incrby_and_expire(self.window.key(), self.window, hits, to).await?;
        self.set_count(counted.after.checked_sub(hits).ok_or(ReplyError::Failed(RedisError::BadReply))?);
        self.record_charge_results();
        self.step = next;
        self.record_expire_outcome(counted.expire)
    }

    fn record_charge_results(&mut self) {
        for index in 0..self.charges.len() {
            if !is_refund(&self.charges[index]) {
                self.record_result(index, |hits| hits);
            }
        }
    }

    /// Selects the refunds that fit into the count; returns the sum of their hits. `reserved` includes this batch's.
    fn select_refunds(&mut self, count: i64, reserved: i64) -> i64 {
        self.set_count(count);
        let others = reserved.saturating_sub(self.refunded_hits()).max(0);
        let mut room = u64::try_from(count.saturating_sub(others)).unwrap_or(0);
        let (mut selected, mut dropped) = (0, 0);
        for index in 0..self.charges.len() {
            if is_refund(&self.charges[index]) {
                self.record_result(index, |hits| {
                    let fits = hits <= room;
                    let hits = if fits { hits } else { 0 };
                    (room, selected, dropped) = (room - hits, selected + hits, dropped + u64::from(!fits));
                    hits
                });
            }
        }
        self.refunds.count_dropped(dropped);
        to_signed(selected)
    }

    /// Sum of the hits of all refunds.
    fn refunded_hits(&self) -> i64 {
        -self.charges.iter().filter(|charge| is_refund(charge)).map(signed_hits).sum::<i64>()
    }

    fn counted_hits(&self) -> u64 {
        let [State::FixedWindow(fixed_window::State { count, .. })] = self.states else { return 0 };
        count
    }

    /// Sets the count before the next charge. Other programs may have left a negative one; it counts as 0.
    fn set_count(&mut self, count: i64) {
        let count = u64::try_from(count).unwrap_or(0).min(MAX_COUNT);
        self.states = [State::FixedWindow(fixed_window::State { count, last: self.now })];
    }

    /// Computes the result of a charge from the count before it. `refunded` returns the hits by which a refund of that
    /// many lowers the count.
    fn record_result(&mut self, index: usize, refunded: impl FnOnce(u64) -> u64) {
        let charge = &self.charges[index];
        let limits = charge.joint_limits();
        let hits = match charge.request.hits {
            Hits::Refund(hits) if is_refund(charge) => Hits::Refund(refunded(hits)),
            hits => hits,
        };
        let request = ChargeRequest { hits, ..charge.request };
        self.results[index] = match charge.dry_run {
            true => charge_together(&limits, &mut self.states.clone(), self.now, request),
            false => charge_together(&limits, &mut self.states, self.now, request),
        };
    }

    /// Keeps what was counted if only EXPIRE was redirected.
    fn record_expire_outcome(&mut self, expire: Result<(), ReplyError>) -> Result<(), ReplyError> {
        match expire {
            Err(ReplyError::Moved(_) | ReplyError::Ask(_)) => self.expire_pending = true,
            outcome => outcome?,
        }
        Ok(())
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

/// Sends INCRBY and EXPIRE for a key of the window.
async fn send_incrby_and_expire(
    key: &[u8],
    window: &EnvoyRatelimitKey,
    hits: i64,
    to: Destination<'_>,
) -> Result<IncrOutcome, ReplyError> {
    let (hits, seconds) = (hits.to_string(), window.lifetime_s().to_string());
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

/// Time from a rejected script to the next attempt: the permissions of the user may have changed.
const SCRIPT_RETRY_AFTER_REJECTION: Duration = Duration::from_secs(60);
/// Time from a script without reply to the next attempt. Some proxies close the connection, which fails other charges.
const SCRIPT_RETRY_AFTER_NO_REPLY: Duration = Duration::from_secs(3600);

/// Script support of one deployment, and its number of dropped refunds.
#[derive(Debug, Default)]
pub struct RefundScriptSupport {
    scripts: Mutex<ScriptSupport>,
    dropped: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default)]
enum ScriptSupport {
    #[default]
    Unknown,
    Supported,
    Unsupported {
        retry_at: Instant,
    },
}

impl RefundScriptSupport {
    /// Returns false if scripts are known to be rejected at `now`.
    pub fn may_use_script(&self, now: Instant) -> bool {
        let mut support = lock_ignoring_poison(&self.scripts);
        match *support {
            ScriptSupport::Unknown | ScriptSupport::Supported => true,
            ScriptSupport::Unsupported { retry_at } if now < retry_at => false,
            ScriptSupport::Unsupported { .. } => {
                *support = ScriptSupport::Unknown;
                true
            }
        }
    }

    /// Records that the script ran.
    pub fn record_script_ran(&self) {
        *lock_ignoring_poison(&self.scripts) = ScriptSupport::Supported;
    }

    /// Records a script that failed at `now`. Returns true if the server rejects scripts: it did not run, and commands
    /// can replace it.
    pub fn record_script_failed(&self, error: &ReplyError, now: Instant) -> bool {
        let mut support = lock_ignoring_poison(&self.scripts);
        let (is_rejected, retry_after) = match (error, *support) {
            // Proxies have error texts of their own.
            (ReplyError::Failed(RedisError::Misconfigured | RedisError::BadReply), _) => {
                (true, SCRIPT_RETRY_AFTER_REJECTION)
            }
            (ReplyError::Failed(RedisError::Broken | RedisError::Timeout), ScriptSupport::Unknown) => {
                (false, SCRIPT_RETRY_AFTER_NO_REPLY)
            }
            _ => return false,
        };
        if !matches!(*support, ScriptSupport::Unsupported { .. }) {
            tracing::warn!(
                "refunds do without scripts: the server did not run one; a refund below 0 is dropped, and counted in \
                 tollkeeper_refunds_dropped_total (grant `+eval +evalsha` to the user of redis to refund down to 0)"
            );
        }
        *support = ScriptSupport::Unsupported { retry_at: now + retry_after };
        is_rejected
    }

    /// Counts refunds that were dropped because they would have gone below 0.
    fn count_dropped(&self, refunds: u64) {
        self.dropped.fetch_add(refunds, Ordering::Relaxed);
    }

    /// Returns the number of dropped refunds.
    pub(crate) fn dropped_refunds(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}
