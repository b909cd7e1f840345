//! Statistics of a store for metrics, `/store` and health: plain values, the counters behind some of them, and notices
//! about what a region may do.
//!
//! Decides: the latency of the store: from the charge to its outcome, waiting included.
//! Decides: not of answers that this process gives alone; which charges are abandoned.
//! Decides: words of region notices (`RegionNotice`).

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::charge::{DecidedBy, StoreOutcome};
use super::client::server_status::ServerStatus;
use crate::base::clock::to_micros;
use crate::base::go_syntax::DurationText;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::algorithm::region::RegionHitsByAllotment;
use crate::telemetry::metrics::histogram::{Histogram, HistogramSnapshot};

/// Statistics of a store since the start of the process.
#[derive(Clone, Debug)]
pub struct StoreStats {
    /// `memory`, `redis` or `memcache`.
    pub store: &'static str,
    /// Counters in this process: all counters of the memory store, the fallback counters of any other.
    pub memory: MemoryUsage,
    /// Statistics of a store that all replicas share.
    pub shared: Option<SharedStoreStats>,
}

/// Statistics of a store that all replicas share, since the start of the process.
#[derive(Clone, Debug)]
pub struct SharedStoreStats {
    /// Charges requested.
    pub charges: u64,
    /// Calls that count charges; coalesced charges share one.
    pub calls: u64,
    /// Charges whose caller gave up or timed out; the store may have counted them.
    pub abandoned: u64,
    /// Refunds dropped because Redis rejects scripts; `None` if the store never drops one.
    pub refunds_dropped: Option<u64>,
    /// Charges rejected by the over-limit cache.
    pub rejected_locally: u64,
    /// Latency of charges that needed a round trip to the store.
    pub latency: HistogramSnapshot,
    /// Sharing of eventual limits; `None` if the store has no such limits.
    pub eventual: Option<EventualSharingStats>,
    /// Membership of this region; `None` if there is only one.
    pub regions: Option<RegionStats>,
    /// Servers in use, each once, by address.
    pub servers: Vec<ServerStatus>,
    /// Connections, by the settings that name their servers.
    pub pools: Vec<PoolStats>,
    /// Commands sent, as envoyproxy/ratelimit counts them.
    pub commands: Vec<CommandCount>,
}

/// Counters and bytes in the memory store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Counters.
    pub counters: u64,
    /// Bytes that they use, index and logs included.
    pub bytes: u64,
    /// Counters evicted to make room for others since the start.
    pub evicted: u64,
    /// Upper bound of `bytes`.
    pub capacity_bytes: u64,
}

/// Sharing of eventual limits between replicas.
#[derive(Clone, Copy, Debug)]
pub struct EventualSharingStats {
    /// Hits of eventual rules.
    pub hits: EventualHitTotals,
    /// Descriptors of eventual rules that are tracked now.
    pub descriptors: usize,
    /// Slot whose free share this process may use; `None`: it has no slot.
    pub slot: Option<u32>,
    /// Number of slots.
    pub slots: u32,
    /// Processes that share the store, at the last count; `None`: unknown.
    pub live_replicas: Option<u32>,
}

/// Hits of eventual rules since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventualHitTotals {
    /// Admitted from shares.
    pub shared: u64,
    /// Admitted from leases.
    pub leased: u64,
    /// Charged in Redis for leases.
    pub lent: u64,
    /// Left of leases when they ended.
    pub returned: u64,
}

/// Membership of a region, and the clocks that it compares.
#[derive(Clone, Debug)]
pub struct RegionStats {
    /// Name of this region.
    pub region: String,
    /// Names of all regions.
    pub regions: Vec<String>,
    /// True if the global Redis has answered within 5 s.
    pub connected: bool,
    /// Microseconds since its last answer; `None` before the first.
    pub us_since_answer: Option<u64>,
    /// Microseconds since the list of a region last changed, or a new Redis was first used; `None` if neither happened.
    pub us_since_change: Option<u64>,
    /// Clocks of the region's Redis and the global one.
    pub clocks: Vec<ServerClockStats>,
    /// Jumps of these clocks that were noticed.
    pub clock_jumps: u64,
    /// Grants from the global Redis.
    pub grants: GrantTotals,
    /// What restricts the region now.
    pub notices: Vec<RegionNotice>,
    /// Configuration error of the global Redis, free of secrets.
    pub misconfiguration: Option<String>,
}

/// Grant requests and hits of a region's counters, since the start of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantTotals {
    /// Requests to the global Redis.
    pub requested: u64,
    /// Requests without an answer, or whose answer could not be given to the region's counter.
    pub failed: u64,
    /// Requests that were not sent, because too many were in progress.
    pub dropped: u64,
    /// Hits that the region's counters took.
    pub granted: u64,
    /// Hits that came too late, or whose fate is not known: they stay unused.
    pub wasted: u64,
    /// Unused hits that went back to the global Redis.
    pub returned: u64,
    /// Hits that the region's counters admitted for this process, by what they were admitted from.
    pub used: RegionHitsByAllotment,
    /// Microseconds since the last grant; `None` before the first.
    pub last_grant_us: Option<u64>,
}

/// Clock of a Redis server, as this process knows it.
#[derive(Clone, Debug)]
pub struct ServerClockStats {
    /// `region` or `global`.
    pub deployment: &'static str,
    /// Address of the server.
    pub address: String,
    /// Width of the interval that contains its offset, in microseconds; `None`: it is unknown.
    pub uncertainty_us: Option<u64>,
}

/// Connections to servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// Name in metrics, such as `redis_pool`.
    pub name: &'static str,
    /// Connections in use.
    pub open_connection_count: usize,
    /// Connections opened since the start.
    pub opened_connections_total: u64,
}

/// Number of commands of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandCount {
    /// Name in statsd, after `ratelimit.`; series of one name are in a row.
    pub name: &'static str,
    /// Outcome; `None` if the name says all.
    pub code: Option<&'static str>,
    /// Commands since the start.
    pub count: u64,
}

/// Charges since the start.
#[derive(Debug, Default)]
pub(super) struct ChargeStats {
    requested: AtomicU64,
    abandoned: AtomicU64,
    latency: Histogram,
}

/// Charges in progress. If it is dropped before they finish, they are counted as abandoned.
pub(super) struct ChargesInProgress<'a> {
    stats: &'a ChargeStats,
    started: Instant,
    charges: usize,
}

impl ChargeStats {
    /// Counts charges that begin now.
    pub(super) fn begin_charges(&self, charges: usize) -> ChargesInProgress<'_> {
        self.requested.fetch_add(charges as u64, Ordering::Relaxed);
        ChargesInProgress { stats: self, started: Instant::now(), charges }
    }

    /// Returns the number of charges requested.
    pub(super) fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    /// Returns the number of charges whose caller gave up or timed out.
    pub(super) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Returns the latency of charges that needed a round trip to the store.
    pub(super) fn latency(&self) -> HistogramSnapshot {
        self.latency.snapshot()
    }
}

impl ChargesInProgress<'_> {
    /// Counts the outcomes of all charges: those that timed out are abandoned.
    pub(super) fn finish<E>(mut self, outcomes: &[Result<StoreOutcome, E>], is_timeout: impl Fn(&E) -> bool) {
        self.charges = outcomes.iter().filter(|outcome| outcome.as_ref().is_err_and(&is_timeout)).count();
        let is_local =
            |outcome: &Result<StoreOutcome, E>| outcome.as_ref().is_ok_and(|it| it.decided_by != DecidedBy::Store);
        if !outcomes.iter().all(is_local) {
            self.stats.latency.observe(self.started.elapsed());
        }
    }
}

impl Drop for ChargesInProgress<'_> {
    fn drop(&mut self) {
        self.stats.abandoned.fetch_add(self.charges as u64, Ordering::Relaxed);
    }
}

/// Counts of requests and hits.
#[derive(Debug, Default)]
pub(crate) struct GrantCounts {
    requested: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
    granted: AtomicU64,
    wasted: AtomicU64,
    returned: AtomicU64,
    used_grant: AtomicU64,
    used_reserve: AtomicU64,
    used_cut_off_allowance: AtomicU64,
    last_grant: Mutex<Option<Instant>>,
}

impl GrantCounts {
    pub(crate) fn count_request(&self) {
        self.requested.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_failed_request(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_dropped_request(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_granted_hits(&self, hits: u64, at: Instant) {
        self.granted.fetch_add(hits, Ordering::Relaxed);
        *lock_ignoring_poison(&self.last_grant) = Some(at);
    }

    pub(crate) fn add_wasted_hits(&self, hits: u64) {
        self.wasted.fetch_add(hits, Ordering::Relaxed);
    }

    pub(crate) fn add_returned_hits(&self, hits: u64) {
        self.returned.fetch_add(hits, Ordering::Relaxed);
    }

    /// Adds hits that a call admitted.
    pub(crate) fn add_used_hits(&self, admitted: RegionHitsByAllotment) {
        let RegionHitsByAllotment { grant, reserve, cut_off_allowance } = admitted;
        let counts = [
            (&self.used_grant, grant),
            (&self.used_reserve, reserve),
            (&self.used_cut_off_allowance, cut_off_allowance),
        ];
        for (count, hits) in counts.into_iter().filter(|(_, hits)| *hits > 0) {
            count.fetch_add(hits, Ordering::Relaxed);
        }
    }

    pub(crate) fn totals(&self, at: Instant) -> GrantTotals {
        let last = *lock_ignoring_poison(&self.last_grant);
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        GrantTotals {
            requested: load(&self.requested),
            failed: load(&self.failed),
            dropped: load(&self.dropped),
            granted: load(&self.granted),
            wasted: load(&self.wasted),
            returned: load(&self.returned),
            used: RegionHitsByAllotment {
                grant: load(&self.used_grant),
                reserve: load(&self.used_reserve),
                cut_off_allowance: load(&self.used_cut_off_allowance),
            },
            last_grant_us: last.map(|last| to_micros(at.duration_since(last))),
        }
    }
}

/// Notice about what a region may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionNotice {
    /// Another Redis has the name of this region.
    SecondRedis {
        /// Time since its last report.
        silent: Duration,
        /// Time until this region may use its parts if the other Redis reports no more.
        pause: Duration,
    },
    /// The Redis of this region has its identity from another one, and both are used.
    CopiedRedis {
        /// Time until this region may use its parts if only one is used from now on.
        pause: Duration,
    },
    /// Regions have another list.
    OtherLists {
        /// Their names.
        regions: Vec<String>,
        /// Time until this region may use its parts if these regions report no more.
        pause: Duration,
    },
    /// A list changed, or a pause because of another Redis ended, within the last minute.
    ListChanged,
    /// The Redis of this region is new, and other regions have not told yet that no list changed.
    NewRedis,
    /// The global Redis does not answer.
    CutOff {
        /// Time for which the region still has its parts.
        parts_left: Option<Duration>,
    },
    /// The region has been cut off for longer than it may use its parts.
    LeaseEnded,
    /// These regions have never reported to this global Redis.
    NeverReported(Vec<String>),
    /// These regions have not reported for a minute.
    NotSeen(Vec<String>),
    /// The clock of the global Redis jumped.
    GlobalClockJumped {
        /// Time until the limit with the longest period is granted hits again.
        pause: Duration,
    },
    /// The clock of the region's Redis jumped.
    RegionClockJumped {
        /// Time until the region may use its parts of the limit with the longest period.
        pause: Duration,
    },
}

impl RegionNotice {
    /// Names of all notices in pages and metrics.
    pub const NAMES: [&'static str; 11] = [
        "second_redis",
        "copied_redis",
        "other_lists",
        "list_changed",
        "new_redis",
        "cut_off",
        "lease_ended",
        "never_reported",
        "not_seen",
        "global_clock_jumped",
        "region_clock_jumped",
    ];

    /// Name in pages and metrics.
    pub const fn name(&self) -> &'static str {
        let index = match self {
            Self::SecondRedis { .. } => 0,
            Self::CopiedRedis { .. } => 1,
            Self::OtherLists { .. } => 2,
            Self::ListChanged => 3,
            Self::NewRedis => 4,
            Self::CutOff { .. } => 5,
            Self::LeaseEnded => 6,
            Self::NeverReported(_) => 7,
            Self::NotSeen(_) => 8,
            Self::GlobalClockJumped { .. } => 9,
            Self::RegionClockJumped { .. } => 10,
        };
        Self::NAMES[index]
    }

    /// Returns true if the region has less than its part because of it.
    pub const fn restricts_region(&self) -> bool {
        !matches!(self, Self::CutOff { .. } | Self::NotSeen(_))
    }

    /// Returns true if both tell the same, perhaps at other times.
    pub fn has_same_subject(&self, other: &Self) -> bool {
        self.name() == other.name() && self.regions() == other.regions()
    }

    /// Names of regions that it tells of.
    fn regions(&self) -> &[String] {
        match self {
            Self::OtherLists { regions, .. } | Self::NeverReported(regions) | Self::NotSeen(regions) => regions,
            _ => &[],
        }
    }
}

/// Parts of limits that a region does not use.
const PARTS_UNUSED_TEXT: &str = "this region uses neither its reserve nor its share of max_overshoot";

impl fmt::Display for RegionNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SecondRedis { silent, pause } => write_second_redis_notice(f, *silent, *pause),
            Self::CopiedRedis { pause } => write_copied_redis_notice(f, *pause),
            Self::OtherLists { regions, pause } => write_other_lists_notice(f, regions, *pause),
            Self::ListChanged => write!(
                f,
                "the regions or the Redis of one changed: {PARTS_UNUSED_TEXT} for one period of the limit, 60 s at least"
            ),
            Self::NewRedis => write!(
                f,
                "the Redis of this region is new and may follow another TOLLKEEPER_REGIONS: {PARTS_UNUSED_TEXT} for one period \
                 of the limit, 60 s at least"
            ),
            Self::CutOff { parts_left } => write_cut_off_notice(f, *parts_left),
            Self::LeaseEnded => write!(
                f,
                "the global Redis has not confirmed this region for TOLLKEEPER_REGION_LEASE, or never: {PARTS_UNUSED_TEXT} until \
                 it answers (a longer lease, or on_region_loss: local, lets a region go on)"
            ),
            Self::NeverReported(names) => write!(
                f,
                "{} never reported to this global Redis: the part of each is kept back (start them, or give all regions \
                 the same TOLLKEEPER_GLOBAL_REDIS_URL and CACHE_KEY_PREFIX)",
                names.join(", ")
            ),
            Self::NotSeen(names) => {
                write!(f, "{} has not reported to the global Redis for a minute", names.join(", "))
            }
            Self::GlobalClockJumped { pause } => write!(
                f,
                "the clock of the global Redis, or of this machine, jumped: on_region_loss decides here for one period \
                 of each limit, at most {} from now ({CLOCK_JUMP_ADVICE})",
                format_rounded_up(*pause)
            ),
            Self::RegionClockJumped { pause } => write!(
                f,
                "the clock of the Redis of this region, or of this machine, jumped, or that Redis lost its data: \
                 {PARTS_UNUSED_TEXT} for one period of each limit, at most {} from now ({CLOCK_JUMP_ADVICE})",
                format_rounded_up(*pause)
            ),
        }
    }
}

/// Advice on a clock that jumped.
const CLOCK_JUMP_ADVICE: &str = "keep the clock of the server with NTP, without steps";

fn write_second_redis_notice(f: &mut fmt::Formatter<'_>, silent: Duration, pause: Duration) -> fmt::Result {
    write!(
        f,
        "another Redis has the name of this region and last reported {} ago: {PARTS_UNUSED_TEXT} until the other has been silent \
         for its lease, {} from now at the earliest (if it is no longer used, wait; otherwise give each region its own \
         TOLLKEEPER_REGION and REDIS_URL)",
        format_rounded_up(silent),
        format_rounded_up(pause)
    )
}

fn write_copied_redis_notice(f: &mut fmt::Formatter<'_>, pause: Duration) -> fmt::Result {
    write!(
        f,
        "the Redis of this region is a copy of another that is used too, or was restored: {PARTS_UNUSED_TEXT} for {} (let all \
         replicas of the region use one REDIS_URL)",
        format_rounded_up(pause)
    )
}

fn write_other_lists_notice(f: &mut fmt::Formatter<'_>, regions: &[String], pause: Duration) -> fmt::Result {
    write!(
        f,
        "TOLLKEEPER_REGIONS differs in {}: {PARTS_UNUSED_TEXT} until all have one list, or those have been silent for their \
         lease, {} from now at the earliest (give the same list to all regions)",
        regions.join(", "),
        format_rounded_up(pause)
    )
}

fn write_cut_off_notice(f: &mut fmt::Formatter<'_>, parts_left: Option<Duration>) -> fmt::Result {
    f.write_str(
        "the global Redis does not answer: this region spends its grants and its reserve, then on_region_loss decides",
    )?;
    if let Some(left) = parts_left {
        write!(f, "; reserve and share of max_overshoot end in {} (TOLLKEEPER_REGION_LEASE)", format_rounded_up(left))?;
    }
    f.write_str(" (see the preceding connection errors)")
}

/// Formats a time, rounded up to seconds, and from ten minutes on to minutes.
fn format_rounded_up(duration: Duration) -> String {
    let unit_s = if duration.as_secs() < 600 { 1 } else { 60 };
    DurationText(Duration::from_secs((duration.as_secs() + 1).next_multiple_of(unit_s))).to_string()
}
