//! A call to Redis without its charges: the command that counts them, its keys and its deployment; and the call that
//! asks for a hold, whose argument and reply `lua/hold.lua` documents.
//!
//! The charges of the leader and of its followers come later, so [`PreparedCall::send_charges`] takes them.
//!
//! A call is sent again only if the reply proves that it did not run: the server lacks the script, or another node has
//! the slot. A call belongs to its connection and not to its caller: if the caller gives up, the call continues, and
//! what it charges stays charged.
//!
//! Decides: whether a call is sent again: after a broken connection never, after NOSCRIPT yes.
//! Decides: what `/reset` deletes beside a counter.

use std::slice;
use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::deployments::CounterDeployment;
use super::eventual::descriptor::{EventualDescriptor, can_be_leased};
use super::eventual::{LeaseArguments, LeasePurpose, OwnLease};
use super::hold_call::{decode_hold_answer, encode_hold_request};
use super::incrby::WindowChargeBatch;
use super::key::{CountCommand, CounterSetId, holds_key, leases_key};
use super::regions::RegionClient;
use super::script::{CallTime, ScriptOutcome, encode_charges, hold_script, replay_charges};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::ChargeRequest;
use crate::limit::hold::{HoldAnswer, HoldRequest, PoolId};
use crate::limit::request::Hits;
use crate::store::charge::{OwnedCharge, OwnedCounter, set_span_server, start_call_span};
use crate::store::client::redis::connection::{MergeableScriptCall, Script};
use crate::store::client::redis::deployment::TargetNode;
use crate::store::client::redis::error::{RedisError, ReplyError};
use crate::store::client::redis::node::Node;
use crate::store::client::redis::resp::{Reply, reply_bytes, reply_integer};
use crate::store::error::CounterCommandError;
use crate::telemetry::traces::{Span, SpanRef};

/// Maximum number of charges of a call that shares a command, so that the server is not busy with it for long.
const MAX_MERGED_CHARGES: usize = 8;

/// Call on the counters of one descriptor, without its charges.
#[derive(Clone, Debug)]
pub(super) struct PreparedCall {
    pub(super) command: CountCommand,
    pub(super) id: CounterSetId,
    pub(super) deployment: Arc<CounterDeployment>,
    /// Time of the charges, by the clock of this process.
    pub(super) now: Time,
    /// True if the counters follow that clock instead of the server's.
    pub(super) client_clock: bool,
    /// The counters, if they are eventual. `None` for strict ones, the default: shares and leases then concern no
    /// charge, and of refunds only those on counters that eventual rules may share.
    pub(super) eventual: Option<EventualDescriptor>,
    /// Client of the global Redis; `None` if no limit is global.
    pub(super) region: Option<Arc<RegionClient>>,
    /// Slot of the only charge, as `lua/slots.lua` takes it; `None` if no limit is concurrent.
    pub(super) slot: Option<Bytes>,
    /// Requests that the call serves, if they are sampled.
    pub(super) span_refs: Vec<SpanRef>,
}

impl PreparedCall {
    /// Starts the span of the call for a number of charges; `None` if no request is sampled.
    pub(super) fn start_span(&self, charges: usize) -> Option<Span> {
        let command = match self.command {
            CountCommand::Script { .. } => "EVALSHA",
            CountCommand::Incrby(_) => "INCRBY",
        };
        start_call_span("redis", &self.span_refs, command, charges)
    }

    /// Returns the charge of a lease of this size; `None` if the counters are not eventual.
    pub(super) fn build_lease_charge(&self, hits: u64) -> Option<OwnedCharge> {
        let mut counters = self.eventual.as_ref()?.counters.clone();
        // A lease is charged to all limits or, if one has no room, to none: quotas too.
        counters.iter_mut().for_each(|counter| counter.quota = false);
        Some(OwnedCharge::new(counters, ChargeRequest::new(Hits::Charge(hits), 0)))
    }

    /// Sends the call, and follows redirections; returns the node that answered, too. Ends by `deadline`, or later only if other tasks delay this one.
    pub(super) async fn send_charges(
        &self,
        charges: &[OwnedCharge],
        leases: Option<&LeaseArguments>,
        deadline: Instant,
        mut span: Option<&mut Span>,
    ) -> Result<(ScriptOutcome, Arc<Node>), RedisError> {
        let mut target = self.deployment.client.target_node(self.first_key(), deadline).await?;
        let mut attempt = match &self.command {
            CountCommand::Script { script, keys } => {
                let arguments = encode_charges(charges, self.call_time());
                let is_mergeable = charges.len() <= MAX_MERGED_CHARGES && !self.client_clock;
                let sending = if is_mergeable { ScriptSendMode::Mergeable } else { ScriptSendMode::Separate };
                let call = ScriptCall::new(ScriptCommand { script, keys }, arguments, leases, sending);
                let call = ScriptCall { slot: self.slot.as_ref(), ..call };
                CallAttempt::Script { call, charges }
            }
            CountCommand::Incrby(window) => {
                CallAttempt::Incrby(WindowChargeBatch::new(window, charges, self.now, &self.deployment.dropped_refunds))
            }
        };
        loop {
            if let Some(span) = &mut span {
                set_span_server(span, target.node.endpoint());
            }
            match attempt.continue_call_at_node(&mut target, deadline).await {
                Ok(outcome) => return Ok((outcome, target.node)),
                Err(error) => target.follow_redirection(error)?,
            }
        }
    }

    /// Resets the counters that `refund` refunds, and ends the leases of this process in `own`; returns how many
    /// counters existed. Hits that other replicas have leased stay charged. Global limits are reset in all regions.
    pub(super) async fn reset(
        &self,
        refund: &OwnedCharge,
        own: SmallVec<[OwnLease; 2]>,
        deadline: Instant,
    ) -> Result<u64, CounterCommandError> {
        if let Some(region) = &self.region {
            let reset = region.reset(self.command.keys(), refund, deadline).await;
            reset.map_err(CounterCommandError::GlobalRedis)?;
        }
        // Counters with a ban or reservations have no leases.
        let has_own_keys = |limit: &Limit| limit.ban().is_some() || limit.reservations().is_some();
        let in_script = |limit: &Limit| can_be_leased(limit) && !limit.is_counted_in_region() && !has_own_keys(limit);
        let can_be_leased = refund.counters.iter().all(|counter| in_script(&counter.limit));
        let script = match &self.command {
            CountCommand::Script { script, keys } if can_be_leased => {
                let arguments = encode_charges(slice::from_ref(refund), self.call_time());
                let leases = LeaseArguments { purpose: LeasePurpose::Reset, own };
                Some(ScriptCall::new(
                    ScriptCommand { script, keys },
                    arguments,
                    Some(&leases),
                    ScriptSendMode::Unrecorded,
                ))
            }
            CountCommand::Script { .. } | CountCommand::Incrby(_) => None,
        };
        // Without the record of leases, none refunds hits that the reset has deleted.
        let leases = self.region.as_ref().map(|_| leases_key(&self.command.keys()[0]));
        let keys = self.command.keys().iter().chain(&leases).map(|key| &**key);
        let unlink: CallWords<'_> = [&b"UNLINK"[..]].into_iter().chain(keys).collect();
        let mut target = self.deployment.client.target_node(self.first_key(), deadline).await?;
        loop {
            let reply = match &script {
                Some(call) => call.send_or_load(&target, deadline).await,
                None => target.node.call_unrecorded(&unlink, target.asking, deadline).await,
            };
            match reply {
                Ok(reply) => {
                    let deleted = reply_integer(&reply).and_then(|deleted| u64::try_from(deleted).ok());
                    // Those of bans and reservations are no counters.
                    let deleted = deleted.map(|deleted| deleted.min(refund.counters.len() as u64));
                    return deleted.ok_or(CounterCommandError::Redis(RedisError::BadReply));
                }
                Err(error) => target.follow_redirection(error)?,
            }
        }
    }

    /// Adjusts the hold of a pool on the counter of the call, by one script. It is sent again only if the reply
    /// proves that it did not run.
    pub(super) async fn adjust_hold(
        &self,
        counter: &OwnedCounter,
        pool: PoolId,
        request: HoldRequest,
        deadline: Instant,
    ) -> Result<HoldAnswer, RedisError> {
        let mut span = self.start_span(1);
        let keys = [self.command.keys()[0].clone(), holds_key(self.first_key())];
        let command = ScriptCommand { script: hold_script(counter.limit.counting_method()), keys: &keys };
        let arguments = encode_hold_request(counter, pool, request, self.call_time());
        let call = ScriptCall::new(command, arguments, None, ScriptSendMode::Separate);
        let mut target = self.deployment.client.target_node(self.first_key(), deadline).await?;
        loop {
            if let Some(span) = &mut span {
                set_span_server(span, target.node.endpoint());
            }
            match call.send_or_load(&target, deadline).await {
                Ok(reply) => {
                    let bytes = reply_bytes(&reply).ok_or(RedisError::BadReply)?;
                    return decode_hold_answer(bytes, &counter.limit).map_err(|_| RedisError::BadReply);
                }
                Err(error) => target.follow_redirection(error)?,
            }
        }
    }

    fn call_time(&self) -> CallTime {
        if self.client_clock { CallTime::Given(self.now) } else { CallTime::Server { about: self.now } }
    }

    /// Key that says which node has the counters: all of a call are in one slot.
    fn first_key(&self) -> &[u8] {
        &self.command.keys()[0]
    }
}

/// Work of a call, which continues at another node after a redirection.
enum CallAttempt<'a> {
    Script { call: ScriptCall<'a>, charges: &'a [OwnedCharge] },
    Incrby(WindowChargeBatch<'a>),
}

impl CallAttempt<'_> {
    /// Does the rest of the work at the current node.
    async fn continue_call_at_node(
        &mut self,
        target: &mut TargetNode<'_>,
        deadline: Instant,
    ) -> Result<ScriptOutcome, ReplyError> {
        match self {
            Self::Incrby(batch) => batch.run_steps(target, deadline).await,
            Self::Script { call, charges } => call.charge_and_replay(charges, target, deadline).await,
        }
    }
}

/// Words of a call.
type CallWords<'c> = SmallVec<[&'c [u8]; 8]>;

/// Script, and the keys of the counters that it works on.
#[derive(Clone, Copy)]
struct ScriptCommand<'a> {
    script: &'static Script,
    keys: &'a [Bytes],
}

/// Call of a script.
struct ScriptCall<'a> {
    script: &'static Script,
    keys: &'a [Bytes],
    key_count: String,
    arguments: Bytes,
    leases: Option<LeaseWords>,
    /// Only for concurrent limits.
    slot: Option<&'a Bytes>,
    sending: ScriptSendMode,
}

/// How a script call is sent, and whether its failure counts for the breaker.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScriptSendMode {
    /// Shared with calls on other keys that are queued at the same moment, if the node allows it: most charges.
    Mergeable,
    /// Its own: many charges, or those by the clock of this process.
    Separate,
    /// Its own, and its failure says nothing of the health of the server: a reset.
    Unrecorded,
}

/// Form in which a command names its script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScriptForm {
    /// SHA-1, for EVALSHA.
    Hash,
    /// Text, for EVAL, which makes the server keep the script.
    Text,
}

/// Words of a script call that concerns leases: the key of their record, and the argument.
struct LeaseWords {
    key: Bytes,
    argument: Bytes,
}

impl<'a> ScriptCall<'a> {
    fn new(
        command: ScriptCommand<'a>,
        arguments: Bytes,
        leases: Option<&LeaseArguments>,
        sending: ScriptSendMode,
    ) -> Self {
        let ScriptCommand { script, keys } = command;
        let leases = leases.map(|leases| LeaseWords { key: leases_key(&keys[0]), argument: leases.encode() });
        let key_count = (keys.len() + usize::from(leases.is_some())).to_string();
        Self { script, keys, key_count, arguments, leases, slot: None, sending }
    }

    /// Makes the call at the current node, and repeats its charges on the states in the reply.
    async fn charge_and_replay(
        &self,
        charges: &[OwnedCharge],
        target: &TargetNode<'_>,
        deadline: Instant,
    ) -> Result<ScriptOutcome, ReplyError> {
        let reply = self.send_or_load(target, deadline).await?;
        let bytes = reply_bytes(&reply).ok_or(ReplyError::Failed(RedisError::BadReply))?;
        replay_charges(charges, bytes, self.leases.is_some()).map_err(|_| ReplyError::Failed(RedisError::BadReply))
    }

    /// Sends the hash of the script to the current node, and its text if the node does not have it (NOSCRIPT).
    async fn send_or_load(&self, target: &TargetNode<'_>, deadline: Instant) -> Result<Reply, ReplyError> {
        match self.send(target, ScriptForm::Hash, deadline).await {
            Err(ReplyError::NoScript) => self.send(target, ScriptForm::Text, deadline).await,
            outcome => outcome,
        }
    }

    async fn send(&self, target: &TargetNode<'_>, form: ScriptForm, deadline: Instant) -> Result<Reply, ReplyError> {
        let TargetNode { node, asking, .. } = target;
        if let Some(call) = self.build_mergeable_call(node, form) {
            return node.call_mergeable(call, deadline).await;
        }
        let words = self.words(form);
        match self.sending {
            ScriptSendMode::Mergeable | ScriptSendMode::Separate => node.call(&words, *asking, deadline).await,
            ScriptSendMode::Unrecorded => node.call_unrecorded(&words, *asking, deadline).await,
        }
    }

    /// Returns the call in the form that can share a command with others, if it can.
    ///
    /// This is the usual form, on a server that is no node of a cluster: one counter, no leases. A call that meets no
    /// others in the queue is then a command of its own, as that of [`ScriptCall::words`] is.
    fn build_mergeable_call(&self, node: &Node, form: ScriptForm) -> Option<MergeableScriptCall> {
        let [key] = self.keys else { return None };
        let is_mergeable =
            self.script.merged.is_some() && self.leases.is_none() && self.sending == ScriptSendMode::Mergeable;
        if !is_mergeable || !node.can_merge_calls() {
            return None;
        }
        Some(MergeableScriptCall {
            script: self.script,
            key: key.clone(),
            argument: self.arguments.clone(),
            sends_text: form == ScriptForm::Text,
        })
    }

    /// Returns the words of the call as a command of its own.
    fn words(&self, form: ScriptForm) -> CallWords<'_> {
        let (command, script): (&[u8], _) = match form {
            ScriptForm::Hash => (b"EVALSHA", &self.script.sha1),
            ScriptForm::Text => (b"EVAL", &self.script.text),
        };
        let mut words: CallWords<'_> = SmallVec::from_slice(&[command, script.as_bytes(), self.key_count.as_bytes()]);
        words.extend(self.keys.iter().map(|key| &**key));
        words.extend(self.leases.iter().map(|leases| &*leases.key));
        words.push(&self.arguments);
        words.extend(self.leases.iter().map(|leases| &*leases.argument));
        if let Some(slot) = self.slot {
            if self.leases.is_none() {
                words.push(b"");
            }
            words.push(slot);
        }
        words
    }
}
