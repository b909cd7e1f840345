//! Replay of recorded traffic through the decider: the base of the tools that predict the effect of rules.
//!
//! [`source`] reads decision logs and other files as [`recorded_request::RecordedRequest`]s. [`merge`] puts the
//! requests of all files in order. [`replayer::Replayer`] decides them, with counters of its own in memory and the
//! recorded time as its clock. Nothing here prints or knows statistics.

pub mod recorded_request;
pub mod field_map;
mod row_reader;
pub mod log_completeness;
pub mod source;
pub(crate) mod redis_clock;
mod record_converter;
pub mod merge;
pub mod replayer;
