//! The `/store` page: charges since the start, for operators.
//!
//! Decides: what `/store` shows, and since when.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::Decider;
use crate::limit::StoreFailurePolicy;
use crate::store::client::server_status::ServerStatus;
use crate::store::stats::{EventualSharingStats, GrantTotals, RegionStats, SharedStoreStats};

/// Charges and hits since the start of the process.
#[derive(Clone, Debug, Serialize)]
pub struct StoreTotals {
    /// `memory`, `redis` or `memcache`.
    pub store: &'static str,
    /// Charges that the store failed to decide, by kind of failure; kinds without any are left out.
    pub failed_charges: BTreeMap<&'static str, u64>,
    /// The same charges by the failure policy that decided. Hits that `local` and `allow` admit come on top of limits.
    pub decided_by_policy: BTreeMap<&'static str, u64>,
    /// Figures of a store that all replicas share.
    #[serde(flatten)]
    pub shared: Option<SharedStoreReport>,
}

/// Figures of a store that all replicas share.
#[derive(Clone, Debug, Serialize)]
pub struct SharedStoreReport {
    /// Calls that count charges.
    pub calls: u64,
    /// Charges rejected by the over-limit cache.
    pub rejected_locally: u64,
    /// Servers that keep counters.
    pub servers: Vec<ServerStatus>,
    /// Figures of eventual rules, if the store has them.
    #[serde(flatten)]
    pub eventual: Option<EventualLimitsReport>,
    /// Membership of this region, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regions: Option<RegionMembershipReport>,
}

/// Membership of a region.
#[derive(Clone, Debug, Serialize)]
pub struct RegionMembershipReport {
    /// Name of this region.
    pub region: String,
    /// Names of all regions.
    pub names: Vec<String>,
    /// False if the global Redis has not answered for 5 s.
    pub connected: bool,
    /// Seconds since its last answer; `null` before the first.
    pub unanswered_s: Option<f64>,
    /// Hits that the region holds at the global Redis.
    pub grants: RegionGrantsReport,
    /// What an operator should know.
    pub notices: Vec<RegionNoticeReport>,
}

/// Something that an operator should know of a region.
#[derive(Clone, Debug, Serialize)]
pub struct RegionNoticeReport {
    /// `misconfigured`, or a name of a [`RegionNotice`](crate::store::stats::RegionNotice).
    pub notice: &'static str,
    /// Meaning, and what to do.
    pub text: String,
}

/// Figures of eventual rules.
#[derive(Clone, Debug, Serialize)]
pub struct EventualLimitsReport {
    /// Hits admitted from this process's free shares.
    pub admitted_from_shares: u64,
    /// Hits admitted from leases.
    pub admitted_from_leases: u64,
    /// Hits leased.
    pub leased_hits: u64,
    /// Hits left over when their leases ended.
    pub lease_hits_left: u64,
    /// Descriptors that are tracked now.
    pub eventual_descriptors: usize,
    /// Slot whose free share this process may use; `null`: it has no slot.
    pub slot: Option<u32>,
    /// Number of slots.
    pub slots: u32,
    /// Processes that share the store, at the last count; `null`: unknown.
    pub live_replicas: Option<u32>,
}

impl From<SharedStoreStats> for SharedStoreReport {
    fn from(stats: SharedStoreStats) -> Self {
        Self {
            calls: stats.calls,
            rejected_locally: stats.rejected_locally,
            servers: stats.servers,
            eventual: stats.eventual.map(EventualLimitsReport::from),
            regions: stats.regions.map(RegionMembershipReport::from),
        }
    }
}

/// Grant requests and hits of a region's counters, since the start of this process.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RegionGrantsReport {
    /// Requests to the global Redis.
    pub requested: u64,
    /// Requests without an answer, or whose answer could not be given to the region's counter.
    pub failed: u64,
    /// Requests that were not sent, because too many were in progress.
    pub dropped: u64,
    /// Hits that the region's counters took.
    pub granted_hits: u64,
    /// Hits that came too late, or whose fate is not known.
    pub wasted_hits: u64,
    /// Unused hits that went back to the global Redis.
    pub returned_hits: u64,
    /// Hits that this process admitted from what the region holds.
    pub admitted_from_grants: u64,
    /// Hits that this process admitted from the region's own part: its reserve, and what a cut-off region has more.
    pub admitted_from_reserves: u64,
    /// Time since the last grant in seconds; `null` before the first.
    pub last_grant_s: Option<f64>,
}

impl From<RegionStats> for RegionMembershipReport {
    fn from(stats: RegionStats) -> Self {
        let seconds = |us| Duration::from_micros(us).as_secs_f64();
        let misconfiguration = stats.misconfiguration.map(|text| RegionNoticeReport { notice: "misconfigured", text });
        let notices =
            stats.notices.iter().map(|notice| RegionNoticeReport { notice: notice.name(), text: notice.to_string() });
        Self {
            region: stats.region,
            names: stats.regions,
            connected: stats.connected,
            unanswered_s: stats.us_since_answer.map(seconds),
            grants: RegionGrantsReport::from(stats.grants),
            notices: notices.chain(misconfiguration).collect(),
        }
    }
}

impl From<GrantTotals> for RegionGrantsReport {
    fn from(totals: GrantTotals) -> Self {
        let GrantTotals { requested, failed, dropped, granted, wasted, returned, used, last_grant_us } = totals;
        let last_grant_s = last_grant_us.map(|us| Duration::from_micros(us).as_secs_f64());
        Self {
            requested,
            failed,
            dropped,
            granted_hits: granted,
            wasted_hits: wasted,
            returned_hits: returned,
            admitted_from_grants: used.pool,
            admitted_from_reserves: used.part,
            last_grant_s,
        }
    }
}

impl From<EventualSharingStats> for EventualLimitsReport {
    fn from(sharing: EventualSharingStats) -> Self {
        let EventualSharingStats { hits, descriptors, place, max_replicas, live_replicas } = sharing;
        Self {
            admitted_from_shares: hits.shared,
            admitted_from_leases: hits.from_leases,
            leased_hits: hits.leased,
            lease_hits_left: hits.returned,
            eventual_descriptors: descriptors,
            slot: place,
            slots: max_replicas,
            live_replicas,
        }
    }
}

impl Decider {
    /// Report on all charges since the start.
    pub fn build_store_totals(&self) -> StoreTotals {
        let stats = self.store.stats();
        let policies = StoreFailurePolicy::ALL.map(|policy| (policy.name(), self.failures.count_decided_by(policy)));
        StoreTotals {
            store: stats.store,
            failed_charges: self.failed_charge_counts().filter(|(_, count)| *count > 0).collect(),
            decided_by_policy: policies.into_iter().filter(|(_, count)| *count > 0).collect(),
            shared: stats.shared.map(SharedStoreReport::from),
        }
    }
}
