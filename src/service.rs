//! Crate of the rooms between `rules` and the command line. Its code is generated while `tools` is checked.
//!
//! The modules stand in reading order, and a module uses only modules above it (a test checks this).

pub use tollkeeper_core::{base, limit, settings, telemetry};
pub use tollkeeper_rules::rules;
pub use tollkeeper_store::store;

pub mod decide;
pub mod serve;
