//! Where counters live. A store owns the atomicity of a draw; the arithmetic is [`crate::algorithm`]'s.

pub mod memory;
