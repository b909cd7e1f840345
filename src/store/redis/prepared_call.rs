//! One call: charges on the counters of a descriptor, decided by the server that has them.
//!
//! A call is repeated only when the reply proves that it did not run: the script is asked for, or another node has the
//! slot. Anything else is the end of it. It belongs to the connection, not to whoever waits: a caller that gives up
//! leaves it to finish, and what it decides stays charged.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use smallvec::SmallVec;

use super::coalescer::ChargeBatch;
use super::command::ChargeCommand;
use super::eventual::EventualCounters;
use super::incrby::{IncrBatch, WindowKey};
use super::script;
use super::script::compose::Script;
use super::script::replay::ScriptOutcome;
use super::spans;
use crate::clock::Time;
use crate::redis::deployment::Deployment;
use crate::redis::error::{RedisError, ReplyError};
use crate::redis::hash_slot::hash_slot;
use crate::redis::node::Node;
use crate::redis::redirects::Redirects;
use crate::redis::reply::{bytes, integer};
use crate::telemetry::traces::{Span, SpanRef};

/// Where counters are, and how they are charged from.
#[derive(Clone, Debug)]
pub(super) struct PreparedCall {
    pub(super) manner: Manner,
    /// What its counters are known by here.
    pub(super) id: u128,
    pub(super) route: Arc<Deployment>,
    /// What the path is remembered under in this process.
    pub(super) path: u128,
    /// This process's time.
    pub(super) now: Time,
    /// Whether to use that instead of the server's.
    pub(super) client_clock: bool,
    /// What may be leased on them; `None`: they are strict.
    pub(super) lending: Option<EventualCounters>,
    /// The spans that the call is made for.
    pub(super) span_refs: Vec<SpanRef>,
}

/// How counters are charged from.
#[derive(Clone, Debug)]
pub(super) enum Manner {
    /// By a script, on these keys.
    Script(&'static Script, SmallVec<[Bytes; 1]>),
    /// By INCRBY and EXPIRE.
    Count(WindowKey),
}

impl PreparedCall {
    fn slot(&self) -> u16 {
        match &self.manner {
            Manner::Script(_, keys) => hash_slot(&keys[0]),
            Manner::Count(window) => hash_slot(&window.key),
        }
    }

    /// Makes the call; not later than `deadline`, give or take what others in this process need.
    ///
    /// Where the replies say that it did not run, it is sent again as they say. `span` is told to whom.
    pub(super) async fn call(
        &self,
        commands: &ChargeBatch,
        deadline: Instant,
        mut span: Option<&mut Span>,
    ) -> Result<ScriptOutcome, RedisError> {
        let slot = || self.slot();
        let mut redirects = Redirects::start(&self.route, slot, deadline).await?;
        if let Some(span) = &mut span {
            spans::sent_to(span, redirects.node.endpoint());
        }
        let mut work = match &self.manner {
            Manner::Script(script, keys) => {
                Work::Script { script, keys, commands, now: self.client_clock.then_some(self.now) }
            }
            Manner::Count(window) => Work::Count(IncrBatch::new(window, commands, self.now)),
        };
        loop {
            match work.go_on(&redirects.node, redirects.asking, deadline).await {
                Ok(replayed) => return Ok(replayed),
                Err(refused) => {
                    redirects.follow(refused, slot)?;
                    if let Some(span) = &mut span {
                        spans::sent_to(span, redirects.node.endpoint());
                    }
                }
            }
        }
    }
}

impl PreparedCall {
    /// Lets go of the counters; how many there were. Not later than `deadline`.
    pub(super) async fn unlink(&self, deadline: Instant) -> Result<u64, RedisError> {
        let slot = || self.slot();
        let keys = match &self.manner {
            Manner::Script(_, keys) => &**keys,
            Manner::Count(window) => std::slice::from_ref(&window.key),
        };
        let words: SmallVec<[&[u8]; 4]> = [&b"UNLINK"[..]].into_iter().chain(keys.iter().map(|key| &**key)).collect();
        let mut redirects = Redirects::start(&self.route, slot, deadline).await?;
        loop {
            match redirects.node.call_unrecorded(&words, redirects.asking, deadline).await {
                Ok(reply) => {
                    let gone = integer(&reply).and_then(|gone| u64::try_from(gone).ok());
                    return gone.ok_or(RedisError::BadReply);
                }
                Err(refused) => redirects.follow(refused, slot)?,
            }
        }
    }
}

/// What a call has to do.
enum Work<'a> {
    Script { script: &'static Script, keys: &'a [Bytes], commands: &'a [ChargeCommand], now: Option<Time> },
    Count(IncrBatch<'a>),
}

impl Work<'_> {
    /// Does what is left to do, at this node.
    async fn go_on(&mut self, node: &Arc<Node>, asking: bool, deadline: Instant) -> Result<ScriptOutcome, ReplyError> {
        match self {
            Self::Count(tally) => tally.go_on(node, asking, deadline).await,
            Self::Script { script, keys, commands, now } => {
                let arguments = script::arguments::arguments(commands, *now);
                let count = keys.len().to_string();
                let mut words: SmallVec<[&[u8]; 8]> =
                    SmallVec::from_slice(&[b"EVALSHA", script.sha1.as_bytes(), count.as_bytes()]);
                words.extend(keys.iter().map(|key| &**key));
                words.push(&arguments);
                let reply = match node.call(&words, asking, deadline).await {
                    Err(ReplyError::NoScript) => {
                        (words[0], words[1]) = (b"EVAL", script.text.as_bytes());
                        node.call(&words, asking, deadline).await?
                    }
                    outcome => outcome?,
                };
                let bytes = bytes(&reply).ok_or(ReplyError::Failed(RedisError::BadReply))?;
                script::replay::replay(commands, bytes).map_err(|_| ReplyError::Failed(RedisError::BadReply))
            }
        }
    }
}
