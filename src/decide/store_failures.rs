//! Charges that the store failed to decide: the policies that decide in its place, and how many there were.
//!
//! The strictest policy of the hard limits decides for these, and that of the quotas for the quotas: a quota rejects
//! only together with all others, so its policy must not replace that of the limits beside it. Limits in shadow mode do
//! not count. `outcome` and `status` turn the policy into a verdict and a retry time; `outcome` says which verdict
//! wins.
//!
//! Every failed charge counts, also where its policy answered without an error. The first failure of each kind is
//! logged at once; after that, one line per kind every 10 s, with the policy that decided and advice for the operator.
//!
//! Decides: which policy decides if the store fails (`on_store_error`): of a rule, of the environment.
//! Decides: none in shadow mode; refunds, peeks and releases if the store fails; the strictest of several.
//! Decides: the line `store failed`: what it advises, how often, when this process is blamed (`process_late_ms`).

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::selection::SelectedLimit;
use crate::base::clock::Time;
use crate::limit::StoreFailurePolicy;
use crate::limit::request::Hits;
use crate::store::Store;
use crate::store::client::server_status::ServerStatus;
use crate::store::error::ChargeError;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::scheduler_lag::SCHEDULER_LAG;

/// Failed charges, by kind of failure and by the policy that decided.
#[derive(Debug)]
pub(super) struct FailedChargeCounters {
    kinds: [ThrottledFailureCount; ChargeError::MAX_KINDS],
    policies: [AtomicU64; StoreFailurePolicy::ALL.len()],
}

/// Number of failures of one kind, and the throttle of their log lines.
#[derive(Debug)]
struct ThrottledFailureCount {
    count: AtomicU64,
    throttle: LogThrottle,
}

impl Default for FailedChargeCounters {
    fn default() -> Self {
        const LOG_INTERVAL: Duration = Duration::from_secs(10);
        let kind = |_| ThrottledFailureCount { count: AtomicU64::new(0), throttle: LogThrottle::every(LOG_INTERVAL) };
        Self { kinds: std::array::from_fn(kind), policies: Default::default() }
    }
}

impl FailedChargeCounters {
    /// Counts a failed charge by its kind and by the policy that decides it, and logs it, at most every 10 s per kind.
    pub(super) fn record_and_log_failure(
        &self,
        error: ChargeError,
        policy: StoreFailurePolicy,
        now: Time,
        store: &Store,
    ) {
        let kind = &self.kinds[error.kind_index()];
        kind.count.fetch_add(1, Ordering::Relaxed);
        self.policies[policy as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = kind.throttle.allow(now) {
            let (policy, lag) = (policy.name(), SCHEDULER_LAG.recent_maximum(Instant::now()));
            let (process_late_ms, advice) = (lag.as_millis(), explain_failure(error, lag, store));
            tracing::warn!(
                suppressed,
                policy,
                process_late_ms,
                "store failed: {error}; `on_store_error` decides ({advice})"
            );
        }
    }

    /// Number of failures of this kind.
    pub(super) fn count_of_kind(&self, error: ChargeError) -> u64 {
        self.kinds[error.kind_index()].count.load(Ordering::Relaxed)
    }

    /// Number of failed charges that this policy decided.
    pub(super) fn count_decided_by(&self, policy: StoreFailurePolicy) -> u64 {
        self.policies[policy as usize].load(Ordering::Relaxed)
    }
}

/// Explains a failure to an operator. `lag` is the largest one of this process in the last seconds; from half of the
/// store's wait on, it explains a timeout.
fn explain_failure(error: ChargeError, lag: Duration, store: &Store) -> Cow<'static, str> {
    let servers = || store.stats().shared.map(|shared| shared.servers).unwrap_or_default();
    let (wait, lag_ms) = (store.call_timeout(), lag.as_millis());
    let wait_ms = wait.as_millis();
    let late = format!(
        "this process was late by {lag_ms} ms in the last seconds, and TOLLKEEPER_STORE_TIMEOUT is {wait_ms} ms"
    );
    match error.is_timeout() {
        true if 2 * lag >= wait => format!("{late}: give it more CPU").into(),
        true => {
            let answer = servers().into_iter().find_map(|server| Some((server.last_late_answer_ms?, server.address)));
            let answer =
                answer.map_or_else(String::new, |(ms, address)| format!("; {address} last came late after {ms} ms"));
            format!("look at the server and the network{answer}; {late}").into()
        }
        false if error.is_unreachable() => {
            ServerStatus::last_error_of(&servers()).map_or_else(|| error.advice().into(), Cow::from)
        }
        false => error.advice().into(),
    }
}

/// Failure policies of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FailurePolicies {
    /// Policy of the hard limits; `allow` if there are none.
    pub(super) hard: StoreFailurePolicy,
    /// Policy of the quotas; `allow` if there are none.
    pub(super) quotas: StoreFailurePolicy,
}

impl FailurePolicies {
    /// Policies for a charge of `hits`. Peeks and refunds are never rejected: all policies but `local` allow them.
    pub(super) fn for_charge(limits: &[SelectedLimit<'_>], hits: Hits) -> Self {
        let strictest = |quota: bool| {
            let of_kind = limits.iter().filter(|selected| selected.quota == quota && !selected.shadow);
            let strictest =
                of_kind.map(|selected| selected.limit.on_store_error()).max_by_key(|policy| strictness(*policy));
            match strictest {
                Some(StoreFailurePolicy::Local) => StoreFailurePolicy::Local,
                Some(policy) if matches!(hits, Hits::Charge(_)) => policy,
                _ => StoreFailurePolicy::Allow,
            }
        };
        Self { hard: strictest(false), quotas: strictest(true) }
    }

    /// Policy that decides for a limit.
    pub(super) const fn policy_for_limit(self, selected: &SelectedLimit<'_>) -> StoreFailurePolicy {
        if selected.quota { self.quotas } else { self.hard }
    }

    /// The stricter of both policies.
    pub(super) fn strictest(self) -> StoreFailurePolicy {
        if strictness(self.quotas) > strictness(self.hard) { self.quotas } else { self.hard }
    }

    /// Returns true if the fallback counters decide for some limits.
    pub(super) fn uses_fallback(self) -> bool {
        match self.hard {
            StoreFailurePolicy::Local => true,
            StoreFailurePolicy::Allow => self.quotas == StoreFailurePolicy::Local,
            StoreFailurePolicy::Deny | StoreFailurePolicy::Error => false,
        }
    }
}

pub(super) const fn strictness(policy: StoreFailurePolicy) -> u8 {
    match policy {
        StoreFailurePolicy::Allow => 0,
        StoreFailurePolicy::Local => 1,
        StoreFailurePolicy::Deny => 2,
        StoreFailurePolicy::Error => 3,
    }
}
