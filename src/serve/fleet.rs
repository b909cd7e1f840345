//! The fleet: all replicas that share one Redis, as any of them shows it.
//!
//! Each replica publishes a bounded summary of its statistics every few seconds; any replica reads and merges them when
//! an operator asks. Decisions never wait for it: the work is done on a thread of its own with low priority, over
//! connections of its own. Summaries come from a store that others may write to, so they are untrusted input.

pub mod envelope;
mod exchange;
mod collect;
pub mod findings;
pub mod merge_keys;
pub mod merge_limits;
pub mod report;
mod report_text;
mod resets;
mod sketch;
pub mod summary;
pub mod view;
mod worker;
pub mod membership;
