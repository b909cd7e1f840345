//! Strict fixed windows by INCRBY and EXPIRE, on the very keys of envoyproxy/ratelimit.
//!
//! So both can serve one Redis during a roll-out, and a Redis or a user without scripts will do. The key holds the
//! window's start by this process's clock, in whole seconds, and nothing of the limit. A run of charges is one INCRBY of
//! their sum: with refused hits counted the order makes no difference to the count, and each charge's own level is
//! worked out here.
//!
//! A refund that leaves less than nothing is added back, as far as it was its own doing: `count + what is still to be
//! added back` is never negative, so the count is not either once all have done so. Nothing is counted twice if a part
//! of a call has to go to another node: it goes on there where it stood.

use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use smallvec::SmallVec;
use tokio::time::timeout;

use super::command::ChargeCommand;
use super::script::replay::ScriptOutcome;
use crate::algorithm::state::{State, charge_together};
use crate::algorithm::{ChargeResult, EnforcedLimit, MAX_COUNT, fixed_window};
use crate::clock::Time;
use crate::counter::{Charge, Counter, Path};
use crate::limit::algorithm::Algorithm;
use crate::limit::{Consistency, Limit};
use crate::redis::deadline::timeout_with_grace;
use crate::redis::error::{RedisError, ReplyError};
use crate::redis::node::Node;
use crate::redis::reply::{self, Reply};
use crate::request::Hits;

/// A window's counter.
#[derive(Clone, Debug)]
pub(super) struct WindowKey {
    pub(super) key: Bytes,
    /// What EXPIRE says.
    expire_s: u64,
}

/// The start of the window that `charge` counts in, in seconds since the epoch; `None` if envoyproxy/ratelimit has no
/// such counter.
pub(super) fn start_s(charge: &Charge<'_>, now: Time) -> Option<u64> {
    plain_limit(charge).map(|limit| seconds(fixed_window::window(limit, now).0))
}

impl WindowKey {
    /// The window that `charge` counts in; `None` if envoyproxy/ratelimit has no such counter. Its key outlives it by
    /// `jitter_s`.
    pub(super) fn of(prefix: &str, charge: &Charge<'_>, now: Time, jitter_s: u64) -> Option<Self> {
        let limit = plain_limit(charge)?;
        let (start, end) = fixed_window::window(limit, now);
        // As there: a calendar month's counter goes with the month, any other a whole window after its last hit.
        let from = if limit.calendar_months() { now } else { start };
        let expire_s = end.since_us(from).div_ceil(1_000_000) + jitter_s;
        Some(Self { key: key(prefix, &charge.path, seconds(start)), expire_s })
    }
}

/// The limit of a charge that envoyproxy/ratelimit could make.
fn plain_limit<'a>(charge: &Charge<'a>) -> Option<&'a Limit> {
    let [Counter { limit, epoch: 0, .. }] = *charge.counters else { return None };
    let plain = limit.algorithm() == Algorithm::FixedWindow
        && limit.consistency() == Consistency::Strict
        && limit.count_rejected()
        && limit.period().multiplier() == 1;
    plain.then_some(limit)
}

fn seconds(time: Time) -> u64 {
    time.as_micros() / 1_000_000
}

/// `<prefix><domain>_<key>_<value>_..._<start>`
fn key(prefix: &str, path: &Path<'_>, start_s: u64) -> Bytes {
    let mut key = BytesMut::with_capacity(128);
    key.put_slice(prefix.as_bytes());
    key.put_slice(path.domain.as_bytes());
    key.put_u8(b'_');
    let mut shared = path.shared.iter().peekable();
    for (place, entry) in path.entries.iter().enumerate() {
        let pattern = shared.next_if(|(shared_place, _)| *shared_place == place);
        key.put_slice(entry.key);
        key.put_u8(b'_');
        key.put_slice(pattern.map_or(entry.value, |(_, pattern)| pattern));
        key.put_u8(b'_');
    }
    key.put_slice(start_s.to_string().as_bytes());
    key.freeze()
}

/// Charges that are counted in their order, and how far that has come.
pub(super) struct IncrBatch<'a> {
    window: &'a WindowKey,
    now: Time,
    rest: &'a [ChargeCommand],
    states: [State; 1],
    levels: Vec<SmallVec<[ChargeResult; 1]>>,
    /// Hits that a refund took too many.
    to_add_back: i64,
    /// The key was counted on where it no longer is, and has not been told when to go.
    is_to_expire: bool,
}

impl<'a> IncrBatch<'a> {
    /// Nothing is counted yet. `now` is this process's time, within the window.
    pub(super) fn new(window: &'a WindowKey, commands: &'a [ChargeCommand], now: Time) -> Self {
        Self {
            window,
            now,
            rest: commands,
            states: [State::empty(Algorithm::FixedWindow)],
            levels: Vec::with_capacity(commands.len()),
            to_add_back: 0,
            is_to_expire: false,
        }
    }

    /// Counts what is left to count. Where that is refused because another node has the key, call it again with that.
    pub(super) async fn go_on(
        &mut self,
        node: &Arc<Node>,
        asking: bool,
        until: Instant,
    ) -> Result<ScriptOutcome, ReplyError> {
        while self.is_to_expire || self.to_add_back > 0 || !self.rest.is_empty() {
            if self.is_to_expire {
                let seconds = self.window.expire_s.to_string();
                node.call(&self.window.expiry(&seconds), asking, until).await?;
                self.is_to_expire = false;
            } else if self.to_add_back > 0 {
                let counted = increment(self.window, self.to_add_back, node, (asking, until)).await?;
                self.to_add_back = 0;
                self.expires(counted.expiry)?;
            } else {
                self.step(node, asking, until).await?;
            }
        }
        Ok(ScriptOutcome {
            results: take(&mut self.levels),
            states: SmallVec::from(self.states.clone()),
            now: self.now,
        })
    }

    /// Counts a run of hits, or one refund.
    async fn step(&mut self, node: &Arc<Node>, asking: bool, until: Instant) -> Result<(), ReplyError> {
        if let Some((ChargeCommand { request, dry_run: false, .. }, rest)) = self.rest.split_first()
            && let Hits::Refund(hits) = request.hits
        {
            // A task of its own: no deadline may come between a refund and what is added back.
            let refund = refund(self.window.clone(), signed(hits), Arc::clone(node), asking);
            let refunded = tokio::spawn(timeout(REFUND_TAKES, refund));
            let refunded = timeout_with_grace(refunded, until).await.ok_or_else(|| node.record_timeout())?;
            let refunded = refunded.ok().and_then(Result::ok).unwrap_or(Err(ReplyError::Failed(RedisError::Broken)))?;
            self.take_note(refunded.before, 1, rest);
            self.to_add_back = refunded.to_add_back;
            return self.expires(refunded.expiry);
        }
        let run = self.rest.iter().take_while(|command| command.dry_run || !is_refund(command.request.hits)).count();
        let (run, rest) = self.rest.split_at(run);
        if run.iter().all(|command| command.dry_run) {
            let count = node.call(&[b"GET", &self.window.key], asking, until).await?;
            let count = if matches!(count, Reply::Null) { 0 } else { integer(&count)? };
            self.take_note(count, run.len(), rest);
            return Ok(());
        }
        let hits = run.iter().map(charged_hits).sum();
        let counted = increment(self.window, hits, node, (asking, until)).await?;
        let before = counted.after.checked_sub(hits).ok_or(ReplyError::Failed(RedisError::BadReply))?;
        self.take_note(before, run.len(), rest);
        self.expires(counted.expiry)
    }

    /// Works out the levels of the next charges, before which the count was this.
    fn take_note(&mut self, before: i64, charges: usize, rest: &'a [ChargeCommand]) {
        // Less than nothing is what a refund took too many and is about to add back.
        let count = u64::try_from(before).unwrap_or(0).min(MAX_COUNT);
        self.states = [State::FixedWindow(fixed_window::State { count, last: self.now })];
        for command in &self.rest[..charges] {
            let levels = level(command, &mut self.states, self.now);
            self.levels.push(levels);
        }
        self.rest = rest;
    }

    /// What was counted stays so: if only the expiry has to go elsewhere, it goes alone.
    fn expires(&mut self, expiry: Result<(), ReplyError>) -> Result<(), ReplyError> {
        match expiry {
            Err(ReplyError::Moved(_) | ReplyError::Ask(_)) => self.is_to_expire = true,
            outcome => outcome?,
        }
        Ok(())
    }
}

fn is_refund(hits: Hits) -> bool {
    matches!(hits, Hits::Refund(_))
}

fn charged_hits(command: &ChargeCommand) -> i64 {
    match command.request.hits {
        Hits::Charge(hits) if !command.dry_run => signed(hits),
        Hits::Charge(_) | Hits::Peek | Hits::Refund(_) => 0,
    }
}

/// A sum of as many as a call holds fits too: a charge has 2^32 at most.
fn signed(hits: u64) -> i64 {
    i64::try_from(hits).unwrap_or(i64::MAX)
}

fn level(command: &ChargeCommand, states: &mut [State; 1], now: Time) -> SmallVec<[ChargeResult; 1]> {
    let terms: SmallVec<[EnforcedLimit<'_>; 1]> = command
        .counters
        .iter()
        .map(|counted| EnforcedLimit { limit: &counted.limit, enforced: counted.enforced })
        .collect();
    if command.dry_run {
        return charge_together(&terms, &mut states.clone(), now, command.request);
    }
    charge_together(&terms, states, now, command.request)
}

/// A refund whose answers have not come by then is given up: its connection is gone.
const REFUND_TAKES: Duration = Duration::from_secs(5);

/// What came of a refund.
struct Refunded {
    before: i64,
    to_add_back: i64,
    expiry: Result<(), ReplyError>,
}

/// Takes hits off, and adds back those that were not there.
async fn refund(window: WindowKey, hits: i64, node: Arc<Node>, asking: bool) -> Result<Refunded, ReplyError> {
    let until = Instant::now() + REFUND_TAKES;
    let IncrOutcome { after, expiry } = increment(&window, -hits, &node, (asking, until)).await?;
    let before = after.checked_add(hits).ok_or(ReplyError::Failed(RedisError::BadReply))?;
    // Of what is missing, others may have taken a part meanwhile, who add that back.
    let missing = after.saturating_neg().clamp(0, hits);
    if missing == 0 {
        return Ok(Refunded { before, to_add_back: 0, expiry });
    }
    match increment(&window, missing, &node, (asking, until)).await {
        Ok(counted) => Ok(Refunded { before, to_add_back: 0, expiry: counted.expiry }),
        Err(ReplyError::Moved(_) | ReplyError::Ask(_)) => Ok(Refunded { before, to_add_back: missing, expiry: Ok(()) }),
        Err(refused) => Err(refused),
    }
}

/// What came of an INCRBY and the EXPIRE behind it.
struct IncrOutcome {
    after: i64,
    expiry: Result<(), ReplyError>,
}

/// Adds hits, or takes them off, and has the key live from now on.
async fn increment(
    window: &WindowKey,
    hits: i64,
    node: &Node,
    (asking, until): (bool, Instant),
) -> Result<IncrOutcome, ReplyError> {
    let (hits, seconds) = (hits.to_string(), window.expire_s.to_string());
    let increment: [&[u8]; 3] = [b"INCRBY", &window.key, hits.as_bytes()];
    let (count, expiry) = node.call_pair(&increment, &window.expiry(&seconds), asking, until).await;
    Ok(IncrOutcome { after: integer(&count?)?, expiry: expiry.map(|_| ()) })
}

impl WindowKey {
    /// The words that have its key live so long.
    fn expiry<'w>(&'w self, seconds: &'w str) -> [&'w [u8]; 3] {
        [b"EXPIRE", &self.key, seconds.as_bytes()]
    }
}

fn integer(reply: &Reply) -> Result<i64, ReplyError> {
    reply::integer(reply).ok_or(ReplyError::Failed(RedisError::WrongType))
}
