//! The rate limit quota service (RLQS): proxies decide by themselves, from assignments, and report what they did.
//!
//! A *stream* is one call of `StreamRateLimitQuotas`: of one proxy, for one domain. A *bucket* is what the proxy counts
//! for itself, named by pairs of keys and values. `limit::division` divides the limits of each key among the streams
//! that report a bucket of it; `divisions` keeps one division for each key, and its hold in the store; `stream` reads
//! reports and sends assignments, in a task of its own for each stream, so that a large report delays no decision.
//!
//! Everything has a bound: buckets of a stream, pairs and bytes of an id, responses that wait for a proxy that does not
//! read (one).

pub mod stats;
mod messages;
mod divisions;
mod bucket;
pub mod page;
mod stream;
pub mod method;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use self::divisions::Divisions;
use self::stats::QuotaStats;
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::hold::HolderId;
use crate::serve::grpc::service::RateLimitService;
use crate::settings::grpc::QuotaSettings;

/// Interval at which what became free is looked for.
const TICK: Duration = Duration::from_millis(100);
/// Gap between two ticks after which the process counts as having stood still, in microseconds.
const STANDSTILL_US: u64 = 750_000;

/// Maximum size of a report in bytes: 100 000 buckets with long ids. A report that is refused would cut the proxy off
/// from all its quotas.
const MAX_REPORT_BYTES: usize = 64 << 20;

/// The quota service of this process.
#[derive(Debug)]
pub struct QuotaService {
    service: Arc<RateLimitService>,
    bounds: QuotaSettings,
    divisions: Divisions,
    /// Identity of this replica among the holders of counters.
    holder: HolderId,
    streams: Mutex<HashMap<u64, Arc<StreamHandle>>>,
    next_stream: AtomicU64,
    /// Counts since the start.
    pub stats: QuotaStats,
    /// Time of the last tick, and end of the last standstill, in microseconds.
    last_tick_us: AtomicU64,
    stood_still_from_us: AtomicU64,
    resumed_us: AtomicU64,
    /// Turns true when streams must end.
    ending: watch::Sender<bool>,
}

/// A stream, as others see it.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    id: u64,
    peer: String,
    /// The proxy keeps the ratio of tokens when its bucket changes.
    keeps_ratio: bool,
    opened: Time,
    state: Mutex<StreamState>,
    wake: Notify,
}

/// What others change of a stream, or see of it.
#[derive(Debug, Default)]
struct StreamState {
    domain: String,
    /// Indices of buckets whose assignment may change.
    due: BTreeSet<u32>,
    buckets: usize,
    reports: u64,
    last_report: Time,
}

impl QuotaService {
    /// Creates the service; [`Self::run`] must be spawned.
    pub fn new(service: Arc<RateLimitService>, bounds: QuotaSettings) -> Arc<Self> {
        let now_us = service.clock.now().as_micros();
        Arc::new(Self {
            divisions: Divisions::default(),
            holder: HolderId::random(),
            service,
            bounds,
            streams: Mutex::default(),
            next_stream: AtomicU64::new(1),
            stats: QuotaStats::default(),
            last_tick_us: AtomicU64::new(now_us),
            stood_still_from_us: AtomicU64::new(0),
            resumed_us: AtomicU64::new(0),
            ending: watch::Sender::new(false),
        })
    }

    /// Ends all streams; assignments stay at the proxies.
    pub fn end_streams(&self) {
        self.ending.send_replace(true);
    }

    /// Gives out what becomes free; never returns.
    pub async fn run(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let now = self.service.clock.now();
            self.record_tick(now);
            self.divisions.wake_due(&self, now).await;
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
    fn received_at(&self, now: Time) -> Time {
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

    fn open_stream(&self, peer: String, keeps_ratio: bool) -> Arc<StreamHandle> {
        let id = self.next_stream.fetch_add(1, Ordering::Relaxed);
        let opened = self.service.clock.now();
        let state = Mutex::default();
        let handle = Arc::new(StreamHandle { id, peer, keeps_ratio, opened, state, wake: Notify::new() });
        lock_ignoring_poison(&self.streams).insert(id, Arc::clone(&handle));
        handle
    }

    fn close_stream(&self, handle: &StreamHandle) {
        lock_ignoring_poison(&self.streams).remove(&handle.id);
    }

    fn handles(&self) -> Vec<Arc<StreamHandle>> {
        lock_ignoring_poison(&self.streams).values().map(Arc::clone).collect()
    }

    /// Number of keys whose limits are divided.
    pub fn key_count(&self) -> usize {
        self.divisions.count()
    }

    /// Number of open streams.
    pub fn stream_count(&self) -> usize {
        lock_ignoring_poison(&self.streams).len()
    }
}

impl StreamHandle {
    fn lock(&self) -> std::sync::MutexGuard<'_, StreamState> {
        lock_ignoring_poison(&self.state)
    }

    /// Makes the stream look at a bucket.
    fn mark_due(&self, bucket: u32) {
        self.lock().due.insert(bucket);
        self.wake.notify_one();
    }
}
