//! Counts of one replay: of all requests and of each limit.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use super::key_tallies::{KeyId, KeyTallies};
use super::limit_tally::{LimitLabel, LimitTally};
use super::timeline::Timeline;
use crate::base::clock::Time;
use crate::decide::results::{DescriptorResults, LimitWithResult};
use crate::limit::request::Request;
use crate::tools::replay::recorded::RecordedRequest;
use crate::tools::replay::replayer::ReplayedAnswer;

/// Maximum number of limits with a timeline.
const MAX_TIMELINES: usize = 1000;

/// Counts of one replay.
#[derive(Debug)]
pub struct ReplayTally {
    /// Requests that the limits reject, also if SHADOW_MODE admits them.
    pub rejected: u64,
    /// Requests without an answer.
    pub failed: u64,
    /// Descriptors without a rule.
    pub unmatched: u64,
    /// Requests over time.
    pub timeline: Timeline,
    /// Counts of each limit that was met, in the order of its first request.
    pub limits: Vec<LimitTally>,
    by_id: HashMap<u64, usize>,
    by_path: HashMap<String, usize>,
    /// Id and index of the limit that was counted last.
    last: Option<(u64, usize)>,
    /// Counts by key.
    pub keys: KeyTallies,
    start: Time,
}

/// Rejection of a descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DescriptorRejection {
    /// Index of the first limit that rejects; `None`: none does.
    pub by: Option<usize>,
    /// Hash of the path of the counters; 0 without limits.
    pub path: u128,
    /// Text of the key, if the values of an entry share a counter; else it is that of the descriptor.
    pub shared_key: Option<Arc<str>>,
}

/// Rejection of each descriptor of a request.
pub type Rejections = SmallVec<[DescriptorRejection; 2]>;

impl ReplayTally {
    /// Creates empty counts of traffic that begins at `start`.
    pub fn new(start: Time, max_keys: usize) -> Self {
        Self {
            rejected: 0,
            failed: 0,
            unmatched: 0,
            timeline: Timeline::new(start),
            limits: Vec::new(),
            by_id: HashMap::new(),
            by_path: HashMap::new(),
            last: None,
            keys: KeyTallies::new(max_keys),
            start,
        }
    }

    /// Counts a descriptor; returns its rejection. A descriptor whose key is not in the sample is not counted.
    pub fn add_descriptor(
        &mut self,
        recorded: &RecordedRequest,
        request: &Request<'_>,
        descriptor: &DescriptorResults<'_, '_>,
    ) -> DescriptorRejection {
        let path = descriptor.key();
        let mut rejection = DescriptorRejection { by: None, path, shared_key: None };
        let Some(of) = recorded.descriptors().get(descriptor.index).filter(|of| of.is_sampled) else {
            return rejection;
        };
        self.unmatched += u64::from(descriptor.rule().is_none() && of.limit_override.is_none());
        for limit in descriptor.limits() {
            let index = self.index(descriptor, &limit);
            let rejected = !limit.result.admitted;
            if rejected && !limit.shadow {
                rejection.by = rejection.by.or(Some(index));
            }
            let tally = &mut self.limits[index];
            if tally.add(of.hits, recorded.arrival, &limit) {
                let change = self.keys.add(KeyId::new(path, index), recorded.arrival, rejected);
                tally.add_key(path, change, rejected, || descriptor.key_text(request));
            }
        }
        if rejection.by.is_some() && descriptor.shares_values() {
            rejection.shared_key = Some(descriptor.key_text(request));
        }
        rejection
    }

    /// Counts the answer to a request.
    pub fn add_answer(&mut self, at: Time, answer: ReplayedAnswer) {
        let rejected = answer.over_limit || answer.shadowed;
        self.rejected += u64::from(rejected);
        self.failed += u64::from(answer.failed);
        self.timeline.add(at, rejected);
    }

    /// Index of a limit, which is added if it is new. Limits of one path are one, as after a reload.
    fn index(&mut self, descriptor: &DescriptorResults<'_, '_>, limit: &LimitWithResult<'_, '_>) -> usize {
        if let Some((_, index)) = self.last.filter(|(id, _)| *id == limit.id) {
            return index;
        }
        if let Some(index) = self.by_id.get(&limit.id) {
            self.last = Some((limit.id, *index));
            return *index;
        }
        let label = LimitLabel::new(descriptor, limit);
        let index = match self.by_path.get(&label.path) {
            Some(index) => {
                self.limits[*index].label = label;
                *index
            }
            None => {
                let index = self.limits.len();
                self.by_path.insert(label.path.clone(), index);
                let timeline_start = (index < MAX_TIMELINES).then_some(self.start);
                self.limits.push(LimitTally::new(label, timeline_start));
                index
            }
        };
        self.by_id.insert(limit.id, index);
        index
    }

    /// Returns the counts of a limit by its path.
    pub fn of_path(&self, path: &str) -> Option<&LimitTally> {
        self.by_path.get(path).map(|index| &self.limits[*index])
    }
}
