//! Collects all metrics of the process.
//!
//! Prometheus, statsd and `/stats` get the same families, built one at a time. Each part of the process keeps its own
//! statistics; the collector reads them and keeps none. Collecting takes a few locks, each for a moment.

mod limits;
mod listeners;
mod process;
mod rules;
mod service;
mod store;

use std::sync::Arc;

use crate::serve::grpc::service::Service;
use crate::serve::health::Health;
use crate::telemetry::listener_stats::ServerStats;
use crate::telemetry::metrics::family::Family;

/// Collects all metrics of the process.
#[derive(Clone, Debug)]
pub struct MetricsCollector {
    /// Service, with its rules, store and tracer.
    pub service: Arc<Service>,
    /// Health of the process.
    pub health: Arc<Health>,
    /// Counters of the listeners.
    pub listeners: Arc<ServerStats>,
    /// True if metrics of limits have a `path` label.
    pub path_label: bool,
}

impl MetricsCollector {
    /// Passes each family to `emit`, once.
    pub fn collect(&self, emit: &mut dyn FnMut(Family)) {
        limits::collect(&self.service, self.path_label, emit);
        service::collect(&self.service, emit);
        store::collect(&self.service.decider, &self.health, emit);
        rules::collect(&self.service.rules, emit);
        process::collect_build(&self.health, emit);
        listeners::collect(&self.listeners, emit);
        process::collect(emit);
    }
}
