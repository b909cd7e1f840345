//! gRPC health: the same answer as `/healthcheck`, under the service names that probes use.
//!
//! Envoy uses the empty name, manifests use `ratelimit`, and other clients the full name of the service. Watch streams
//! receive every change. They are closed before the connections, because an open stream would delay the shutdown.

use std::sync::Arc;

use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{self, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_health::server::{HealthReporter, HealthService};

use crate::health::Health;
use crate::pb::rate_limit_service_server::SERVICE_NAME;
use crate::telemetry::service_metrics::ServiceMetrics;

/// gRPC health service, and the reporter of its status.
#[derive(Clone, Debug)]
pub struct GrpcHealth {
    health: Arc<Health>,
    metrics: Arc<ServiceMetrics>,
    reporter: HealthReporter,
}

const NAMES: [&str; 3] = ["", "ratelimit", SERVICE_NAME];

impl GrpcHealth {
    /// Creates a service that reports `health` and counts its calls in `metrics`.
    pub async fn new(health: Arc<Health>, metrics: Arc<ServiceMetrics>) -> Self {
        let this = Self { health, metrics, reporter: HealthReporter::new() };
        this.sync().await;
        this
    }

    /// Sends the current status to all watch streams.
    pub async fn sync(&self) {
        let status = if self.health.is_healthy() { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in NAMES {
            self.reporter.set_service_status(name, status).await;
        }
    }

    /// Sends the status after every change of the store's health; never returns.
    pub async fn follow_store(self) {
        loop {
            self.health.store_changed().await;
            self.sync().await;
        }
    }

    /// Closes the watch streams.
    pub async fn close(mut self) {
        for name in NAMES {
            self.reporter.clear_service_status(name).await;
        }
    }

    /// The service for tonic.
    pub fn server(&self) -> HealthServer<Timed> {
        let service = HealthService::from_health_reporter(self.reporter.clone());
        HealthServer::new(Timed { service, metrics: Arc::clone(&self.metrics) })
    }
}

/// Health service that records the duration of its calls.
#[derive(Debug)]
pub struct Timed {
    service: HealthService,
    metrics: Arc<ServiceMetrics>,
}

#[tonic::async_trait]
impl health_server::Health for Timed {
    type WatchStream = <HealthService as health_server::Health>::WatchStream;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let begun = self.metrics.start_timer();
        let answer = self.service.check(request).await;
        self.metrics.health_checks.observe_since(begun);
        answer
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.service.watch(request).await
    }
}
