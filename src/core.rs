//! The lower half of tollkeeper, a crate of its own so that it is compiled beside what it does not use, and not again when
//! only the upper half (`lib.rs`) changes: counters and what they need.
//!
//! The modules stand in reading order, and a module uses only modules above it (a test checks this).

pub mod base;
pub mod telemetry;
pub mod limit;
pub mod settings;
pub mod store;
