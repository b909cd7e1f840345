//! Strict fixed windows with INCRBY and EXPIRE, on the keys of envoyproxy/ratelimit.
//!
//! Both programs can so share one Redis during a migration, and a Redis or a user without scripts can be used. The key
//! holds the start of the window by this process's clock, in whole seconds, and nothing of the limit. A run of charges
//! is one INCRBY of their sum: rejected hits count, so their order does not change the count, and the result of each
//! charge is computed here.
//!
//! Refunds: a refund that makes the count negative adds back as much of the deficit as it caused. Invariant: the count
//! plus all that is still to be added back is never negative; so once all refunds are done, the count is not either.
//! Redirections: work that is done is not repeated at the next node, so nothing is counted twice.

pub(crate) mod window_key;

use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tokio::time::timeout;

use self::window_key::WindowKey;
use super::command::ChargeCommand;
use super::script::replay::ScriptOutcome;
use crate::algorithm::state::{State, charge_together};
use crate::algorithm::{ChargeResult, MAX_COUNT, fixed_window};
use crate::clock::Time;
use crate::limit::algorithm::Algorithm;
use crate::redis::deadline::timeout_with_grace;
use crate::redis::error::{RedisError, ReplyError};
use crate::redis::node::Node;
use crate::redis::reply::{self, Reply};
use crate::request::Hits;

/// Upper bound on a refund and what it adds back; without a reply by then the connection is gone.
const REFUND_TIMEOUT: Duration = Duration::from_secs(5);

/// Progress of a batch of charges, which are counted in order.
pub(super) struct IncrBatch<'a> {
    window: &'a WindowKey,
    now: Time,
    /// Charges that are not counted yet.
    rest: &'a [ChargeCommand],
    states: [State; 1],
    results: Vec<SmallVec<[ChargeResult; 1]>>,
    /// Hits by which a refund exceeded the count.
    to_add_back: i64,
    /// True if hits were counted, but EXPIRE was redirected.
    expire_pending: bool,
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

/// Outcome of a refund.
struct RefundOutcome {
    /// Count before the refund.
    before: i64,
    to_add_back: i64,
    expire: Result<(), ReplyError>,
}

impl<'a> IncrBatch<'a> {
    /// Creates a batch of which nothing is counted. `now` is this process's time, within the window.
    pub(super) fn new(window: &'a WindowKey, commands: &'a [ChargeCommand], now: Time) -> Self {
        Self {
            window,
            now,
            rest: commands,
            states: [State::empty(Algorithm::FixedWindow)],
            results: Vec::with_capacity(commands.len()),
            to_add_back: 0,
            expire_pending: false,
        }
    }

    /// Counts the rest. After a redirection, call it again with the next node.
    pub(super) async fn run(
        &mut self,
        node: &Arc<Node>,
        asking: bool,
        deadline: Instant,
    ) -> Result<ScriptOutcome, ReplyError> {
        let to = Destination { node, asking, deadline };
        while self.expire_pending || self.to_add_back > 0 || !self.rest.is_empty() {
            if self.expire_pending {
                let seconds = self.window.expire_s().to_string();
                node.call(&expire(self.window, &seconds), asking, deadline).await?;
                self.expire_pending = false;
            } else if self.to_add_back > 0 {
                let added = increment(self.window, self.to_add_back, to).await?;
                self.to_add_back = 0;
                self.note_expire(added.expire)?;
            } else if let Some((command, rest)) = self.rest.split_first()
                && let Some(hits) = refunded_hits(command)
            {
                self.refund(hits, rest, to).await?;
            } else {
                self.count_run(to).await?;
            }
        }
        Ok(ScriptOutcome {
            results: take(&mut self.results),
            states: SmallVec::from(self.states.clone()),
            now: self.now,
        })
    }

    /// Makes the refund that is next.
    async fn refund(&mut self, hits: i64, rest: &'a [ChargeCommand], to: Destination<'_>) -> Result<(), ReplyError> {
        // In a task of its own: no deadline may separate a refund from what it adds back.
        let refund = refund(self.window.clone(), hits, Arc::clone(to.node), to.asking);
        let refunded = tokio::spawn(timeout(REFUND_TIMEOUT, refund));
        let refunded = timeout_with_grace(refunded, to.deadline).await.ok_or_else(|| to.node.record_timeout())?;
        let outcome = refunded.ok().and_then(Result::ok).unwrap_or(Err(ReplyError::Failed(RedisError::Broken)))?;
        self.record(outcome.before, 1, rest);
        self.to_add_back = outcome.to_add_back;
        self.note_expire(outcome.expire)
    }

    /// Counts all charges before the next refund.
    async fn count_run(&mut self, to: Destination<'_>) -> Result<(), ReplyError> {
        let length = self.rest.iter().take_while(|command| refunded_hits(command).is_none()).count();
        let (run, rest) = self.rest.split_at(length);
        if run.iter().all(|command| command.dry_run) {
            let count = to.node.call(&[b"GET", self.window.key()], to.asking, to.deadline).await?;
            let count = if matches!(count, Reply::Null) { 0 } else { integer(&count)? };
            self.record(count, run.len(), rest);
            return Ok(());
        }
        let hits = run.iter().map(charged_hits).sum();
        let counted = increment(self.window, hits, to).await?;
        let before = counted.after.checked_sub(hits).ok_or(ReplyError::Failed(RedisError::BadReply))?;
        self.record(before, run.len(), rest);
        self.note_expire(counted.expire)
    }

    /// Computes the results of the next charges from the count before them.
    fn record(&mut self, before: i64, charges: usize, rest: &'a [ChargeCommand]) {
        // A negative count is a refund's deficit that is about to be added back.
        let count = u64::try_from(before).unwrap_or(0).min(MAX_COUNT);
        self.states = [State::FixedWindow(fixed_window::State { count, last: self.now })];
        for command in &self.rest[..charges] {
            let results = results(command, &mut self.states, self.now);
            self.results.push(results);
        }
        self.rest = rest;
    }

    /// Keeps what was counted if only EXPIRE was redirected.
    fn note_expire(&mut self, expire: Result<(), ReplyError>) -> Result<(), ReplyError> {
        match expire {
            Err(ReplyError::Moved(_) | ReplyError::Ask(_)) => self.expire_pending = true,
            outcome => outcome?,
        }
        Ok(())
    }
}

/// Returns the hits of a refund; `None` for all other charges.
fn refunded_hits(command: &ChargeCommand) -> Option<i64> {
    match command.request.hits {
        Hits::Refund(hits) if !command.dry_run => Some(signed(hits)),
        Hits::Charge(_) | Hits::Peek | Hits::Refund(_) => None,
    }
}

fn charged_hits(command: &ChargeCommand) -> i64 {
    match command.request.hits {
        Hits::Charge(hits) if !command.dry_run => signed(hits),
        Hits::Charge(_) | Hits::Peek | Hits::Refund(_) => 0,
    }
}

/// Converts hits: a charge has at most 2^32, so the sum of a call fits too.
fn signed(hits: u64) -> i64 {
    i64::try_from(hits).unwrap_or(i64::MAX)
}

fn results(command: &ChargeCommand, states: &mut [State; 1], now: Time) -> SmallVec<[ChargeResult; 1]> {
    let limits = command.limits();
    if command.dry_run {
        return charge_together(&limits, &mut states.clone(), now, command.request);
    }
    charge_together(&limits, states, now, command.request)
}

/// Subtracts hits, and adds back those that exceeded the count.
async fn refund(window: WindowKey, hits: i64, node: Arc<Node>, asking: bool) -> Result<RefundOutcome, ReplyError> {
    let to = Destination { node: &node, asking, deadline: Instant::now() + REFUND_TIMEOUT };
    let IncrOutcome { after, expire } = increment(&window, -hits, to).await?;
    let before = after.checked_add(hits).ok_or(ReplyError::Failed(RedisError::BadReply))?;
    // Other refunds may have caused a part of the deficit; they add back their own part.
    let deficit = after.saturating_neg().clamp(0, hits);
    if deficit == 0 {
        return Ok(RefundOutcome { before, to_add_back: 0, expire });
    }
    match increment(&window, deficit, to).await {
        Ok(added) => Ok(RefundOutcome { before, to_add_back: 0, expire: added.expire }),
        Err(ReplyError::Moved(_) | ReplyError::Ask(_)) => {
            Ok(RefundOutcome { before, to_add_back: deficit, expire: Ok(()) })
        }
        Err(error) => Err(error),
    }
}

/// Sends INCRBY and EXPIRE.
async fn increment(window: &WindowKey, hits: i64, to: Destination<'_>) -> Result<IncrOutcome, ReplyError> {
    let (hits, seconds) = (hits.to_string(), window.expire_s().to_string());
    let incrby: [&[u8]; 3] = [b"INCRBY", window.key(), hits.as_bytes()];
    let (count, expired) = to.node.call_pair(&incrby, &expire(window, &seconds), to.asking, to.deadline).await;
    Ok(IncrOutcome { after: integer(&count?)?, expire: expired.map(|_| ()) })
}

/// Returns the words of EXPIRE.
fn expire<'w>(window: &'w WindowKey, seconds: &'w str) -> [&'w [u8]; 3] {
    [b"EXPIRE", window.key(), seconds.as_bytes()]
}

fn integer(reply: &Reply) -> Result<i64, ReplyError> {
    reply::integer(reply).ok_or(ReplyError::Failed(RedisError::WrongType))
}
