//! Releases of slots and reservations that nothing waits for, until Redis has made them: of rejected requests, of
//! candidates, and those whose call Redis failed to decide.
//!
//! Envoy does not report the end of a request that it knows to be rejected, so nothing else would free its slots before
//! their time is over. As a release, what is given back twice is given back once. If the call that acquires them was
//! not answered, Redis may make it after they were given back, so all is given back once more at the end. Unused hits
//! of leases return in `eventual::lease_reaper`, those of grants in `regions::unused_hits`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, sleep_until};

use super::{ChargeOutcome, Redis};
use crate::base::clock::Clock;
use crate::limit::Limit;
use crate::limit::charge::{Charge, ChargeRequest, Counter};
use crate::limit::counter_path::CounterPath;
use crate::limit::request::Entry;
use crate::limit::slot::SlotUse;
use crate::store::charge::ChargeContext;

/// Time for which it is tried again, as releases are, unless the process ends before. No call to Redis is on its way
/// for longer (`TOMBSTONE_US`).
const REPEAT_TIME: Duration = Duration::from_secs(15);
/// Pauses before that: the first, and the longest; each is twice the one before.
const FIRST_AND_LONGEST_PAUSE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];
/// Maximum memory of all charges that may be repeated, in KiB. Beyond it, they are made once.
static REPEAT_MEMORY_KIB: Semaphore = Semaphore::const_new(64 * 1024);
/// Memory of a charge beside its entries, in bytes.
const CHARGE_BYTES: usize = 512;

/// A charge with a slot that outlives its request.
struct OwnedGiveBack {
    domain: String,
    entries: Vec<[Box<[u8]>; 2]>,
    shared: Vec<(usize, Box<[u8]>)>,
    candidate: Option<String>,
    counters: Vec<OwnedCounter>,
    request: ChargeRequest,
    slot: Option<SlotUse>,
}

struct OwnedCounter {
    limit: Limit,
    shadow: bool,
    quota: bool,
    tag: u128,
    epoch: u64,
}

impl OwnedCounter {
    const fn as_counter(&self) -> Counter<'_> {
        let Self { ref limit, shadow, quota, tag, epoch } = *self;
        Counter { limit, shadow, quota, tag, epoch }
    }
}

impl OwnedGiveBack {
    fn new(charge: &Charge<'_>) -> Self {
        let CounterPath { domain, entries, shared, candidate } = charge.path;
        let counter = |counter: &Counter<'_>| {
            let Counter { limit, shadow, quota, tag, epoch } = *counter;
            OwnedCounter { limit: *limit, shadow, quota, tag, epoch }
        };
        Self {
            domain: domain.to_owned(),
            entries: entries.iter().map(|entry| [entry.key.into(), entry.value.into()]).collect(),
            shared: shared.iter().map(|(index, pattern)| (*index, (*pattern).into())).collect(),
            candidate: candidate.map(str::to_owned),
            counters: charge.counters.iter().map(counter).collect(),
            request: charge.request,
            slot: charge.slot.copied(),
        }
    }

    /// Makes the charge; returns true if Redis failed.
    async fn charge_and_check_failure(&self, redis: &Arc<Redis>) -> bool {
        let entries: Vec<Entry<'_>> = self.entries.iter().map(|[key, value]| Entry { key, value }).collect();
        let shared: Vec<(usize, &[u8])> = self.shared.iter().map(|(index, pattern)| (*index, &**pattern)).collect();
        let candidate = self.candidate.as_deref();
        let path = CounterPath { domain: &self.domain, entries: &entries, shared: &shared, candidate };
        let counters: SmallVec<[Counter<'_>; 1]> = self.counters.iter().map(OwnedCounter::as_counter).collect();
        let charge = Charge { slot: self.slot.as_ref(), ..Charge::new(path, counters, self.request) };
        let context = ChargeContext::new(Clock::System.now(), Instant::now() + redis.timeout());
        redis.charge_without_waiting(&[charge], context).await.iter().any(Result::is_err)
    }
}

impl Redis {
    /// Makes charges without waiting, and repeats in a task those of them that release slots and that Redis fails to
    /// make; if `may_acquire_late`, releases are made once more at the end. Must be called within a tokio runtime.
    pub fn charge_and_repeat_releases(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        may_acquire_late: bool,
        context: ChargeContext<'_>,
    ) -> impl Future<Output = SmallVec<[ChargeOutcome; 2]>> + Send + use<> {
        let mut first = Box::pin(self.charge_without_waiting(charges, context));
        // Its calls are sent now.
        let outcomes = (&mut first).now_or_never();
        let entries = charges.iter().filter(|charge| charge.is_release()).flat_map(|charge| charge.path.entries);
        let entry_bytes: usize = entries.map(|entry| entry.key.len() + entry.value.len()).sum();
        let kib = (entry_bytes + charges.len() * CHARGE_BYTES).div_ceil(1024);
        let permit = REPEAT_MEMORY_KIB.try_acquire_many(u32::try_from(kib).unwrap_or(u32::MAX)).ok();
        let owned = charges.iter().map(|charge| charge.is_release().then(|| OwnedGiveBack::new(charge)));
        let owned: Vec<Option<OwnedGiveBack>> = if permit.is_some() { owned.collect() } else { Vec::new() };
        let redis = Arc::clone(self);
        let (to_caller, arrived) = oneshot::channel();
        tokio::spawn(async move {
            let _permit = permit;
            let outcomes = match outcomes {
                Some(outcomes) => outcomes,
                None => first.await,
            };
            let failed = owned.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_err());
            let left = failed.filter_map(|(one, _)| one.as_ref()).collect();
            // The caller may not be interested.
            let _ = to_caller.send(outcomes);
            let end = Instant::now() + REPEAT_TIME;
            redis.repeat_failed(left, end).await;
            if may_acquire_late {
                sleep_until(end.into()).await;
                join_all(owned.iter().flatten().map(|one| one.charge_and_check_failure(&redis))).await;
            }
        });
        // An error only if the runtime ends.
        arrived.map(Result::unwrap_or_default)
    }

    async fn repeat_failed(self: &Arc<Self>, mut left: Vec<&OwnedGiveBack>, end: Instant) {
        let [mut pause, longest] = FIRST_AND_LONGEST_PAUSE;
        while !left.is_empty() && Instant::now() < end {
            sleep(pause).await;
            pause = (pause * 2).min(longest);
            let mut fails = join_all(left.iter().map(|one| one.charge_and_check_failure(self))).await.into_iter();
            left.retain(|_| fails.next().unwrap_or(false));
        }
    }
}
