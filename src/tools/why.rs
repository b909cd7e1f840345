//! Decisions on one descriptor, read from decision logs, and changes that would have let it pass.
//!
//! [`asked_descriptor`] compares recorded descriptors with the asked one, [`time_range`] selects the time, and
//! [`descriptor_history::DescriptorHistory`] collects from logs of any size in bounded memory. [`rejection`] computes
//! from a record alone; [`results`] is the JSON, from which the command makes text.

pub mod asked_descriptor;
pub mod time_range;
pub mod rejection;
pub mod descriptor_history;
pub mod results;
