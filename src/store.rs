//! Where counters live.

pub mod memory;
pub mod redis;
