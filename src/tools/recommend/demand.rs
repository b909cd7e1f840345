//! Demand on one limit: its recorded charges by counter, whether or not they were rejected.

use std::collections::BTreeMap;

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::request::Hits;
use crate::tools::simulate::simulation::TrafficSpan;

/// A recorded charge or refund.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedCharge {
    /// Time that the counter worked at.
    pub at: Time,
    /// Hits; never a peek, which changes no counter.
    pub hits: Hits,
    /// Longest delay that the caller could wait for, in microseconds.
    pub max_delay_us: u64,
}

/// Charges of one counter, in the order of the log.
#[derive(Clone, Debug, Default)]
pub struct ChargeSequence {
    /// Index of the key. A key has several counters if processes count in their own memory.
    pub key: usize,
    /// The charges.
    pub charges: Vec<RecordedCharge>,
}

/// Demand on one limit.
#[derive(Debug, Default)]
pub struct LimitDemand {
    /// Number of keys with a charge or a refund.
    pub keys: usize,
    /// Charges by counter.
    pub sequences: Vec<ChargeSequence>,
    /// The rule.
    pub subject: Option<DemandSubject>,
    /// Totals.
    pub totals: DemandTotals,
    /// First and last time of the limit's charges.
    pub span: Option<TrafficSpan>,
}

/// The limit that is in the rules.
#[derive(Clone, Debug)]
pub struct DemandSubject {
    /// Path of its rule.
    pub rule: String,
    /// File, line and column of the rule.
    pub location: String,
    /// Name; empty if it has none.
    pub name: String,
    /// The limit.
    pub limit: Limit,
    /// Maximum `requests_per_unit` of a sliding_window_log.
    pub log_max: u32,
}

/// Totals of the demand on one limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DemandTotals {
    /// Charges.
    pub requests: u64,
    /// Hits of the charges.
    pub hits: u64,
    /// Peeks, which count nothing.
    pub peeks: u64,
    /// Refunds.
    pub refunds: u64,
    /// Descriptors of the rule's domain that brought a limit of their own, so that the rule did not decide.
    pub overrides: u64,
    /// Charges of keys beyond the bound of keys.
    pub untracked: u64,
    /// Longest delay that a caller could wait for, in microseconds.
    pub max_delay_us: u64,
    /// Processes with counters of their own.
    pub own_counters: u64,
    /// Charges whose request has a known answer.
    pub answered: u64,
    /// Charges of requests that were rejected.
    pub rejected: u64,
    /// Keys with such a charge.
    pub rejected_keys: u64,
    /// Charges that each limit of the rule rejected, by path.
    pub rejected_by: BTreeMap<String, u64>,
    /// Charges of rejected requests that no limit of the rule rejected.
    pub rejected_elsewhere: u64,
}
