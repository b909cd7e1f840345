//! Grant requests: a charge that leaves little opens one, and the process that made the charge answers it here.
//!
//! The global Redis is asked, and its answer is given to the region's counter, both in the background. The counter
//! takes an answer once and in its window only, so an answer that is lost, late or repeated wastes hits and doubles
//! none. If this process stops meanwhile, the counter opens a new request, which another process gets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use tokio::sync::mpsc;

use super::demand::WindowDemand;
use super::grant_request::{GrantRequest, pool};
use super::grant_stats::GrantCounts;
use super::heartbeat::GLOBAL_TIMEOUT;
use super::membership::Membership;
use super::region_call;
use super::returns::{Returns, UnusedHits};
use super::script_call::{CallKind, KeyScript};
use super::window_grants::{self, WindowCall, WindowReply};
use crate::algorithm::region_grant::RegionGrant;
use crate::algorithm::region_window::REQUEST_INTERVAL_US;
use crate::limit::algorithm::Algorithm;
use crate::redis::deployment::Deployment;
use crate::redis::error::RedisError;
use crate::redis::reply::{bytes, integer};
use crate::redis::server_clock::{ClockReading, process_us};
use crate::store::redis::key::global_key;
use crate::store::redis::script::compose::{global_window_script, region_grant_script};

/// Upper bound on requests that wait to be sent; further ones are dropped, and opened again by their counters.
const MAX_WAITING: usize = 65_536;
/// Upper bound on requests that wait for answers.
const MAX_IN_FLIGHT: usize = 1024;
/// Upper bound on giving an answer to the region's counter.
const REGION_TIMEOUT: Duration = Duration::from_millis(500);
/// Time between two requests of a window of which nothing is left to grant.
const EXHAUSTED_INTERVAL_US: u64 = 5_000_000;

/// Queue of the requests of this process.
#[derive(Debug)]
pub(super) struct GrantRequests {
    queue: mpsc::Sender<GrantRequest>,
    counts: Arc<GrantCounts>,
}

/// Clients and settings of the worker.
#[derive(Debug)]
pub(super) struct GrantWorker {
    pub(super) global: Arc<Deployment>,
    pub(super) region: Arc<Deployment>,
    pub(super) wait_replicas: u32,
    pub(super) membership: Arc<Membership>,
    pub(super) counts: Arc<GrantCounts>,
    pub(super) returns: Arc<Returns>,
}

impl GrantRequests {
    /// Creates a queue, and the end that [`GrantWorker::run`] takes requests from.
    pub(super) fn new(counts: Arc<GrantCounts>) -> (Self, mpsc::Receiver<GrantRequest>) {
        let (queue, requests) = mpsc::channel(MAX_WAITING);
        (Self { queue, counts }, requests)
    }

    /// Adds a request; never waits.
    pub(super) fn push(&self, request: GrantRequest) {
        if self.queue.try_send(request).is_err() {
            self.counts.add_dropped();
        }
    }
}

impl GrantWorker {
    /// Answers requests, many at a time, until all senders are gone.
    pub(super) async fn run(&self, requests: mpsc::Receiver<GrantRequest>) {
        let requests = stream::unfold(requests, |mut requests| async move { Some((requests.recv().await?, requests)) });
        requests.for_each_concurrent(MAX_IN_FLIGHT, |request| self.answer(request)).await;
    }

    async fn answer(&self, request: GrantRequest) {
        self.counts.add_requested();
        let reserve = u64::from(request.limit.region_reserve());
        let demand = WindowDemand::at(&request.counts, reserve, request.limit.period_us(), request.global_us());
        let wanted = demand.wanted();
        let reply = match self.ask(&request, wanted).await {
            Ok(reply) => reply,
            Err(error) => {
                self.counts.add_failed();
                tracing::debug!(%error, "the global redis did not answer a grant request");
                return;
            }
        };
        let exhausted = reply.hits == 0;
        let pause_us = match request.limit.algorithm() {
            Algorithm::FixedWindow if exhausted => EXHAUSTED_INTERVAL_US.min(demand.rest_us).max(REQUEST_INTERVAL_US),
            _ => REQUEST_INTERVAL_US,
        };
        let grant = RegionGrant {
            request: request.counts.open_request,
            window: reply.window,
            epoch: reply.epoch.as_micros(),
            hits: reply.hits,
            low: demand.low_after(reply.hits),
            exhausted,
            next_request_at: request.now.plus_us(pause_us),
        };
        self.give(&request, &grant).await;
    }

    /// Asks the global Redis for hits.
    async fn ask(&self, request: &GrantRequest, wanted: u32) -> Result<WindowReply, RedisError> {
        let key = global_key(&request.key, request.limit.algorithm());
        let argument = window_grants::encode(pool(&request.limit), WindowCall::Grant { wanted }, None);
        let call = KeyScript { script: global_window_script(), key: &key, argument: &argument };
        let deadline = Instant::now() + GLOBAL_TIMEOUT;
        let answer = call.run(&self.global, CallKind::Replicated(self.wait_replicas), deadline).await?;
        let reply = bytes(&answer.reply).and_then(|reply| window_grants::decode(reply).ok());
        let reply = reply.ok_or(RedisError::BadReply)?;
        answer.node.record_clock(&ClockReading { within: answer.within, server: reply.now });
        self.membership.record_answer(process_us(answer.within.until));
        Ok(reply)
    }

    /// Gives a grant to the region's counter.
    async fn give(&self, request: &GrantRequest, grant: &RegionGrant) {
        let argument = region_call::encode_grant(request.limit.period_us() / 1000, grant);
        let call = KeyScript { script: region_grant_script(), key: &request.key, argument: &argument };
        let answer = call.run(&self.region, CallKind::Unrecorded, Instant::now() + REGION_TIMEOUT).await;
        match answer.map(|answer| integer(&answer.reply)) {
            Ok(Some(1)) => {
                self.counts.add_granted(grant.hits, Instant::now());
                if request.limit.algorithm() == Algorithm::SlidingWindowCounter && grant.hits > 0 {
                    self.returns.expect(UnusedHits::of(request, grant.window));
                }
            }
            Ok(Some(_)) => self.counts.add_wasted(grant.hits),
            Ok(None) | Err(_) => {
                self.counts.add_failed();
                self.counts.add_wasted(grant.hits);
            }
        }
    }
}
