//! The `/store` page: charges since the start, for operators.
//!
//! Decides: what `/store` shows, and since when.

use std::collections::BTreeMap;

use serde::Serialize;

use super::decider::Decider;
use crate::limit::StoreFailurePolicy;
use crate::store::stats::SharedStoreStats;

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
    pub shared: Option<SharedStoreStats>,
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
            shared: stats.shared,
        }
    }
}
