//! Calls on the Redis of the region and on the global one, outside of decisions, and what every call knows of global
//! time.
//!
//! A process knows the offsets of both servers' clocks as intervals relative to itself at the time of a call. If the
//! script runs between sending and deadline, its `now` lies between `valid_from` and `valid_until`, and global time
//! minus that `now` between both offsets: clocks are read rounded down, and the ends of intervals are whole. If it does
//! not run then, because a clock jumped or another server answers, the script sees it by its own clock. All ends are
//! rounded outwards, so that calls of the same moment have the same view and can share a command.
//!
//! Decides: when a grant is used that a copy may lack (`TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS`).
//! Decides: how long an answer of the global Redis may take.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::base::clock::Time;
use crate::limit::algorithm::region::GlobalTimeAndStanding;
use crate::store::client::redis::connection::Script;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::{RedisError, ReplyError};
use crate::store::client::redis::health_check::{CommandWords, HealthCheck};
use crate::store::client::redis::node::Node;
use crate::store::client::redis::resp::Reply;
use crate::store::client::redis::server_clock::{ClockReading, InstantRange, OffsetInterval, process_time_us};
use crate::store::redis::key;
use crate::store::redis::script::global_probe_script;

/// Upper bound on the wait for a reply of the region's Redis.
pub(super) const REGION_REDIS_TIMEOUT: Duration = Duration::from_millis(500);
/// Upper bound on the wait for a reply of the global Redis.
pub(super) const GLOBAL_REDIS_TIMEOUT: Duration = Duration::from_secs(2);
/// Upper bound on the wait until replicas of the global Redis have the writes; it delays all calls of a connection.
const REPLICATION_TIMEOUT: Duration = Duration::from_millis(500);
/// Unit of the times between which the offsets hold, in microseconds.
const TIME_GRAIN_US: i64 = 5_000;
/// Unit of the offsets, in microseconds.
const OFFSET_GRAIN_US: i64 = 500;

/// Script on one key.
#[derive(Clone, Copy, Debug)]
pub(super) struct SingleKeyScriptCall<'c> {
    pub(super) script: &'static Script,
    pub(super) key: &'c [u8],
    pub(super) argument: &'c [u8],
}

/// How a failed call counts for the breaker of its server, and how many replicas must have its writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BreakerRecording {
    /// A failure opens no breaker: decisions need the server too.
    Unrecorded,
    /// A failure counts for the breaker, which finds a server that is back.
    Recorded,
    /// As recorded, and at least this many replicas must have the writes before the call succeeds.
    Replicated(u32),
}

/// Reply of a script, with what a reading of the server's clock needs.
#[derive(Debug)]
pub(super) struct TimedScriptReply {
    pub(super) reply: Reply,
    pub(super) node: Arc<Node>,
    /// Time before the command was sent and time after its reply was received.
    pub(super) within: InstantRange,
}

impl TimedScriptReply {
    /// Records the reading of the server's clock that the reply contains; returns true if it proves a jump.
    pub(super) fn record_clock_and_detect_jump(&self, server: Time) -> bool {
        self.node.record_clock_and_detect_jump(&ClockReading { within: self.within, server })
    }
}

impl<'c> SingleKeyScriptCall<'c> {
    /// Creates a call with one argument.
    pub(super) const fn new(script: &'static Script, key: &'c [u8], argument: &'c [u8]) -> Self {
        Self { script, key, argument }
    }

    /// Sends the script to the node that has its key, until `deadline`.
    ///
    /// # Errors
    /// The script may not have run. [`RedisError::NoWrites`] if too few replicas have its writes.
    pub(super) async fn run(
        &self,
        deployment: &Deployment,
        kind: BreakerRecording,
        deadline: Instant,
    ) -> Result<TimedScriptReply, RedisError> {
        let mut words: [&[u8]; 5] = [b"EVALSHA", self.script.sha1.as_bytes(), b"1", self.key, self.argument];
        let mut target = deployment.target_node(self.key, deadline).await?;
        loop {
            let from = Instant::now();
            let options = SendOptions { kind, asking: target.asking, deadline };
            match send(&target.node, &words, options).await {
                Ok(reply) => {
                    let within = InstantRange { from, until: Instant::now() };
                    return Ok(TimedScriptReply { reply, node: target.node, within });
                }
                Err(ReplyError::NoScript) => (words[0], words[1]) = (b"EVAL", self.script.text.as_bytes()),
                Err(error) => target.follow_redirection(error)?,
            }
        }
    }
}

/// Options of one attempt.
#[derive(Clone, Copy)]
struct SendOptions {
    kind: BreakerRecording,
    asking: bool,
    deadline: Instant,
}

async fn send(node: &Node, words: &[&[u8]], options: SendOptions) -> Result<Reply, ReplyError> {
    let SendOptions { kind, asking, deadline } = options;
    match kind {
        BreakerRecording::Unrecorded => node.call_unrecorded(words, asking, deadline).await,
        BreakerRecording::Recorded | BreakerRecording::Replicated(0) => node.call(words, asking, deadline).await,
        BreakerRecording::Replicated(replicas) => {
            let replicated = node.call_and_wait_for_replica(words, asking, REPLICATION_TIMEOUT, deadline).await?;
            let is_replicated = replicated.replicas >= replicas;
            if is_replicated { Ok(replicated.reply) } else { Err(ReplyError::Failed(RedisError::NoWrites)) }
        }
    }
}

/// Offsets of both servers' clocks from this process, valid while a call may run.
#[derive(Clone, Copy, Debug)]
pub struct ClockOffsets {
    /// Offset of the region's Redis.
    pub region: OffsetInterval,
    /// Offset of the global Redis.
    pub global: OffsetInterval,
}

/// Returns the view of global time for a call that is sent and answered `within` a range, also if the region's clock
/// has jumped and still shows a time at which the call may run; unknown if a time would be before 1970.
pub fn compute_global_view(offsets: ClockOffsets, within: InstantRange) -> GlobalTimeAndStanding {
    let ClockOffsets { region, global } = offsets;
    let time = |us: i64| u64::try_from(us).ok().map(Time::from_micros);
    let valid_from = time(round_down_us(process_time_us(within.from).saturating_add(region.lo_us), TIME_GRAIN_US));
    // Exclusive.
    let valid_until = process_time_us(within.until).saturating_add(region.hi_us).saturating_add(1);
    let valid_until = time(round_up_us(valid_until, TIME_GRAIN_US));
    let (Some(valid_from), Some(valid_until)) = (valid_from, valid_until) else {
        return GlobalTimeAndStanding::UNKNOWN;
    };
    // A jump that keeps the time within these bounds is not noticed before the reply.
    let unnoticed_us = i64::try_from(valid_until.since_us(valid_from)).unwrap_or(i64::MAX);
    GlobalTimeAndStanding {
        valid_from,
        valid_until,
        offset_lo: round_down_us(
            global.lo_us.saturating_sub(region.hi_us).saturating_sub(unnoticed_us),
            OFFSET_GRAIN_US,
        ),
        offset_hi: round_up_us(global.hi_us.saturating_sub(region.lo_us).saturating_add(unnoticed_us), OFFSET_GRAIN_US),
        ..GlobalTimeAndStanding::UNKNOWN
    }
}

const fn round_down_us(us: i64, grain_us: i64) -> i64 {
    us.saturating_sub(us.rem_euclid(grain_us))
}

const fn round_up_us(us: i64, grain_us: i64) -> i64 {
    us.saturating_add((-us.rem_euclid(grain_us)).rem_euclid(grain_us))
}

/// Health check that runs a script as grants do.
#[derive(Debug)]
pub(super) struct GlobalRedisHealthCheck {
    pub(super) prefix: String,
    /// Settings that hold the credentials, for messages.
    pub(super) auth_setting: &'static str,
    /// True if grants wait for replicas.
    pub(super) waits_for_replicas: bool,
}

impl GlobalRedisHealthCheck {
    fn describe_requirements(&self) -> String {
        let wait = if self.waits_for_replicas { " +wait" } else { "" };
        format!(
            "the user ({}) needs `+eval +evalsha +time +get +set{wait}` on all keys that begin with `{}tk1:`, and the \
             server must be Redis 5.0 or newer, or Valkey",
            self.auth_setting, self.prefix
        )
    }
}

impl HealthCheck for GlobalRedisHealthCheck {
    fn commands(&self, hash_tag: u32) -> Vec<CommandWords> {
        let word = Bytes::from_static;
        let mut key = key::key_head(&self.prefix);
        key.extend_from_slice(format!("{hash_tag}}}:global_probe").as_bytes());
        let text = Bytes::from_static(global_probe_script().text.as_bytes());
        let script = vec![word(b"EVAL"), text, word(b"1"), key.freeze(), Bytes::new()];
        // Waits for nothing.
        let wait = vec![word(b"WAIT"), word(b"0"), word(b"1")];
        if self.waits_for_replicas { vec![script, wait] } else { vec![script] }
    }

    fn advice(&self, error: RedisError, text: &str) -> String {
        match error {
            RedisError::Misconfigured => format!("{text}: {}", self.describe_requirements()),
            RedisError::Unauthenticated => format!("{text}; look at {}", self.auth_setting),
            RedisError::Timeout | RedisError::Broken => error.to_string(),
            _ => format!("{error}: {text}"),
        }
    }
}
