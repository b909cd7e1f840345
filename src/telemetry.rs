//! What the process tells its operators.
//!
//! One idea: a thing is said once, at the place where it is handled, and never so often that it hides the rest.
//! Nothing below the edge logs; algorithms and matching never do. Text that came from outside is escaped where it is
//! written, so callers pass it as it is.

pub mod recent_keys;
pub mod hyperloglog;
pub mod listener_stats;
pub mod logs;
pub mod metrics;
pub mod log_throttle;
pub mod top_keys;
pub mod traces;
