//! Slots in Redis outside of charges: releases of slots and reservations that nothing waits for, and sums of them for
//! `explain`: who holds how many.
//!
//! Releases are repeated until Redis has made them: of rejected requests, of candidates, and those whose call Redis
//! failed to decide. Envoy does not report the end of a request that it knows to be rejected, so nothing else would
//! free its slots before their time is over. As a release, what is given back twice is given back once. A slot that
//! Redis gives out after it was given back, because the call that acquires it was late, is taken until its end. Unused hits of leases return in `eventual::local_admission`, those of grants in `regions::grants`.
//!
//! Decides: how long and how often a release or give-back is repeated (`REPEAT_TIME`, `FIRST_AND_LONGEST_PAUSE`).
//! Decides: how many at once (`REPEAT_MEMORY_KIB`); how many slots `/explain` sums up (`MAX_SUMMARIZED_SLOTS`).

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, sleep};

use super::key::reservations_key;
use super::{ChargeOutcome, Redis};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{Charge, ChargeRequest, Counter};
use crate::limit::counter_path::CounterPath;
use crate::limit::request::Entry;
use crate::limit::slot::{HolderId, SlotUse};
use crate::limit::slot_table::{SlotSummary, SummarizedSlot};
use crate::store::charge::ChargeContext;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::{Reply, reply_bytes};

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
        let context = ChargeContext::new(redis.calls.clock.now(), Instant::now() + redis.timeout());
        redis.charge_without_waiting(&[charge], context).await.iter().any(Result::is_err)
    }
}

impl Redis {
    /// Makes charges without waiting, and repeats in a task those of them that release slots and that Redis fails to
    /// make. Must be called within a tokio runtime.
    pub fn charge_and_repeat_releases(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
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
            redis.repeat_failed(left, Instant::now() + REPEAT_TIME).await;
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

/// Maximum number of slots that a summary looks at.
const MAX_SUMMARIZED_SLOTS: usize = 10_000;

impl Redis {
    /// Sums up to about 10 000 slots or reservations of the limit at `index` of a charge.
    ///
    /// # Errors
    /// Redis failed, or its user may not run HSCAN.
    pub async fn summarize_slots(
        &self,
        charge: &Charge<'_>,
        index: usize,
        now: Time,
        deadline: Instant,
    ) -> Result<SlotSummary, RedisError> {
        let call = self.prepare_call(charge, self.keys.counter_set_id(charge, now), None, now);
        let is_of_reservations = charge.counters[index].limit.reservations().is_some();
        let key = call.command.keys().get(index).ok_or(RedisError::Misconfigured)?;
        let key = &if is_of_reservations { reservations_key(key) } else { key.clone() };
        let (mut cursor, mut slots) = (b"0".to_vec(), Vec::new());
        loop {
            let words: [&[u8]; 5] = [b"HSCAN", key, &cursor, b"COUNT", b"1000"];
            let reply = call.deployment.client.call_key_unrecorded(key, &words, deadline).await?;
            cursor = decode_slot_page(&reply, &mut slots).ok_or(RedisError::BadReply)?;
            if cursor == b"0" || slots.len() >= MAX_SUMMARIZED_SLOTS {
                break;
            }
        }
        let holders = self.fallback().slot_holders();
        let summary = SlotSummary::new(slots.into_iter(), now, &|holder| holders.is_dead(holder, now));
        Ok(SlotSummary { is_partial: cursor != b"0", is_of_reservations, ..summary })
    }
}

/// Appends the slots of a page of a hash that `lua/slots.lua` or `lua/reservations.lua` wrote; returns the cursor of
/// the next one.
fn decode_slot_page(reply: &Reply, slots: &mut Vec<SummarizedSlot>) -> Option<Vec<u8>> {
    let Reply::Array(parts) = reply else { return None };
    let [cursor, Reply::Array(fields)] = &**parts else { return None };
    for pair in fields.chunks_exact(2) {
        let [field, value] = pair else { return None };
        let (field, value) = (reply_bytes(field)?, reply_bytes(value)?);
        if field.len() == 16 {
            let word = |at: usize| Some(u64::from_le_bytes(*value.get(at..)?.first_chunk()?));
            // Seats have four bytes, reserved hits eight.
            let seats = || Some(u64::from(u32::from_le_bytes(*value.get(24..)?.first_chunk()?)));
            let (holder, expires) = (HolderId(word(8)?), Time::from_micros(word(16)?));
            slots.push(SummarizedSlot { holder, expires, seats: word(24).or_else(seats)? });
        }
    }
    Some(reply_bytes(cursor)?.to_vec())
}
