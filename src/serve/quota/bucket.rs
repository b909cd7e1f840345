//! Buckets of one stream: their ids, what limits them, and when they were used; warnings of those that get no quota.
//!
//! Decides: warnings of buckets that get no quota.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;

use super::messages::UnassignableReason;
use super::room::count_places_of_id;
use crate::base::clock::{Clock, Time};
use crate::telemetry::log_throttle::LogThrottle;

/// Interval between log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Buckets of one stream. A bucket keeps its index until it is removed.
#[derive(Debug, Default)]
pub(super) struct Buckets {
    by_id: HashMap<Bytes, u32>,
    slots: Vec<Option<Bucket>>,
    free: Vec<u32>,
    places: usize,
}

/// A bucket.
#[derive(Debug)]
pub(super) struct Bucket {
    /// Id in its one form, encoded.
    pub(super) id: Bytes,
    /// What limits it.
    pub(super) kind: BucketKind,
    /// Number of the rules that it was matched by; 0: none yet.
    pub(super) rules_version: u64,
    /// What limits it may change without a change of the rules.
    pub(super) may_change: bool,
    /// Time of the last report with requests.
    pub(super) used: Time,
    /// Time of the last report.
    pub(super) reported: Time,
}

/// What limits a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BucketKind {
    /// Nothing: everything passes. Has the end of the assignment that says so.
    Open { ends: Time, is_matched: bool },
    /// The division with this key.
    Divided { key: u128 },
    /// A limit that cannot be divided.
    Refused,
}

impl Buckets {
    /// Number of buckets.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Places that the buckets of this stream take.
    pub(super) const fn places(&self) -> usize {
        self.places
    }

    /// Index of a bucket.
    pub(super) fn find(&self, id: &[u8]) -> Option<u32> {
        self.by_id.get(id).copied()
    }

    /// The bucket at an index.
    pub(super) fn get(&self, index: u32) -> Option<&Bucket> {
        self.slots.get(index as usize)?.as_ref()
    }

    /// The bucket at an index.
    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Bucket> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    /// Adds a bucket; returns its index.
    pub(super) fn add(&mut self, id: Bytes, now: Time) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let kind = BucketKind::Open { ends: Time::default(), is_matched: false };
        self.places += count_places_of_id(&id);
        self.by_id.insert(id.clone(), index);
        self.slots[index as usize] =
            Some(Bucket { id, kind, rules_version: 0, may_change: false, used: now, reported: now });
        index
    }

    /// Removes the bucket at an index.
    pub(super) fn remove(&mut self, index: u32) -> Option<Bucket> {
        let bucket = self.slots.get_mut(index as usize)?.take()?;
        self.places -= count_places_of_id(&bucket.id);
        self.by_id.remove(&bucket.id);
        self.free.push(index);
        Some(bucket)
    }

    /// Indices of all buckets.
    pub(super) fn indices(&self) -> Vec<u32> {
        let slots = self.slots.iter().zip(0_u32..);
        slots.filter(|(slot, _)| slot.is_some()).map(|(_, index)| index).collect()
    }
}

/// Warns that a bucket cannot be answered.
pub(super) fn log_unassignable_bucket(peer: &str, domain: &str, reason: UnassignableReason) {
    static THROTTLE: LogThrottle = LogThrottle::every(LOG_INTERVAL);
    if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
        let reason = match reason {
            UnassignableReason::NotUtf8 => "it is not UTF-8, and an Envoy resets a stream that has it",
            UnassignableReason::TooLong => "it has more than 64 pairs or 4096 bytes",
        };
        tracing::warn!(
            peer,
            domain,
            suppressed,
            "a bucket is neither limited nor abandoned, because of its id: {reason}"
        );
    }
}

/// Warns that there is no room for a further bucket of a stream that has `buckets`.
pub(super) fn log_too_many_buckets(peer: &str, domain: &str, buckets: usize) {
    static THROTTLE: LogThrottle = LogThrottle::every(LOG_INTERVAL);
    if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
        tracing::warn!(
            peer,
            domain,
            buckets,
            suppressed,
            "new buckets are abandoned, so `no_assignment_behavior` decides their requests: there are too many of this \
             proxy, its address or all (raise TOLLKEEPER_RLQS_MAX_BUCKETS, or name buckets by fewer and shorter values)"
        );
    }
}

/// Warns that a limit cannot be divided.
pub(super) fn log_indivisible_limit(rule: &str, reason: &str) {
    static THROTTLE: LogThrottle = LogThrottle::every(LOG_INTERVAL);
    if let Some(suppressed) = THROTTLE.allow(Clock::System.now()) {
        tracing::warn!(
            rule,
            suppressed,
            "no quota is assigned, so `no_assignment_behavior` decides: the limit cannot be divided among proxies: {reason}"
        );
    }
}
