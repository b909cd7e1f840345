//! Statistics of a store for metrics, `/store` and health: plain values, the counters behind some of them, and notices
//! about what a region may do. As JSON they are what `/store` shows.
//!
//! Decides: the latency of the store: from the charge to its outcome, waiting included.
//! Decides: not of answers that this process gives alone; which charges are abandoned.
//! Decides: words of region notices (`RegionNotice`).

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};
use tokio::time::Instant;

use super::charge::{DecidedBy, StoreOutcome};
use super::client::server_status::ServerStatus;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::algorithm::region_pool::TakenHits;
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
#[derive(Clone, Debug, Serialize)]
pub struct SharedStoreStats {
    /// Calls that count charges; coalesced charges share one.
    pub calls: u64,
    /// Charges rejected by the over-limit cache.
    pub rejected_locally: u64,
    /// Servers in use, each once, by address.
    pub servers: Vec<ServerStatus>,
    /// Sharing of eventual limits; `None` if the store has no such limits.
    #[serde(flatten)]
    pub eventual: Option<EventualSharingStats>,
    /// Membership of this region; `None` if there is only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regions: Option<RegionStats>,
    /// Charges requested.
    #[serde(skip)]
    pub charges: u64,
    /// Charges whose caller gave up or timed out; the store may have counted them.
    #[serde(skip)]
    pub abandoned: u64,
    /// Refunds dropped because Redis rejects scripts; `None` if the store never drops one.
    #[serde(skip)]
    pub refunds_dropped: Option<u64>,
    /// Latency of charges that needed a round trip to the store.
    #[serde(skip)]
    pub latency: HistogramSnapshot,
    /// Connections, by the settings that name their servers.
    #[serde(skip)]
    pub pools: Vec<PoolStats>,
    /// Commands sent, as envoyproxy/ratelimit counts them.
    #[serde(skip)]
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
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EventualSharingStats {
    /// Hits of eventual rules.
    #[serde(flatten)]
    pub hits: EventualHitTotals,
    /// Descriptors of eventual rules that are tracked now.
    #[serde(rename = "eventual_descriptors")]
    pub descriptors: usize,
    /// Place among the replicas, whose share this process may use; `None`: it has none.
    #[serde(rename = "slot")]
    pub place: Option<u32>,
    /// Number of places (`TOLLKEEPER_MAX_REPLICAS`).
    #[serde(rename = "slots")]
    pub max_replicas: u32,
    /// Processes that share the store, at the last count; `None`: unknown.
    pub live_replicas: Option<u32>,
}

/// Hits of eventual rules since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EventualHitTotals {
    /// Admitted from shares.
    #[serde(rename = "admitted_from_shares")]
    pub from_shares: u64,
    /// Admitted from leases.
    #[serde(rename = "admitted_from_leases")]
    pub from_leases: u64,
    /// Charged in Redis for leases.
    #[serde(rename = "leased_hits")]
    pub leased: u64,
    /// Left of leases when they ended.
    #[serde(rename = "lease_hits_left")]
    pub returned: u64,
}

/// A region among others.
#[derive(Clone, Debug, Serialize)]
pub struct RegionStats {
    /// Name of this region.
    pub region: String,
    /// Names of all regions.
    #[serde(rename = "names")]
    pub regions: Vec<String>,
    /// True if the global Redis has answered within 5 s.
    pub connected: bool,
    /// Time since its last answer; `None` before the first.
    #[serde(rename = "unanswered_s", serialize_with = "serialize_seconds")]
    pub since_answer: Option<Duration>,
    /// Grants from the global Redis.
    pub grants: GrantTotals,
    /// What an operator should know.
    pub notices: Vec<RegionNotice>,
}

/// Writes a number of seconds, or `null`.
fn serialize_seconds<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(serializer)
}

/// Grant requests and hits of a region's counters, since the start of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GrantTotals {
    /// Requests to the global Redis.
    pub requested: u64,
    /// Requests without an answer, or whose answer could not be given to the region's counter.
    pub failed: u64,
    /// Requests that were not sent, because too many were in progress.
    pub dropped: u64,
    /// Hits that the region's counters took.
    #[serde(rename = "granted_hits")]
    pub granted: u64,
    /// Hits that came too late, or whose fate is not known: they stay unused.
    #[serde(rename = "wasted_hits")]
    pub wasted: u64,
    /// Unused hits that went back to the global Redis.
    #[serde(rename = "returned_hits")]
    pub returned: u64,
    /// Hits that this process admitted from what the region holds.
    pub admitted_from_grants: u64,
    /// Hits that this process admitted from the region's own part: its reserve, and what a cut-off region has more.
    #[serde(rename = "admitted_from_reserves")]
    pub admitted_from_parts: u64,
    /// Time since the last grant; `None` before the first.
    #[serde(rename = "last_grant_s", serialize_with = "serialize_seconds")]
    pub since_last_grant: Option<Duration>,
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
    taken_of_pools: AtomicU64,
    taken_of_parts: AtomicU64,
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
    pub(crate) fn add_used_hits(&self, taken: TakenHits) {
        for (count, hits) in [(&self.taken_of_pools, taken.pool), (&self.taken_of_parts, taken.part)] {
            if hits > 0 {
                count.fetch_add(hits, Ordering::Relaxed);
            }
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
            admitted_from_grants: load(&self.taken_of_pools),
            admitted_from_parts: load(&self.taken_of_parts),
            since_last_grant: last.map(|last| at.duration_since(last)),
        }
    }
}

/// Notice about a region among others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionNotice {
    /// The global Redis does not answer.
    CutOff,
    /// These regions have another list.
    OtherLists(Vec<String>),
    /// These regions have not reported for a minute.
    NotSeen(Vec<String>),
    /// The global Redis cannot be used as it is configured; the text is free of secrets.
    GlobalRedisMisconfigured(String),
}

/// As `{"notice": NAME, "text": MEANING}`.
impl Serialize for RegionNotice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut notice = serializer.serialize_struct("RegionNotice", 2)?;
        notice.serialize_field("notice", self.name())?;
        notice.serialize_field("text", &self.to_string())?;
        notice.end()
    }
}

impl RegionNotice {
    /// Names in metrics.
    pub const NAMES: [&'static str; 3] = ["cut_off", "other_lists", "not_seen"];

    /// Name in metrics and pages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::CutOff => Self::NAMES[0],
            Self::OtherLists(_) => Self::NAMES[1],
            Self::NotSeen(_) => Self::NAMES[2],
            Self::GlobalRedisMisconfigured(_) => "misconfigured",
        }
    }

    /// What a log line says when the notice ends.
    pub const fn text_of_end(&self) -> &'static str {
        match self {
            Self::CutOff => "the global Redis answers again",
            Self::OtherLists(_) => "all regions have the same TOLLKEEPER_REGIONS again",
            Self::NotSeen(_) => "all regions report again",
            Self::GlobalRedisMisconfigured(_) => "the global Redis takes all commands again",
        }
    }
}

impl fmt::Display for RegionNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CutOff => f.write_str(
                "the global Redis does not answer: this region spends the hits that it holds, and its part of each limit \
                 by on_region_loss (look at TOLLKEEPER_GLOBAL_REDIS_URL and the network)",
            ),
            Self::OtherLists(regions) => write!(
                f,
                "TOLLKEEPER_REGIONS differs in {}: while it does, up to the reserve of a region more than the limit may \
                 pass for each region that is in one list only (give the same list to all regions)",
                regions.join(", ")
            ),
            Self::NotSeen(regions) => write!(
                f,
                "{} has not reported to the global Redis for a minute: its part of each limit is not used (start it, or \
                 take it from TOLLKEEPER_REGIONS in all regions)",
                regions.join(", ")
            ),
            Self::GlobalRedisMisconfigured(text) => f.write_str(text),
        }
    }
}
