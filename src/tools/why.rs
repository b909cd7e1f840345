//! Time line of one descriptor, read from decision logs: each decision, and changes that would have let it pass.
//!
//! [`question`] compares recorded descriptors with the asked one, [`time_range`] selects the time, and
//! [`time_line::TimeLine`] collects from logs of any size in bounded memory. [`rejection`] computes from a record
//! alone; [`results`] is the JSON, from which the command makes text.

pub mod question;
pub mod time_range;
pub mod rejection;
pub mod time_line;
pub mod results;
