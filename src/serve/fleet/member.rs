//! This replica as a member of the fleet: it publishes its summary, and reads those of all.

use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio::time::{interval, sleep, timeout};

use super::authentication::AuthenticationKey;
use super::redis_client::PUBLISH_INTERVAL;
use super::replica_summary_builder::{ReplicaFacts, ReplicaSummaryBuilder, build_view_of_this_replica};
use super::reset_announcements;
use super::summary::PublishedKeyForm;
use super::view::FleetView;
use super::worker::{FleetWorker, FleetWorkerHandle};
use crate::base::random::random_u64_pair;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::request::Request;
use crate::serve::grpc::service::RateLimitService;
use crate::serve::health::Health;
use crate::serve::quota::service::QuotaService;
use crate::settings::fleet::FleetSettings;
use crate::settings::fleet::TopKeyValueForm;

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
}

impl FleetMembership {
    /// Starts to publish, if there is a Redis. `key` authenticates summaries, if replicas have a common secret.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        service: Arc<RateLimitService>,
        quota: Option<Arc<QuotaService>>,
        health: Arc<Health>,
        settings: &FleetSettings,
        key: Option<AuthenticationKey>,
    ) -> io::Result<Self> {
        let values = match settings.top_values {
            _ if !settings.publishes_keys => PublishedKeyForm::None,
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
        let collector = ReplicaSummaryBuilder::new(service, quota, health, facts);
        let collector = Arc::new(Mutex::new(collector));
        let worker = match &settings.redis {
            Ok(redis) => Ok(FleetWorker::start(redis.clone(), key, Arc::clone(&collector))?),
            Err(reason) => {
                tokio::spawn(record_decision_totals_periodically(Arc::downgrade(&collector)));
                Err(*reason)
            }
        };
        Ok(Self { collector, worker, last: Arc::default() })
    }

    /// Returns the merged summaries of all replicas, at most 5 s old. One caller at a time reads; others wait for it.
    pub async fn get_or_refresh_fleet_view(&self) -> Arc<FleetView> {
        let mut last = self.last.lock().await;
        if let Some((at, view)) = &*last
            && at.elapsed() < VIEW_LIFETIME
        {
            return Arc::clone(view);
        }
        let view = Arc::new(self.read_fleet_view().await);
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
    sleep(VIEW_LIFETIME).await;
    let Some(last) = last.upgrade() else { return };
    let mut last = last.lock().await;
    if last.as_ref().is_some_and(|(at, _)| at.elapsed() >= VIEW_LIFETIME) {
        *last = None;
    }
}

/// Records the decision totals of a replica that publishes nothing every 5 s, until the collector is dropped.
async fn record_decision_totals_periodically(collector: Weak<Mutex<ReplicaSummaryBuilder>>) {
    let mut ticks = interval(PUBLISH_INTERVAL);
    loop {
        ticks.tick().await;
        let Some(collector) = collector.upgrade() else { return };
        let keep = move || lock_ignoring_poison(&collector).record_decision_totals();
        // A panic in it is logged; the next tick tries again.
        let _ = spawn_blocking(keep).await;
    }
}

/// Random id of this process.
fn make_incarnation_id() -> String {
    let (high, low) = random_u64_pair();
    format!("{high:016x}{low:016x}")
}

/// Name of this host; in Kubernetes the name of the pod.
fn read_host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
