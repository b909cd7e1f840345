//! A call to Redis that is ready to be sent: its commands, its keys and its deployment.
//!
//! A call is sent again only if the reply proves that it did not run: the server lacks the script, or another node has
//! the slot. A call belongs to its connection and not to its caller: if the caller gives up, the call continues, and
//! what it charges stays charged.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use smallvec::SmallVec;

use super::command::ChargeCommand;
use super::eventual::counters::EventualCounters;
use super::incrby::IncrBatch;
use super::key_scheme::{CounterId, CountingMode};
use super::script::arguments::arguments;
use super::script::compose::Script;
use super::script::replay::{ScriptOutcome, replay};
use super::spans;
use crate::clock::Time;
use crate::redis::deployment::Deployment;
use crate::redis::error::{RedisError, ReplyError};
use crate::redis::hash_slot::hash_slot;
use crate::redis::redirects::Redirects;
use crate::redis::reply::{bytes, integer};
use crate::telemetry::traces::{Span, SpanRef};

/// Call on the counters of one descriptor.
#[derive(Clone, Debug)]
pub(super) struct PreparedCall {
    pub(super) mode: CountingMode,
    pub(super) id: CounterId,
    pub(super) deployment: Arc<Deployment>,
    /// Time of the charges, by the clock of this process.
    pub(super) now: Time,
    /// True if the counters follow that clock instead of the server's.
    pub(super) client_clock: bool,
    /// The counters, if they are eventual.
    pub(super) eventual: Option<EventualCounters>,
    /// Requests that the call serves, if they are sampled.
    pub(super) span_refs: Vec<SpanRef>,
}

impl PreparedCall {
    /// Starts the span of the call for a number of charges; `None` if no request is sampled.
    pub(super) fn span(&self, charges: usize) -> Option<Span> {
        let command = match self.mode {
            CountingMode::Script { .. } => "EVALSHA",
            CountingMode::Incrby(_) => "INCRBY",
        };
        spans::start(&self.span_refs, command, charges)
    }

    /// Sends the call, and follows redirections. Ends by `deadline`, or later only if other tasks delay this one.
    pub(super) async fn send(
        &self,
        commands: &[ChargeCommand],
        deadline: Instant,
        mut span: Option<&mut Span>,
    ) -> Result<ScriptOutcome, RedisError> {
        let slot = || self.slot();
        let mut redirects = Redirects::start(&self.deployment, slot, deadline).await?;
        let mut attempt = match &self.mode {
            CountingMode::Script { script, keys } => {
                Attempt::Script { script, keys, commands, now: self.client_clock.then_some(self.now) }
            }
            CountingMode::Incrby(window) => Attempt::Incrby(IncrBatch::new(window, commands, self.now)),
        };
        loop {
            if let Some(span) = &mut span {
                spans::set_server(span, redirects.node.endpoint());
            }
            match attempt.run(&redirects, deadline).await {
                Ok(outcome) => return Ok(outcome),
                Err(error) => redirects.follow(error, slot)?,
            }
        }
    }

    /// Deletes the counters; returns how many existed.
    pub(super) async fn unlink(&self, deadline: Instant) -> Result<u64, RedisError> {
        let slot = || self.slot();
        let keys = self.mode.keys().iter().map(|key| &**key);
        let words: SmallVec<[&[u8]; 4]> = [&b"UNLINK"[..]].into_iter().chain(keys).collect();
        let mut redirects = Redirects::start(&self.deployment, slot, deadline).await?;
        loop {
            match redirects.node.call_unrecorded(&words, redirects.asking, deadline).await {
                Ok(reply) => {
                    let deleted = integer(&reply).and_then(|deleted| u64::try_from(deleted).ok());
                    return deleted.ok_or(RedisError::BadReply);
                }
                Err(error) => redirects.follow(error, slot)?,
            }
        }
    }

    fn slot(&self) -> u16 {
        hash_slot(&self.mode.keys()[0])
    }
}

/// Work of a call, which continues at another node after a redirection.
enum Attempt<'a> {
    Script { script: &'static Script, keys: &'a [Bytes], commands: &'a [ChargeCommand], now: Option<Time> },
    Incrby(IncrBatch<'a>),
}

impl Attempt<'_> {
    /// Does the rest of the work at the current node.
    async fn run(&mut self, target: &Redirects<'_>, deadline: Instant) -> Result<ScriptOutcome, ReplyError> {
        match self {
            Self::Incrby(batch) => batch.run(&target.node, target.asking, deadline).await,
            Self::Script { script, keys, commands, now } => {
                let arguments = arguments(commands, *now);
                let key_count = keys.len().to_string();
                let mut words: SmallVec<[&[u8]; 8]> =
                    SmallVec::from_slice(&[b"EVALSHA", script.sha1.as_bytes(), key_count.as_bytes()]);
                words.extend(keys.iter().map(|key| &**key));
                words.push(&arguments);
                let reply = match target.node.call(&words, target.asking, deadline).await {
                    Err(ReplyError::NoScript) => {
                        (words[0], words[1]) = (b"EVAL", script.text.as_bytes());
                        target.node.call(&words, target.asking, deadline).await?
                    }
                    outcome => outcome?,
                };
                let bytes = bytes(&reply).ok_or(ReplyError::Failed(RedisError::BadReply))?;
                replay(commands, bytes).map_err(|_| ReplyError::Failed(RedisError::BadReply))
            }
        }
    }
}
