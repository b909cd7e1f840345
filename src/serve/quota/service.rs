//! The service: its streams, and its clock.
//!
//! Decides: a tollkeeper that stood still: which silence of proxies counts then.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};

use super::divisions::Divisions;
use super::room::BucketRoom;
use super::stats::{Count, QuotaStats};
use super::stream_end::StreamEndSignal;
use super::stream_handle::StreamHandle;
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::serve::grpc::service::RateLimitService;

/// Interval at which what became free is looked for.
const TICK: Duration = Duration::from_millis(100);
/// Gap between two ticks after which the process counts as having stood still, in microseconds.
const STANDSTILL_US: u64 = 750_000;

/// The quota service of this process.
#[derive(Debug)]
pub struct QuotaService {
    /// The service that decides, with its rules and its clock.
    pub service: Arc<RateLimitService>,
    pub(super) room: BucketRoom,
    pub(super) divisions: Divisions,
    streams: Mutex<HashMap<u64, Arc<StreamHandle>>>,
    next_stream: AtomicU64,
    /// Counts since the start.
    pub stats: QuotaStats,
    /// Time of the last tick, and end of the last standstill, in microseconds.
    last_tick_us: AtomicU64,
    stood_still_from_us: AtomicU64,
    resumed_us: AtomicU64,
    /// Set when streams must end.
    pub(super) ending: StreamEndSignal,
}

impl QuotaService {
    /// Starts the service with room for `max_buckets`, and a task that gives out what becomes free, until the service is
    /// dropped. Call within a tokio runtime.
    pub fn start(service: Arc<RateLimitService>, max_buckets: usize) -> Arc<Self> {
        let now_us = service.clock.now().as_micros();
        let quota = Arc::new(Self {
            divisions: Divisions::new(Arc::clone(&service)),
            service,
            room: BucketRoom::new(max_buckets),
            streams: Mutex::default(),
            next_stream: AtomicU64::new(1),
            stats: QuotaStats::default(),
            last_tick_us: AtomicU64::new(now_us),
            stood_still_from_us: AtomicU64::new(0),
            resumed_us: AtomicU64::new(0),
            ending: StreamEndSignal::default(),
        });
        // Tasks of their own: a slow store is no standstill.
        tokio::spawn(Self::watch_standstills(Arc::downgrade(&quota)));
        tokio::spawn(Self::give_out_what_becomes_free(Arc::downgrade(&quota)));
        quota
    }

    /// Ends all streams; assignments stay at the proxies.
    pub fn end_streams(&self) {
        self.ending.set();
    }

    async fn give_out_what_becomes_free(quota: Weak<Self>) {
        let mut ticks = start_ticks();
        loop {
            ticks.tick().await;
            let Some(quota) = quota.upgrade() else { return };
            quota.divisions.settle_and_wake_due_keys(quota.service.clock.now()).await;
        }
    }

    async fn watch_standstills(quota: Weak<Self>) {
        let mut ticks = start_ticks();
        loop {
            ticks.tick().await;
            let Some(quota) = quota.upgrade() else { return };
            quota.record_tick(quota.service.clock.now());
        }
    }

    fn record_tick(&self, now: Time) {
        let last = self.last_tick_us.swap(now.as_micros(), Ordering::Relaxed);
        if now.as_micros().saturating_sub(last) > STANDSTILL_US {
            self.stood_still_from_us.store(last, Ordering::Relaxed);
            self.resumed_us.store(now.as_micros(), Ordering::Relaxed);
        }
    }

    /// Time that a report counts as received at: the beginning of a standstill that ends now, because the report may
    /// have waited since then.
    pub(super) fn earliest_arrival(&self, now: Time) -> Time {
        let last = self.last_tick_us.load(Ordering::Relaxed);
        if now.as_micros().saturating_sub(last) > STANDSTILL_US {
            return Time::from_micros(last);
        }
        let resumed = self.resumed_us.load(Ordering::Relaxed);
        match now.as_micros().saturating_sub(resumed) < STANDSTILL_US {
            true => Time::from_micros(self.stood_still_from_us.load(Ordering::Relaxed)),
            false => now,
        }
    }

    /// Opens a stream of the proxy at `peer`; `keeps_ratio` says whether it keeps its ratio of tokens.
    pub fn open_stream(&self, peer: Option<SocketAddr>, keeps_ratio: bool) -> Arc<StreamHandle> {
        let id = self.next_stream.fetch_add(1, Ordering::Relaxed);
        let opened = self.service.clock.now();
        let handle = Arc::new(StreamHandle::new(id, peer, keeps_ratio, opened));
        lock_ignoring_poison(&self.streams).insert(id, Arc::clone(&handle));
        handle
    }

    pub(super) fn close_stream(&self, handle: &StreamHandle) {
        lock_ignoring_poison(&self.streams).remove(&handle.id);
    }

    pub(super) fn stream_handles(&self) -> Vec<Arc<StreamHandle>> {
        lock_ignoring_poison(&self.streams).values().map(Arc::clone).collect()
    }

    /// Requests to the store that failed.
    pub fn store_failures(&self) -> &Count {
        &self.divisions.store_failures
    }

    /// Number of keys whose limits are divided.
    pub fn key_count(&self) -> usize {
        self.divisions.count()
    }

    /// Number of buckets of all streams.
    pub fn bucket_count(&self) -> usize {
        self.room.bucket_count()
    }

    /// Number of open streams.
    pub fn stream_count(&self) -> usize {
        lock_ignoring_poison(&self.streams).len()
    }
}

fn start_ticks() -> Interval {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
