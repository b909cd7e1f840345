//! Lowest crate of tollkeeper: what counters, rules and the server need.
//!
//! The modules stand in reading order, and a module uses only modules above it (a test checks this).

pub mod base;
pub mod telemetry;
pub mod limit;
pub mod settings;
