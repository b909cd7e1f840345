//! Heartbeat of this process in its region's Redis and in the global Redis, once a second each.
//!
//! One script call each keeps the standing of the region up to date and reads a server's clock. Other nodes, of
//! clusters, are asked for their time; the region's only while no decision has read it. No decision waits for any of
//! this.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::time::{sleep, sleep_until, timeout};

use super::calls::{CallKind, GLOBAL_TIMEOUT, KeyScript, REGION_TIMEOUT};
use super::membership_notices::NoticeLog;
use super::registry::{self, RegionId, RegionListHash, RegionReport, region_identity_key, region_registry_key};
use super::standing::RegionStanding;
use crate::settings::redis::regions::RegionSettings;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::node::Node;
use crate::store::client::redis::resp::{bytes, time};
use crate::store::client::redis::server_clock::{ClockReading, InstantRange, process_us};
use crate::store::redis::script::{global_members_script, region_identity_script};

/// Time from one call to the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// Age of a reading from which a clock is read again, in microseconds.
const IDLE_US: i64 = 900_000;

/// Task that reports to both Redis.
#[derive(Debug)]
pub(super) struct RegionHeartbeat {
    pub(super) region: Arc<Deployment>,
    pub(super) global: Arc<Deployment>,
    pub(super) standing: Arc<RegionStanding>,
    name: String,
    list: RegionListHash,
    /// Id of the region's Redis if it has none.
    proposal: RegionId,
    identity_key: Bytes,
    registry_key: Bytes,
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
        Self {
            region,
            global,
            standing: Arc::default(),
            name: regions.own_region_name().to_owned(),
            list: RegionListHash::new(&regions.names),
            proposal: RegionId::random(),
            identity_key: region_identity_key(prefix),
            registry_key: region_registry_key(prefix),
            tell_region: Notify::new(),
            tell_global: Notify::new(),
            notices: NoticeLog::new(regions),
        }
    }

    /// Reports until it is dropped.
    pub(super) async fn run(&self) {
        tokio::join!(self.run_in_region(), self.run_globally(), self.watch());
    }

    async fn run_in_region(&self) {
        loop {
            let next = Instant::now() + INTERVAL;
            let deadline = Instant::now() + REGION_TIMEOUT;
            let read_times = read_idle_clocks(&self.region, CallKind::Unrecorded, deadline);
            let (outcome, ()) = tokio::join!(self.report_to_region(deadline), read_times);
            if let Err(error) = outcome {
                self.notices.log_failure("identity of the region", &self.identity_key, error);
            }
            let told = timeout(next.saturating_duration_since(Instant::now()), self.tell_region.notified());
            let _elapsed = told.await;
        }
    }

    async fn report_to_region(&self, deadline: Instant) -> Result<(), RedisError> {
        let findings = self.standing.findings();
        let argument = registry::encode_claim(findings.claim(self.proposal), self.list, None);
        let script = KeyScript::new(region_identity_script(), &self.identity_key, &argument);
        let reply = script.run(&self.region, CallKind::Unrecorded, deadline).await?;
        let identity =
            bytes(&reply.reply).and_then(|reply| registry::decode_identity(reply).ok()).ok_or(RedisError::BadReply)?;
        reply.record_clock(identity.now);
        self.standing.record_identity(&identity, process_us(reply.within.until));
        if findings.identity().is_none() {
            self.tell_global.notify_one();
        }
        Ok(())
    }

    async fn run_globally(&self) {
        self.tell_global.notified().await;
        loop {
            let next = Instant::now() + INTERVAL;
            let deadline = Instant::now() + GLOBAL_TIMEOUT;
            let read_times = read_idle_clocks(&self.global, CallKind::Recorded, deadline);
            let (outcome, ()) = tokio::join!(self.report_globally(deadline), read_times);
            if let Err(error) = outcome {
                self.notices.log_failure("registry of regions", &self.registry_key, error);
            }
            sleep_until(next.into()).await;
        }
    }

    async fn report_globally(&self, deadline: Instant) -> Result<(), RedisError> {
        let Some(identity) = self.standing.findings().identity() else { return Ok(()) };
        let report = RegionReport { name: &self.name, id: identity.id, list: self.list };
        let argument = registry::encode_report(report, None);
        let script = KeyScript::new(global_members_script(), &self.registry_key, &argument);
        let reply = script.run(&self.global, CallKind::Recorded, deadline).await?;
        let regions =
            bytes(&reply.reply).and_then(|reply| registry::decode_registry(reply).ok()).ok_or(RedisError::BadReply)?;
        reply.record_clock(regions.now);
        self.standing.record_registry(&regions, process_us(reply.within.until));
        let findings = self.standing.findings();
        if findings.should_clear_creation() {
            self.tell_region.notify_one();
        }
        Ok(())
    }

    /// Logs changes of what this region may do.
    async fn watch(&self) {
        loop {
            self.notices.log_changes(&self.standing, Instant::now());
            sleep(INTERVAL).await;
        }
    }
}

/// Reads the clocks that have not been read for an interval.
async fn read_idle_clocks(deployment: &Deployment, kind: CallKind, deadline: Instant) {
    let nodes = deployment.nodes();
    let now = Instant::now();
    let is_idle = |node: &&Arc<Node>| node.clock().last_read_us().is_none_or(|at| process_us(now) - at >= IDLE_US);
    join_all(nodes.iter().filter(is_idle).map(|node| read_clock(node, kind, deadline))).await;
}

async fn read_clock(node: &Node, kind: CallKind, deadline: Instant) {
    let from = Instant::now();
    let reply = match kind {
        CallKind::Unrecorded => node.call_unrecorded(&[b"TIME"], false, deadline).await,
        CallKind::Recorded | CallKind::Replicated(_) => node.call(&[b"TIME"], false, deadline).await,
    };
    let within = InstantRange { from, until: Instant::now() };
    if let Some(server) = reply.ok().as_ref().and_then(time) {
        node.record_clock(&ClockReading { within, server });
    }
}
