//! The `/store` page: charges since the start, for operators.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Decider;
use crate::limit::StorePolicy;
use crate::store::stats::RedisStats;

/// Charges and hits since the start of the process.
#[derive(Clone, Debug, Serialize)]
pub struct StoreReport {
    /// `memory` or `redis`.
    pub store: &'static str,
    /// Charges that the store failed to decide, by kind of failure; kinds without any are left out.
    pub failed_charges: BTreeMap<&'static str, u64>,
    /// The same charges by the failure policy that decided. Hits that `local` and `allow` admit come on top of limits.
    pub decided_by_policy: BTreeMap<&'static str, u64>,
    /// Figures of a Redis store.
    #[serde(flatten)]
    pub redis: Option<RedisReport>,
}

/// Figures of a Redis store.
#[derive(Clone, Debug, Serialize)]
pub struct RedisReport {
    /// Calls of scripts, or of commands in their place.
    pub calls: u64,
    /// Charges rejected by the over-limit cache.
    pub rejected_locally: u64,
    /// Hits of eventual rules admitted from this process's free shares.
    pub admitted_from_shares: u64,
    /// Hits of eventual rules admitted from leases.
    pub admitted_from_leases: u64,
    /// Hits leased.
    pub leased_hits: u64,
    /// Hits left over when their leases ended.
    pub lease_hits_left: u64,
    /// Descriptors of eventual rules that are tracked now.
    pub eventual_descriptors: usize,
    /// Slot whose free share this process may use; `null`: it has no slot.
    pub slot: Option<u32>,
    /// Number of slots.
    pub slots: u32,
    /// Processes that share this Redis, at the last count; `null`: unknown.
    pub live_replicas: Option<u32>,
}

impl From<RedisStats> for RedisReport {
    fn from(stats: RedisStats) -> Self {
        Self {
            calls: stats.calls,
            rejected_locally: stats.rejected_locally,
            admitted_from_shares: stats.eventual.shared,
            admitted_from_leases: stats.eventual.leased,
            leased_hits: stats.eventual.lent,
            lease_hits_left: stats.eventual.returned,
            eventual_descriptors: stats.eventual_descriptors,
            slot: stats.slot,
            slots: stats.slots,
            live_replicas: stats.live_replicas,
        }
    }
}

impl Decider {
    /// Report on all charges since the start.
    pub fn store_report(&self) -> StoreReport {
        let stats = self.store.stats();
        let policies = StorePolicy::ALL.map(|policy| (policy.name(), self.failures.decided_by(policy)));
        StoreReport {
            store: stats.store,
            failed_charges: self.failed_charges().filter(|(_, count)| *count > 0).collect(),
            decided_by_policy: policies.into_iter().filter(|(_, count)| *count > 0).collect(),
            redis: stats.redis.map(RedisReport::from),
        }
    }
}
