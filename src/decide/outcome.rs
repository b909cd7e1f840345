//! Outcome of the charge of one descriptor, failures included.

use crate::limit::StorePolicy;
use crate::store::outcome::{ChargeResults, StoreOutcome};

/// Outcome of the charge of one descriptor.
#[derive(Clone, Debug)]
pub(super) enum DescriptorOutcome {
    /// The descriptor has no limit.
    Unlimited,
    /// The store decided.
    Charged(StoreOutcome),
    /// The store failed, and the fallback counters decided.
    Fallback(ChargeResults),
    /// The store failed, and this policy, which is not `local`, decides.
    Failed(StorePolicy),
}

impl DescriptorOutcome {
    /// Tells whether the limit at `index` rejected the charge.
    pub(super) fn rejects(&self, index: usize) -> bool {
        match self {
            Self::Unlimited | Self::Failed(_) => false,
            Self::Charged(StoreOutcome { results, .. }) | Self::Fallback(results) => !results[index].admitted,
        }
    }
}
