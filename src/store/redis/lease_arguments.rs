//! Leases as calls to Redis carry them: `lua/leases.lua` documents the record of a descriptor's leases.
//!
//! A call names the record only if it concerns leases: it requests or returns one, it has a refund, or it is a reset.
//! All other calls do not read the record.

use bytes::Bytes;
use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::limit::charge::{ChargeRequest, MAX_COUNT};
use crate::limit::request::Hits;
use crate::store::charge::{OwnedCharge, OwnedCounter};

/// Lease as the record has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredLease {
    /// Time of Redis at which the record of the lease ends.
    pub end: Time,
    /// Hits of the lease.
    pub hits: u64,
}

/// Lease of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnLease {
    /// The lease.
    pub lease: StoredLease,
    /// Hits of it that will not be admitted any more.
    pub done: u64,
}

/// Purpose of a call that concerns leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeasePurpose {
    /// Charges and refunds; with `requested` hits, the last charge is that of a lease.
    Charge {
        /// Hits of the lease; 0: no lease.
        requested: u64,
        /// Time for which that lease is recorded, in microseconds.
        kept_us: u64,
    },
    /// Return of the only lease of the call.
    Return,
    /// Reset of all counters of the call, which ends its leases.
    Reset,
}

/// Arguments of a call that concern leases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseArguments {
    /// Purpose.
    pub purpose: LeasePurpose,
    /// Leases of this process.
    pub own: SmallVec<[OwnLease; 2]>,
}

impl LeaseArguments {
    /// Encodes the second argument of a script.
    pub fn encode(&self) -> Bytes {
        let [purpose, requested, kept_us] = match self.purpose {
            LeasePurpose::Charge { requested, kept_us } => [0, requested, kept_us],
            LeasePurpose::Return => [1, 0, 0],
            LeasePurpose::Reset => [2, 0, 0],
        };
        let own = self.own.iter().flat_map(|own| [own.lease.end.as_micros(), own.lease.hits, own.done]);
        [purpose, requested, kept_us].into_iter().chain(own).flat_map(u64::to_le_bytes).collect()
    }
}

/// Returns the charge of a reset: a refund of all hits.
pub fn build_full_refund(counters: SmallVec<[OwnedCounter; 1]>) -> OwnedCharge {
    OwnedCharge::new(counters, ChargeRequest::new(Hits::Refund(MAX_COUNT), 0))
}
