//! Runs calls, and updates the caches of this process from their replies.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use smallvec::SmallVec;

use super::coalescer::{CallReply, CallResults};
use super::eventual::lease::CallReport;
use super::eventual::local_admission::{LeaseReply, LocalAdmission};
use super::prepared_call::PreparedCall;
use super::regions::grant_request::{GrantRequest, RegionCounts};
use super::script::replay::ScriptOutcome;
use crate::base::clock::Time;
use crate::limit::algorithm::state::State;
use crate::limit::{Limit, StorePolicy};
use crate::store::command::{ChargeBatch, OwnedCounter};
use crate::store::fallback::Fallback;
use crate::store::over_limit_cache::{CallTimes, OverLimitCache};

/// Sender of calls, with the caches that their reports update.
#[derive(Debug)]
pub(super) struct CallRunner {
    pub(super) local_admission: LocalAdmission,
    pub(super) over_limit_cache: OverLimitCache,
    /// Counters that replace those in Redis while it is away.
    pub(super) fallback: Fallback,
    calls: AtomicU64,
}

/// Requests grants in the background for the counters at these indices, on which a call opened requests.
fn request_grants(call: &PreparedCall, commands: &ChargeBatch, states: &[State], opened: &[usize]) {
    let (Some(grants), Some(command)) = (&call.grants, commands.last()) else { return };
    for &index in opened {
        if let Some((counts, clock)) = RegionCounts::of(&states[index]) {
            grants.request(GrantRequest {
                key: call.mode.keys()[index].clone(),
                limit: command.counters[index].limit,
                counts,
                clock,
                now: Time::from_micros(states[index].open_request()),
            });
        }
    }
}

impl CallRunner {
    /// Creates a runner that has sent nothing.
    pub(super) const fn new(
        local_admission: LocalAdmission,
        over_limit_cache: OverLimitCache,
        fallback: Fallback,
    ) -> Self {
        Self { local_admission, over_limit_cache, fallback, calls: AtomicU64::new(0) }
    }

    /// Returns the number of calls sent; coalesced charges share one.
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Sends a call for these charges, together with the charge of a lease if demand requires one.
    pub(super) async fn run(&self, call: &PreparedCall, commands: &mut ChargeBatch, deadline: Instant) -> CallResults {
        let sent = Instant::now();
        let lease_hits = self.local_admission.request_lease(call, commands, sent);
        if commands.is_empty() {
            return Ok(CallReply::default());
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut span = call.span(commands.len());
        let leases = self.local_admission.lease_call(call, commands, lease_hits);
        let outcome = call.send(commands, leases.as_ref(), deadline, span.as_mut()).await;
        if let (Some(span), Err(error)) = (&mut span, &outcome) {
            span.fail(error.name(), error.to_string());
        }
        drop(span);
        if let Ok(outcome) = &outcome {
            request_grants(call, commands, &outcome.states, &outcome.grant_requests);
        }
        if lease_hits > 0 {
            commands.pop();
        }
        let ScriptOutcome { mut results, states, now, region_use, .. } = outcome?;
        call.grants.iter().for_each(|grants| grants.record_use(region_use));
        let lease = (lease_hits > 0).then(|| results.pop()).flatten();
        let lease = lease.map(|results| LeaseReply { hits: lease_hits, results });
        let times = CallTimes { sent, answered: Instant::now() };
        self.over_limit_cache.update(call.id.counters, commands, &results, times);
        let report = CallReport { sent, now, states, leased: 0 };
        self.update_fallback(call, commands, &report);
        self.local_admission.record(call, report, lease);
        Ok(CallReply { results, now })
    }

    /// Ends leases when their life is over; runs until it is dropped.
    pub(super) async fn reap_leases(&self) {
        self.local_admission.reap_leases(&self.over_limit_cache).await;
    }

    /// Ends all leases and returns their unused hits.
    pub(super) async fn return_leases(&self) {
        self.local_admission.return_leases(&self.over_limit_cache).await;
    }

    /// Copies the reported states to the fallback counters, for limits that use these while Redis is away.
    fn update_fallback(&self, call: &PreparedCall, commands: &ChargeBatch, report: &CallReport) {
        let Some(last) = commands.last() else { return };
        let uses_fallback =
            |counter: &OwnedCounter| counter.enforced && counter.limit.on_store_error() == StorePolicy::Local;
        if last.counters.iter().any(uses_fallback) {
            let counters: SmallVec<[(Limit, u128); 1]> =
                last.counters.iter().map(|counter| (counter.limit, counter.tag)).collect();
            self.fallback.remember(call.id.path, &counters, &report.states, call.now);
        }
    }
}
