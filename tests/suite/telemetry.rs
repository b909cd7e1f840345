//! Metrics, traces, log lines, and statistics of descriptors without a rule.

mod logs;
mod metrics;
mod mapper_file;
mod traces;
mod unmatched;
mod statistics;
mod scheduler_lag;
mod http2_refusals;
