//! Thread that publishes the summary of this replica and reads those of the others.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::collect::{SummaryCollector, collect, own_view};
use super::envelope::{SummaryKey, authenticated, seal};
use super::exchange::{Exchange, PUBLISH_INTERVAL, RedisTime};
use super::resets::ResetReader;
use super::view::{FleetView, ViewBuilder};
use crate::clock::{Clock, Time, micros};
use crate::redis::error::RedisError;
use crate::settings::fleet::FleetRedis;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::service_metrics::{HashSeed, ServiceMetrics};
use crate::thread_priority;

/// Round trip beyond which a reply does not tell the time.
const MAX_UNCERTAINTY: Duration = Duration::from_millis(250);
/// Upper bound on withdrawing the summary.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Number of requests that may wait.
const MAX_REQUESTS: usize = 16;

/// WorkerRequest to the worker.
#[derive(Debug)]
enum WorkerRequest {
    Announce(Vec<u8>, oneshot::Sender<bool>),
    Read(oneshot::Sender<FleetView>),
    Stop(oneshot::Sender<()>),
}

/// Handle to the thread, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct WorkerHandle(mpsc::Sender<WorkerRequest>);

/// State of the thread.
#[derive(Debug)]
pub(super) struct Worker {
    exchange: Exchange,
    collector: Arc<Mutex<SummaryCollector>>,
    incarnation: String,
    key: Option<SummaryKey>,
    /// Time of Redis less that of this process, in microseconds.
    clock_offset_us: i64,
    has_seed: bool,
    failure_log: LogThrottle,
}

impl WorkerHandle {
    /// Reads the summaries of all replicas; `None` if the thread has ended.
    pub(super) async fn read(&self) -> Option<FleetView> {
        let (reply, view) = oneshot::channel();
        self.0.send(WorkerRequest::Read(reply)).await.ok()?;
        view.await.ok()
    }

    /// Tells all replicas that counters were reset; returns false if Redis failed.
    pub(super) async fn announce_reset(&self, message: Vec<u8>) -> bool {
        let (reply, done) = oneshot::channel();
        let sent = self.0.send(WorkerRequest::Announce(message, reply)).await;
        sent.is_ok() && done.await.unwrap_or(false)
    }

    /// Withdraws the summary of this replica, and ends the thread.
    pub(super) async fn stop(&self) {
        let (reply, done) = oneshot::channel();
        if self.0.send(WorkerRequest::Stop(reply)).await.is_ok() {
            // If this fails, the summary expires.
            let _ = timeout(STOP_TIMEOUT, done).await;
        }
    }
}

impl Worker {
    /// Starts the thread.
    pub(super) fn start(
        redis: FleetRedis,
        key: Option<SummaryKey>,
        collector: Arc<Mutex<SummaryCollector>>,
    ) -> io::Result<WorkerHandle> {
        let (sender, requests) = mpsc::channel(MAX_REQUESTS);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let incarnation = collect(&collector, 0).incarnation;
        let run = move || {
            thread_priority::lower();
            runtime.block_on(async move {
                let exchange = Exchange::start(&redis.deployment, &redis.key_prefix);
                let service = Arc::clone(lock(&collector).service());
                tokio::spawn(ResetReader::start(&redis).follow(service, key.clone()));
                let failure_log = LogThrottle::every(LOG_INTERVAL);
                let worker =
                    Self { exchange, collector, incarnation, key, clock_offset_us: 0, has_seed: false, failure_log };
                worker.run(requests).await;
            });
        };
        thread::Builder::new().name("fleet".to_owned()).spawn(run)?;
        Ok(WorkerHandle(sender))
    }

    async fn run(mut self, mut requests: mpsc::Receiver<WorkerRequest>) {
        let mut ticks = interval(PUBLISH_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    self.collector().keep_totals();
                    if let Err(error) = self.publish().await {
                        self.log_failure(error);
                    }
                }
                request = requests.recv() => match request {
                    Some(WorkerRequest::Read(reply)) => {
                        let view = self.read().await;
                        let _ = reply.send(view);
                    }
                    Some(WorkerRequest::Announce(message, reply)) => {
                        let _ = reply.send(self.announce(&message).await);
                    }
                    Some(WorkerRequest::Stop(reply)) => {
                        let _ = timeout(STOP_TIMEOUT, self.exchange.withdraw(&self.incarnation)).await;
                        let _ = reply.send(());
                        return;
                    }
                    None => return,
                },
            }
        }
    }

    async fn publish(&mut self) -> Result<(), RedisError> {
        let now = self.synchronize().await?;
        if !self.has_seed {
            let random = RandomState::new();
            let proposal = HashSeed(random.hash_one(0_u8), random.hash_one(1_u8));
            let seed = self.exchange.seed(proposal).await?;
            self.metrics(|metrics| metrics.set_distinct_key_seed(seed));
            self.has_seed = true;
        }
        let mut summary = collect(&self.collector, self.clock_offset_us);
        let sealed = seal(&summary, self.key.as_ref()).or_else(|| {
            // The estimate of its size was wrong: the figures without names and keys always fit.
            summary.limits_left_out += summary.limits.len();
            summary.limits.clear();
            summary.keys.clear();
            summary.minutes.clear();
            summary.names.clear();
            seal(&summary, self.key.as_ref())
        });
        match sealed {
            Some(sealed) => self.exchange.publish(&self.incarnation, &sealed, now).await,
            None => Ok(()),
        }
    }

    async fn announce(&self, message: &[u8]) -> bool {
        match authenticated(message, self.key.as_ref()) {
            Some(sealed) => self.exchange.announce_reset(&sealed).await.is_ok(),
            None => false,
        }
    }

    /// Asks Redis for its time, and sets the minutes of rejected keys by it.
    async fn synchronize(&mut self) -> Result<Time, RedisError> {
        let RedisTime { redis, uncertainty } = self.exchange.time().await?;
        let now = Clock::System.now();
        if uncertainty <= MAX_UNCERTAINTY {
            let at_redis = redis.plus_us(micros(uncertainty));
            let (ahead, behind) = (at_redis.since_us(now), now.since_us(at_redis));
            self.clock_offset_us = i64::try_from(ahead).unwrap_or(i64::MAX) - i64::try_from(behind).unwrap_or(i64::MAX);
            self.metrics(|metrics| metrics.top_keys.set_clock_offset(self.clock_offset_us));
        }
        Ok(redis)
    }

    async fn read(&mut self) -> FleetView {
        match self.read_all().await {
            Ok(view) => view,
            Err(error) => {
                let cause = self.exchange.misconfigured().unwrap_or_else(|| error.advice().to_owned());
                own_view(&self.collector, self.clock_offset_us, format!("Redis: {error} ({cause})"))
            }
        }
    }

    async fn read_all(&mut self) -> Result<FleetView, RedisError> {
        let now = self.synchronize().await?;
        let mut view = ViewBuilder::new(collect(&self.collector, self.clock_offset_us), now);
        let key = self.key.as_ref();
        let beyond = self.exchange.read_all(now, |id, sealed| view.add(id, sealed, key)).await?;
        view.left_out_beyond_maximum(beyond);
        Ok(view.finish(None))
    }

    fn metrics(&self, with: impl FnOnce(&ServiceMetrics)) {
        with(self.collector().metrics());
    }

    fn collector(&self) -> MutexGuard<'_, SummaryCollector> {
        lock(&self.collector)
    }

    fn log_failure(&self, error: RedisError) {
        if let Some(suppressed) = self.failure_log.allow(Clock::System.now()) {
            let cause = self.exchange.misconfigured().unwrap_or_else(|| error.advice().to_owned());
            tracing::warn!(%error, cause, suppressed, "cannot publish to the fleet: /fleet shows this replica only");
        }
    }
}

fn lock(collector: &Mutex<SummaryCollector>) -> MutexGuard<'_, SummaryCollector> {
    collector.lock().unwrap_or_else(PoisonError::into_inner)
}
