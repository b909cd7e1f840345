//! A request of recorded traffic, with the answer that it got if that is known.
//!
//! Keys and values of a request share one buffer, so that a request costs few allocations at any number of entries.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::limit::request::{Descriptor, Entry, Hits, LimitOverride, Request};
use crate::limit::slot::SlotUse;
use crate::rules::plan_table::OwnLimit;
use crate::rules::rule::set::RuleSet;

/// A recorded request.
#[derive(Clone, Debug, Default)]
pub struct RecordedRequest {
    /// Arrival.
    pub arrival: Time,
    /// Process that decided it; empty if the traffic does not say.
    pub process: Arc<str>,
    /// Number of the decision in its process.
    pub seq: u64,
    /// Domain.
    pub domain: Arc<str>,
    /// Longest delay that the caller could wait for, in microseconds.
    pub max_delay_us: u64,
    /// Answer that the request got, if it is known.
    pub answer: Option<RecordedAnswer>,
    /// A blocked value rejected it, whatever the rules are: only its refunds reached counters.
    pub is_blocked: bool,
    /// Id of the rules that decided it; empty if the traffic does not say, or if there were none.
    pub rules_id: Arc<str>,
    /// Rules that decided it, if they are not those of the process's last header.
    pub rules: Option<Arc<RuleSet>>,
    text: Vec<u8>,
    entries: SmallVec<[EntrySpan; 4]>,
    descriptors: SmallVec<[RecordedDescriptor; 1]>,
}

/// Answer that a request got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedAnswer {
    /// The request was rejected.
    pub rejected: bool,
    /// Counters decided every descriptor, and all of their charges are in the log: a replay can repeat the answer.
    pub repeatable: bool,
}

/// A descriptor of a recorded request.
#[derive(Clone, Debug)]
pub struct RecordedDescriptor {
    /// Hits.
    pub hits: Hits,
    /// Limit that came with the request.
    pub limit_override: Option<LimitOverride>,
    /// Time that the counters worked at by the clock of Redis, if it is not the arrival.
    pub charged_at: Option<Time>,
    /// The traffic contains all requests of the key.
    pub is_sampled: bool,
    /// For each limit that decides, in the order of the rule: true if it admitted the hits. Empty if that is not known.
    pub admitted: SmallVec<[bool; 8]>,
    /// Plan that a table chose.
    pub plan: Option<RecordedPlan>,
    /// Slot that it took or freed, if its rule had a concurrent limit.
    pub slot: Option<SlotUse>,
    entries_end: usize,
}

/// Plan of a recorded descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedPlan {
    /// Name.
    pub name: Box<str>,
    /// Limit of the row, if it had one of its own.
    pub own: Option<OwnLimit>,
}

impl RecordedDescriptor {
    /// Creates a descriptor of `hits`.
    pub fn new(hits: Hits) -> Self {
        Self {
            hits,
            limit_override: None,
            charged_at: None,
            is_sampled: true,
            admitted: SmallVec::new(),
            plan: None,
            slot: None,
            entries_end: 0,
        }
    }
}

/// Ends of key and value in the text of a request; a key begins where the value before ends.
#[derive(Clone, Copy, Debug)]
struct EntrySpan {
    key_end: usize,
    value_end: usize,
}

impl RecordedRequest {
    /// Adds a descriptor; [`RecordedRequest::push_entry`] adds its entries.
    pub fn push_descriptor(&mut self, mut descriptor: RecordedDescriptor) {
        descriptor.entries_end = self.entries.len();
        self.descriptors.push(descriptor);
    }

    /// Adds an entry to the last descriptor.
    pub fn push_entry(&mut self, key: &[u8], value: &[u8]) {
        let Some(descriptor) = self.descriptors.last_mut() else { return };
        self.text.extend_from_slice(key);
        let key_end = self.text.len();
        self.text.extend_from_slice(value);
        self.entries.push(EntrySpan { key_end, value_end: self.text.len() });
        descriptor.entries_end = self.entries.len();
    }

    /// Descriptors.
    pub fn descriptors(&self) -> &[RecordedDescriptor] {
        &self.descriptors
    }

    /// The request, as the decider takes it.
    pub fn to_request(&self) -> Request<'_> {
        let (mut text_start, mut first) = (0, 0);
        let descriptors = self.descriptors.iter().map(|descriptor| {
            let spans = &self.entries[first..descriptor.entries_end];
            first = descriptor.entries_end;
            let entries = spans.iter().map(|span| {
                let key = &self.text[text_start..span.key_end];
                text_start = span.value_end;
                Entry { key, value: &self.text[span.key_end..span.value_end] }
            });
            Descriptor {
                entries: entries.collect(),
                hits: descriptor.hits,
                hits_addend: None,
                limit_override: descriptor.limit_override,
            }
        });
        Request { domain: &self.domain, descriptors: descriptors.collect(), hits_addend: 0 }
    }

    /// Slots, one for each descriptor; empty if no rule had a concurrent limit.
    pub fn slot_uses(&self) -> SmallVec<[SlotUse; 2]> {
        if self.descriptors.iter().all(|descriptor| descriptor.slot.is_none()) {
            return SmallVec::new();
        }
        self.descriptors.iter().map(|descriptor| descriptor.slot.unwrap_or_else(SlotUse::unnamed)).collect()
    }

    /// Times of the charges, one for each descriptor; empty if all are at the arrival.
    pub fn charge_times(&self) -> SmallVec<[Time; 2]> {
        if self.descriptors.iter().all(|descriptor| descriptor.charged_at.is_none()) {
            return SmallVec::new();
        }
        self.descriptors.iter().map(|descriptor| descriptor.charged_at.unwrap_or(self.arrival)).collect()
    }

    /// Time of the last charge by the clock of Redis, which all processes share; `None` if no charge has one.
    pub fn last_charge_time_in_redis(&self) -> Option<Time> {
        self.descriptors.iter().filter_map(|descriptor| descriptor.charged_at).max()
    }

    /// Time of the last charge, or else the arrival.
    pub fn order_time(&self) -> Time {
        self.last_charge_time_in_redis().unwrap_or(self.arrival)
    }
}
