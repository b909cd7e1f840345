//! Eventually consistent rules: most charges are answered from this process, within a stated bound.
//!
//! Decides: how much an eventual limit may overshoot, and why: the proof.
//!
//! # Terms
//!
//! - *Descriptor*: a set of limits that are charged together. It is eventual if all its limits are; one strict limit
//!   makes it strict.
//! - *Limit* L per *period* P, with *overshoot* O = L x `max_overshoot`, in hits.
//! - *Replica*: a process that shares the limits through one Redis. *Place*: one of R numbers that Redis assigns to
//!   replicas (see [`replicas`](super::replicas)). At no time do two replicas have one place.
//! - *Share*: hits that a replica may admit without a call to Redis. They are never charged in Redis.
//! - *Lease*: hits that were charged in Redis as one charge before any of them is admitted here. Its *life* T is the
//!   time from *sending* that charge until no hit of the lease is admitted any more.
//! - *Lent hits*: hits of leases that replicas may still admit.
//! - *Return*: a refund of the unused hits of a lease that has ended.
//! - *Record*: the leases of a descriptor with their hits, which Redis keeps beside the counters
//!   (`lua/leases.lua`) until no hit of them is admitted and none is returned any more.
//!
//! # Promise
//!
//! In any span of one period, all replicas together admit at most what the strict algorithm could admit, plus O. This
//! excludes what Redis itself loses in a failover or through eviction. A charge that fits neither share nor lease is
//! charged in Redis, as that of a strict rule.
//!
//! # Proof
//!
//! 1. *Shares add at most O, or O/2 for token_bucket.* A replica that has a place admits at most `floor(S / 2R)` hits
//!    of its share in a tumbling period that starts with the first of them; S is O, for token_bucket O/2. A span of one
//!    period overlaps at most two tumbling periods, so a place admits at most S/R in the span, and R places S. A new
//!    owner of a place uses no share of a limit until one period after the claim before its own ended, so a change of
//!    holders adds nothing. A used share is remembered until its period is over; if there is no memory for that, no
//!    share is used.
//! 2. *Each leased hit was charged at most T before it is admitted, and never after.* The strict algorithm admitted the
//!    charge in Redis, so only this shift in time can add hits to a span of one period:
//!    - fixed_window, sliding_window_counter: none. A lease ends with the window, by the time of Redis, in which it was
//!      charged; so each hit is admitted in the window that counts it. Within a window the weight of the previous
//!      window only falls.
//!    - sliding_window_log: none. The log of an eventual limit keeps hits for P + T. Hits admitted in one period were
//!      charged within P + T, and the log holds at most L hits of such a span.
//!    - token_bucket: what refills within T, at most L x T / P. T is chosen so that this is at most O/2.
//! 3. *Sum.* For token_bucket O/2 + O/2, for the others O + 0.
//! 4. *Refunds and resets keep the invariant `used >= admitted + leased`*: `used` is the level in Redis, `admitted` the
//!    level that the strict algorithm has after the charged hits admitted so far, the refunds and the resets (for
//!    token_bucket less what refills within T). So what Redis admits, the strict algorithm admits too.
//!
//!    | step | used | admitted | leased |
//!    |---|---|---|---|
//!    | charge of n, if it fits | + n | + n | |
//!    | lease of n, if it fits | + n | | + n |
//!    | hit of a lease | | + 1 | - 1 |
//!    | return of n | - n | | - n |
//!    | lease that ends without a return | | | - n |
//!    | refund of n | - n, but at least min(used, record) | - n, at least 0 | |
//!    | reset | min(used, record) | 0 | ends the caller's leases |
//!
//!    The record is at least the leased hits: a call names the leases of its own process, so that hits admitted from
//!    these do not count, but those that other replicas admitted from theirs do. So less than requested may be refunded
//!    for up to 1.2 s. A log drops its oldest hits for a refund while hits are leased, as the newest may be leased.
//! 5. *Returns keep steps 1 and 2 true.* A return has no effect from a stated time of Redis on, so a late one cannot
//!    refund hits of another window, nor unless the lease is in the record, so none refunds hits that a reset has
//!    deleted. What it refunds is still in the state:
//!    - Windows: until the window ends, the count contains the hits.
//!    - token_bucket: the unused hits less what may have refilled since the charge, `L x time / P` up to the stated
//!      time.
//!    - sliding_window_log: nothing is returned. A refund removes the newest hits, which may belong to others; older
//!      hits would take their place, and with return after return hits would become older without end. So a lease of a
//!      log is small, and its unused hits stay charged.
//! 6. *Other limits on the same counters* (an override, a reload) use no lease of these, and what was used of a share
//!    counts for them too. Its tumbling period is then no shorter than the period of any limit that uses it, so step 1
//!    holds for each of them, with the largest O.
//! 7. *Losses err on the safe side.* A crash, or a lost reply, wastes the hits of a lease: they stay charged until the
//!    window ends or they have refilled, and recorded until their time is over.
//!
//! A build before 0.2.0 knows no record. While such replicas run beside newer ones, their leases are not recorded, and
//! their refunds and resets do not leave leased hits charged.
//!
//! Replicas do not [hold](crate::limit::hold) hits in place of leases, though that would be one mechanism less: Redis takes
//! 1.4 to 1.9 times as long for it (13 to 23 us of script time against 9 to 12, with eight replicas 21 to 30 against 13
//! to 20), and on many keys most calls lease something.
//!
//! Calls to Redis carry leases as [`LeaseArguments`]; `lua/leases.lua` documents the record of a descriptor's leases. A
//! call names the record only if it concerns leases: it requests or returns one, it has a refund, or it is a reset. All
//! other calls do not read the record.
//!
//! This module reads no clock and sends no call, except for the end of leases in `local_admission`; callers pass the
//! time and the reports of Redis.

pub mod descriptor;
pub(super) mod local_admission;
pub mod table;

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::base::clock::Time;
use crate::limit::algorithm::state::State;
use crate::limit::charge::{ChargeRequest, MAX_COUNT};
use crate::limit::request::Hits;
use crate::store::charge::{OwnedCharge, OwnedCounter, StoreOutcome};

/// Inputs of a local admission.
#[derive(Clone, Copy, Debug)]
pub struct AdmitContext {
    /// Now.
    pub at: Instant,
    /// Approximate time of Redis, for descriptors that Redis has not reported on.
    pub now: Time,
    /// True if the share of this process may be used.
    pub may_use_share: bool,
    /// True if the charge was tried before and waited since: it is not new demand.
    pub is_retry: bool,
}

/// Whether a charge was admitted in this process, or Redis must decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocalDecision {
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

/// Report of Redis on a descriptor: the outcome of one call.
#[derive(Clone, Debug)]
pub struct DescriptorStateReport {
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
    pub recorded: StoredLease,
    /// Time of Redis from which a return has no effect; `None`: nothing is returned.
    pub void_from: Option<Time>,
    /// Hits that may have refilled meanwhile, and are not returned.
    pub refilled: u64,
}

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
