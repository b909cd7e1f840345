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
use super::grant_request::{GrantRequest, RegionCounts, pool};
use super::grant_stats::GrantCounts;
use super::heartbeat::GLOBAL_TIMEOUT;
use super::membership::Membership;
use super::region_call;
use super::returns::{Returns, UnusedHits};
use super::script_call::{CallKind, KeyScript, ScriptReply};
use super::window_grants::{self, WindowCall, WindowReply};
use crate::base::clock::Time;
use crate::limit::algorithm::Algorithm;
use crate::limit::algorithm::region_grant::RegionGrant;
use crate::limit::algorithm::region_window::{REQUEST_INTERVAL_US, RegionWindowCounts};
use crate::limit::algorithm::reply_reader::MalformedReply;
use crate::settings::redis::RegionSettings;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::reply::{bytes, integer};
use crate::store::client::redis::server_clock::{ClockReading, process_us};
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
    pub(super) settings: RegionSettings,
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
        match request.counts {
            RegionCounts::Window(counts) => self.answer_window(&request, &counts).await,
            RegionCounts::Bucket(counts) => self.answer_bucket(&request, &counts).await,
        }
    }

    async fn answer_window(&self, request: &GrantRequest, counts: &RegionWindowCounts) {
        let reserve = u64::from(request.limit.region_reserve());
        let demand = WindowDemand::at(counts, reserve, request.limit.period_us(), request.global_us());
        let wanted = demand.wanted();
        let Some(reply) = self.ask(request, wanted).await else { return };
        let exhausted = reply.hits == 0;
        let pause_us = match request.limit.algorithm() {
            Algorithm::FixedWindow if exhausted => EXHAUSTED_INTERVAL_US.min(demand.rest_us).max(REQUEST_INTERVAL_US),
            _ => REQUEST_INTERVAL_US,
        };
        let grant = RegionGrant {
            request: counts.open_request,
            window: reply.window,
            epoch: reply.epoch.as_micros(),
            hits: reply.hits,
            low: demand.low_after(reply.hits),
            exhausted,
            next_request_at: request.now.plus_us(pause_us),
        };
        self.give(request, &grant).await;
    }

    /// Asks the global Redis for hits.
    async fn ask(&self, request: &GrantRequest, wanted: u32) -> Option<WindowReply> {
        let key = global_key(&request.key);
        let argument = window_grants::encode(pool(&request.limit), WindowCall::Grant { wanted }, None);
        let call = KeyScript { script: global_window_script(), key: &key, argument: &argument, more: &[] };
        let (reply, answer) = self.call_global(call, window_grants::decode).await?;
        self.record_answer(&answer, reply.now);
        Some(reply)
    }

    /// Calls the global Redis and decodes its reply; counts a failure.
    pub(super) async fn call_global<T>(
        &self,
        call: KeyScript<'_>,
        decode: fn(&[u8]) -> Result<T, MalformedReply>,
    ) -> Option<(T, ScriptReply)> {
        let deadline = Instant::now() + GLOBAL_TIMEOUT;
        let answer = call.run(&self.global, CallKind::Replicated(self.settings.wait_replicas), deadline).await;
        let decoded = answer.and_then(|answer| {
            let reply = bytes(&answer.reply).and_then(|reply| decode(reply).ok()).ok_or(RedisError::BadReply)?;
            Ok((reply, answer))
        });
        decoded
            .inspect_err(|error| {
                self.counts.add_failed();
                tracing::debug!(%error, "the global redis did not answer a grant request");
            })
            .ok()
    }

    /// Records the time of the global Redis in its answer, and that it answered.
    pub(super) fn record_answer(&self, answer: &ScriptReply, now: Time) {
        answer.node.record_clock(&ClockReading { within: answer.within, server: now });
        self.membership.record_answer(process_us(answer.within.until));
    }

    /// Gives a grant to the region's counter.
    async fn give(&self, request: &GrantRequest, grant: &RegionGrant) {
        let argument = region_call::encode_grant(request.limit.period_us() / 1000, grant);
        let call = KeyScript { script: region_grant_script(), key: &request.key, argument: &argument, more: &[] };
        let is_sliding = request.limit.algorithm() == Algorithm::SlidingWindowCounter;
        if self.call_region(call, grant.hits).await && is_sliding && grant.hits > 0 {
            self.returns.expect(UnusedHits::of(request, grant));
        }
    }

    /// Gives `hits` to a counter of the region, and counts them; false if the counter did not take them.
    pub(super) async fn call_region(&self, call: KeyScript<'_>, hits: u64) -> bool {
        let answer = call.run(&self.region, CallKind::Unrecorded, Instant::now() + REGION_TIMEOUT).await;
        let taken = answer.ok().and_then(|answer| integer(&answer.reply));
        match taken {
            Some(1) => self.counts.add_granted(hits, Instant::now()),
            Some(_) => self.counts.add_wasted(hits),
            None => {
                self.counts.add_failed();
                self.counts.add_wasted(hits);
            }
        }
        taken == Some(1)
    }
}
