//! Counters, gauges and histograms, and their encodings for Prometheus and statsd.

pub mod family;
pub(crate) mod striped_counters;
pub mod histogram;
pub mod limit_registry;
pub mod limit_stats;
pub mod mapper;
pub mod prometheus;
pub mod statsd;
