//! The clock of Redis as the common one of all replicas, whose own clocks differ.
//!
//! A charge in Redis has the time of Redis in its record. What a replica decided without Redis, such as a rejection of
//! the over-limit cache, has the time of the replica; it is moved by as much as the two clocks differ.
//!
//! Decides: at which time a recorded decision was made, if its replica's clock is wrong.

use std::collections::HashMap;
use std::sync::Arc;

use crate::decide::log::record::{DecisionRecord, DecisionSource, DescriptorRecord};

/// Maximum number of processes whose clock is compared with that of Redis.
const MAX_PROCESSES: usize = 10_000;
/// Part by which the uncertainty of a difference grows with each charge, so that a clock that was set is noticed.
const UNCERTAINTY_GROWTH: u64 = 64;

/// Clock of Redis, by what it differs from that of each process.
#[derive(Debug, Default)]
pub(crate) struct RedisClock {
    differences: HashMap<Arc<str>, ClockDifference>,
}

/// Time of Redis less that of a process, in microseconds.
#[derive(Clone, Copy, Debug)]
struct ClockDifference {
    us: i64,
    uncertainty_us: u64,
}

impl RedisClock {
    /// Learns from a decision how much the clock of its process differs: the charge was made between the arrival and
    /// the decision. The shortest decision tells most.
    pub(crate) fn compare_clocks(&mut self, decision: &DecisionRecord<'_>) {
        let Some(redis_us) = decision.last_charge_us() else { return };
        let middle_us = decision.time_us.saturating_add(decision.duration_us / 2);
        let us = redis_us.cast_signed().saturating_sub(middle_us.cast_signed());
        let found = ClockDifference { us, uncertainty_us: decision.duration_us };
        if let Some(known) = self.differences.get_mut(&*decision.process) {
            let grown_us = known.uncertainty_us.saturating_add(known.uncertainty_us / UNCERTAINTY_GROWTH + 1);
            *known = if found.uncertainty_us <= grown_us {
                found
            } else {
                ClockDifference { uncertainty_us: grown_us, ..*known }
            };
        } else if self.differences.len() < MAX_PROCESSES {
            self.differences.insert(Arc::from(&*decision.process), found);
        }
    }

    /// Returns a time of a process by the clock of Redis; `None` if the process has charged nothing there.
    pub(crate) fn to_redis_time_us(&self, process: &str, time_us: u64) -> Option<u64> {
        self.differences.get(process).map(|difference| time_us.saturating_add_signed(difference.us))
    }

    /// Returns the time of a descriptor's charge by the clock of Redis; `None`: it is the arrival, or not known.
    pub(crate) fn charge_time_us(
        &self,
        decision: &DecisionRecord<'_>,
        descriptor: &DescriptorRecord<'_>,
    ) -> Option<u64> {
        let is_at_arrival = descriptor.decided_by == Some(DecisionSource::Counter);
        let moved = || self.to_redis_time_us(&decision.process, decision.time_us).filter(|_| !is_at_arrival);
        descriptor.now_us.or_else(moved)
    }
}
