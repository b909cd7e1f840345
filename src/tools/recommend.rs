//! Recommendation: the smallest limits of a rule that reject at most a given share of its keys in recorded traffic.
//!
//! [`demand::DemandCollector`] sorts the charges of one limit by key; [`recommendation::recommend_limits`] finds
//! the peak use of each key, and replays the charges through the algorithm of the rule to find the smallest limits.

pub mod demand;
pub mod results;
pub mod recommendation;
pub mod results_builder;
