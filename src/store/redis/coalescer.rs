//! Charges on one counter that come while a call for it is in flight wait, and go together as the next.
//!
//! A counter that nobody charges from costs nothing: it is known here only while its call is in flight. Whoever finds it
//! idle leads and sends at once; the others leave what they charge and a place for the answer. When the call is over,
//! what waits is taken as one batch, in order of arrival, without those who have given up meanwhile. The charges of one
//! request on one counter stay together. No lock is held while anything is awaited.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::pin;
use std::sync::MutexGuard;
use std::time::Instant;

use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::Answer;
use super::charge_context::ChargeContext;
use super::command::{ChargeCommand, MAX_CHARGES_PER_CALL};
use crate::clock::Time;
use crate::redis::deadline::timeout_with_grace;
use crate::redis::error::RedisError;
use crate::sharded::{Sharded, upper_half};
use crate::store::outcome::{ChargeResults, StoreOutcome};
use crate::telemetry::traces::{MAX_LINKS, SpanRef};

/// The most charges that wait for one counter; more fail at once.
const MOST_WAITING: usize = 32 * MAX_CHARGES_PER_CALL;
/// Enough that threads seldom meet.
const SHARDS: usize = 64;

/// Charges that are to be decided together, one after the other.
pub(super) type ChargeBatch = SmallVec<[ChargeCommand; 1]>;

/// The counters whose calls are in flight, by the hash of their keys.
#[derive(Debug)]
pub(super) struct Coalescer {
    shards: Sharded<Shard>,
}

type Shard = HashMap<u128, VecDeque<Waiting>, BuildHasherDefault<IdentityHasher>>;

/// A charge that waits for its turn.
#[derive(Debug)]
struct Waiting {
    command: ChargeCommand,
    answer: oneshot::Sender<Answer>,
    /// When it wants an answer, whatever that is.
    until: Instant,
    /// When it was made, by this process's clock.
    now: Time,
    /// It belongs to the same request as the one before it.
    joined: bool,
    /// The span that it is made for; none if it is joined.
    span_ref: Option<SpanRef>,
}

/// What to do about charges that were brought.
#[derive(Debug)]
pub(super) enum Role {
    /// Send them now, and then look for what waits.
    Leader(ChargeBatch),
    /// Wait for the answers, in their order.
    Follower {
        answers: SmallVec<[oneshot::Receiver<Answer>; 1]>,
        /// The next call will be full before it comes to these: whoever waits must look to the time.
        long: bool,
    },
}

/// Charges that waited, and where to answer them.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) commands: ChargeBatch,
    /// The latest time among theirs.
    pub(super) now: Time,
    /// The spans that they are made for, as many as one can link to.
    pub(super) span_refs: Vec<SpanRef>,
    /// `None`: answered already.
    answers: Vec<Option<(oneshot::Sender<Answer>, Instant)>>,
}

impl Default for Coalescer {
    fn default() -> Self {
        Self { shards: Sharded::new(SHARDS, Shard::default) }
    }
}

impl Coalescer {
    /// Brings the charges of one request on one counter, at most [`MAX_CHARGES_PER_CALL`].
    pub(super) fn enter(&self, id: u128, commands: ChargeBatch, context: ChargeContext<'_>) -> Role {
        let ChargeContext { now, until, span_ref } = context;
        let mut shard = self.shard(id);
        let Some(waiting) = shard.get_mut(&id) else {
            shard.insert(id, VecDeque::new());
            return Role::Leader(commands);
        };
        let crowded = waiting.len() >= MOST_WAITING;
        let mut joined = false;
        let wait = |command| {
            let (answer, receiver) = oneshot::channel();
            if crowded {
                // Nobody is there to take it: whoever sent it may be gone, which is not our affair.
                let _gone = answer.send(Err(RedisError::Overloaded));
            } else {
                let span_ref = span_ref.filter(|_| !joined).cloned();
                waiting.push_back(Waiting { command, answer, until, now, joined, span_ref });
                joined = true;
            }
            receiver
        };
        let answers = commands.into_iter().map(wait).collect();
        Role::Follower { answers, long: waiting.len() > MAX_CHARGES_PER_CALL }
    }

    /// Takes what waits for a counter whose call is over; `None`, and the counter is idle, if nothing does.
    pub(super) fn next(&self, id: u128) -> Option<Batch> {
        let mut shard = self.shard(id);
        let waiting = shard.get_mut(&id)?;
        let mut batch = Batch::default();
        while let Some(first) = waiting.front() {
            let given_up = first.answer.is_closed();
            let together = 1 + waiting.iter().skip(1).take_while(|next| next.joined).count();
            if given_up {
                // A request that is just giving up has not let go of all its charges yet: none of them is to be sent.
                for Waiting { answer, .. } in waiting.drain(..together) {
                    let _gone = answer.send(Err(RedisError::Timeout));
                }
                continue;
            }
            if !batch.commands.is_empty() && batch.commands.len() + together > MAX_CHARGES_PER_CALL {
                break;
            }
            for Waiting { command, answer, until, now, span_ref, .. } in waiting.drain(..together) {
                batch.now = batch.now.max(now);
                batch.span_refs.extend(span_ref.filter(|_| batch.span_refs.len() <= MAX_LINKS));
                batch.commands.push(command);
                batch.answers.push(Some((answer, until)));
            }
        }
        if batch.commands.is_empty() {
            shard.remove(&id);
            return None;
        }
        Some(batch)
    }

    fn shard(&self, id: u128) -> MutexGuard<'_, Shard> {
        self.shards.lock(upper_half(id))
    }
}

impl Batch {
    /// Waits for the outcome of the batch's call; those whose time is up meanwhile are told then. So one timer serves
    /// all, and whoever waits needs none.
    pub(super) async fn wait_for(
        &mut self,
        call: impl Future<Output = Result<Vec<ChargeResults>, RedisError>>,
    ) -> Result<Vec<ChargeResults>, RedisError> {
        let mut call = pin!(call);
        loop {
            let Some(until) = self.answers.iter().flatten().map(|(_, until)| *until).min() else { return call.await };
            if let Some(outcome) = timeout_with_grace(&mut call, until).await {
                return outcome;
            }
            self.give_up(Instant::now());
        }
    }

    /// Answers the charges that `decide` decides; they are not to be sent.
    pub(super) fn answer_some(&mut self, decide: impl Fn(&ChargeCommand) -> Option<StoreOutcome>) {
        let commands = std::mem::take(&mut self.commands);
        let answers = std::mem::take(&mut self.answers);
        for (command, answer) in commands.into_iter().zip(answers) {
            match (decide(&command), answer) {
                (Some(found), Some((answer, _))) => {
                    let _gone = answer.send(Ok(found));
                }
                (_, answer) => {
                    self.commands.push(command);
                    self.answers.push(answer);
                }
            }
        }
    }

    /// Answers everybody who still waits.
    pub(super) fn answer(self, outcome: Result<Vec<ChargeResults>, RedisError>) {
        let mut levels = outcome.map(Vec::into_iter);
        for answer in self.answers {
            // Who was answered has its levels all the same.
            let found = match &mut levels {
                Ok(levels) => levels.next().map(StoreOutcome::by_store).ok_or(RedisError::BadReply),
                Err(error) => Err(*error),
            };
            if let Some((answer, _)) = answer {
                let _gone = answer.send(found);
            }
        }
    }

    /// Tells those whose time is up that no answer came.
    fn give_up(&mut self, now: Instant) {
        for answer in &mut self.answers {
            if let Some((answer, _)) = answer.take_if(|(_, until)| *until <= now) {
                let _gone = answer.send(Err(RedisError::Timeout));
            }
        }
    }
}

/// Keys are hashes under a secret already.
#[derive(Debug, Default)]
pub(super) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 ^= u64::from_le_bytes(word);
        }
    }

    fn write_u128(&mut self, key: u128) {
        #[expect(clippy::cast_possible_truncation, reason = "either half of a hash is one")]
        {
            self.0 = key as u64;
        }
    }
}
