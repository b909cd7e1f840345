//! Counts of one limit in a replay.

use std::sync::Arc;

use hdrhistogram::Histogram;

use super::key_tallies::{KeyChange, RejectionRun};
use super::timeline::Timeline;
use crate::base::clock::Time;
use crate::base::sharded::upper_half;
use crate::decide::results::{DescriptorResults, LimitWithResult};
use crate::limit::request::Hits;
use crate::telemetry::hyperloglog::HyperLogLog;

/// Counts of one limit.
#[derive(Debug)]
pub struct LimitTally {
    /// Identity and text of the limit.
    pub label: LimitLabel,
    /// Charges.
    pub requests: u64,
    /// Hits of the charges.
    pub hits: u64,
    /// Charges that the limit rejects; in shadow mode, that it would reject.
    pub rejected: u64,
    /// Peeks.
    pub peeks: u64,
    /// Refunds.
    pub refunds: u64,
    /// Distinct keys.
    pub keys: KeyCounter,
    /// Distinct keys that the limit rejected at least once.
    pub rejected_keys: KeyCounter,
    /// Longest run of rejections of one key.
    pub longest_run: RejectionRun,
    /// Key of the longest run.
    pub longest_run_key: Arc<str>,
    longest_run_path: u128,
    /// Delays of admitted requests, in microseconds; `None` if there were none.
    pub delays: Option<Box<Histogram<u64>>>,
    /// Requests over time; `None` beyond a number of limits.
    pub timeline: Option<Timeline>,
    /// Requests that this limit rejects first, and the rules to compare with admit.
    pub changed: u64,
}

/// Identity and text of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitLabel {
    /// Path of the limit, as in `/rlconfig` and metrics.
    pub path: String,
    /// Path of its rule; that of the domain for limits that came with requests.
    pub rule: String,
    /// Location of the rule; empty for limits that came with requests.
    pub location: String,
    /// Name; empty if it has none.
    pub name: String,
    /// The limit in words; empty for limits that came with requests.
    pub text: String,
    /// Shadow mode.
    pub shadow: bool,
    /// Quota mode.
    pub quota: bool,
    /// Candidate: charged as if it were the only limit of its rule.
    pub candidate: bool,
}

/// Number of distinct keys: exact while keys are tracked, else estimated.
#[derive(Debug, Default)]
pub struct KeyCounter {
    exact: u64,
    sketch: HyperLogLog,
    is_estimate: bool,
}

/// Suffix of the path of limits that came with requests.
const OVERRIDES: &str = "(limits of requests)";

impl LimitLabel {
    /// Label of a limit of a descriptor.
    pub fn new(descriptor: &DescriptorResults<'_, '_>, limit: &LimitWithResult<'_, '_>) -> Self {
        let (path, rule, location, text) = match descriptor.rule() {
            Some(compiled) => {
                let rule = &compiled.rule;
                let location = rule.location.to_string();
                (rule.limit_path(limit.index), rule.path.clone(), location, limit.limit.to_string())
            }
            None => {
                let domain = descriptor.domain().map_or("", |domain| &domain.name);
                let path = format!("{domain} {OVERRIDES}");
                (path.clone(), path, String::new(), String::new())
            }
        };
        let LimitWithResult { shadow, quota, candidate, .. } = *limit;
        Self { path, rule, location, text, name: limit.name.to_owned(), shadow, quota, candidate }
    }
}

impl LimitTally {
    /// Creates the counts of a limit. `timeline_start` is the start of its timeline, if it has one.
    pub fn new(label: LimitLabel, timeline_start: Option<Time>) -> Self {
        Self {
            label,
            requests: 0,
            hits: 0,
            rejected: 0,
            peeks: 0,
            refunds: 0,
            keys: KeyCounter::default(),
            rejected_keys: KeyCounter::default(),
            longest_run: RejectionRun::default(),
            longest_run_key: Arc::from(""),
            longest_run_path: 0,
            delays: None,
            timeline: timeline_start.map(Timeline::new),
            changed: 0,
        }
    }

    /// Counts hits at `at`; returns true for a charge.
    pub fn add(&mut self, hits: Hits, at: Time, limit: &LimitWithResult<'_, '_>) -> bool {
        let count = match hits {
            Hits::Charge(count) => count,
            Hits::Peek => {
                self.peeks += 1;
                return false;
            }
            Hits::Refund(_) => {
                self.refunds += 1;
                return false;
            }
        };
        let rejected = !limit.result.admitted;
        self.requests += 1;
        self.hits = self.hits.saturating_add(count);
        self.rejected += u64::from(rejected);
        if limit.result.delay_us > 0 && !rejected {
            self.add_delay(limit.result.delay_us);
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.add(at, rejected);
        }
        true
    }

    fn add_delay(&mut self, delay_us: u64) {
        if self.delays.is_none() {
            // Two digits are valid, and the size follows the values.
            self.delays = Histogram::new(2).ok().map(Box::new);
        }
        if let Some(delays) = &mut self.delays {
            // The histogram grows, so it has room for every delay.
            let _ = delays.record(delay_us);
        }
    }

    /// Counts the key of a charge. `text` is called if the key has a new longest run.
    pub fn add_key(&mut self, path: u128, change: Option<KeyChange>, rejected: bool, text: impl FnOnce() -> Arc<str>) {
        self.keys.add(path, change.map(|change| change.is_new));
        if rejected {
            self.rejected_keys.add(path, change.map(|change| change.is_first_rejection));
        }
        let Some(KeyChange { run, .. }) = change else { return };
        if run > self.longest_run {
            self.longest_run = run;
            if self.longest_run_path != path {
                (self.longest_run_path, self.longest_run_key) = (path, text());
            }
        }
    }
}

impl KeyCounter {
    /// Adds a key; `is_new` is `None` if that is not known.
    fn add(&mut self, path: u128, is_new: Option<bool>) {
        match is_new {
            Some(false) => {}
            Some(true) => {
                self.exact += 1;
                self.sketch.add(upper_half(path));
            }
            None => {
                self.is_estimate = true;
                self.sketch.add(upper_half(path));
            }
        }
    }

    /// Number of distinct keys.
    pub fn count(&self) -> u64 {
        if self.is_estimate { self.sketch.estimate().max(self.exact) } else { self.exact }
    }

    /// True if the number is an estimate.
    pub const fn is_estimate(&self) -> bool {
        self.is_estimate
    }
}
