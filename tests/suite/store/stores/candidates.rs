//! Candidate limits: enforced limits decide as they do without candidates, and a candidate counts as it does alone.

use std::fmt::Write as _;

use tollkeeper::limit::charge::ChargeResult;
use tollkeeper::rules::rule::set::CompiledLimit;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::DEFAULT_CALLER_DEADLINE;
use tollkeeper::telemetry::metrics::limit_stats::LimitStat;

use super::model::Random;
use super::{SECOND, StoreUnderTest};
use kit::fixtures::{decide, shop_request};
use kit::test_service::{TestRequest, TestService, store_runtime};
use kit::wait_for;

const LIMITS: [&str; 9] = [
    "unit: minute, requests_per_unit: 3",
    "unit: minute, requests_per_unit: 6, count_rejected: true",
    "unit: minute, requests_per_unit: 6, count_rejected: false",
    "unit: hour, requests_per_unit: 9",
    "unit: minute, requests_per_unit: 4, algorithm: sliding_window_log",
    "unit: minute, requests_per_unit: 4, algorithm: sliding_window_counter, count_rejected: true",
    "unit: minute, requests_per_unit: 5, algorithm: token_bucket, max_wait: 20s",
    "unit: minute, requests_per_unit: 5, algorithm: leaky_bucket, queue_size: 3, max_wait: 30s",
    "unit: minute, requests_per_unit: 0",
];

/// Rules of one scenario: `with` has candidates, `without` has none, and each `alone` is one of the candidates.
struct Scenario {
    text: String,
    candidates: usize,
}

impl Scenario {
    fn new(random: &mut Random) -> Self {
        let mut deciding = vec![LIMITS[random.index(LIMITS.len())]];
        if random.is(2) {
            deciding.push("unit: day, requests_per_unit: 8, shadow_mode: true");
        }
        if random.is(2) {
            deciding.push("unit: week, requests_per_unit: 7, algorithm: sliding_window_counter");
        }
        let candidates: Vec<&str> = (0..=random.index(3)).map(|_| LIMITS[random.index(LIMITS.len())]).collect();
        let quota = if random.is(4) { "quota_mode: true, " } else { "" };
        let list = |limits: &[String]| limits.iter().map(|limit| format!("{{{limit}}}")).collect::<Vec<_>>().join(", ");
        let deciding: Vec<String> = deciding.into_iter().map(str::to_owned).collect();
        let mut all: Vec<String> = candidates
            .iter()
            .enumerate()
            .map(|(index, limit)| format!("{limit}, shadow_mode: true, name: 'c:{index}'"))
            .collect();
        // The order of the list does not matter to candidates.
        let place = random.index(all.len() + 1);
        all.splice(place..place, deciding.iter().cloned());
        let mut text = "descriptors:\n".to_owned();
        for (key, limits) in [("with", &all), ("without", &deciding)] {
            let _ = writeln!(text, "  - {{key: {key}, {quota}rate_limit: [{}]}}", list(limits));
            let _ = writeln!(text, "  - {{key: other_{key}, rate_limit: {{unit: minute, requests_per_unit: 2}}}}");
        }
        for (index, limit) in candidates.iter().enumerate() {
            let _ = writeln!(text, "  - {{key: alone{index}, rate_limit: {{{limit}}}}}");
        }
        Self { text, candidates: candidates.len() }
    }
}

pub(super) fn candidate_changes_no_verdict_and_counts_as_if_alone(store: &StoreUnderTest) {
    let scenarios = kit::histories(if store.env.is_empty() { 50 } else { 12 });
    for seed in 0..scenarios {
        let mut random = Random((seed + 77_u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let scenario = Scenario::new(&mut random);
        let flag = |random: &mut Random, one_in| if random.is(one_in) { "true" } else { "false" };
        let variables = [
            ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", flag(&mut random, 3)),
            ("QUOTA_MODE", flag(&mut random, 6)),
            ("SHADOW_MODE", flag(&mut random, 12)),
        ];
        let service = store.service(&variables, &scenario.text);
        for step in 0..25 {
            let about = format!("seed {seed}, step {step}, {variables:?} of\n{}", scenario.text);
            service.advance_us(random.below(30) * random.below(2) * SECOND);
            let hits = [1, 1, 1, 2, 4, 0, -1, -3][random.index(8)];
            let other = random.is(3);
            let [with, without] = ["with", "without"].map(|key| {
                let descriptors = if other { format!("{key}; other_{key}") } else { key.to_owned() };
                let answer = decide(&service, &sent(&descriptors, hits));
                (answer.response, answer.delay)
            });
            assert_eq!(with, without, "{about}");
            let counters = peek(&service, "with");
            for index in 0..scenario.candidates {
                let alone = format!("alone{index}");
                decide(&service, &sent(&alone, hits));
                let at = counters.len() - scenario.candidates + index;
                assert_eq!(counters[at], peek(&service, &alone)[0], "candidate {index}, {hits} hits, {about}");
            }
        }
        for index in 0..scenario.candidates {
            let about = format!("candidate {index} of seed {seed}:\n{}", scenario.text);
            compare_stats(&service, &format!("shop.with.c_{index}"), &format!("shop.alone{index}"), &about);
        }
    }
}

/// Compares the statistics of a candidate with those of the same limit enforced.
fn compare_stats(service: &TestService, candidate: &str, alone: &str, about: &str) {
    let get = |name: &str, stat| limit(service, name).stats.counter_value(stat);
    // An outcome that came after the answer is recorded by a task.
    let decisions = |name: &str| limit(service, name).stats.decision_count();
    wait_for("all outcomes", || (decisions(candidate) == decisions(alone)).then_some(()));
    for (of_candidate, of_alone) in [
        (LimitStat::TotalHits, LimitStat::TotalHits),
        (LimitStat::OverLimit, LimitStat::OverLimit),
        (LimitStat::NearLimit, LimitStat::NearLimit),
        (LimitStat::WithinLimit, LimitStat::WithinLimit),
        (LimitStat::ShadowMode, LimitStat::OverLimit),
        (LimitStat::TotalNegativeHits, LimitStat::TotalNegativeHits),
        (LimitStat::Ok, LimitStat::Ok),
        (LimitStat::Shadow, LimitStat::Over),
        (LimitStat::Over, LimitStat::Shadow),
        (LimitStat::Error, LimitStat::Error),
    ] {
        assert_eq!(get(candidate, of_candidate), get(alone, of_alone), "{of_candidate:?} of {about}");
    }
    let rejected = |name: &str| limit(service, name).stats.rejected_keys.estimate();
    assert_eq!(rejected(candidate), rejected(alone), "{about}");
}

/// The compiled limit with this name in metrics.
fn limit(service: &TestService, name: &str) -> CompiledLimit {
    let loaded = service.inner.rules.current_rules_owned().unwrap();
    let limits = loaded.rules.rules().flat_map(|rule| &rule.limits);
    limits.into_iter().find(|limit| limit.stats.name().as_str() == name).unwrap_or_else(|| panic!("no {name}")).clone()
}

fn sent(descriptors: &str, hits: i64) -> TestRequest {
    let mut request = shop_request(descriptors);
    for descriptor in &mut request.0.descriptors {
        descriptor.hits_addend = Some(hits.unsigned_abs());
        descriptor.is_negative_hits = hits < 0;
    }
    request
}

/// Results of all limits of a descriptor, candidates last, by a peek.
fn peek(service: &TestService, descriptor: &str) -> Vec<ChargeResult> {
    let request = shop_request(descriptor);
    let request = decode::convert_request(&request.0);
    let rules = service.inner.rules.current_rules_owned();
    let context = service.inner.build_decision_context(rules.as_deref(), DEFAULT_CALLER_DEADLINE);
    let results = store_runtime().block_on(service.inner.decider.peek_counters(context, &request));
    results[0].iter().map(|counter| counter.expect("the store answers").result).collect()
}
