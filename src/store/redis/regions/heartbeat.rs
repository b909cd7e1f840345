//! Heartbeat of this process in its region's Redis and in the global Redis, once a second each.
//!
//! One script call each keeps the standing of the region up to date and reads a server's clock. The other nodes of a
//! cluster are asked for their time: those of the global Redis always, those of the region's Redis only while no
//! decision has read their clock. No decision waits for any of this.
//!
//! Decides: how often a region reports to the global Redis, and clocks are read (`read_stale_clocks`).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};

use super::calls::{BreakerRecording, GLOBAL_REDIS_TIMEOUT, REGION_REDIS_TIMEOUT, SingleKeyScriptCall};
use super::region_notices::NoticeLog;
use super::registry::{
    self, FencingToken, IdentityCall, RegionIdentity, RegionListHash, RegionRedisId, RegionReport, region_identity_key,
    region_registry_key,
};
use super::standing::{
    CallTimes, ClockAndConnectionEvents, OwnRegionSettings, RegionStanding, shorten_by_drift_us, time_left_until,
};
use crate::base::clock::{Time, to_micros};
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::redis::regions::RegionSettings;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::hash_slot::hash_slot;
use crate::store::client::redis::node::Node;
use crate::store::client::redis::resp::{reply_bytes, time_in_reply};
use crate::store::client::redis::server_clock::{ClockReading, InstantRange, process_time_us};
use crate::store::redis::script::{global_members_script, region_identity_script};

/// Time from one call to the next.
const CALL_INTERVAL: Duration = Duration::from_secs(1);
/// Age of a reading from which a clock is read again, in microseconds.
const CLOCK_REREAD_AGE_US: i64 = 900_000;
/// Age up to which the identity counts for a report, in microseconds.
const MAX_IDENTITY_AGE_US: i64 = 2_000_000;
/// Time from the first call, which only reads the clock, to the next.
const FIRST_INTERVAL: Duration = Duration::from_millis(50);

/// Task that reports to both Redis.
#[derive(Debug)]
pub(super) struct RegionHeartbeat {
    pub(super) region: Arc<Deployment>,
    pub(super) global: Arc<Deployment>,
    pub(super) standing: Arc<RegionStanding>,
    name: String,
    list: RegionListHash,
    /// Id of the region's Redis if it has none.
    proposal: RegionRedisId,
    identity_key: Bytes,
    registry_key: Bytes,
    /// Token that the registry accepted last.
    accepted: Mutex<FencingToken>,
    /// Notified when the region's Redis must be told something at once.
    tell_region: Notify,
    /// Notified when the first identity is known.
    tell_global: Notify,
    notices: NoticeLog,
}

impl RegionHeartbeat {
    /// Creates the heartbeat of a process; `prefix` is `CACHE_KEY_PREFIX`.
    pub(super) fn new(
        regions: &RegionSettings,
        prefix: &str,
        region: Arc<Deployment>,
        global: Arc<Deployment>,
    ) -> Self {
        let events = ClockAndConnectionEvents {
            region_jumps: Arc::clone(region.clock_jumps()),
            region_connections: Arc::clone(region.connection_openings()),
            global_jumps: Arc::clone(global.clock_jumps()),
        };
        Self {
            region,
            global,
            standing: Arc::new(RegionStanding::new(OwnRegionSettings::new(regions), events)),
            name: regions.own_region_name().to_owned(),
            list: RegionListHash::new(&regions.names),
            proposal: RegionRedisId::random(),
            identity_key: region_identity_key(prefix),
            registry_key: region_registry_key(prefix),
            accepted: Mutex::default(),
            tell_region: Notify::new(),
            tell_global: Notify::new(),
            notices: NoticeLog::new(regions),
        }
    }

    /// Reports until it is dropped.
    pub(super) async fn run(&self) {
        tokio::join!(self.run_with_region_redis(), self.run_with_global_redis(), self.log_standing_changes());
    }

    async fn run_with_region_redis(&self) {
        loop {
            let next = Instant::now() + CALL_INTERVAL;
            let deadline = Instant::now() + REGION_REDIS_TIMEOUT;
            let read_times = read_stale_clocks(&self.region, BreakerRecording::Unrecorded, deadline);
            let (outcome, ()) = tokio::join!(self.exchange_identity_with_region_redis(deadline), read_times);
            if let Err(error) = outcome {
                self.notices.log_failure("identity of the region", &self.identity_key, error);
            }
            tokio::select! {
                () = sleep_until(next) => {}
                () = self.tell_region.notified() => {}
                () = self.region.connection_openings().wait_for_next() => {}
            }
        }
    }

    async fn exchange_identity_with_region_redis(&self, deadline: Instant) -> Result<(), RedisError> {
        let findings = self.standing.findings();
        let argument = registry::encode_identity_call(&self.build_identity_call(Instant::now()), None);
        let script = SingleKeyScriptCall::new(region_identity_script(), &self.identity_key, &argument);
        let reply = script.run(&self.region, BreakerRecording::Unrecorded, deadline).await?;
        let identity = reply_bytes(&reply.reply)
            .and_then(|reply| registry::decode_identity_reply(reply).ok())
            .ok_or(RedisError::BadReply)?;
        reply.record_clock_and_detect_jump(identity.now);
        self.standing.record_identity(&identity, call_times(reply.within));
        if findings.identity().is_none() {
            self.tell_global.notify_one();
        }
        Ok(())
    }

    /// Builds the call that tells the region's Redis what this process knows at a time.
    fn build_identity_call(&self, at: Instant) -> IdentityCall {
        let (findings, at_us) = (self.standing.findings(), process_time_us(at));
        IdentityCall {
            claim: findings.build_identity_claim(self.proposal),
            list: self.list,
            other_list_changed_ago_us: findings.us_since_registry_change(at_us),
            leased_until: self.lease_end_in_region(at).unwrap_or_default(),
            jumped_ago_us: self.standing.us_since_region_jump_to_report(at_us),
            accepted: *lock_ignoring_poison(&self.accepted),
            proposal: FencingToken::random(),
        }
    }

    /// Returns the time of the region's Redis at which the lease surely has not ended; `None` if none is known.
    fn lease_end_in_region(&self, at: Instant) -> Option<Time> {
        let left = time_left_until(self.standing.findings().lease_ends_us()?, at)?;
        let within = InstantRange { from: at, until: at };
        let offset = self.region.clock_offset(|| hash_slot(&self.identity_key), within)?;
        let now_us = u64::try_from(process_time_us(at).saturating_add(offset.lo_us)).ok()?;
        Some(Time::from_micros(now_us).plus_us(shorten_by_drift_us(to_micros(left))))
    }

    async fn run_with_global_redis(&self) {
        self.tell_global.notified().await;
        loop {
            let started = Instant::now();
            let is_first = self.latest_global_time(started).is_none();
            let deadline = started + GLOBAL_REDIS_TIMEOUT;
            let read_times = read_stale_clocks(&self.global, BreakerRecording::Recorded, deadline);
            let (outcome, ()) = tokio::join!(self.report_to_global_redis(deadline), read_times);
            if let Err(error) = outcome {
                self.notices.log_failure("registry of regions", &self.registry_key, error);
            }
            let interval = if is_first && outcome.is_ok() { FIRST_INTERVAL } else { CALL_INTERVAL };
            sleep_until(started + interval).await;
        }
    }

    /// Returns the latest possible time of the global Redis; `None` if it is unknown.
    fn latest_global_time(&self, at: Instant) -> Option<Time> {
        let within = InstantRange { from: at, until: at };
        let offset = self.global.clock_offset(|| hash_slot(&self.registry_key), within)?;
        u64::try_from(process_time_us(at).saturating_add(offset.hi_us)).ok().map(Time::from_micros)
    }

    async fn report_to_global_redis(&self, deadline: Instant) -> Result<(), RedisError> {
        let Some(identity) = self.standing.findings().identity() else { return Ok(()) };
        let argument = registry::encode_region_report(self.build_region_report(identity, Instant::now()), None);
        let script = SingleKeyScriptCall::new(global_members_script(), &self.registry_key, &argument);
        let reply = script.run(&self.global, BreakerRecording::Recorded, deadline).await?;
        let regions = reply_bytes(&reply.reply)
            .and_then(|reply| registry::decode_registry_reply(reply).ok())
            .ok_or(RedisError::BadReply)?;
        reply.record_clock_and_detect_jump(regions.now);
        // A reply to a report of another Redis tells nothing of this one.
        if self.standing.findings().identity().is_none_or(|known| known.id != identity.id) {
            self.standing.record_global_answer_time(process_time_us(reply.within.until));
            return Ok(());
        }
        self.standing.record_registry(&regions, call_times(reply.within));
        if regions.accepted {
            *lock_ignoring_poison(&self.accepted) = identity.fence.next;
        }
        if self.standing.findings().should_clear_new_mark() {
            self.tell_region.notify_one();
        }
        Ok(())
    }

    /// Builds the report at a time. It only reads while global time is unknown, and while the region's Redis does not
    /// answer, because its tokens may have changed.
    fn build_region_report(&self, identity: RegionIdentity, at: Instant) -> RegionReport<'_> {
        let at_us = process_time_us(at);
        let is_fresh = self.standing.findings().has_read_identity_within(MAX_IDENTITY_AGE_US, at_us);
        RegionReport {
            name: &self.name,
            id: identity.id,
            fence: identity.fence,
            list: self.list,
            sent: self.latest_global_time(at).filter(|_| is_fresh).unwrap_or_default(),
            lease_us: self.standing.own_region_settings().lease_us,
            jumped_ago_us: self.standing.us_since_global_jump_to_report(at_us),
        }
    }

    /// Logs changes of what this region may do.
    async fn log_standing_changes(&self) {
        loop {
            self.notices.log_changes(&self.standing, Instant::now());
            sleep(CALL_INTERVAL).await;
        }
    }
}

/// Returns the process times of a call.
fn call_times(within: InstantRange) -> CallTimes {
    CallTimes { sent_us: process_time_us(within.from), answered_us: process_time_us(within.until) }
}

/// Reads the clocks that have not been read for an interval.
async fn read_stale_clocks(deployment: &Deployment, kind: BreakerRecording, deadline: Instant) {
    let nodes = deployment.nodes();
    let now = Instant::now();
    let is_idle = |node: &&Arc<Node>| {
        node.clock().last_read_us().is_none_or(|at| process_time_us(now) - at >= CLOCK_REREAD_AGE_US)
    };
    join_all(nodes.iter().filter(is_idle).map(|node| read_clock(node, kind, deadline))).await;
}

async fn read_clock(node: &Node, kind: BreakerRecording, deadline: Instant) {
    let from = Instant::now();
    let reply = match kind {
        BreakerRecording::Unrecorded => node.call_unrecorded(&[b"TIME"], false, deadline).await,
        BreakerRecording::Recorded | BreakerRecording::Replicated(_) => node.call(&[b"TIME"], false, deadline).await,
    };
    let within = InstantRange { from, until: Instant::now() };
    if let Some(server) = reply.ok().as_ref().and_then(time_in_reply) {
        node.record_clock_and_detect_jump(&ClockReading { within, server });
    }
}
