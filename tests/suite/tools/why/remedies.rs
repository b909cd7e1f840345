//! Changes that would have let a request pass: each is applied to the very state of the counter.

use std::num::NonZeroU32;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use serde_json::{Value, json};
use smallvec::smallvec;
use tollkeeper::base::clock::Time;
use tollkeeper::decide::log::record::{
    DecisionRecord, DecisionSource, DescriptorRecord, LimitRecord, LimitResultRecord, RecordedVerdict,
};
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::algorithm::{Algorithm, RejectedHitsPolicy};
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::reservation::{ReservationPolicy, UnsettledPolicy};
use tollkeeper::limit::slot::SlotChange;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::tools::why::rejection::{RejectingLimit, Remedy};

use super::{Logs, NOON_US, changed, decision, descriptor};

/// Requests to one counter.
#[derive(Clone, Debug)]
struct Traffic {
    spec: LimitSpec,
    /// Microseconds since the last request, hits and the caller's bound on a delay.
    requests: Vec<(u64, u64, u64)>,
}

fn traffic() -> impl Strategy<Value = Traffic> {
    let algorithm = proptest::sample::select(&Algorithm::ALL[..]);
    let request = (0_u64..20_000_000, 1_u64..8, proptest::sample::select(vec![0, 5_000_000, 90_000_000]));
    let requests = proptest::collection::vec(request, 1..40);
    let estimate = proptest::option::weighted(0.2, 1_u32..12);
    let bounds = (proptest::option::of(1_u32..12), proptest::option::of(1_u64..30_000_000), estimate);
    (algorithm, 1_u32..9, bounds, any::<bool>(), requests).prop_map(
        |(algorithm, requests_per_unit, (capacity, max_wait_us, estimate), count_rejected, requests)| {
            let mut spec = LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(Unit::Minute, 1).unwrap());
            match algorithm {
                Algorithm::TokenBucket => spec.bucket_size = capacity,
                Algorithm::LeakyBucket => spec.queue_size = capacity,
                _ => {}
            }
            if matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket) {
                spec.max_wait_us = max_wait_us;
            }
            let may_count = algorithm.properties().rejected_hits != RejectedHitsPolicy::NeverCounted;
            spec.count_rejected = may_count.then_some(count_rejected);
            spec.reservations =
                estimate.and_then(|hits| ReservationPolicy::new(600, UnsettledPolicy::Keep, NonZeroU32::new(hits)));
            Traffic { spec, requests }
        },
    )
}

/// A limit and a rejected request, with the state before it.
struct RejectedCharge<'a> {
    spec: &'a LimitSpec,
    state: &'a State,
    now: Time,
    request: ChargeRequest,
}

impl RejectedCharge<'_> {
    /// Tells whether the request passes a changed limit, with this bound on its delay.
    fn passes(&self, change: impl FnOnce(&mut LimitSpec), hits: Hits, max_delay_us: u64) -> bool {
        let mut spec = *self.spec;
        change(&mut spec);
        let limit = Limit::new(&spec).unwrap();
        self.state.admits(&limit, self.now, ChargeRequest { hits, max_delay_us, ..self.request })
    }

    fn list_remedies(&self, result: &ChargeResult) -> Vec<Remedy> {
        let Hits::Charge(hits) = self.request.hits else { unreachable!() };
        let limit = Limit::new(self.spec).unwrap();
        let &ChargeResult { admitted, before, after, remaining, reset_us, retry_after_us, delay_us, .. } = result;
        let record = LimitRecord {
            name: "".into(),
            algorithm: self.spec.algorithm,
            requests_per_unit: self.spec.requests_per_unit,
            unit: Unit::Minute,
            unit_multiplier: None,
            capacity: Some(limit.capacity()).filter(|capacity| *capacity != self.spec.requests_per_unit),
            max_wait_us: limit.non_default_max_wait_us(),
            window: None,
            ban: None,
            reservations: self.spec.reservations.map(|policy| policy.to_string().into()),
            takes_overflow: false,
            active: None,
            global: None,
            shadow: false,
            candidate: false,
            quota: false,
            result: Some(LimitResultRecord {
                admitted,
                before,
                after,
                remaining,
                reset_us,
                retry_after_us,
                delay_us,
                banned_us: 0,
                slot: SlotChange::None,
                expired_seats: 0,
                above_estimate: 0,
            }),
        };
        let descriptor = DescriptorRecord {
            entries: smallvec![],
            hits: hits.cast_signed(),
            limit_override: None,
            sampled: true,
            rule: None,
            unlimited: false,
            limits: smallvec![record.clone()],
            decided_by: Some(DecisionSource::Counter),
            policy: None,
            reason: None,
            block: None,
            now_us: None,
            slot: None,
            verdict: RecordedVerdict::OverLimit,
        };
        let decision = DecisionRecord {
            process: "p".into(),
            zone: "".into(),
            seq: 1,
            time_us: self.now.as_micros(),
            domain: "d".into(),
            hits_addend: 0,
            descriptors: smallvec![descriptor.clone()],
            verdict: RecordedVerdict::OverLimit,
            error: None,
            retry_after_us,
            delay_us: 0,
            max_delay_us: self.request.max_delay_us,
            rules: "r".into(),
            trace_id: None,
            duration_us: 1,
        };
        RejectingLimit { decision: &decision, descriptor: &descriptor, limit: &record }.list_remedies()
    }

    /// Checks that each number passes, and that the next one does not.
    fn check(&self, result: &ChargeResult) -> TestCaseResult {
        let hits = self.request.hits;
        for remedy in self.list_remedies(result) {
            match remedy {
                Remedy::Limit { key, value, delay_us, max_wait_us, .. } => {
                    let set = |spec: &mut LimitSpec, value: u64| {
                        match key {
                            "bucket_size" => spec.bucket_size = Some(u32::try_from(value).unwrap()),
                            "queue_size" => spec.queue_size = Some(u32::try_from(value).unwrap()),
                            _ => spec.requests_per_unit = value,
                        }
                        spec.max_wait_us = max_wait_us.or(spec.max_wait_us);
                    };
                    let delay_us = delay_us.unwrap_or(0);
                    prop_assert!(self.passes(|spec| set(spec, value), hits, delay_us), "{} {}", key, value);
                    prop_assert!(
                        value == 1 || !self.passes(|spec| set(spec, value - 1), hits, delay_us),
                        "{} is less",
                        key
                    );
                    if delay_us > 0 {
                        prop_assert!(!self.passes(|spec| set(spec, value), hits, delay_us - 1), "{} us", delay_us);
                    }
                }
                Remedy::LongerDelay { delay_us, max_wait_us } => {
                    let passes = |delay_us| {
                        self.passes(|spec| spec.max_wait_us = max_wait_us.or(spec.max_wait_us), hits, delay_us)
                    };
                    prop_assert!(passes(delay_us) && !passes(delay_us - 1), "{} us", delay_us);
                    let without = self.passes(|_| {}, hits, delay_us);
                    prop_assert!(without == max_wait_us.is_none(), "max_wait {:?}", max_wait_us);
                }
                Remedy::FewerHits { hits } => {
                    prop_assert!(self.passes(|_| {}, Hits::Charge(hits), 0), "with {} hits", hits);
                    prop_assert!(!self.passes(|_| {}, Hits::Charge(hits + 1), 0), "{} are fewer", hits);
                }
                Remedy::Wait { wait_us, .. } => {
                    let limit = Limit::new(self.spec).unwrap();
                    let mut state = self.state.clone();
                    state.charge(&limit, self.now, self.request);
                    prop_assert!(state.admits(&limit, self.now.plus_us(wait_us), self.request));
                }
                Remedy::NeverByWaiting { .. } => {
                    let limit = Limit::new(self.spec).unwrap();
                    prop_assert!(!State::empty(limit.algorithm()).admits(&limit, self.now, self.request));
                }
                Remedy::ShadowMode => {}
                Remedy::WorkingStore => prop_assert!(false, "the store works"),
                Remedy::Unblock => prop_assert!(false, "nothing is blocked"),
            }
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn changes_let_the_request_pass_and_lesser_ones_do_not(traffic in traffic()) {
        let Ok(limit) = Limit::new(&traffic.spec) else { return Ok(()) };
        let mut state = State::empty(limit.algorithm());
        let mut now = Time::from_micros(NOON_US);
        for (pause_us, hits, max_delay_us) in traffic.requests {
            now = now.plus_us(pause_us);
            let before = state.clone();
            let request = ChargeRequest::new(Hits::Charge(hits), max_delay_us);
            let result = state.charge(&limit, now, request);
            if !result.admitted {
                RejectedCharge { spec: &traffic.spec, state: &before, now, request }.check(&result)?;
            }
        }
    }
}

/// Text about a rejection of `login=ann` by a changed descriptor and limit.
fn text(of_descriptor: &Value, of_limit: &Value) -> String {
    let ann = descriptor("login=ann", "over_limit");
    let limit = changed(ann["limits"][0].clone(), of_limit);
    let ann = changed(changed(ann, &json!({"limits": [limit]})), of_descriptor);
    Logs::new(&[decision(0, &[ann])]).text("")
}

fn rejection(before: u64, reset_us: u64, retry_after_us: Option<u64>) -> Value {
    let mut result =
        json!({"admitted": false, "before": before, "after": before, "remaining": 0, "reset_us": reset_us});
    if let Some(retry_after_us) = retry_after_us {
        result["retry_after_us"] = json!(retry_after_us);
    }
    json!({"result": result})
}

#[test]
fn hits_that_never_pass_have_no_time() {
    let none = json!({});
    let zero = changed(rejection(0, 0, None), &json!({"requests_per_unit": 0}));
    let text_of_zero = text(&none, &zero);
    assert!(text_of_zero.contains("never passes later: the limit is 0"), "{text_of_zero}");
    assert!(!text_of_zero.contains("would have passed"), "{text_of_zero}");
    let many = text(&json!({"hits": 11}), &rejection(4, 1, None));
    for expected in [
        "never passes later: more hits than the limit",
        "would have passed with 6 hits",
        "would have passed with bucket_size 15: 4 were counted before",
    ] {
        assert!(many.contains(expected), "{expected:?} is missing: {many}");
    }
    assert!(!many.contains("would have passed at"), "{many}");
}

#[test]
fn queue_needs_room_and_a_delay() {
    let queue =
        |changes: Value| text(&json!({}), &changed(changes, &json!({"algorithm": "leaky_bucket", "capacity": 3})));
    let full = queue(rejection(3, 18_000_000, Some(6_000_000)));
    let told = "with queue_size 4 and a delay of 18 s (raise the caller's deadline): 3 were counted before";
    assert!(full.contains(told), "{full}");
    let waiting = queue(rejection(2, 12_000_000, Some(6_000_000)));
    assert!(waiting.contains("with a delay of 12 s (raise the caller's deadline)"), "{waiting}");
    assert!(!waiting.contains("with queue_size"), "{waiting}");
}

#[test]
fn delay_beyond_max_wait_needs_a_longer_one() {
    let queue = |max_wait_us: u64, before: u64| {
        let own = json!({"algorithm": "leaky_bucket", "capacity": 3, "max_wait_us": max_wait_us});
        text(&json!({}), &changed(rejection(before, 18_000_000, Some(6_000_000)), &own))
    };
    let full = queue(5_000_000, 3);
    let told = "with queue_size 4 and a delay of 18 s (raise max_wait to it, and the caller's deadline): 3 were";
    assert!(full.contains(told) && full.contains("queue_size 3, max_wait 5s"), "{full}");
    let waiting = queue(5_000_000, 2);
    assert!(waiting.contains("with a delay of 18 s (raise max_wait to it, and the caller's deadline)"), "{waiting}");
    // Long enough.
    assert!(!queue(30_000_000, 3).contains("raise max_wait"), "max_wait is not the reason");
}

#[test]
fn no_limit_is_guessed_where_no_counter_decided() {
    for decided_by in ["over_limit_cache", "share", "lease", "policy"] {
        let text = text(&json!({"decided_by": decided_by, "hits": 5}), &rejection(7, 1, Some(6_000_000)));
        assert!(text.contains("would have passed at 2026-07-08 12:00:06.000000 UTC (6 s later)"), "{text}");
        assert!(!text.contains("bucket_size") && !text.contains("with 3 hits"), "{decided_by}: {text}");
        assert_eq!(text.contains("with a store that answers"), decided_by == "policy", "{text}");
    }
}

#[test]
fn wait_begins_at_the_time_of_the_counters() {
    let text = text(&json!({"now_us": NOON_US + 1_000_000}), &rejection(10, 1, Some(6_000_000)));
    assert!(text.contains("would have passed at 2026-07-08 12:00:07.000000 UTC"), "{text}");
}
