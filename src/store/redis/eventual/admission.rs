//! Decision of a charge on an eventual descriptor: admitted in this process, or left to Redis.

use std::time::Instant;

use crate::base::clock::Time;
use crate::store::outcome::StoreOutcome;

/// Inputs of a local admission.
#[derive(Clone, Copy, Debug)]
pub struct AdmitContext {
    /// Now.
    pub at: Instant,
    /// Approximate time of Redis, for descriptors that Redis has not reported on.
    pub now: Time,
    /// True if the share of this process may be used.
    pub may_share: bool,
    /// True if the charge was tried before and waited since: it is not new demand.
    pub is_retry: bool,
}

/// Decision of a charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Admitted in this process.
    Local {
        /// Results by the last report of Redis.
        outcome: StoreOutcome,
        /// True if it is time to request the next lease.
        lease_ahead: bool,
    },
    /// Redis must decide.
    CallRedis,
}
