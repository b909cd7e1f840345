//! Load tests of a rate limit service: throughput, latencies, verdicts, errors, resource usage, and accuracy of limits.
//!
//! The load speaks `ShouldRateLimit` to any server of that service, and knows nothing of its implementation.

pub mod requests;
pub mod connection;
pub mod measurements;
pub mod load_generator;
pub mod results;
