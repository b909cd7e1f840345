//! Failure policies of a descriptor: the decision while its store fails.
//!
//! The strictest policy of the enforced limits decides for these, and that of the quotas for the quotas: a quota
//! rejects only together with all others, so its policy must not replace that of the limits beside it. Limits in shadow
//! mode do not count.

use super::selection::SelectedLimit;
use crate::limit::StorePolicy;
use crate::limit::request::Hits;

/// Failure policies of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FailurePolicies {
    /// Policy of the limits that reject a request alone; `allow` if there are none.
    pub(super) enforced: StorePolicy,
    /// Policy of the quotas; `allow` if there are none.
    pub(super) quotas: StorePolicy,
}

impl FailurePolicies {
    /// Policies for a charge of `hits`. Peeks and refunds are never rejected: all policies but `local` allow them.
    pub(super) fn of(limits: &[SelectedLimit<'_>], hits: Hits) -> Self {
        let strictest = |quota: bool| {
            let of_kind = limits.iter().filter(|selected| selected.quota == quota && !selected.shadow);
            let strictest =
                of_kind.map(|selected| selected.limit.on_store_error()).max_by_key(|policy| strictness(*policy));
            match strictest {
                Some(StorePolicy::Local) => StorePolicy::Local,
                Some(policy) if matches!(hits, Hits::Charge(_)) => policy,
                _ => StorePolicy::Allow,
            }
        };
        Self { enforced: strictest(false), quotas: strictest(true) }
    }

    /// Policy that decides for a limit.
    pub(super) const fn for_limit(self, selected: &SelectedLimit<'_>) -> StorePolicy {
        if selected.quota { self.quotas } else { self.enforced }
    }

    /// The stricter of both policies.
    pub(super) fn strictest(self) -> StorePolicy {
        if strictness(self.quotas) > strictness(self.enforced) { self.quotas } else { self.enforced }
    }

    /// Returns true if the fallback counters decide for some limits.
    pub(super) fn use_fallback(self) -> bool {
        match self.enforced {
            StorePolicy::Local => true,
            StorePolicy::Allow => self.quotas == StorePolicy::Local,
            StorePolicy::Deny | StorePolicy::Error => false,
        }
    }
}

const fn strictness(policy: StorePolicy) -> u8 {
    match policy {
        StorePolicy::Allow => 0,
        StorePolicy::Local => 1,
        StorePolicy::Deny => 2,
        StorePolicy::Error => 3,
    }
}
