//! Where counters live.

pub mod guard;
pub mod memory;
pub mod redis;
