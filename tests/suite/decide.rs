//! Decisions, their explanation and their log.

mod decisions;
mod vectors;
mod candidates;
mod times;
mod blocks;
mod failure_policies;
pub(crate) mod decision_log;
mod request_headers;
mod policy_headers;
mod reached_levels;
mod overflow;
mod key_text;
