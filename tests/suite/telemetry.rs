//! Metrics, traces, log lines, and statistics of descriptors without a rule.

mod logs;
mod metrics;
mod mapper_file;
mod traces;
mod unmatched;
mod statistics;
mod http2_refusals;
