//! Grant requests, and the return of unused hits.
//!
//! A charge that leaves little opens a request, and the process that made the charge answers it here. A request passes
//! three steps, in the background: the demand on the counter ([`demand`](super::demand)), a grant of the global Redis,
//! and the region's counter, which takes the grant. The counter takes a grant once, so one that is lost, late or
//! repeated wastes hits and doubles none. If this process stops meanwhile, the counter opens a new request, which
//! another process gets.
//!
//! *Unused hits*: a sliding_window_counter counts the hits of a window in the next one too, used or not. So shortly
//! before the window ends, the process that gave a grant to the counter takes out of it what is left, and returns that
//! to the global Redis. The region's counter gives the hits up first, then the global one takes them back: a process
//! that stops in between wastes them.
//!
//! Decides: which process of a region asks for a grant; how many requests wait.
//! Decides: grants that failed or came by a clock that jumped (unused).
//! Decides: when a region returns unused hits (`RETURN_LEAD_US`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};

use super::calls::{BreakerRecording, GLOBAL_REDIS_TIMEOUT, REGION_REDIS_TIMEOUT, SingleKeyScriptCall};
use super::demand::{BucketDemand, WindowDemand, jittered_pause_us};
use super::grant_encoding::{self, GlobalBucketAction, GlobalWindowAction};
use super::standing::{RegionStanding, ReportedRegionCounts};
use crate::base::clock::Time;
use crate::base::random::random_u64;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::limit::algorithm::global_bucket::GlobalBucketParameters;
use crate::limit::algorithm::global_window::{GlobalWindowParameters, ReturnedHits};
use crate::limit::algorithm::region::GlobalTimeAndStanding;
use crate::limit::algorithm::region_bucket::{BucketCounts, PrepaidHitsGrant};
use crate::limit::algorithm::region_window::{HitsGrant, WindowCounts};
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::stored_state::MalformedReply;
use crate::settings::redis::regions::RegionSettings;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::{reply_bytes, reply_integer};
use crate::store::client::redis::server_clock::process_time_us;
use crate::store::redis::key::global_key;
use crate::store::redis::script::{
    global_bucket_script, global_window_script, region_bucket_grant_script, region_grant_script,
};
use crate::store::stats::GrantCounts;

/// Upper bound on requests that wait to be sent; further ones are dropped, and opened again by their counters.
const MAX_WAITING_REQUESTS: usize = 65_536;
/// Upper bound on requests that wait for answers.
const MAX_REQUESTS_IN_FLIGHT: usize = 1024;
/// Shortest time between a return of unused hits and the end of the window: the return must cross an ocean.
const RETURN_LEAD_US: u64 = 1_000_000;

/// Grant request that a charge opened on a region's counter.
#[derive(Clone, Debug)]
pub(crate) struct GrantRequest {
    /// Key of the region's counter.
    key: Bytes,
    limit: Limit,
    /// Counts after the charge.
    counts: RegionCounts,
    view: GlobalTimeAndStanding,
    /// Time of the charge, by the region's Redis.
    now: Time,
}

/// Counts of a region's counter.
#[derive(Clone, Copy, Debug)]
enum RegionCounts {
    Window(WindowCounts),
    Bucket(BucketCounts),
}

impl GrantRequest {
    /// Returns the request that is open in a state; `None` if no region counts it.
    pub(crate) fn from_state(state: &State, limit: Limit, key: Bytes) -> Option<Self> {
        let (counts, view) = match state {
            State::RegionWindow(state) => (RegionCounts::Window(*state.counts), *state.view),
            State::RegionBucket(state) => (RegionCounts::Bucket(*state.counts), *state.view),
            _ => return None,
        };
        Some(Self { key, limit, counts, view, now: Time::from_micros(state.open_grant_request_id()) })
    }

    /// Global time of the request in microseconds: the middle of the interval that contains it.
    fn global_time_us(&self) -> u64 {
        let offset = self.view.offset_lo / 2 + self.view.offset_hi / 2;
        self.now.as_micros().saturating_add_signed(offset)
    }

    /// Builds the return of a grant's unused hits, due before their window ends.
    fn build_due_return(&self, grant: &HitsGrant) -> DueHitReturn {
        let end_us = (grant.window + 1) * self.limit.period_us();
        let width_us = self.view.offset_hi.abs_diff(self.view.offset_lo);
        let rest_us = end_us.saturating_sub(self.global_time_us());
        let wait = Duration::from_micros(rest_us.saturating_sub(RETURN_LEAD_US.max(2 * width_us)));
        DueHitReturn {
            key: self.key.clone(),
            limit: self.limit,
            window: grant.window,
            epoch: Time::from_micros(grant.epoch),
            at: Instant::now() + wait,
        }
    }
}

/// Queue of the requests of this process.
#[derive(Debug)]
pub(super) struct GrantRequestQueue {
    queue: mpsc::Sender<GrantRequest>,
    counts: Arc<GrantCounts>,
}

/// Clients and settings of the worker that answers requests.
#[derive(Debug)]
pub(super) struct GrantWorker {
    pub(super) global: Arc<Deployment>,
    pub(super) region: Arc<Deployment>,
    pub(super) settings: RegionSettings,
    pub(super) standing: Arc<RegionStanding>,
    pub(super) counts: Arc<GrantCounts>,
    pub(super) returns: Arc<UnusedHitReturner>,
}

impl GrantRequestQueue {
    /// Creates a queue, and the end that [`GrantWorker::run`] takes requests from.
    pub(super) fn new(counts: Arc<GrantCounts>) -> (Self, mpsc::Receiver<GrantRequest>) {
        let (queue, requests) = mpsc::channel(MAX_WAITING_REQUESTS);
        (Self { queue, counts }, requests)
    }

    /// Adds a request; never waits.
    pub(super) fn push(&self, request: GrantRequest) {
        if self.queue.try_send(request).is_err() {
            self.counts.count_dropped_request();
        }
    }
}

impl GrantWorker {
    /// Answers requests, many at a time, until all senders are gone.
    pub(super) async fn run(&self, requests: mpsc::Receiver<GrantRequest>) {
        let requests = stream::unfold(requests, |mut requests| async move { Some((requests.recv().await?, requests)) });
        requests.for_each_concurrent(MAX_REQUESTS_IN_FLIGHT, |request| self.fetch_grant(request)).await;
    }

    async fn fetch_grant(&self, request: GrantRequest) {
        self.counts.count_request();
        match &request.counts {
            RegionCounts::Window(counts) => self.fetch_window_grant(&request, counts).await,
            RegionCounts::Bucket(counts) => self.fetch_bucket_grant(&request, counts).await,
        }
    }

    /// Gets hits for a counter of windows.
    async fn fetch_window_grant(&self, request: &GrantRequest, counts: &WindowCounts) {
        let (limit, reserve) = (&request.limit, u64::from(request.limit.region_reserve()));
        let demand = WindowDemand::estimate_at(counts, reserve, limit.period_us(), request.global_time_us());
        let purpose = GlobalWindowAction::Grant { wanted: demand.hits_to_request() };
        let key = global_key(&request.key);
        let ReportedRegionCounts { reported, listed } = self.standing.count_reported_regions();
        let pool = GlobalWindowParameters::from_limit(limit).scaled_to_reported_regions(reported, listed);
        let argument = grant_encoding::encode_global_window_call(pool, purpose, None);
        let call = SingleKeyScriptCall::new(global_window_script(), &key, &argument);
        let reply =
            self.request_global_grant(call, limit.period_us(), grant_encoding::decode_global_window_reply, |reply| {
                reply.now
            });
        let Some(reply) = reply.await else { return };
        let exhausted = reply.hits == 0;
        let is_sliding = limit.algorithm() == Algorithm::SlidingWindowCounter;
        let next_request_pause_us = demand.next_request_pause_us(is_sliding, reply.hits);
        let grant = HitsGrant {
            request: counts.cycle.open_request,
            window: reply.window,
            epoch: reply.epoch.as_micros(),
            hits: reply.hits,
            low: demand.request_more_at_hits_left(reply.hits),
            exhausted,
            next_request_at: request.now.plus_us(jittered_pause_us(next_request_pause_us, random_u64())),
        };
        let argument = grant_encoding::encode_hits_grant(limit.period_us() / 1000, &grant);
        let call = SingleKeyScriptCall::new(region_grant_script(), &request.key, &argument);
        if self.give_grant_to_counter(call, grant.hits).await && is_sliding && grant.hits > 0 {
            self.returns.schedule_return(request.build_due_return(&grant));
        }
    }

    /// Gets prepaid hits for a token bucket.
    async fn fetch_bucket_grant(&self, request: &GrantRequest, counts: &BucketCounts) {
        let limit = &request.limit;
        let ReportedRegionCounts { reported, listed } = self.standing.count_reported_regions();
        let pool = GlobalBucketParameters::from_limit(limit).scaled_to_reported_regions(reported, listed);
        let demand = BucketDemand::estimate_at(counts, pool, request.now.as_micros());
        let key = global_key(&request.key);
        let argument = grant_encoding::encode_global_bucket_call(
            pool,
            GlobalBucketAction::Grant { wanted: demand.hits_to_request() },
            None,
        );
        let call = SingleKeyScriptCall::new(global_bucket_script(), &key, &argument);
        let reply =
            self.request_global_grant(call, limit.period_us(), grant_encoding::decode_global_bucket_reply, |reply| {
                reply.now
            });
        let Some(reply) = reply.await else { return };
        let grant = PrepaidHitsGrant {
            request: counts.cycle.open_request,
            epoch: reply.epoch.as_micros(),
            hits: reply.hits,
            low: demand.request_more_at_hits_left(reply.hits),
            start: reply.now,
            end: reply.end,
            exhausted: reply.hits == 0,
            next_request_at: request
                .now
                .plus_us(jittered_pause_us(demand.next_request_pause_us(reply.hits, reply.free), random_u64())),
        };
        let argument = grant_encoding::encode_prepaid_hits_grant(limit, &grant);
        self.give_grant_to_counter(
            SingleKeyScriptCall::new(region_bucket_grant_script(), &request.key, &argument),
            grant.hits,
        )
        .await;
    }

    /// Asks the global Redis for a grant of a limit with a period, and records that it answered and at what time of its
    /// clock; counts a failure. A grant by a clock that jumped is not used: it may repeat another.
    async fn request_global_grant<T>(
        &self,
        call: SingleKeyScriptCall<'_>,
        period_us: u64,
        decode: fn(&[u8]) -> Result<T, MalformedReply>,
        time_of: fn(&T) -> Time,
    ) -> Option<T> {
        let deadline = Instant::now() + GLOBAL_REDIS_TIMEOUT;
        let answer = call.run(&self.global, BreakerRecording::Replicated(self.settings.wait_replicas), deadline).await;
        let decoded = answer.and_then(|answer| {
            let reply = reply_bytes(&answer.reply).and_then(|reply| decode(reply).ok()).ok_or(RedisError::BadReply)?;
            let is_jump = answer.record_clock_and_detect_jump(time_of(&reply));
            self.standing.record_global_answer_time(process_time_us(answer.within.until));
            let is_usable = !is_jump && !self.standing.global_clock_jumped_recently(period_us, Instant::now());
            is_usable.then_some(reply).ok_or(RedisError::BadReply)
        });
        decoded
            .inspect_err(|error| {
                self.counts.count_failed_request();
                tracing::debug!(%error, "the global redis did not answer a grant request, or its clock jumped");
            })
            .ok()
    }

    /// Gives `hits` to a counter of the region, and counts them; false if the counter did not take them.
    async fn give_grant_to_counter(&self, call: SingleKeyScriptCall<'_>, hits: u64) -> bool {
        let answer = call.run(&self.region, BreakerRecording::Unrecorded, Instant::now() + REGION_REDIS_TIMEOUT).await;
        let taken = answer.ok().and_then(|answer| reply_integer(&answer.reply));
        match taken {
            Some(1) => self.counts.add_granted_hits(hits, Instant::now()),
            Some(_) => self.counts.add_wasted_hits(hits),
            None => {
                self.counts.count_failed_request();
                self.counts.add_wasted_hits(hits);
            }
        }
        taken == Some(1)
    }
}

/// Upper bound on counters whose unused hits are returned; those of others stay charged until they expire.
const MAX_COUNTERS: usize = 100_000;
/// Upper bound on returns that wait for answers.
const MAX_RETURNS_IN_FLIGHT: usize = 256;

/// Hits of a counter that may be left when their window ends.
#[derive(Clone, Debug)]
struct DueHitReturn {
    key: Bytes,
    limit: Limit,
    window: u64,
    /// Epoch of the grant.
    epoch: Time,
    /// Time of the return.
    at: Instant,
}

/// Returns unused hits to the global Redis, by a schedule.
#[derive(Debug)]
pub(super) struct UnusedHitReturner {
    global: Arc<Deployment>,
    region: Arc<Deployment>,
    counts: Arc<GrantCounts>,
    schedule: Mutex<ReturnSchedule>,
    added: Notify,
}

impl UnusedHitReturner {
    /// Creates an empty schedule.
    pub(super) fn new(global: Arc<Deployment>, region: Arc<Deployment>, counts: Arc<GrantCounts>) -> Self {
        Self { global, region, counts, schedule: Mutex::default(), added: Notify::new() }
    }

    /// Schedules a return; drops it if there is no room.
    fn schedule_return(&self, unused: DueHitReturn) {
        self.lock_schedule().add(unused);
        self.added.notify_one();
    }

    /// Makes each return at its time; runs until it is dropped.
    pub(super) async fn run(&self) {
        loop {
            let next = self.lock_schedule().next_due_at();
            tokio::select! {
                () = self.added.notified() => {}
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    let due = self.lock_schedule().take_due(Some(Instant::now()));
                    self.return_all(due).await;
                }
            }
        }
    }

    /// Makes all returns now, because the process stops.
    pub(super) async fn return_all_now(&self) {
        let due = self.lock_schedule().take_due(None);
        self.return_all(due).await;
    }

    async fn return_all(&self, due: Vec<DueHitReturn>) {
        stream::iter(due).for_each_concurrent(MAX_RETURNS_IN_FLIGHT, |unused| self.return_unused_hits(unused)).await;
    }

    async fn return_unused_hits(&self, unused: DueHitReturn) {
        let argument = grant_encoding::encode_hits_return(unused.limit.period_us() / 1000, unused.window);
        let call = SingleKeyScriptCall::new(region_grant_script(), &unused.key, &argument);
        let taken = call.run(&self.region, BreakerRecording::Unrecorded, Instant::now() + REGION_REDIS_TIMEOUT).await;
        let taken = taken.ok().and_then(|taken| reply_integer(&taken.reply)).and_then(|hits| u64::try_from(hits).ok());
        let Some(hits) = taken.filter(|hits| *hits > 0) else { return };
        let key = global_key(&unused.key);
        let purpose = GlobalWindowAction::Return(ReturnedHits { window: unused.window, hits, epoch: unused.epoch });
        let argument =
            grant_encoding::encode_global_window_call(GlobalWindowParameters::from_limit(&unused.limit), purpose, None);
        let call = SingleKeyScriptCall::new(global_window_script(), &key, &argument);
        let answer = call.run(&self.global, BreakerRecording::Recorded, Instant::now() + GLOBAL_REDIS_TIMEOUT).await;
        let reply =
            answer.ok().and_then(|answer| grant_encoding::decode_global_window_reply(reply_bytes(&answer.reply)?).ok());
        let returned = reply.map_or(0, |reply| reply.hits);
        self.counts.add_returned_hits(returned);
        self.counts.add_wasted_hits(hits - returned.min(hits));
    }

    fn lock_schedule(&self) -> MutexGuard<'_, ReturnSchedule> {
        lock_ignoring_poison(&self.schedule)
    }
}

/// Returns in the order of their times, one for each counter and window.
#[derive(Debug, Default)]
struct ReturnSchedule {
    by_time: BinaryHeap<Reverse<(Instant, Bytes, u64)>>,
    grants: HashMap<(Bytes, u64), LastGrant>,
}

/// Limit and epoch of the last grant to a counter in a window.
#[derive(Clone, Copy, Debug)]
struct LastGrant {
    limit: Limit,
    epoch: Time,
}

impl ReturnSchedule {
    fn add(&mut self, unused: DueHitReturn) {
        let DueHitReturn { key, limit, window, epoch, at } = unused;
        let last = LastGrant { limit, epoch };
        if self.grants.len() < MAX_COUNTERS && self.grants.insert((key.clone(), window), last).is_none() {
            self.by_time.push(Reverse((at, key, window)));
        }
    }

    fn next_due_at(&self) -> Option<Instant> {
        self.by_time.peek().map(|Reverse((at, ..))| *at)
    }

    /// Removes the returns that are due at `now`; all if it is `None`.
    fn take_due(&mut self, now: Option<Instant>) -> Vec<DueHitReturn> {
        let mut due = Vec::new();
        while self.next_due_at().is_some_and(|at| now.is_none_or(|now| at <= now)) {
            let Some(Reverse((at, key, window))) = self.by_time.pop() else { break };
            if let Some(LastGrant { limit, epoch }) = self.grants.remove(&(key.clone(), window)) {
                due.push(DueHitReturn { key, limit, window, epoch, at });
            }
        }
        due
    }
}
