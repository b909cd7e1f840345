//! Charges as a store takes them: the inputs of a request besides counters and hits, and the owned form that calls
//! carry.
//!
//! A call outlives the request that started it, so its charges own all that they need of a
//! [`Charge`](crate::limit::counter::Charge). The charges of one call have the same counters in the same order; limits
//! and capacities may differ between them.

use std::time::Instant;

use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::reply_reader::MAX_EXACT;
use crate::limit::algorithm::state::State;
use crate::limit::charge::{ChargeRequest, JointLimit};
use crate::telemetry::traces::SpanRef;

/// Upper bound on the charges of one call; other clients of the server wait while a script runs.
pub const MAX_CHARGES_PER_CALL: usize = 512;

/// Effect of charges on the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeMode {
    /// Hits are charged.
    Commit,
    /// Results are computed, and nothing is charged.
    DryRun,
}

/// Time, deadline and span of charges.
#[derive(Clone, Copy, Debug)]
pub struct ChargeContext<'s> {
    /// Time of the charges by the clock of this process.
    pub now: Time,
    /// Latest time for an answer.
    pub until: Instant,
    /// Parent of the call's span, if the request is sampled.
    pub span_ref: Option<&'s SpanRef>,
}

impl ChargeContext<'_> {
    /// A context of an unsampled request.
    pub const fn new(now: Time, until: Instant) -> Self {
        Self { now, until, span_ref: None }
    }
}

/// Charges of one call, decided in this order.
pub type ChargeBatch = SmallVec<[OwnedCharge; 1]>;

/// Counter of an owned charge: its limit and what identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedCounter {
    /// The limit.
    pub limit: Limit,
    /// The limit is in shadow mode: it never rejects the descriptor.
    pub shadow: bool,
    /// The limit is a quota: its rejection does not keep the other counters from being charged.
    pub quota: bool,
    /// Distinguishes the counter from others of the same path.
    pub tag: u128,
}

/// One charge of a call, in owned form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedCharge {
    /// One counter for each key of the call.
    pub counters: SmallVec<[OwnedCounter; 1]>,
    /// Hits and the longest delay.
    pub request: ChargeRequest,
    /// True if the charge is only computed, and changes no counter.
    pub dry_run: bool,
    /// Time of the counter, 1 us after the epoch or later, from which a refund has no effect; `None`: never.
    pub void_from: Option<Time>,
}

impl OwnedCharge {
    /// A charge of `request` that changes the counters.
    pub const fn new(counters: SmallVec<[OwnedCounter; 1]>, request: ChargeRequest) -> Self {
        Self { counters, request, dry_run: false, void_from: None }
    }

    /// The longest delay in microseconds: as requested, within the bounds of the algorithms.
    pub fn max_delay_us(&self) -> u64 {
        let bound_us = |counter: &OwnedCounter| State::max_exact_delay_us(&counter.limit);
        self.counters.iter().map(bound_us).fold(self.request.max_delay_us.min(MAX_EXACT - 1), u64::min)
    }

    /// Limits of the counters, as [`charge_together`](crate::limit::algorithm::state::charge_together) takes them.
    pub fn limits(&self) -> SmallVec<[JointLimit<'_>; 1]> {
        self.counters.iter().map(OwnedCounter::joint_limit).collect()
    }
}

impl OwnedCounter {
    /// The limit of the counter, as [`charge_together`](crate::limit::algorithm::state::charge_together) takes it.
    pub const fn joint_limit(&self) -> JointLimit<'_> {
        JointLimit { limit: &self.limit, rejects_others: !self.shadow && !self.quota }
    }
}
