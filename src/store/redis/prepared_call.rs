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
use super::eventual::EventualCounters;
use super::failure::{RedisError, Refused};
use super::incrby::{IncrBatch, WindowKey};
use super::key;
use super::node::Node;
use super::reply::{bytes, integer};
use super::route::Route;
use super::script::{self, ChargeCommand, Script, ScriptOutcome};
use super::spans;
use crate::clock::Time;
use crate::telemetry::traces::{Span, SpanRef};

/// How often a call is sent elsewhere.
const MOST_REDIRECTIONS: usize = 5;

/// Where counters are, and how they are charged from.
#[derive(Clone, Debug)]
pub(super) struct PreparedCall {
    pub(super) manner: Manner,
    /// What its counters are known by here.
    pub(super) id: u128,
    pub(super) route: Arc<Route>,
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
            Manner::Script(_, keys) => key::slot(&keys[0]),
            Manner::Count(window) => key::slot(&window.key),
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
        let mut way = Redirects::begin(&self.route, slot, deadline).await?;
        if let Some(span) = &mut span {
            spans::sent_to(span, way.node.endpoint());
        }
        let mut work = match &self.manner {
            Manner::Script(script, keys) => {
                Work::Script { script, keys, commands, now: self.client_clock.then_some(self.now) }
            }
            Manner::Count(window) => Work::Count(IncrBatch::new(window, commands, self.now)),
        };
        loop {
            match work.go_on(&way.node, way.asking, deadline).await {
                Ok(replayed) => return Ok(replayed),
                Err(refused) => {
                    way.follow(refused, slot)?;
                    if let Some(span) = &mut span {
                        spans::sent_to(span, way.node.endpoint());
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
        let mut way = Redirects::begin(&self.route, slot, deadline).await?;
        loop {
            match way.node.call_aside(&words, way.asking, deadline).await {
                Ok(reply) => {
                    let gone = integer(&reply).and_then(|gone| u64::try_from(gone).ok());
                    return gone.ok_or(RedisError::BadReply);
                }
                Err(refused) => way.follow(refused, slot)?,
            }
        }
    }
}

/// The way of a call: to the node that has its slot, and then where replies send it.
#[derive(Debug)]
pub(super) struct Redirects<'r> {
    route: &'r Route,
    /// Where to send it.
    pub(super) node: Arc<Node>,
    /// Whether after ASKING.
    pub(super) asking: bool,
    redirections: usize,
}

impl<'r> Redirects<'r> {
    /// To the owner of `slot`, if that is known by `deadline`.
    pub(super) async fn begin(
        route: &'r Route,
        slot: impl FnOnce() -> u16,
        deadline: Instant,
    ) -> Result<Self, RedisError> {
        Ok(Self { route, node: route.owner(slot, deadline).await?, asking: false, redirections: 0 })
    }

    /// To where the reply sends it, or to its end.
    pub(super) fn follow(&mut self, refused: Refused, slot: impl FnOnce() -> u16) -> Result<(), RedisError> {
        let (address, moved) = match refused {
            Refused::Failed(error) => {
                if error == RedisError::SlotDown {
                    self.route.is_in_doubt();
                }
                return Err(error);
            }
            Refused::NoScript => return Err(RedisError::BadReply),
            Refused::Moved(address) => (address, true),
            Refused::ChargeRequest(address) => (address, false),
        };
        let next = self.route.node_at(&address, &self.node).ok_or(RedisError::Misconfigured)?;
        if moved {
            self.route.moved(slot(), &next);
        }
        (self.node, self.asking) = (next, !moved);
        self.redirections += 1;
        if self.redirections > MOST_REDIRECTIONS { Err(RedisError::SlotDown) } else { Ok(()) }
    }
}

/// What a call has to do.
enum Work<'a> {
    Script { script: &'static Script, keys: &'a [Bytes], commands: &'a [ChargeCommand], now: Option<Time> },
    Count(IncrBatch<'a>),
}

impl Work<'_> {
    /// Does what is left to do, at this node.
    async fn go_on(&mut self, node: &Arc<Node>, asking: bool, deadline: Instant) -> Result<ScriptOutcome, Refused> {
        match self {
            Self::Count(tally) => tally.go_on(node, asking, deadline).await,
            Self::Script { script, keys, commands, now } => {
                let arguments = script::arguments(commands, *now);
                let count = keys.len().to_string();
                let mut words: SmallVec<[&[u8]; 8]> =
                    SmallVec::from_slice(&[b"EVALSHA", script.sha1.as_bytes(), count.as_bytes()]);
                words.extend(keys.iter().map(|key| &**key));
                words.push(&arguments);
                let reply = match node.call(&words, asking, deadline).await {
                    Err(Refused::NoScript) => {
                        (words[0], words[1]) = (b"EVAL", script.text.as_bytes());
                        node.call(&words, asking, deadline).await?
                    }
                    outcome => outcome?,
                };
                let bytes = bytes(&reply).ok_or(Refused::Failed(RedisError::BadReply))?;
                script::replay(commands, bytes).map_err(|_| Refused::Failed(RedisError::BadReply))
            }
        }
    }
}
