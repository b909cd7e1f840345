//! Small pieces that know nothing of rate limits: time, threads, text, and the protobuf messages of Envoy's APIs.
//!
//! Every other module may use them; they use nothing of the crate but each other.

pub mod clock;
pub mod go_syntax;
pub mod thread_priority;
pub mod thread_time;
pub mod coalesce;
pub mod task_budget;
pub mod sharded;
pub mod identity_hasher;
pub mod pb;
