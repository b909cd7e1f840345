//! Messages between Redis and the leases of this process.

use std::time::Instant;

use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::limit::algorithm::state::State;
use crate::store::redis::lease_call::RecordedLease;

/// Report of Redis on a descriptor: the outcome of one call.
#[derive(Clone, Debug)]
pub struct CallReport {
    /// Time of sending the call.
    pub sent: Instant,
    /// Time of Redis.
    pub now: Time,
    /// States after all charges, the lease included.
    pub states: SmallVec<[State; 1]>,
    /// Hits charged for a lease; 0: no lease was granted.
    pub leased: u64,
}

/// Lease that was granted, and the terms of its return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTicket {
    /// Number of the lease.
    pub serial: u64,
    /// End of its life.
    pub end: Instant,
    /// The lease as Redis has recorded it.
    pub recorded: RecordedLease,
    /// Time of Redis from which a return has no effect; `None`: nothing is returned.
    pub void_from: Option<Time>,
    /// Hits that may have refilled meanwhile, and are not returned.
    pub refilled: u64,
}
