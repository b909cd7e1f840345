//! gRPC health: the same answer as `/healthcheck`, under the names that probes ask for.
//!
//! Envoy asks for the empty name, manifests for `ratelimit`, and others for the service's full name. Streams that watch
//! are told of every change, and are closed before the connections are: a stream that stays open would otherwise
//! keep the process from ending.

use std::sync::Arc;

use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};

use crate::health::Health;
use crate::pb::rate_limit_service_server::SERVICE_NAME;

/// gRPC health.
#[derive(Clone, Debug)]
pub struct GrpcHealth {
    health: Arc<Health>,
    reporter: HealthReporter,
}

const NAMES: [&str; 3] = ["", "ratelimit", SERVICE_NAME];

impl GrpcHealth {
    /// Reports `health`.
    pub async fn new(health: Arc<Health>) -> Self {
        let this = Self { health, reporter: HealthReporter::new() };
        this.sync().await;
        this
    }

    /// Tells everybody who watches how things stand now.
    pub async fn sync(&self) {
        let status = if self.health.is_healthy() { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in NAMES {
            self.reporter.set_service_status(name, status).await;
        }
    }

    /// Tells them whenever the store is lost or back, for ever.
    pub async fn follow_store(self) {
        loop {
            self.health.store_changed().await;
            self.sync().await;
        }
    }

    /// Ends the streams that watch.
    pub async fn close(mut self) {
        for name in NAMES {
            self.reporter.clear_service_status(name).await;
        }
    }

    /// The service.
    pub fn server(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }
}
