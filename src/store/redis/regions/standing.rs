//! Standing of a region: whether its Redis is the one that all regions know, whether they agree on their number, and
//! so what the region may do.
//!
//! Each region's own *parts*, its reserve and its cut-off allowance, are fractions of a limit by the number of regions.
//! Their sum is within the limit only if all regions have one list, and each region is one Redis. Grants are exact for
//! whoever asks, so a region whose standing is in doubt loses its parts, never its grants.
//!
//! Decides: when a region is cut off (`on_region_loss`), missing or silent (`find_missing_regions`).
//! Decides: different `TOLLKEEPER_REGIONS`, and until when parts are unused.
//! Decides: `second_redis`, `copied_redis`, `other_lists`: when each begins and ends; what follows a clock that jumped.
//! Decides: which regions never reported (`count_reported_regions`).
//!
//! # Lease of the parts
//!
//! A region may use its parts only for the lease V after a report that the registry did not contest: V by the process's
//! clock, from the sending of the report, shortened by drift. The registry keeps the end of that lease for each Redis,
//! V after the report by its clock, and whoever would be in conflict with that Redis waits for it:
//!
//! - *Another list*: while a Redis with another list has a lease, no region uses its parts. So a region that was
//!   removed from the lists and runs on loses its parts before the others divide them. A first list is no change.
//! - *Another Redis of one name*: while both have leases, neither uses its parts. A Redis that replaces another gets
//!   parts when the lease of the old one ends.
//! - *A copied Redis* ([`registry`](super::registry)): the parts are unused until the leases of both copies have ended.
//!
//! After each of these ends, and after all report one list, the parts are unused for a period: others were used before.
//! A report that meets such a conflict renews no lease. All processes of a region share the lease through the region's
//! Redis, so that one which starts while the global Redis is away has what the others have. What the last replies said
//! stands while a region is cut off, until the lease ends.
//!
//! # A Redis that loses its data
//!
//! A region's Redis that restarts empty forgets which parts were used. It has lost its identity too: the process that
//! writes it back records the loss, and the parts are unused for one period, as after a jump of its clock. Its
//! connections close, so the parts are also unused from each opened connection until the identity was read again. Only
//! calls that were waiting for that connection may still use them.
//!
//! # Jumps of clocks
//!
//! After a jump of the global clock by more than a second, windows may repeat. So nothing is requested and no grant is
//! used for one period, by the process's clock; what was admitted before is then out of every span. After such a jump
//! of a region's clock, its counters may have expired early, so its parts are unused for one period. Processes notice
//! jumps themselves, and tell both Redis, for those that start later.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::Instant;

use super::registry::{IdentityClaim, IdentityReply, OtherRegion, RegionIdentity, RegionRedisId, RegistryReply};
use crate::base::clock::{Time, to_micros};
use crate::limit::algorithm::region::GlobalTimeAndStanding;
use crate::settings::redis::regions::{DEFAULT_REGION_LEASE, RegionSettings};
use crate::store::client::redis::deployment_context::ConnectionOpenings;
use crate::store::client::redis::server_clock::{ClockJumps, process_time_us};

/// Time without an answer of the global Redis after which a region is cut off.
pub const CUT_OFF_AFTER: Duration = Duration::from_secs(5);
/// Time without a report after which another region gets a notice.
const SILENT_AFTER_US: u64 = 60_000_000;
/// Minimum time for which a changed list leaves the parts unused: replicas with the old one may still run.
const MIN_TIME_WITHOUT_PARTS_US: u64 = 60_000_000;
/// Process time of an event that never happened.
const NEVER_HAPPENED_US: i64 = i64::MIN;
/// Time in microseconds in which two clocks may move apart by one.
const US_PER_DRIFT_US: u64 = 999;

/// Process times of a call.
#[derive(Clone, Copy, Debug)]
pub struct CallTimes {
    /// Process time before it was sent, in microseconds.
    pub sent_us: i64,
    /// Process time after its reply was received, in microseconds.
    pub answered_us: i64,
}

/// Settings that the standing of a region depends on.
#[derive(Clone, Debug)]
pub struct OwnRegionSettings {
    name: String,
    /// Names of all regions.
    names: Vec<String>,
    /// Time for which the parts may be used after a report, in microseconds.
    pub(super) lease_us: u64,
}

impl OwnRegionSettings {
    /// Takes the settings of the region of this process.
    pub fn new(settings: &RegionSettings) -> Self {
        let names: Vec<&str> = settings.names.iter().map(String::as_str).collect();
        Self::with_names(settings.own_region_name(), &names, settings.lease)
    }

    /// Creates the settings of the region `name`, one of `names`, with a lease.
    pub fn with_names(name: &str, names: &[&str], lease: Duration) -> Self {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Self { name: name.to_owned(), names, lease_us: to_micros(lease) }
    }
}

/// Kind of conflict because of which a region may not use its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionConflictKind {
    /// A Redis has another list of regions.
    OtherList,
    /// Another Redis has the name of this region.
    SecondRedis,
    /// The Redis of this region has its identity from another one.
    CopiedRedis,
}

/// Conflict with another Redis, during which a region may not use its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionConflict {
    /// What it conflicts about.
    pub kind: RegionConflictKind,
    /// Name of the region of that Redis.
    pub region: String,
    /// Identity of that Redis.
    pub id: RegionRedisId,
    /// Process time of the last report of that Redis, in microseconds.
    pub seen_us: i64,
    /// Process time at which the conflict ends if that Redis reports no more, in microseconds.
    pub until_us: i64,
}

impl RegionConflict {
    fn is_of_same_redis(&self, other: &Self) -> bool {
        (self.kind, &self.region, self.id) == (other.kind, &other.region, other.id)
    }
}

/// Numbers of regions: of those that take part in grants, and of all listed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportedRegionCounts {
    /// Listed regions that the registry knows, this one included; 0 before the first report.
    pub reported: u32,
    /// Listed regions.
    pub listed: u32,
}

/// Listed regions that are missing in the registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingRegions {
    /// Regions that have never reported.
    pub never_reported: Vec<String>,
    /// Regions without a report for a minute.
    pub silent: Vec<String>,
}

/// What the last replies of both Redis say about the region.
#[derive(Clone, Debug)]
pub struct RegionFindings {
    /// Identity of the region's Redis; `None` before the first reply.
    identity: Option<RegionIdentity>,
    /// Process time at which the call was sent that read the identity last.
    identity_read_us: i64,
    /// Process time of the last change of a list that the region's Redis knows.
    identity_changed_us: i64,
    /// Process time of the last change of any region's list that the registry knows.
    registry_changed_us: i64,
    /// Process times of the last jumps of clocks that both Redis know.
    region_jumped_at_us: i64,
    global_jumped_at_us: i64,
    /// Conflicts that have not ended.
    conflicts: Vec<RegionConflict>,
    /// Process time at which the last of those that have ended did so.
    pause_ended_us: i64,
    /// Process time at which the lease of the parts ends.
    lease_ends_us: i64,
    /// Listed regions that are missing; `None` before the first report was recorded.
    missing: Option<MissingRegions>,
    /// True if no region has had another list, by the registry.
    is_settled: bool,
}

impl Default for RegionFindings {
    fn default() -> Self {
        Self {
            identity: None,
            identity_read_us: NEVER_HAPPENED_US,
            identity_changed_us: NEVER_HAPPENED_US,
            registry_changed_us: NEVER_HAPPENED_US,
            region_jumped_at_us: NEVER_HAPPENED_US,
            global_jumped_at_us: NEVER_HAPPENED_US,
            conflicts: Vec::new(),
            pause_ended_us: NEVER_HAPPENED_US,
            lease_ends_us: NEVER_HAPPENED_US,
            missing: None,
            is_settled: false,
        }
    }
}

impl RegionFindings {
    /// Returns the claim for the next call to the region's Redis; `proposal` is the id if none is known.
    pub fn build_identity_claim(&self, proposal: RegionRedisId) -> IdentityClaim {
        match self.identity {
            Some(identity) => IdentityClaim::Remember { identity, is_settled: self.is_settled },
            None => IdentityClaim::Propose(proposal),
        }
    }

    /// Identity of the region's Redis; `None` before the first reply.
    pub const fn identity(&self) -> Option<RegionIdentity> {
        self.identity
    }

    /// Returns true if the identity was read within `age_us` before a process time.
    pub const fn has_read_identity_within(&self, age_us: i64, at_us: i64) -> bool {
        self.identity_read_us.saturating_add(age_us) >= at_us
    }

    /// Conflicts that had not ended at the last reply.
    pub fn conflicts(&self) -> &[RegionConflict] {
        &self.conflicts
    }

    /// Process time at which the lease of the parts ends, in microseconds; `None` if there never was one.
    pub fn lease_ends_us(&self) -> Option<i64> {
        (self.lease_ends_us != NEVER_HAPPENED_US).then_some(self.lease_ends_us)
    }

    /// Listed regions that are missing in the registry; `None` before the first report.
    pub const fn missing_regions(&self) -> Option<&MissingRegions> {
        self.missing.as_ref()
    }

    /// Returns true if the region's Redis should stop counting its own creation as a change of the list: all regions
    /// have told that no list changed.
    pub fn should_clear_new_mark(&self) -> bool {
        self.is_settled && self.has_new_redis()
    }

    /// Returns true if the region's Redis cannot know of an earlier list.
    pub fn has_new_redis(&self) -> bool {
        self.identity.is_some_and(|identity| identity.is_new)
    }

    /// Microseconds since the list of a region last changed, a new Redis was first used, or a pause because of another
    /// Redis ended; `None` if none of these happened.
    pub fn us_since_change(&self, at: Instant) -> Option<u64> {
        us_since_event(self.last_change_at_us(), process_time_us(at))
    }

    /// Microseconds since the list of a region last changed or a pause ended, by the registry; `None` if neither
    /// happened.
    pub fn us_since_registry_change(&self, at_us: i64) -> Option<u64> {
        us_since_event(self.registry_changed_us.max(self.pause_ended_us), at_us)
    }

    fn last_change_at_us(&self) -> i64 {
        self.identity_changed_us.max(self.registry_changed_us).max(self.pause_ended_us)
    }

    /// Returns the findings after a reply of the region's Redis.
    #[must_use]
    pub fn after_identity_reply(&self, reply: &IdentityReply, times: CallTimes) -> Self {
        let is_same = self.identity.is_none_or(|known| known.id == reply.identity.id);
        // A lease and a copy are those of one Redis.
        let own = if is_same {
            self.clone()
        } else {
            Self { lease_ends_us: NEVER_HAPPENED_US, conflicts: Vec::new(), ..self.clone() }
        };
        let lease_us = reply.leased_until.since_us(reply.now);
        let lease_ends_us = match lease_us {
            0 => NEVER_HAPPENED_US,
            _ => times.sent_us.saturating_add_unsigned(shorten_by_drift_us(lease_us)),
        };
        let jumped_us = event_process_time_us(reply.clock_jumped, reply.now, times.answered_us);
        Self {
            identity: Some(reply.identity),
            identity_read_us: self.identity_read_us.max(times.sent_us),
            identity_changed_us: event_process_time_us(reply.identity.list_changed, reply.now, times.answered_us),
            region_jumped_at_us: self.region_jumped_at_us.max(jumped_us),
            lease_ends_us: own.lease_ends_us.max(lease_ends_us),
            ..own
        }
    }

    /// Returns the findings after a reply of the registry to a report of `own`.
    #[must_use]
    pub fn after_registry_reply(&self, reply: &RegistryReply, times: CallTimes, own: &OwnRegionSettings) -> Self {
        let conflicts = self.conflicts_after(reply, times, own);
        let last_change = reply.others.iter().map(|other| other.list_changed).fold(reply.list_changed, Time::max);
        let is_uncontested = reply.recorded && conflicts.is_empty();
        let renewed_us = times.sent_us.saturating_add_unsigned(shorten_by_drift_us(own.lease_us));
        let agree = reply.others.iter().all(|other| !other.has_other_list || other.leased_until <= reply.now);
        let knows_all = reply.recorded || self.missing.is_some();
        Self {
            registry_changed_us: event_process_time_us(last_change, reply.now, times.answered_us),
            global_jumped_at_us: self.global_jumped_at_us.max(event_process_time_us(
                reply.clock_jumped,
                reply.now,
                times.answered_us,
            )),
            lease_ends_us: if is_uncontested { self.lease_ends_us.max(renewed_us) } else { self.lease_ends_us },
            missing: knows_all.then(|| find_missing_regions(reply, own)),
            is_settled: is_uncontested && agree && last_change == Time::default(),
            pause_ended_us: self.last_conflict_end_us(reply, times, own),
            conflicts,
            ..self.clone()
        }
    }

    /// Returns the process time at which the last conflict ended, of those that the registry tells or that were known.
    fn last_conflict_end_us(&self, reply: &RegistryReply, times: CallTimes, own: &OwnRegionSettings) -> i64 {
        let of_others = reply.others.iter().filter(|other| conflict_kind_with(other, own).is_some());
        let ends = of_others.map(|other| other.leased_until).chain([reply.contested_until]);
        let told =
            ends.filter(|end| *end <= reply.now).map(|end| event_process_time_us(end, reply.now, times.answered_us));
        let known = self
            .conflicts
            .iter()
            .filter(|conflict| conflict.until_us <= times.sent_us)
            .map(|conflict| conflict.until_us);
        told.chain(known).fold(self.pause_ended_us, i64::max)
    }

    /// Returns the conflicts after a reply of the registry: those that it tells, and earlier ones that it does not end.
    /// A jump of the global clock shortens none.
    fn conflicts_after(&self, reply: &RegistryReply, times: CallTimes, own: &OwnRegionSettings) -> Vec<RegionConflict> {
        let of_others = reply.others.iter().filter_map(|other| build_parts_conflict(other, reply, times, own));
        let is_copied = reply.contested_until > reply.now;
        let copied = self.identity.filter(|_| is_copied).map(|identity| RegionConflict {
            kind: RegionConflictKind::CopiedRedis,
            region: own.name.clone(),
            id: identity.id,
            seen_us: times.answered_us,
            until_us: surely_passed_at_us(reply.contested_until.since_us(reply.now), times),
        });
        let mut conflicts: Vec<RegionConflict> = of_others.chain(copied).collect();
        for earlier in &self.conflicts {
            match conflicts.iter_mut().find(|conflict| conflict.is_of_same_redis(earlier)) {
                Some(conflict) => conflict.until_us = conflict.until_us.max(earlier.until_us),
                None if earlier.until_us <= times.sent_us || has_now_same_list(earlier, reply) => {}
                None => conflicts.push(earlier.clone()),
            }
        }
        conflicts.truncate(MAX_REMEMBERED_CONFLICTS);
        conflicts
    }

    /// Returns the process time from which the parts of limits with this period may be used; `None` before the identity
    /// is known.
    pub fn parts_usable_from_us(&self, period_us: u64) -> Option<i64> {
        self.identity?;
        let last_change_at_us =
            self.conflicts.iter().map(|conflict| conflict.until_us).fold(self.last_change_at_us(), i64::max);
        let from_us = last_change_at_us.saturating_add_unsigned(period_us.max(MIN_TIME_WITHOUT_PARTS_US));
        Some(from_us.max(usable_after_jump_us(self.region_jumped_at_us, period_us)))
    }
}

/// Upper bound on remembered conflicts, as on the Redis in a reply of the registry.
const MAX_REMEMBERED_CONFLICTS: usize = 256;

/// Returns the kind of conflict with another Redis that has a lease; `None` if there is no conflict.
fn conflict_kind_with(other: &OtherRegion, own: &OwnRegionSettings) -> Option<RegionConflictKind> {
    match other {
        _ if other.name == own.name => Some(RegionConflictKind::SecondRedis),
        OtherRegion { has_other_list: true, .. } => Some(RegionConflictKind::OtherList),
        OtherRegion { .. } => None,
    }
}

/// Returns the conflict with another Redis; `None` if there is none.
fn build_parts_conflict(
    other: &OtherRegion,
    reply: &RegistryReply,
    times: CallTimes,
    own: &OwnRegionSettings,
) -> Option<RegionConflict> {
    let kind = conflict_kind_with(other, own)?;
    // If the clock jumped since the last report, the lease may have begun then.
    let jumped_us = reply.clock_jumped.since_us(other.seen);
    let left_us = other.leased_until.plus_us(jumped_us).since_us(reply.now);
    let seen_us = event_process_time_us(other.seen, reply.now, times.answered_us);
    let (region, id, until_us) = (other.name.clone(), other.id, surely_passed_at_us(left_us, times));
    (left_us > 0).then_some(RegionConflict { kind, region, id, seen_us, until_us })
}

/// Returns true if the Redis that had another list has reported the list of this region since.
fn has_now_same_list(conflict: &RegionConflict, reply: &RegistryReply) -> bool {
    let is_it = |other: &OtherRegion| other.id == conflict.id && other.name == conflict.region && !other.has_other_list;
    conflict.kind == RegionConflictKind::OtherList && reply.others.iter().any(is_it)
}

fn find_missing_regions(reply: &RegistryReply, own: &OwnRegionSettings) -> MissingRegions {
    let mut missing = MissingRegions::default();
    for name in own.names.iter().filter(|name| **name != own.name) {
        let reports = reply.others.iter().filter(|other| other.name == *name).map(|other| other.seen);
        match reports.max() {
            None => missing.never_reported.push(name.clone()),
            Some(seen) if reply.now.since_us(seen) > SILENT_AFTER_US => missing.silent.push(name.clone()),
            Some(_) => {}
        }
    }
    missing
}

/// Returns the process time of an event at a server's time, the latest possible one; 0 is an event that never happened.
fn event_process_time_us(event: Time, now: Time, answered_us: i64) -> i64 {
    if event == Time::default() {
        return NEVER_HAPPENED_US;
    }
    answered_us.saturating_sub_unsigned(now.since_us(event))
}

/// Returns the time since an event in microseconds; `None` if it never happened.
fn us_since_event(event_us: i64, at_us: i64) -> Option<u64> {
    (event_us != NEVER_HAPPENED_US).then(|| u64::try_from(at_us.saturating_sub(event_us)).unwrap_or(0))
}

/// Returns the process time at which `left_us` have surely passed on a server.
fn surely_passed_at_us(left_us: u64, times: CallTimes) -> i64 {
    times.answered_us.saturating_add_unsigned(left_us.saturating_add(left_us.div_ceil(US_PER_DRIFT_US)))
}

/// Returns the part of a time that surely has not passed on another clock when it has passed on this one.
pub(super) fn shorten_by_drift_us(us: u64) -> u64 {
    us.saturating_sub(us.div_ceil(US_PER_DRIFT_US))
}

/// Returns the process time at which a period has surely passed since a jump of a clock.
fn usable_after_jump_us(jumped_us: i64, period_us: u64) -> i64 {
    jumped_us.saturating_add_unsigned(period_us.saturating_add(period_us.div_ceil(US_PER_DRIFT_US)))
}

/// What the clients of both Redis notice.
#[derive(Debug, Default)]
pub struct ClockAndConnectionEvents {
    /// Jumps of the clocks of the region's Redis.
    pub region_jumps: Arc<ClockJumps>,
    /// Connections to the region's Redis.
    pub region_connections: Arc<ConnectionOpenings>,
    /// Jumps of the clocks of the global Redis.
    pub global_jumps: Arc<ClockJumps>,
}

/// What the region may do: the findings of the last replies, the time of the last answer of the global Redis, and jumps
/// of clocks. Reading takes no lock.
#[derive(Debug)]
pub struct RegionStanding {
    own: OwnRegionSettings,
    events: ClockAndConnectionEvents,
    findings: ArcSwap<RegionFindings>,
    /// Process time of the last answer of the global Redis.
    answered_us: AtomicI64,
    /// Longest period of the limits that were charged.
    longest_period_us: AtomicU64,
}

impl Default for RegionStanding {
    /// Creates the standing of a region without others.
    fn default() -> Self {
        Self::new(OwnRegionSettings::with_names("", &[], DEFAULT_REGION_LEASE), ClockAndConnectionEvents::default())
    }
}

impl RegionStanding {
    /// Creates the standing of a region before the first reply.
    pub fn new(own: OwnRegionSettings, events: ClockAndConnectionEvents) -> Self {
        Self {
            own,
            events,
            findings: ArcSwap::default(),
            answered_us: AtomicI64::new(NEVER_HAPPENED_US),
            longest_period_us: AtomicU64::new(0),
        }
    }

    /// Settings of the region.
    pub(super) const fn own_region_settings(&self) -> &OwnRegionSettings {
        &self.own
    }

    /// Returns the findings of the last replies.
    pub fn findings(&self) -> RegionFindings {
        RegionFindings::clone(&self.findings.load())
    }

    /// Records a reply of the region's Redis.
    pub fn record_identity(&self, reply: &IdentityReply, times: CallTimes) {
        self.findings.rcu(|findings| findings.after_identity_reply(reply, times));
    }

    /// Records a reply of the registry to a report with the identity that is known now.
    pub fn record_registry(&self, reply: &RegistryReply, times: CallTimes) {
        self.findings.rcu(|findings| findings.after_registry_reply(reply, times, &self.own));
        self.record_global_answer_time(times.answered_us);
    }

    /// Records an answer of the global Redis at a process time.
    pub fn record_global_answer_time(&self, answered_us: i64) {
        self.answered_us.fetch_max(answered_us, Ordering::Relaxed);
    }

    /// Microseconds since the last answer of the global Redis; `None` before the first.
    pub fn us_since_global_answer(&self, at: Instant) -> Option<u64> {
        us_since_event(self.answered_us.load(Ordering::Relaxed), process_time_us(at))
    }

    /// Returns true if the global Redis has answered within [`CUT_OFF_AFTER`].
    pub fn has_global_connection(&self, at: Instant) -> bool {
        self.us_since_global_answer(at).is_some_and(|us| us <= to_micros(CUT_OFF_AFTER))
    }

    /// Number of listed regions that the registry knows. A region gets grants of a limit only for that part of them, so
    /// regions with different registries divide the limit.
    pub fn count_reported_regions(&self) -> ReportedRegionCounts {
        let listed = u32::try_from(self.own.names.len()).unwrap_or(u32::MAX).max(1);
        let findings = self.findings.load();
        let missing = findings.missing_regions().map(|missing| missing.never_reported.len());
        let missing = missing.map_or(listed, |missing| u32::try_from(missing).unwrap_or(u32::MAX));
        ReportedRegionCounts { reported: listed.saturating_sub(missing), listed }
    }

    /// Returns true while nothing of the global Redis may be used after a jump of its clock, for limits with a period.
    pub fn global_clock_jumped_recently(&self, period_us: u64, at: Instant) -> bool {
        process_time_us(at) < usable_after_jump_us(self.global_jumped_at_us(&self.findings.load()), period_us)
    }

    /// Adds what the region may do at `at` to the view of a call on limits with periods up to `period_us`.
    pub fn restrict_view(&self, view: GlobalTimeAndStanding, period_us: u64, at: Instant) -> GlobalTimeAndStanding {
        let (findings, at_us) = (self.findings.load(), process_time_us(at));
        if self.longest_period_us.load(Ordering::Relaxed) < period_us {
            self.longest_period_us.fetch_max(period_us, Ordering::Relaxed);
        }
        let parts_unusable = !self.may_use_region_parts(&findings, period_us, at_us);
        if at_us < usable_after_jump_us(self.global_jumped_at_us(&findings), period_us) {
            return GlobalTimeAndStanding { cut_off: true, parts_unusable, ..GlobalTimeAndStanding::UNKNOWN };
        }
        let may_ask = self.has_global_connection(at) && findings.identity.is_some() && findings.missing.is_some();
        GlobalTimeAndStanding { can_request: may_ask, cut_off: !may_ask, parts_unusable, ..view }
    }

    fn may_use_region_parts(&self, findings: &RegionFindings, period_us: u64, at_us: i64) -> bool {
        let Some(from_us) = findings.parts_usable_from_us(period_us) else { return false };
        let jumped_us = self.events.region_jumps.last_large_jump_at_us();
        // Behind a newer connection may be a Redis that lost its data.
        let is_same_redis = findings.identity_read_us > self.events.region_connections.last_opened_at_us();
        let from_us = from_us.max(usable_after_jump_us(jumped_us, period_us));
        is_same_redis && from_us <= at_us && at_us < findings.lease_ends_us
    }

    fn global_jumped_at_us(&self, findings: &RegionFindings) -> i64 {
        findings.global_jumped_at_us.max(self.events.global_jumps.last_large_jump_at_us())
    }

    /// Time until the pause after a jump of the global clock ends, for the limit with the longest period; `None`: there
    /// is none.
    pub fn pause_left_after_global_jump(&self, at: Instant) -> Option<Duration> {
        self.pause_left(self.global_jumped_at_us(&self.findings.load()), at)
    }

    /// Time until the pause of the parts after a jump of the region's clock ends, for the limit with the longest
    /// period; `None`: there is none.
    pub fn pause_left_after_region_jump(&self, at: Instant) -> Option<Duration> {
        self.pause_left(
            self.findings.load().region_jumped_at_us.max(self.events.region_jumps.last_large_jump_at_us()),
            at,
        )
    }

    fn pause_left(&self, jumped_us: i64, at: Instant) -> Option<Duration> {
        let period_us = self.longest_period_us.load(Ordering::Relaxed).max(MIN_TIME_WITHOUT_PARTS_US);
        time_left_until(usable_after_jump_us(jumped_us, period_us), at)
    }

    /// Microseconds since a jump of the global clock that the registry is to be told; `None`: there is none.
    pub fn us_since_global_jump_to_report(&self, at_us: i64) -> Option<u64> {
        let other = OtherClock {
            jumped_us: self.events.region_jumps.last_large_jump_at_us(),
            read_us: self.findings.load().identity_read_us,
        };
        us_since_jump_to_report(self.events.global_jumps.last_large_jump_at_us(), other, at_us)
    }

    /// Microseconds since a jump of the region's clock that its Redis is to be told; `None`: there is none.
    pub fn us_since_region_jump_to_report(&self, at_us: i64) -> Option<u64> {
        let other = OtherClock {
            jumped_us: self.events.global_jumps.last_large_jump_at_us(),
            read_us: self.answered_us.load(Ordering::Relaxed),
        };
        us_since_jump_to_report(self.events.region_jumps.last_large_jump_at_us(), other, at_us)
    }
}

/// Time after a jump of one clock by which both Redis have been read; the jump is reported from then on.
const REPORT_JUMP_AFTER_US: u64 = 3_000_000;
/// Time after a jump from which on it is no longer reported.
const MAX_REPORTED_JUMP_AGE_US: u64 = 30_000_000;

/// Clock of the other Redis than the one that jumped.
#[derive(Clone, Copy)]
struct OtherClock {
    /// Process time of its last jump.
    jumped_us: i64,
    /// Process time at which it was read last.
    read_us: i64,
}

/// Returns the time since a jump of one clock that other processes must know. If the clock of this process jumped, both
/// other clocks seem to jump, and nobody else must know.
fn us_since_jump_to_report(jumped_us: i64, other: OtherClock, at_us: i64) -> Option<u64> {
    let ago_us =
        us_since_event(jumped_us, at_us).filter(|us| (REPORT_JUMP_AFTER_US..MAX_REPORTED_JUMP_AGE_US).contains(us))?;
    let other_us = us_since_event(other.jumped_us, at_us);
    let is_alone = other_us.is_none_or(|other_us| other_us.abs_diff(ago_us) > REPORT_JUMP_AFTER_US);
    (is_alone && other.read_us > jumped_us).then_some(ago_us)
}

/// Returns the time until a process time; `None` if it is over.
pub(super) fn time_left_until(until_us: i64, at: Instant) -> Option<Duration> {
    let left_us = u64::try_from(until_us.saturating_sub(process_time_us(at))).ok().filter(|us| *us > 0)?;
    Some(Duration::from_micros(left_us))
}
