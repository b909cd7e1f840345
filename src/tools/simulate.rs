//! Simulation: the effect that rules would have had on recorded traffic.
//!
//! [`simulation::Simulation`] replays each request under the new rules and, to compare, under the old ones.
//! [`results::SimulationResults`] has the figures, from which the command makes text, JSON and an HTML page. Memory is
//! bounded whatever the traffic is: keys are counted exactly up to a bound and estimated above it, and the keys of the
//! lists come from sketches.

pub mod tally;
pub mod simulation;
pub mod results;
pub mod warnings;
pub mod fail_condition;
