//! What the process tells its operators.
//!
//! One idea: a thing is said once, at the place where it is handled, and never so often that it hides the rest.
//! Nothing below the edge logs; algorithms and matching never do. Text that came from outside is escaped where it is
//! written, so callers pass it as it is.

pub mod begun;
pub mod distinct;
pub mod doors;
pub mod logs;
pub mod metrics;
pub mod log_throttle;
pub mod top;
pub mod traces;
