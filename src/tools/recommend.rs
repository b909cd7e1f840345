//! Recommendation: the smallest limits of a rule that reject at most a given share of its keys in recorded traffic.
//!
//! [`demand::DemandCollector`] sorts the charges of one limit by key; [`recommendation::recommend_limits`] replays each
//! key through the algorithms to find its smallest limit that rejects nothing, and takes the quantile over all keys.
//! [`verifier::Verifier`] replays the traffic again, as the server would decide it under the limits
//! found.

pub mod demand;
pub mod results;
pub mod recommendation;
pub mod verifier;
pub mod results_builder;
