//! Reference model of decisions: which limits reject a request, what it charges, and when it passes again.
//!
//! A counter is the list of its hits with their times. The model repeats the rules of `docs/algorithms.md`, from
//! "Several limits on one descriptor" on, as literally as possible, without the types of the program. Random rules and
//! requests are decided by both.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use tollkeeper::base::clock::Time;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::service::DEFAULT_CALLER_DEADLINE;

use super::{SECOND, StoreUnderTest};
use kit::fixtures::{decide, shop_request};
use kit::test_service::{TestRequest, TestResponse, TestService, store_runtime};

/// Compares the decisions and counters of a store with those of the model, in random scenarios.
pub(super) fn compare(store: &StoreUnderTest, scenarios: u64) {
    for seed in 0..kit::histories(scenarios) {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let modes = Modes { spares: random.is(2), all_quotas: random.is(6), shadow: random.is(12) };
        let rules: Vec<Vec<ModelLimit>> = (0..4).map(|_| limits(&mut random)).collect();
        let text = rules_text(&rules);
        let env = |is_set: bool| if is_set { "true" } else { "false" };
        let variables = [
            ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", env(modes.spares)),
            ("QUOTA_MODE", env(modes.all_quotas)),
            ("SHADOW_MODE", env(modes.shadow)),
        ];
        let service = store.service(&variables, &text);
        let mut model = Model { modes, rules, counters: HashMap::new() };
        for step in 0..25 {
            service.advance_us(random.below(30) * random.below(2) * SECOND);
            let request = model.request(&mut random);
            let expected = model.decide(&request, service.now());
            let response = decide(&service, &wire(&request));
            let mut seen = seen(&response);
            if is_repeated(&request) {
                // The wait of a counter that is charged twice depends on both charges.
                seen.retry_after_s = expected.retry_after_s;
            }
            assert_eq!(seen, expected, "seed {seed}, step {step}, {modes:?}: {request:?} of\n{text}");
            let used = peek(&service, &request);
            assert_eq!(used, model.used(&request, service.now()), "seed {seed}, step {step}: {request:?} of\n{text}");
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Modes {
    /// STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT.
    spares: bool,
    all_quotas: bool,
    shadow: bool,
}

#[derive(Clone, Copy, Debug)]
struct ModelLimit {
    limit: u64,
    period_s: u64,
    unit: &'static str,
    /// Hits expire one by one after a period, not at the end of their window.
    is_log: bool,
    counts_rejected: bool,
    shadow: bool,
    quota: bool,
}

/// Rule and hits of a descriptor: 0 is a peek, a negative number a refund.
#[derive(Clone, Copy, Debug)]
struct ModelDescriptor {
    /// Index of the rule; one beyond the last has no limits.
    rule: usize,
    hits: i64,
}

/// Decision, as the client sees it.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    over_limit: bool,
    statuses: Vec<bool>,
    retry_after_s: Option<u64>,
}

struct Model {
    modes: Modes,
    rules: Vec<Vec<ModelLimit>>,
    /// Hits and times in seconds, by rule and limit.
    counters: HashMap<(usize, usize), Vec<(u64, u64)>>,
}

impl Model {
    fn request(&self, random: &mut Random) -> Vec<ModelDescriptor> {
        let mut rules: Vec<usize> = (0..=self.rules.len()).collect();
        let (count, repeats) = (1 + random.below(3), random.is(4));
        (0..count)
            .map(|_| {
                let hits = [0, 1, 1, 1, 2, 3, -1, -2][random.index(8)];
                let index = random.index(rules.len());
                ModelDescriptor { rule: if repeats { rules[index] } else { rules.swap_remove(index) }, hits }
            })
            .collect()
    }

    fn decide(&mut self, request: &[ModelDescriptor], now: Time) -> Seen {
        let now_s = now.as_micros() / SECOND;
        let trial: Vec<Vec<bool>> = request.iter().map(|one| self.admits(*one, now_s)).collect();
        let spares = self.modes.spares && self.is_rejected(request, &trial);
        let is_spared = |index: usize| spares && trial[index].iter().all(|admits| *admits) && request[index].hits > 0;
        let mut admitted = Vec::new();
        for (index, descriptor) in request.iter().enumerate() {
            admitted.push(match is_spared(index) {
                true => self.admits(ModelDescriptor { hits: 0, ..*descriptor }, now_s),
                false => self.charge(*descriptor, now_s),
            });
        }
        if !self.is_rejected(request, &admitted) {
            for index in (0..request.len()).filter(|index| is_spared(*index)) {
                admitted[index] = self.charge(request[index], now_s);
            }
        }
        let over_limit = self.is_rejected(request, &admitted) && !self.modes.shadow;
        let over = |(descriptor, admitted): (&ModelDescriptor, &Vec<bool>)| {
            self.limits(*descriptor).iter().zip(admitted).any(|(limit, admitted)| !limit.shadow && !admitted)
        };
        Seen {
            over_limit,
            statuses: request.iter().zip(&admitted).map(over).collect(),
            retry_after_s: if over_limit { self.retry_after_s(request, &admitted, now) } else { None },
        }
    }

    /// A limit that is not a quota rejects alone. Quotas reject if each descriptor with quotas has an exceeded one.
    fn is_rejected(&self, request: &[ModelDescriptor], admitted: &[Vec<bool>]) -> bool {
        let mut quotas = Vec::new();
        for (descriptor, admitted) in request.iter().zip(admitted) {
            let limits = self.limits(*descriptor);
            if limits.iter().zip(admitted).any(|(limit, admitted)| !self.is_quota(limit) && !limit.shadow && !admitted)
            {
                return true;
            }
            let of_quotas: Vec<bool> = limits
                .iter()
                .zip(admitted)
                .filter(|(limit, _)| self.is_quota(limit))
                .map(|(limit, admitted)| *admitted || limit.shadow)
                .collect();
            if !of_quotas.is_empty() || limits.is_empty() && self.modes.all_quotas {
                quotas.push(of_quotas.iter().all(|admitted| *admitted));
            }
        }
        !quotas.is_empty() && quotas.iter().all(|has_room| !has_room)
    }

    /// The first time at which the limits that reject now let the request pass, if no other request comes.
    fn retry_after_s(&self, request: &[ModelDescriptor], admitted: &[Vec<bool>], now: Time) -> Option<u64> {
        let now_s = now.as_micros() / SECOND;
        // Only the end of a hit lets a counter admit more.
        let ends = self.counters.iter().flat_map(|((rule, index), hits)| {
            let limit = self.rules[*rule][*index];
            hits.iter().map(move |(_, at_s)| limit.end_s(*at_s))
        });
        let waits: BTreeSet<u64> = ends.filter(|end_s| *end_s > now_s).map(|end_s| end_s - now_s).collect();
        waits.into_iter().find(|wait_s| {
            let later: Vec<Vec<bool>> = request
                .iter()
                .zip(admitted)
                .map(|(descriptor, admitted)| {
                    let later = self.admits(*descriptor, now_s + wait_s);
                    later.iter().zip(admitted).map(|(later, now)| *later || *now).collect()
                })
                .collect();
            !self.is_rejected(request, &later)
        })
    }

    /// Charges a descriptor; returns which of its limits admit the hits.
    fn charge(&mut self, descriptor: ModelDescriptor, now_s: u64) -> Vec<bool> {
        let admitted = self.admits(descriptor, now_s);
        let limits = self.limits(descriptor).to_vec();
        let is_alone = |limit: &ModelLimit| !limit.shadow && !self.is_quota(limit);
        let rejected = limits.iter().zip(&admitted).any(|(limit, admitted)| is_alone(limit) && !admitted);
        for (index, (limit, admitted)) in limits.iter().zip(&admitted).enumerate() {
            let hits = self.counters.entry((descriptor.rule, index)).or_default();
            hits.retain(|(_, at_s)| limit.is_live(*at_s, now_s));
            match descriptor.hits {
                0 => {}
                count if count < 0 => refund(hits, count.unsigned_abs()),
                count if *admitted && !rejected || limit.counts_rejected => hits.push((count.unsigned_abs(), now_s)),
                _ => {}
            }
        }
        admitted
    }

    fn admits(&self, descriptor: ModelDescriptor, now_s: u64) -> Vec<bool> {
        let admits = |(index, limit): (usize, &ModelLimit)| {
            let used = self.used_of(descriptor.rule, index, now_s);
            match descriptor.hits {
                count if count < 0 => true,
                0 if limit.counts_rejected => used <= limit.limit,
                hits => used + hits.unsigned_abs().max(1) <= limit.limit,
            }
        };
        self.limits(descriptor).iter().enumerate().map(admits).collect()
    }

    fn used(&self, request: &[ModelDescriptor], now: Time) -> Vec<Vec<u64>> {
        let now_s = now.as_micros() / SECOND;
        let used = |descriptor: &ModelDescriptor| {
            (0..self.limits(*descriptor).len()).map(|index| self.used_of(descriptor.rule, index, now_s)).collect()
        };
        request.iter().map(used).collect()
    }

    fn used_of(&self, rule: usize, index: usize, now_s: u64) -> u64 {
        let limit = self.rules[rule][index];
        let hits = self.counters.get(&(rule, index)).map_or(&[][..], Vec::as_slice);
        hits.iter().filter(|(_, at_s)| limit.is_live(*at_s, now_s)).map(|(hits, _)| hits).sum()
    }

    fn limits(&self, descriptor: ModelDescriptor) -> &[ModelLimit] {
        self.rules.get(descriptor.rule).map_or(&[], Vec::as_slice)
    }

    fn is_quota(&self, limit: &ModelLimit) -> bool {
        limit.quota || self.modes.all_quotas
    }
}

impl ModelLimit {
    fn is_live(&self, at_s: u64, now_s: u64) -> bool {
        now_s < self.end_s(at_s)
    }

    /// Time from which a hit no longer counts.
    fn end_s(&self, at_s: u64) -> u64 {
        match self.is_log {
            true => at_s + self.period_s,
            false => (at_s / self.period_s + 1) * self.period_s,
        }
    }
}

/// Removes the newest hits.
fn refund(hits: &mut Vec<(u64, u64)>, mut count: u64) {
    while let Some((newest, _)) = hits.last_mut().filter(|_| count > 0) {
        let removed = count.min(*newest);
        *newest -= removed;
        count -= removed;
        if *newest == 0 {
            hits.pop();
        }
    }
}

/// One to three limits of different periods.
fn limits(random: &mut Random) -> Vec<ModelLimit> {
    let mut units = vec![("second", 1), ("minute", 60), ("hour", 3600)];
    let count = [1, 1, 2, 2, 3][random.index(5)];
    let mut limit = || {
        let (unit, period_s) = units.swap_remove(random.index(units.len()));
        let is_log = random.is(3);
        ModelLimit {
            limit: random.below(6),
            period_s,
            unit,
            is_log,
            counts_rejected: !is_log && random.is(3),
            shadow: random.is(6),
            quota: random.is(3),
        }
    };
    (0..count).map(|_| limit()).collect()
}

fn rules_text(rules: &[Vec<ModelLimit>]) -> String {
    let mut text = "descriptors:\n".to_owned();
    for (index, limits) in rules.iter().enumerate() {
        let _ = writeln!(text, "  - key: k{index}\n    rate_limit:");
        for limit in limits {
            let ModelLimit { limit: count, unit, counts_rejected, shadow, quota, .. } = limit;
            let algorithm = if limit.is_log { "sliding_window_log" } else { "fixed_window" };
            let _ = writeln!(
                text,
                "      - {{unit: {unit}, requests_per_unit: {count}, algorithm: {algorithm}, \
                 count_rejected: {counts_rejected}, shadow_mode: {shadow}, quota_mode: {quota}}}"
            );
        }
    }
    text
}

/// Returns true if a rule is charged more than once.
fn is_repeated(request: &[ModelDescriptor]) -> bool {
    let rules: BTreeSet<usize> = request.iter().map(|descriptor| descriptor.rule).collect();
    rules.len() < request.len()
}

fn wire(request: &[ModelDescriptor]) -> TestRequest {
    let names: Vec<String> = request.iter().map(|descriptor| format!("k{}", descriptor.rule)).collect();
    let mut wire = shop_request(&names.join("; "));
    for (sent, descriptor) in wire.0.descriptors.iter_mut().zip(request) {
        sent.hits_addend = Some(descriptor.hits.unsigned_abs());
        sent.is_negative_hits = descriptor.hits < 0;
    }
    wire
}

fn seen(response: &TestResponse) -> Seen {
    let headers = &response.response.response_headers_to_add;
    let retry_after = headers.iter().find(|header| header.key == "Retry-After");
    Seen {
        over_limit: response.over_limit(),
        statuses: response.statuses().into_iter().map(|(over_limit, _)| over_limit).collect(),
        retry_after_s: retry_after.map(|header| header.value.parse().unwrap()),
    }
}

/// Hits that each limit has counted.
fn peek(service: &TestService, request: &[ModelDescriptor]) -> Vec<Vec<u64>> {
    let request = wire(request);
    let request = decode::convert_request(&request.0);
    let rules = service.inner.rules.current_rules_owned();
    let context = service.inner.build_decision_context(rules.as_deref(), DEFAULT_CALLER_DEADLINE);
    let results = store_runtime().block_on(service.inner.decider.peek_counters(context, &request));
    results.iter().map(|results| results.iter().flatten().map(|counter| counter.result.after).collect()).collect()
}

/// Reproducible random numbers: the upper bits of a linear congruential generator.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    pub(super) fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap()
    }

    /// True once in `times`.
    pub(super) fn is(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
