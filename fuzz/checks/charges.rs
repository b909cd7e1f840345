//! Sequential charges on the memory store: each result equals that of the algorithm alone.
//!
//! Input: 12 bytes for the limit, then 8 for each charge: change of the clock, its amount, and the hits.

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::joint_charge::charge_together;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::algorithm::{Algorithm, CapacityRuleKey, DelayPolicy, RejectedHitsPolicy};
use tollkeeper::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter, JointLimit};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::memory::MemoryStore;

/// 2026-01-01.
const START: Time = Time::from_secs(1_767_225_600);

pub(crate) fn check(data: &[u8]) {
    let Some((head, charges)) = data.split_first_chunk::<12>() else { return };
    let Some(limits) = limits(head) else { return };
    let memory = MemoryStore::new(0);
    let enforced: Vec<JointLimit<'_>> = limits.iter().map(|limit| JointLimit { limit, rejects_others: true }).collect();
    let mut states: Vec<State> = limits.iter().map(|limit| State::empty(limit.algorithm())).collect();
    // A sweep drops counters together with their time, which shows if a clock is set back.
    let sweeps = head[1] & 8 == 0;
    let mut now = START;
    for charge in charges.chunks_exact(8).take(200) {
        let by = u64::from(u16::from_le_bytes([charge[1], charge[2]]));
        now = match charge[0] % 6 {
            0 => now,
            1 => now.plus_us(by),
            2 => now.plus_us(by * 1_000),
            3 => now.plus_us(by * 1_000_000),
            4 => now.plus_us(by * 86_400_000_000),
            5 if sweeps => now,
            // Clocks are set back, too.
            _ => Time::from_micros(now.as_micros().saturating_sub(by * 1_000)),
        };
        let count = u64::from(u32::from_le_bytes([charge[3], charge[4], charge[5], 0])) >> (charge[6] % 24);
        // A refund to an absent counter is not stored, and neither is its time, which shows if a clock is set back.
        let refunds = sweeps && charge[7] & 1 == 1;
        let request =
            ChargeRequest::new(Hits::new(count << (charge[6] / 24), refunds), u64::from(charge[7] >> 1) * 10_000);
        let expected = charge_together(&enforced, &mut states, now, request);
        let found = charged(&memory, &enforced, now, request);
        let comparable =
            |results: &[ChargeResult]| -> Vec<ChargeResult> { results.iter().zip(&limits).map(comparable).collect() };
        assert_eq!(comparable(&found), comparable(&expected), "{request:?} at {now:?} of {limits:?}");
        for (result, limit) in found.iter().zip(&limits) {
            check_invariants(result, limit, request);
        }
        if sweeps && charge[7] & 2 == 2 {
            memory.sweep(now, 0, 1);
        }
    }
}

/// A limit of 0 keeps counted rejected hits forever, and no result depends on them: they may be dropped.
fn comparable((result, limit): (&ChargeResult, &Limit)) -> ChargeResult {
    match limit.requests_per_unit() {
        0 => ChargeResult { before: 0, after: 0, ..*result },
        _ => *result,
    }
}

/// Checks the invariants of any result.
fn check_invariants(result: &ChargeResult, limit: &Limit, request: ChargeRequest) {
    assert!(result.remaining <= limit.capacity().max(limit.requests_per_unit()), "{result:?} of {limit:?}");
    assert!(!result.admitted || result.retry_after_us.is_none(), "{result:?}");
    assert!(result.admitted || result.delay_us == 0, "{result:?}");
    assert!(result.delay_us <= request.max_delay_us, "{result:?}");
}

fn charged(memory: &MemoryStore, limits: &[JointLimit<'_>], now: Time, request: ChargeRequest) -> Vec<ChargeResult> {
    let entries = [Entry { key: b"k", value: b"v" }];
    let counters = limits
        .iter()
        .map(|JointLimit { limit, rejects_others }| Counter {
            limit,
            shadow: !rejects_others,
            quota: false,
            tag: hash_limit_identity(limit, 0),
            epoch: 0,
        })
        .collect();
    let charge =
        Charge::new(CounterPath { domain: "d", entries: &entries, shared: &[], candidate: None }, counters, request);
    memory.charge(&charge, now).expect("two counters find room").to_vec()
}

/// One limit, or two of different algorithms; `None` if there is no such limit.
fn limits(head: &[u8; 12]) -> Option<Vec<Limit>> {
    let requests = u32::from_le_bytes([head[2], head[3], head[4], head[5]]) >> (head[6] % 32);
    let units = [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Week, Unit::Month, Unit::Year];
    let period = Period::new(units[usize::from(head[7]) % units.len()], u32::from(head[8] % 16) + 1)?;
    let size = u32::from(head[9]) << (head[10] % 24);
    let both = head[1] % 8;
    let one = |number: u8| {
        let algorithm = Algorithm::ALL[usize::from(number) % Algorithm::ALL.len()];
        let mut spec = LimitSpec::new(algorithm, requests.into(), period);
        spec.sole = both >= 5;
        let sized = head[11] & 1 == 1;
        let properties = algorithm.properties();
        match properties.capacity {
            CapacityRuleKey::BucketSize => spec.bucket_size = sized.then_some(size),
            CapacityRuleKey::QueueSize => spec.queue_size = sized.then_some(size),
            CapacityRuleKey::RequestsPerUnit => {}
        }
        if properties.delay != DelayPolicy::Never && head[11] & 2 == 2 {
            spec.max_wait_us = Some(u64::from(head[10]) * 1_000);
        }
        if properties.rejected_hits != RejectedHitsPolicy::NeverCounted && head[11] & 4 == 4 {
            spec.count_rejected = Some(head[11] & 8 == 8);
        }
        spec.calendar_months = head[11] & 16 == 16;
        Limit::new(&spec).ok()
    };
    let first = one(head[0])?;
    if both >= 5 {
        return Some(vec![first]);
    }
    let second = one(both)?;
    (second.algorithm() != first.algorithm()).then(|| vec![first, second])
}
