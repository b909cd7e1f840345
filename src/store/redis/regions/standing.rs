//! Standing of a region: whether its Redis is the one that all regions know, whether they agree on their number, and
//! so what the region may do.
//!
//! Each region's own parts, its reserve and its cut-off allowance, are fractions of a limit by the number of regions.
//! Their sum is within the limit only if all regions have one list, and each region is one Redis. A process learns
//! about both from two replies, one a second each:
//!
//! - The region's Redis has an id. A second Redis of one name is told so by the registry, and gets nothing.
//! - A list that differs from another region's, and one that changed within a period, switch the parts off. The parts
//!   of an old list have been used for at most that long. A first list is no change, so a first start does not wait.
//!
//! What the last replies said stands while a region is cut off: nothing here expires.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use super::registry::{IdentityClaim, IdentityReply, OtherRegion, RegionId, RegionIdentity, RegistryReply};
use crate::base::clock::{Time, to_micros};
use crate::limit::algorithm::region::GlobalView;
use crate::store::client::redis::server_clock::process_us;

/// Time without an answer of the global Redis after which a region is cut off.
pub const CUT_OFF_AFTER: Duration = Duration::from_secs(5);
/// Time for which another list counts after the last report of its region.
const OTHER_LIST_VALIDITY_US: u64 = 60_000_000;
/// Minimum time for which a changed list leaves the parts unused: replicas with the old one may still run.
const MIN_UNUSED_US: u64 = 60_000_000;
/// Process time of a change that never happened.
const NEVER_US: i64 = i64::MIN;

/// Findings of the last replies.
#[derive(Clone, Debug)]
pub struct Findings {
    /// Identity of the region's Redis; `None` before the first reply.
    identity: Option<RegionIdentity>,
    /// Process time of the last change that the region's Redis knows.
    identity_changed_us: i64,
    /// Process time of the last change of any region's list that the registry knows.
    registry_changed_us: i64,
    /// True if another Redis has the name of this region.
    is_second: bool,
    /// Names of the regions with another list.
    differing: Vec<String>,
    /// True if no region has had another list, by the registry.
    is_settled: bool,
}

impl Default for Findings {
    fn default() -> Self {
        Self {
            identity: None,
            identity_changed_us: NEVER_US,
            registry_changed_us: NEVER_US,
            is_second: false,
            differing: Vec::new(),
            is_settled: false,
        }
    }
}

impl Findings {
    /// Returns the claim for the next call to the region's Redis; `proposal` is the id if none is known.
    pub fn claim(&self, proposal: RegionId) -> IdentityClaim {
        match self.identity {
            Some(identity) => IdentityClaim::Remember { identity, is_settled: self.is_settled },
            None => IdentityClaim::Propose(proposal),
        }
    }

    /// Identity of the region's Redis; `None` before the first reply.
    pub const fn identity(&self) -> Option<RegionIdentity> {
        self.identity
    }

    /// Returns true if another Redis has the name of this region, which gets nothing then.
    pub const fn is_second(&self) -> bool {
        self.is_second
    }

    /// Names of the regions with another list.
    pub fn differing(&self) -> &[String] {
        &self.differing
    }

    /// Returns true if the region's Redis should stop counting its own creation as a change of the list: all regions
    /// have told that no list changed.
    pub fn should_clear_creation(&self) -> bool {
        self.is_settled && self.is_new()
    }

    /// Returns true if the region's Redis cannot know of an earlier list.
    pub fn is_new(&self) -> bool {
        self.identity.is_some_and(|identity| identity.is_new)
    }

    /// Microseconds since the list of a region last changed, or a new Redis was first used; `None` if neither happened.
    pub fn changed_before_us(&self, at: Instant) -> Option<u64> {
        let changed_us = self.identity_changed_us.max(self.registry_changed_us);
        (changed_us != NEVER_US).then(|| u64::try_from(process_us(at).saturating_sub(changed_us)).unwrap_or(0))
    }

    /// Returns the findings after a reply of the region's Redis, received at a process time.
    #[must_use]
    pub fn with_identity(&self, reply: &IdentityReply, received_us: i64) -> Self {
        let identity_changed_us = changed_us(reply.identity.list_changed, reply.now, received_us);
        Self { identity: Some(reply.identity), identity_changed_us, ..self.clone() }
    }

    /// Returns the findings after a reply of the registry, received at a process time.
    #[must_use]
    pub fn with_registry(&self, reply: &RegistryReply, received_us: i64) -> Self {
        let last_change = reply.others.iter().map(|other| other.list_changed).fold(reply.list_changed, Time::max);
        let counts =
            |other: &&OtherRegion| other.has_other_list && reply.now.since_us(other.seen) <= OTHER_LIST_VALIDITY_US;
        let differing: Vec<String> = reply.others.iter().filter(counts).map(|other| other.name.clone()).collect();
        let is_settled = !reply.is_second && differing.is_empty() && last_change == Time::default();
        Self {
            registry_changed_us: changed_us(last_change, reply.now, received_us),
            is_second: reply.is_second,
            differing,
            is_settled,
            ..self.clone()
        }
    }

    /// Returns the process time from which the parts of limits with this period may be used; `None` while they may not.
    pub fn parts_usable_from_us(&self, period_us: u64) -> Option<i64> {
        if self.identity.is_none() || self.is_second || !self.differing.is_empty() {
            return None;
        }
        let unused_us = i64::try_from(period_us.max(MIN_UNUSED_US)).unwrap_or(i64::MAX);
        Some(self.identity_changed_us.max(self.registry_changed_us).saturating_add(unused_us))
    }
}

/// Returns the process time of a change at a server's time; the latest possible one.
fn changed_us(changed: Time, now: Time, received_us: i64) -> i64 {
    if changed == Time::default() {
        return NEVER_US;
    }
    received_us.saturating_sub(i64::try_from(now.since_us(changed)).unwrap_or(i64::MAX))
}

/// What the region may do: the findings of the last replies, and the time of the last answer of the global Redis.
/// Reading takes no lock.
#[derive(Debug)]
pub struct RegionStanding {
    findings: ArcSwap<Findings>,
    /// Process time of the last answer of the global Redis.
    answered_us: AtomicI64,
}

impl Default for RegionStanding {
    fn default() -> Self {
        Self { findings: ArcSwap::default(), answered_us: AtomicI64::new(NEVER_US) }
    }
}

impl RegionStanding {
    /// Returns the findings of the last replies.
    pub fn findings(&self) -> Findings {
        Findings::clone(&self.findings.load())
    }

    /// Records a reply of the region's Redis, received at a process time.
    pub fn record_identity(&self, reply: &IdentityReply, received_us: i64) {
        self.findings.rcu(|findings| findings.with_identity(reply, received_us));
    }

    /// Records a reply of the registry, received at a process time.
    pub fn record_registry(&self, reply: &RegistryReply, received_us: i64) {
        self.findings.rcu(|findings| findings.with_registry(reply, received_us));
        self.record_answer(received_us);
    }

    /// Records an answer of the global Redis at a process time.
    pub fn record_answer(&self, received_us: i64) {
        self.answered_us.fetch_max(received_us, Ordering::Relaxed);
    }

    /// Microseconds since the last answer of the global Redis; `None` before the first.
    pub fn unanswered_us(&self, at: Instant) -> Option<u64> {
        let answered_us = self.answered_us.load(Ordering::Relaxed);
        (answered_us != NEVER_US).then(|| u64::try_from(process_us(at).saturating_sub(answered_us)).unwrap_or(0))
    }

    /// Returns true if the global Redis has answered within [`CUT_OFF_AFTER`].
    pub fn is_connected(&self, at: Instant) -> bool {
        self.unanswered_us(at).is_some_and(|us| us <= to_micros(CUT_OFF_AFTER))
    }

    /// Adds what the region may do at `at` to the view of a call on limits with periods up to `period_us`.
    pub fn restrict(&self, view: GlobalView, period_us: u64, at: Instant) -> GlobalView {
        let findings = self.findings.load();
        if findings.is_second {
            return GlobalView { cut_off: true, parts_unusable: true, ..GlobalView::UNKNOWN };
        }
        let may_ask = self.is_connected(at) && findings.identity.is_some();
        let parts_usable = findings.parts_usable_from_us(period_us).is_some_and(|from_us| process_us(at) >= from_us);
        GlobalView { can_request: may_ask, cut_off: !may_ask, parts_unusable: !parts_usable, ..view }
    }
}
