//! gRPC health: the same answer as `/healthcheck`, under the service names that probes use.
//!
//! Envoy uses the empty name, manifests use `ratelimit`, and other clients the full name of the service. A watch stream
//! receives every change; that of another name receives SERVICE_UNKNOWN and stays open, as the protocol demands. Watch
//! streams are closed before the connections, because an open stream would delay the shutdown.
//! `serve::server::admission` bounds their number.
//!
//! Decides: what gRPC health answers, for unknown names, `Watch` and during the drain (NOT_SERVING).
//! Decides: heartbeats of Envoys.

use std::sync::Arc;

use futures_util::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{self, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::call::SLOT_HOLDER_HEADER;
use super::service::RateLimitService;
use crate::base::pb::rate_limit_service_server::SERVICE_NAME;
use crate::serve::health::Health;
use crate::telemetry::service_metrics::ServiceMetrics;

/// gRPC health service, and the reporter of its status.
#[derive(Clone, Debug)]
pub struct GrpcHealth {
    health: Arc<Health>,
    metrics: Arc<ServiceMetrics>,
    /// Learns of Envoys that hold slots from their health checks.
    service: Arc<RateLimitService>,
    /// Status of all known services; `None` once the watch streams are closed.
    status: Arc<watch::Sender<Option<ServingStatus>>>,
}

const SERVICE_NAMES: [&str; 3] = ["", "ratelimit", SERVICE_NAME];

impl GrpcHealth {
    /// Creates a service that reports `health`, counts its calls, and tells the holders of slots to `service`.
    pub fn new(health: Arc<Health>, service: Arc<RateLimitService>) -> Self {
        let status = Arc::new(watch::Sender::new(Some(serving_status(&health))));
        Self { health, metrics: Arc::clone(&service.decider.metrics), service, status }
    }

    /// Sends the current status to all watch streams if it changed.
    pub fn send_changed_status(&self) {
        self.status.send_if_modified(|sent| {
            let status = sent.map(|_| serving_status(&self.health));
            std::mem::replace(sent, status) != status
        });
    }

    /// Sends the status after every change of the store's health; never returns.
    pub async fn send_status_after_store_changes(self) {
        loop {
            self.health.wait_for_store_health_change().await;
            self.send_changed_status();
        }
    }

    /// Closes the watch streams.
    pub fn close_watch_streams(&self) {
        self.status.send_replace(None);
    }

    /// The service for tonic.
    pub fn build_server(&self) -> HealthServer<Self> {
        HealthServer::new(self.clone())
    }
}

fn serving_status(health: &Health) -> ServingStatus {
    if health.is_healthy() { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn is_known_service(request: &Request<HealthCheckRequest>) -> bool {
    SERVICE_NAMES.contains(&request.get_ref().service.as_str())
}

const fn build_check_response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status as i32 }
}

#[tonic::async_trait]
impl health_server::Health for GrpcHealth {
    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let begun = self.metrics.start_timer();
        if let Some(holder) = request.metadata().get(SLOT_HOLDER_HEADER.as_str()).filter(|name| !name.is_empty()) {
            self.service.decider.store.slot_holders().record_heartbeat(holder.as_bytes(), self.service.clock.now());
        }
        let answer = match is_known_service(&request) {
            true => Ok(Response::new(build_check_response(serving_status(&self.health)))),
            false => Err(Status::not_found("service not registered")),
        };
        self.metrics.health_checks.observe_since(begun);
        answer
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let statuses =
            WatchStreamState { statuses: self.status.subscribe(), is_known: is_known_service(&request), sent: None };
        Ok(Response::new(stream::unfold(statuses, WatchStreamState::next_status).boxed()))
    }
}

/// State of a watch stream.
struct WatchStreamState {
    statuses: watch::Receiver<Option<ServingStatus>>,
    /// False for a name that has no status here.
    is_known: bool,
    /// Status that the client has.
    sent: Option<ServingStatus>,
}

impl WatchStreamState {
    /// Waits until the status differs from the one that the client has; `None` once the streams are closed.
    async fn next_status(mut self) -> Option<(Result<HealthCheckResponse, Status>, Self)> {
        loop {
            let status = (*self.statuses.borrow_and_update())?;
            let status = if self.is_known { status } else { ServingStatus::ServiceUnknown };
            if self.sent.replace(status) != Some(status) {
                return Some((Ok(build_check_response(status)), self));
            }
            self.statuses.changed().await.ok()?;
        }
    }
}
