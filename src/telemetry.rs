//! Logs, metrics and traces.
//!
//! Each event is logged once, where it is handled, and repeated events are throttled. Only the edges of the process
//! log; algorithms and matching never do. Text from outside is escaped where it is written, so callers pass it as it
//! is.

pub mod hyperloglog;
pub mod listener_stats;
pub mod scheduler_lag;
pub mod log_throttle;
pub mod http2_refusals;
pub mod logs;
pub mod metrics;
pub mod recently_created_keys;
pub mod top_keys;
pub mod unmatched_descriptors;
pub mod decision_history;
pub mod service_metrics;
pub mod otlp;
pub mod otlp_metrics;
pub mod traces;
