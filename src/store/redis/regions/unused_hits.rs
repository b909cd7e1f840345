//! Unused hits: what a region was granted and has not used goes back to the global Redis before its window ends.
//!
//! A sliding_window_counter counts the hits of a window in the next one too, used or not. So shortly before the window
//! ends, the process that gave a grant to the counter takes out of it what is left, and returns that. The region's
//! counter gives the hits up first, then the global one takes them back: a process that stops in between wastes them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use tokio::sync::Notify;
use tokio::time::sleep_until;

use super::calls::{BreakerRecording, GLOBAL_REDIS_TIMEOUT, REGION_REDIS_TIMEOUT, SingleKeyScriptCall};
use super::grant_encoding::{self, GlobalWindowAction};
use super::grant_stats::GrantCounts;
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::Limit;
use crate::limit::algorithm::global_window::{GlobalWindowParameters, ReturnedHits};
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::resp::{reply_bytes, reply_integer};
use crate::store::redis::key::global_key;
use crate::store::redis::script::{global_window_script, region_grant_script};

/// Upper bound on counters whose unused hits are returned; those of others stay charged until they expire.
const MAX_COUNTERS: usize = 100_000;
/// Upper bound on returns that wait for answers.
const MAX_RETURNS_IN_FLIGHT: usize = 256;

/// Hits of a counter that may be left when their window ends.
#[derive(Clone, Debug)]
pub(super) struct DueHitReturn {
    pub(super) key: Bytes,
    pub(super) limit: Limit,
    pub(super) window: u64,
    /// Epoch of the grant.
    pub(super) epoch: Time,
    /// Time of the return.
    pub(super) at: Instant,
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
    pub(super) fn schedule_return(&self, unused: DueHitReturn) {
        self.lock_schedule().add(unused);
        self.added.notify_one();
    }

    /// Makes each return at its time; runs until it is dropped.
    pub(super) async fn run(&self) {
        loop {
            let next = self.lock_schedule().next_due_at();
            tokio::select! {
                () = self.added.notified() => {}
                () = sleep_until(next.unwrap_or_else(Instant::now).into()), if next.is_some() => {
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
