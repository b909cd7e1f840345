//! The fleet: all replicas that share one Redis, as any of them shows it.
//!
//! Each replica publishes a bounded summary of its statistics every few seconds; any replica reads and merges them when
//! an operator asks. Decisions never wait for it: the work is done on a thread of its own with low priority, over
//! connections of its own. Summaries come from a store that others may write to, so they are untrusted input.

pub mod finding;
pub mod summary;
pub mod authentication;
pub mod redis_client;
pub mod merge_keys;
pub mod view;
pub mod rejection_rise;
pub mod alarms;
pub mod differences;
pub mod replica_summary_builder;
mod reset_announcements;
pub mod member;
pub mod report;
