//! Returns: hits that a region was granted and has not used go back to the global Redis before their window ends.
//!
//! A sliding_window_counter counts the hits of a window in the next one too, used or not. So shortly before the window
//! ends, the process that gave a grant to the counter takes out of it what is left, and returns that. The region's
//! counter gives the hits up first, then the global one takes them back: a process that stops in between wastes them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use tokio::sync::Notify;
use tokio::time::sleep_until;

use super::grant_request::{GrantRequest, pool};
use super::grant_stats::GrantCounts;
use super::heartbeat::GLOBAL_TIMEOUT;
use super::region_call;
use super::script_call::{CallKind, KeyScript};
use super::window_grants::{self, WindowCall};
use crate::base::clock::Time;
use crate::base::sharded::lock;
use crate::limit::Limit;
use crate::limit::algorithm::global_window::WindowReturn;
use crate::limit::algorithm::region_grant::RegionGrant;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::reply::{bytes, integer};
use crate::store::redis::key::global_key;
use crate::store::redis::script::compose::{global_window_script, region_grant_script};

/// Upper bound on counters whose unused hits are returned; those of others stay charged until they expire.
const MAX_COUNTERS: usize = 100_000;
/// Upper bound on returns that wait for answers.
const MAX_IN_FLIGHT: usize = 256;
/// Upper bound on taking hits out of the region's counter.
const REGION_TIMEOUT: Duration = Duration::from_millis(500);
/// Shortest time between a return and the end of the window: it must cross an ocean.
const LEAD_US: u64 = 1_000_000;

/// Hits of a counter that may be left when their window ends.
#[derive(Clone, Debug)]
pub(super) struct UnusedHits {
    key: Bytes,
    limit: Limit,
    window: u64,
    /// Epoch of the grant.
    epoch: Time,
    /// Time of the return.
    at: Instant,
}

/// Returns of this process.
#[derive(Debug)]
pub(super) struct Returns {
    global: Arc<Deployment>,
    region: Arc<Deployment>,
    counts: Arc<GrantCounts>,
    schedule: Mutex<Schedule>,
    added: Notify,
}

impl UnusedHits {
    /// The hits of a grant on a request.
    pub(super) fn of(request: &GrantRequest, grant: &RegionGrant) -> Self {
        let (limit, window) = (request.limit, grant.window);
        let end_us = (window + 1) * limit.period_us();
        let width_us = request.clock.offset_hi.abs_diff(request.clock.offset_lo);
        let rest_us = end_us.saturating_sub(request.global_us());
        let wait = Duration::from_micros(rest_us.saturating_sub(LEAD_US.max(2 * width_us)));
        let epoch = Time::from_micros(grant.epoch);
        Self { key: request.key.clone(), limit, window, epoch, at: Instant::now() + wait }
    }
}

impl Returns {
    /// Creates an empty schedule.
    pub(super) fn new(global: Arc<Deployment>, region: Arc<Deployment>, counts: Arc<GrantCounts>) -> Self {
        Self { global, region, counts, schedule: Mutex::default(), added: Notify::new() }
    }

    /// Adds a return; none if there is no room.
    pub(super) fn expect(&self, unused: UnusedHits) {
        self.schedule().add(unused);
        self.added.notify_one();
    }

    /// Makes each return at its time; runs until it is dropped.
    pub(super) async fn run(&self) {
        loop {
            let next = self.schedule().next_at();
            tokio::select! {
                () = self.added.notified() => {}
                () = sleep_until(next.unwrap_or_else(Instant::now).into()), if next.is_some() => {
                    let due = self.schedule().due(Some(Instant::now()));
                    self.return_all(due).await;
                }
            }
        }
    }

    /// Makes all returns now, because the process stops.
    pub(super) async fn return_now(&self) {
        let due = self.schedule().due(None);
        self.return_all(due).await;
    }

    async fn return_all(&self, due: Vec<UnusedHits>) {
        stream::iter(due).for_each_concurrent(MAX_IN_FLIGHT, |unused| self.return_one(unused)).await;
    }

    async fn return_one(&self, unused: UnusedHits) {
        let argument = region_call::encode_return(unused.limit.period_us() / 1000, unused.window);
        let call = KeyScript { script: region_grant_script(), key: &unused.key, argument: &argument, more: &[] };
        let taken = call.run(&self.region, CallKind::Unrecorded, Instant::now() + REGION_TIMEOUT).await;
        let taken = taken.ok().and_then(|taken| integer(&taken.reply)).and_then(|hits| u64::try_from(hits).ok());
        let Some(hits) = taken.filter(|hits| *hits > 0) else { return };
        let key = global_key(&unused.key);
        let purpose = WindowCall::Return(WindowReturn { window: unused.window, hits, epoch: unused.epoch });
        let argument = window_grants::encode(pool(&unused.limit), purpose, None);
        let call = KeyScript { script: global_window_script(), key: &key, argument: &argument, more: &[] };
        let answer = call.run(&self.global, CallKind::Recorded, Instant::now() + GLOBAL_TIMEOUT).await;
        let reply = answer.ok().and_then(|answer| window_grants::decode(bytes(&answer.reply)?).ok());
        let returned = reply.map_or(0, |reply| reply.hits);
        self.counts.add_returned(returned);
        self.counts.add_wasted(hits - returned.min(hits));
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        lock(&self.schedule)
    }
}

/// Returns in the order of their times, one for each counter and window.
#[derive(Debug, Default)]
struct Schedule {
    by_time: BinaryHeap<Reverse<(Instant, Bytes, u64)>>,
    grants: HashMap<(Bytes, u64), LastGrant>,
}

/// Limit and epoch of the last grant to a counter in a window.
#[derive(Clone, Copy, Debug)]
struct LastGrant {
    limit: Limit,
    epoch: Time,
}

impl Schedule {
    fn add(&mut self, unused: UnusedHits) {
        let UnusedHits { key, limit, window, epoch, at } = unused;
        let last = LastGrant { limit, epoch };
        if self.grants.len() < MAX_COUNTERS && self.grants.insert((key.clone(), window), last).is_none() {
            self.by_time.push(Reverse((at, key, window)));
        }
    }

    fn next_at(&self) -> Option<Instant> {
        self.by_time.peek().map(|Reverse((at, ..))| *at)
    }

    /// Removes the returns that are due at `now`; all if it is `None`.
    fn due(&mut self, now: Option<Instant>) -> Vec<UnusedHits> {
        let mut due = Vec::new();
        while self.next_at().is_some_and(|at| now.is_none_or(|now| at <= now)) {
            let Some(Reverse((at, key, window))) = self.by_time.pop() else { break };
            if let Some(LastGrant { limit, epoch }) = self.grants.remove(&(key.clone(), window)) {
                due.push(UnusedHits { key, limit, window, epoch, at });
            }
        }
        due
    }
}
