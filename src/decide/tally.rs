//! What has become of charges since the start, for operators.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Decider;
use crate::limit::StorePolicy;
use crate::store::Store;

/// Charges and hits since the start of the process.
#[derive(Clone, Debug, Serialize)]
pub struct Tally {
    /// `memory` or `redis`.
    pub store: &'static str,
    /// Charges that the store failed and a policy answered, by what went wrong; those that never did are left out.
    pub failed_charges: BTreeMap<&'static str, u64>,
    /// The same charges by the policy that decided; what `local` and `allow` admit is beside what limits promise.
    pub decided_by_policy: BTreeMap<&'static str, u64>,
    /// What only counters in Redis have.
    #[serde(flatten)]
    pub redis: Option<OfRedis>,
}

/// What only counters in Redis have.
#[derive(Clone, Debug, Serialize)]
pub struct OfRedis {
    /// Calls of scripts, or of commands in their place.
    pub calls: u64,
    /// Charges that were refused by what Redis had just said.
    pub refused_locally: u64,
    /// Hits of eventual rules that were admitted from this process's shares.
    pub admitted_from_shares: u64,
    /// Hits of eventual rules that were admitted from leases.
    pub admitted_from_leases: u64,
    /// Hits that were leased.
    pub leased: u64,
    /// Hits that were left of leases when they ended.
    pub left_of_leases: u64,
    /// Descriptors of eventual rules that are known now.
    pub eventual_descriptors: usize,
    /// The slot whose share this process may use; `null`: none.
    pub slot: Option<u32>,
    /// Slots that there are.
    pub slots: u32,
    /// Processes that share this Redis, as last counted; `null`: not known.
    pub live_replicas: Option<u32>,
}

impl Decider {
    /// What has become of charges since the start.
    pub fn tally(&self) -> Tally {
        let failed_charges = self.failed_charges().filter(|(_, count)| *count > 0).collect();
        let policies = StorePolicy::ALL.map(|policy| (policy.name(), self.failures.decided_by(policy)));
        let decided_by_policy = policies.into_iter().filter(|(_, count)| *count > 0).collect();
        let Store::Redis(redis) = &self.store else {
            return Tally { store: "memory", failed_charges, decided_by_policy, redis: None };
        };
        let (usage, replicas) = (redis.eventual().usage(), redis.replicas());
        let of_redis = OfRedis {
            calls: redis.calls(),
            refused_locally: redis.refused_locally(),
            admitted_from_shares: usage.shared,
            admitted_from_leases: usage.leased,
            leased: usage.lent,
            left_of_leases: usage.returned,
            eventual_descriptors: redis.eventual().known(),
            slot: replicas.slot(),
            slots: replicas.slots().get(),
            live_replicas: replicas.live().map(std::num::NonZeroU32::get),
        };
        Tally { store: "redis", failed_charges, decided_by_policy, redis: Some(of_redis) }
    }
}
