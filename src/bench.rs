//! A load on a rate limit service, and what it tells: throughput, latencies, verdicts, errors, what the server uses,
//! and how near its verdicts are to the limits that it states.
//!
//! It speaks `ShouldRateLimit` to any server of it, and knows nothing of what is behind.

pub mod keys;
pub mod template;
pub mod usage;
pub mod connection;
pub mod load;
pub mod exact;
pub mod findings;
