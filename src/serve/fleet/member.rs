//! This replica as a member of the fleet: a thread publishes its summary and reads those of the others.
//!
//! Decides: the name of a replica (`read_host_name`); how old the view may be (`VIEW_LIFETIME`).
//! Decides: how long Redis may take for the fleet (`VIEW_TIMEOUT`, `PUBLISH_TIMEOUT`, `READ_ALL_SUMMARIES_TIMEOUT`).
//! Decides: by whose clock `/fleet` and `/top` tell times, and when a measured offset counts (`synchronize_clock`).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::authentication::{AuthenticationKey, add_authentication_code, encode_summary};
use super::differences::find_problems;
use super::finding::FirstSeen;
use super::redis_client::{FleetRedisClient, PUBLISH_INTERVAL, RedisTime};
use super::replica_summary_builder::{
    ReplicaFacts, ReplicaSummaryBuilder, build_own_summary, build_view_of_this_replica,
};
use super::reset_announcements;
use super::reset_announcements::ResetReader;
use super::summary::PublishedKeyForm;
use super::view::{FleetView, FleetViewBuilder};
use crate::base::clock::{Clock, Time, shorten_in_tests, to_micros};
use crate::base::random::random_id;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::threads;
use crate::limit::request::Request;
use crate::serve::metrics_collector::MetricsCollector;
use crate::settings::fleet::{FleetRedis, FleetSettings, TopKeyValueForm};
use crate::store::client::redis::error::RedisError;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::service_metrics::ServiceMetrics;

/// Time for which a view of the fleet is cached.
const VIEW_LIFETIME: Duration = Duration::from_secs(5);
/// Upper bound on the wait for a view; the client of `top` waits for ten seconds.
const VIEW_TIMEOUT: Duration = Duration::from_secs(8);

/// Cached view of the fleet, with the time of reading it.
type CachedView = tokio::sync::Mutex<Option<(Instant, Arc<FleetView>)>>;

/// This replica's membership in the fleet: publishes its summary, and reads those of all replicas.
#[derive(Debug)]
pub struct FleetMembership {
    collector: Arc<Mutex<ReplicaSummaryBuilder>>,
    worker: Result<FleetWorkerHandle, &'static str>,
    last: Arc<CachedView>,
    /// Since when replicas differ.
    differences_seen: Mutex<FirstSeen>,
}

impl FleetMembership {
    /// Starts to publish, if there is a Redis. `key` authenticates summaries, if replicas have a common secret.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        collector: MetricsCollector,
        settings: &FleetSettings,
        key: Option<AuthenticationKey>,
    ) -> io::Result<Self> {
        let values = match settings.top_values {
            TopKeyValueForm::Plain => PublishedKeyForm::Plain,
            TopKeyValueForm::Hashed => PublishedKeyForm::Hashed,
            TopKeyValueForm::None => PublishedKeyForm::None,
        };
        let facts = ReplicaFacts {
            incarnation: make_incarnation_id(),
            name: read_host_name(),
            started: Instant::now(),
            values,
        };
        let collector = Arc::new(Mutex::new(ReplicaSummaryBuilder::new(collector, facts)));
        let worker = match &settings.redis {
            Ok(redis) => Ok(FleetWorker::start(redis.clone(), key, Arc::clone(&collector))?),
            Err(reason) => {
                tokio::spawn(keep_totals_periodically(Arc::downgrade(&collector)));
                Err(*reason)
            }
        };
        Ok(Self { collector, worker, last: Arc::default(), differences_seen: Mutex::default() })
    }

    /// Returns the merged summaries of all replicas, with what is wrong, at most 5 s old. One caller at a time reads; others wait for it.
    pub async fn get_or_refresh_fleet_view(&self) -> Arc<FleetView> {
        let mut last = self.last.lock().await;
        if let Some((at, view)) = &*last
            && at.elapsed() < shorten_in_tests(VIEW_LIFETIME)
        {
            return Arc::clone(view);
        }
        let mut view = self.read_fleet_view().await;
        let mut between = find_problems(&view.replicas, view.now);
        lock_ignoring_poison(&self.differences_seen).set_since_and_forget_ended(&mut between, view.now);
        view.findings.extend(between);
        let view = Arc::new(view);
        *last = Some((Instant::now(), Arc::clone(&view)));
        tokio::spawn(drop_outdated_view(Arc::downgrade(&self.last)));
        view
    }

    /// Reads the summaries of all replicas, or only that of this one.
    async fn read_fleet_view(&self) -> FleetView {
        let problem = match &self.worker {
            Ok(worker) => match timeout(VIEW_TIMEOUT, worker.request_fleet_view()).await {
                Ok(Some(view)) => return view,
                Ok(None) => "the thread of the fleet has ended",
                Err(_) => "Redis answers too slowly",
            },
            Err(reason) => reason,
        };
        let collector = Arc::clone(&self.collector);
        let own = move || build_view_of_this_replica(&collector, 0, problem.to_owned());
        match spawn_blocking(own).await {
            Ok(view) => view,
            Err(_) => build_view_of_this_replica(&self.collector, 0, problem.to_owned()),
        }
    }

    /// Tells all replicas that the counters of a request were reset. Returns false if they were not told, `None` if
    /// there is no Redis to tell them through.
    pub async fn announce_counter_reset(&self, request: &Request<'_>) -> Option<bool> {
        let worker = self.worker.as_ref().ok()?;
        Some(worker.announce_counter_reset(reset_announcements::encode_reset(request)).await)
    }

    /// Withdraws the summary of this replica and stops. Takes up to a second.
    pub async fn stop(&self) {
        if let Ok(worker) = &self.worker {
            worker.stop().await;
        }
    }
}

/// Drops the view, which may be large, once it is outdated.
async fn drop_outdated_view(last: Weak<CachedView>) {
    sleep(shorten_in_tests(VIEW_LIFETIME)).await;
    let Some(last) = last.upgrade() else { return };
    let mut last = last.lock().await;
    if last.as_ref().is_some_and(|(at, _)| at.elapsed() >= shorten_in_tests(VIEW_LIFETIME)) {
        *last = None;
    }
}

/// Observes a replica that publishes nothing every 5 s, until the collector is dropped.
async fn keep_totals_periodically(collector: Weak<Mutex<ReplicaSummaryBuilder>>) {
    let mut ticks = interval(shorten_in_tests(PUBLISH_INTERVAL));
    loop {
        ticks.tick().await;
        let Some(collector) = collector.upgrade() else { return };
        let keep = move || lock_ignoring_poison(&collector).record_totals_and_alarm_times();
        // A panic in it is logged; the next tick tries again.
        let _ = spawn_blocking(keep).await;
    }
}

/// Random id of this process.
fn make_incarnation_id() -> String {
    format!("{:032x}", u128::from_be_bytes(random_id()))
}

/// Name of this host; in Kubernetes the name of the pod.
fn read_host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Round trip beyond which a reply does not tell the time.
const MAX_CLOCK_UNCERTAINTY: Duration = Duration::from_millis(250);
/// Upper bound on publishing a summary.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(3);
/// Upper bound on reading all summaries. A page waits for both bounds at most.
const READ_ALL_SUMMARIES_TIMEOUT: Duration = Duration::from_secs(4);
/// Number of summaries after which the index is cleared of replicas whose summaries have expired.
const PUBLICATIONS_PER_CLEANUP: u64 = 12;
/// Upper bound on withdrawing the summary.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Number of requests that may wait.
const MAX_QUEUED_REQUESTS: usize = 16;

/// Reset that other replicas have to be told about.
#[derive(Debug)]
struct ResetAnnouncement {
    message: Vec<u8>,
    is_told: oneshot::Sender<bool>,
}

/// Handle to the thread, which ends when it is dropped.
#[derive(Debug)]
struct FleetWorkerHandle {
    requests: mpsc::Sender<oneshot::Sender<FleetView>>,
    announcements: mpsc::Sender<ResetAnnouncement>,
    /// Apart from the requests: a stop waits for none of them.
    stops: mpsc::Sender<oneshot::Sender<()>>,
}

/// State of the thread.
#[derive(Debug)]
struct FleetWorker {
    exchange: Arc<FleetRedisClient>,
    publications: u64,
    collector: Arc<Mutex<ReplicaSummaryBuilder>>,
    incarnation: String,
    key: Option<AuthenticationKey>,
    /// Time of Redis less that of this process, in microseconds.
    clock_offset_us: i64,
    failure_log: LogThrottle,
}

impl FleetWorkerHandle {
    /// Has the thread read the summaries of all replicas; `None` if the thread has ended.
    async fn request_fleet_view(&self) -> Option<FleetView> {
        let (reply, view) = oneshot::channel();
        self.requests.send(reply).await.ok()?;
        view.await.ok()
    }

    /// Tells all replicas that counters were reset; returns false if Redis failed.
    async fn announce_counter_reset(&self, message: Vec<u8>) -> bool {
        let (is_told, done) = oneshot::channel();
        let sent = self.announcements.send(ResetAnnouncement { message, is_told }).await;
        sent.is_ok() && done.await.unwrap_or(false)
    }

    /// Withdraws the summary of this replica, and ends the thread, whatever it does.
    async fn stop(&self) {
        let (reply, done) = oneshot::channel();
        let stop = async {
            if self.stops.send(reply).await.is_ok() {
                let _ = done.await;
            }
        };
        // If this fails, the summary expires.
        let _ = timeout(STOP_TIMEOUT, stop).await;
    }
}

impl FleetWorker {
    /// Starts the thread.
    fn start(
        redis: FleetRedis,
        key: Option<AuthenticationKey>,
        collector: Arc<Mutex<ReplicaSummaryBuilder>>,
    ) -> io::Result<FleetWorkerHandle> {
        let (sender, requests) = mpsc::channel(MAX_QUEUED_REQUESTS);
        let (announcements, announced) = mpsc::channel(MAX_QUEUED_REQUESTS);
        let (stops, stopped) = mpsc::channel(1);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let incarnation = build_own_summary(&collector, 0).incarnation;
        let run = move || {
            threads::lower_thread_priority();
            runtime.block_on(async move {
                let exchange = Arc::new(FleetRedisClient::start(&redis.deployment, &redis.key_prefix));
                let service = Arc::clone(lock_ignoring_poison(&collector).service());
                tokio::spawn(ResetReader::start(&redis).follow_resets(service, key.clone()));
                // Apart from the worker, so that no reset waits until a thousand summaries are read.
                tokio::spawn(announce_counter_resets(Arc::clone(&exchange), key.clone(), announced));
                let worker = Self {
                    exchange,
                    publications: 0,
                    collector,
                    incarnation,
                    key,
                    clock_offset_us: 0,
                    failure_log: LogThrottle::every(LOG_INTERVAL),
                };
                worker.run_until_stopped(requests, stopped).await;
            });
        };
        thread::Builder::new().name("fleet".to_owned()).spawn(run)?;
        Ok(FleetWorkerHandle { requests: sender, announcements, stops })
    }

    /// Works until it is told to stop or the handle is dropped. A stop cancels what runs: publishing or reading may
    /// take seconds, and the process ends before.
    async fn run_until_stopped(
        self,
        requests: mpsc::Receiver<oneshot::Sender<FleetView>>,
        mut stops: mpsc::Receiver<oneshot::Sender<()>>,
    ) {
        let (exchange, incarnation) = (Arc::clone(&self.exchange), self.incarnation.clone());
        let stopped = tokio::select! {
            biased;
            stopped = stops.recv() => stopped,
            () = self.publish_and_answer_view_requests(requests) => None,
        };
        if let Some(reply) = stopped {
            let _ = timeout(STOP_TIMEOUT, exchange.withdraw_summary(&incarnation)).await;
            let _ = reply.send(());
        }
    }

    async fn publish_and_answer_view_requests(mut self, mut requests: mpsc::Receiver<oneshot::Sender<FleetView>>) {
        let mut ticks = interval(shorten_in_tests(PUBLISH_INTERVAL));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // However often others read, this replica publishes.
                biased;
                _ = ticks.tick() => {
                    self.lock_collector().record_totals_and_alarm_times();
                    let published = timeout(PUBLISH_TIMEOUT, self.publish_summary()).await;
                    match published.unwrap_or(Err(RedisError::Timeout)) {
                        Ok(()) => {}
                        Err(error) => self.log_publish_failure(error),
                    }
                }
                request = requests.recv() => match request {
                    Some(reply) => {
                        let view = self.read_fleet_view().await;
                        let _ = reply.send(view);
                    }
                    None => return,
                },
            }
        }
    }

    async fn publish_summary(&mut self) -> Result<(), RedisError> {
        let now = self.synchronize_clock().await?;
        let is_cleanup = self.publications.is_multiple_of(PUBLICATIONS_PER_CLEANUP);
        let mut summary = build_own_summary(&self.collector, self.clock_offset_us);
        let sealed = encode_summary(&summary, self.key.as_ref()).or_else(|| {
            // The estimate of its size was wrong: the figures without names and keys always fit.
            summary.findings.clear();
            summary.keys.clear();
            summary.minutes.clear();
            summary.names.clear();
            summary.domains.clear();
            summary.busy.clear();
            encode_summary(&summary, self.key.as_ref())
        });
        match sealed {
            Some(sealed) => self.exchange.publish_summary(&self.incarnation, &sealed, now).await?,
            None => return Ok(()),
        }
        if is_cleanup {
            self.exchange.remove_outdated_replicas(now).await?;
        }
        self.publications += 1;
        Ok(())
    }

    /// Asks Redis for its time, and sets the minutes of rejected keys by it.
    async fn synchronize_clock(&mut self) -> Result<Time, RedisError> {
        let RedisTime { redis, uncertainty } = self.exchange.read_redis_time().await?;
        let now = Clock::System.now();
        let at_redis = redis.plus_us(to_micros(uncertainty));
        let (ahead, behind) = (at_redis.since_us(now), now.since_us(at_redis));
        let measured = i64::try_from(ahead).unwrap_or(i64::MAX) - i64::try_from(behind).unwrap_or(i64::MAX);
        if is_better_clock_offset(measured, uncertainty, self.clock_offset_us) {
            self.clock_offset_us = measured;
            self.with_metrics(|metrics| {
                metrics.top_keys.set_redis_clock_offset(measured);
                metrics.busiest_keys.set_redis_clock_offset(measured);
            });
        }
        Ok(redis)
    }

    async fn read_fleet_view(&mut self) -> FleetView {
        match timeout(READ_ALL_SUMMARIES_TIMEOUT, self.read_all_summaries()).await.unwrap_or(Err(RedisError::Timeout)) {
            Ok(view) => view,
            Err(error) => {
                let cause = self.describe_cause(error);
                build_view_of_this_replica(&self.collector, self.clock_offset_us, format!("Redis: {error} ({cause})"))
            }
        }
    }

    async fn read_all_summaries(&mut self) -> Result<FleetView, RedisError> {
        let now = self.synchronize_clock().await?;
        let mut view = FleetViewBuilder::new(build_own_summary(&self.collector, self.clock_offset_us), now);
        let key = self.key.as_ref();
        let beyond =
            self.exchange.read_all_summaries(now, |id, sealed| view.add_published_summary(id, sealed, key)).await?;
        view.record_replicas_beyond_maximum(beyond);
        Ok(view.finish_view(None))
    }

    fn with_metrics(&self, with: impl FnOnce(&ServiceMetrics)) {
        with(self.lock_collector().metrics());
    }

    fn lock_collector(&self) -> MutexGuard<'_, ReplicaSummaryBuilder> {
        lock_ignoring_poison(&self.collector)
    }

    /// Cause of an error, free of secrets.
    fn describe_cause(&self, error: RedisError) -> String {
        match error {
            // The bound for decisions is another.
            RedisError::Timeout => "Redis is slow, frozen or unreachable".to_owned(),
            _ => self.exchange.configuration_error().unwrap_or_else(|| error.advice().to_owned()),
        }
    }

    fn log_publish_failure(&self, error: RedisError) {
        if let Some(suppressed) = self.failure_log.allow(Clock::System.now()) {
            let cause = self.describe_cause(error);
            tracing::warn!(%error, cause, suppressed, "cannot publish to the fleet: /fleet shows this replica only");
        }
    }
}

/// Returns true if a measured clock offset is to replace the last one: it is exact, or it refutes the last one, after
/// a clock jumped.
pub const fn is_better_clock_offset(measured_us: i64, uncertainty: Duration, last_us: i64) -> bool {
    let uncertainty_us = uncertainty.as_micros();
    uncertainty_us <= MAX_CLOCK_UNCERTAINTY.as_micros() || measured_us.abs_diff(last_us) as u128 > uncertainty_us
}

/// Tells other replicas about resets, one after the other, until the handle is dropped.
async fn announce_counter_resets(
    exchange: Arc<FleetRedisClient>,
    key: Option<AuthenticationKey>,
    mut announced: mpsc::Receiver<ResetAnnouncement>,
) {
    while let Some(ResetAnnouncement { message, is_told }) = announced.recv().await {
        let told = match add_authentication_code(&message, key.as_ref()) {
            Some(sealed) => exchange.announce_counter_reset(&sealed).await.is_ok(),
            None => false,
        };
        let _ = is_told.send(told);
    }
}
