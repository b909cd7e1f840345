//! A model of proxies, replicas and their network, which checks what all proxies together admit.
//!
//! Proxies behave as Envoy 1.40: a changed bucket keeps its ratio of tokens, a fresh one is full, an equal one is only
//! renewed, reports come each 5 s and at once for the first request, an expired assignment falls back to denying. Time
//! advances in steps of 10 ms, and each proxy has its own clock rate. Proxies and replicas freeze and die, and links
//! are cut: then the proxy goes on without a stream until it has a new one.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::division::assignment::{Assignment, Strategy};
use tollkeeper::limit::division::divided_limit::DividedLimit;
use tollkeeper::limit::division::holder::Usage;
use tollkeeper::limit::division::ledger::Division;
use tollkeeper::limit::hold::{CounterHolds, PoolId, StateWithLimit};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};

mod demand;
mod fair_share;
mod joins;
mod reloads;
mod steps;

/// Time between two steps of the model, in microseconds.
const STEP_US: u64 = 10_000;
/// Time between two reports of a proxy, in microseconds, as Envoy 1.40 has it.
const REPORT_US: u64 = 5_000_000;

/// An Envoy, with one bucket of the key.
struct Proxy {
    /// Replica that its stream goes to.
    replica: Option<usize>,
    /// Rate of its clock, in millionths.
    clock_ppm: i64,
    assigned: Option<(Strategy, f64, u64)>,
    allowed: u64,
    denied: u64,
    is_known: bool,
    reported: u64,
    next_report: u64,
    /// Time between two reports.
    report_us: u64,
    /// Messages on their way to the proxy, and to the replica: with the time of arrival, those to the proxy also with
    /// the time of sending.
    inbox: VecDeque<(u64, u64, Assignment)>,
    outbox: VecDeque<(u64, Usage)>,
    frozen_until: u64,
    /// The stream is cut: both sides notice at this time.
    cut_at: Option<u64>,
    is_dead: bool,
    demand_per_s: u64,
    /// Times of requests, in place of a demand.
    requests: VecDeque<u64>,
    /// Replies to PINGs on their way to the replica: time of arrival, and the time before which all was received.
    acknowledgements: VecDeque<(u64, u64)>,
}

struct Replica {
    division: Division<usize>,
    id: PoolId,
    frozen_until: u64,
    is_dead: bool,
    last_tick: u64,
    received_from: u64,
    /// Proxies to look at.
    due: BTreeSet<usize>,
    /// Time to look at all of them.
    wakes_at: Option<u64>,
}

/// A limit, and its counter in the store.
struct Counter {
    limit: Limit,
    state: State,
    held: CounterHolds,
}

struct Model {
    random: SmallRng,
    now: u64,
    limit: Limit,
    state: State,
    held: CounterHolds,
    /// A second limit of the key.
    second: Option<Counter>,
    proxies: Vec<Proxy>,
    replicas: Vec<Replica>,
    /// Time of each admitted hit.
    admitted: Vec<u64>,
    faults: bool,
    has_late_reports: bool,
    rls_per_s: u64,
    /// Requests over RLS that the replicas were not told of.
    asked_rls: u64,
    admitted_over_rls: u64,
}

impl Proxy {
    fn new(replica: usize, now: u64, random: &mut SmallRng) -> Self {
        Self {
            replica: Some(replica),
            clock_ppm: random.random_range(-500..=500),
            assigned: None,
            allowed: 0,
            denied: 0,
            is_known: false,
            reported: now,
            next_report: now + random.random_range(0..REPORT_US),
            report_us: REPORT_US,
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            frozen_until: 0,
            cut_at: None,
            is_dead: false,
            demand_per_s: 0,
            requests: VecDeque::new(),
            acknowledgements: VecDeque::new(),
        }
    }

    fn local_step_us(&self) -> u64 {
        STEP_US.saturating_add_signed(i64::try_from(STEP_US).expect("a step is short") * self.clock_ppm / 1_000_000)
    }

    fn receive(&mut self, assignment: Assignment, now: u64) {
        let ttl_us = u64::from(assignment.ttl_s) * 1_000_000;
        // A slow clock lets the assignment live longer.
        let ends = now
            + ttl_us.saturating_add_signed(
                -i64::try_from(ttl_us).expect("a time to live is short") * self.clock_ppm / 1_000_000,
            );
        let tokens = match (assignment.strategy, &self.assigned) {
            (Strategy::Tokens(new), Some((Strategy::Tokens(old), left, _))) if !assignment.starts_full => {
                if (new.max, new.fill) == (old.max, old.fill) {
                    // Whatever its interval.
                    self.assigned = Some((Strategy::Tokens(*old), *left, ends));
                    return;
                } else {
                    left / f64::from(old.max) * f64::from(new.max)
                }
            }
            (Strategy::Tokens(new), _) => f64::from(new.max),
            _ => 0.0,
        };
        self.assigned = Some((assignment.strategy, tokens, ends));
    }

    /// Takes requests; returns how many pass.
    fn take_requests(&mut self, requests: u64, now: u64) -> u64 {
        let step_us = self.local_step_us();
        if self.assigned.as_ref().is_some_and(|(_, _, ends)| *ends <= now) {
            self.assigned = None;
        }
        let passed = match &mut self.assigned {
            None | Some((Strategy::Deny, ..)) => 0,
            Some((Strategy::Allow, ..)) => requests,
            Some((Strategy::Tokens(bucket), tokens, _)) => {
                let per_us = f64::from(bucket.fill) / (f64::from(bucket.interval_s) * 1e6);
                *tokens = (*tokens + per_us * step_us as f64).min(f64::from(bucket.max));
                let passed = requests.min(floor_tokens(*tokens));
                *tokens -= passed as f64;
                passed
            }
        };
        self.allowed += passed;
        self.denied += requests - passed;
        passed
    }
}

/// Removes and returns the first of a queue if `is_due` accepts it.
fn pop_front_if<T>(queue: &mut VecDeque<T>, is_due: impl Fn(&T) -> bool) -> Option<T> {
    queue.front().is_some_and(is_due).then(|| queue.pop_front()).flatten()
}

/// Number of whole tokens; one that lacks only a rounding error counts as whole.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "there are few tokens, and none below 0")]
fn floor_tokens(tokens: f64) -> u64 {
    (tokens + 1e-9).floor() as u64
}

impl Model {
    fn new(seed: u64, limit: Limit, proxies: usize, replicas: usize) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let now = 1_800_000_000_000_000 + random.random_range(0..60_000_000_u64);
        let proxies = (0..proxies).map(|index| Proxy::new(index % replicas, now, &mut random)).collect();
        let replicas = (0..replicas).map(|index| Replica {
            division: Division::new([DividedLimit::new(&limit)], Time::from_micros(now)),
            id: PoolId([u8::try_from(index).expect("there are few replicas") + 1; 16]),
            frozen_until: 0,
            is_dead: false,
            last_tick: now,
            received_from: 0,
            due: BTreeSet::new(),
            wakes_at: None,
        });
        Self {
            now,
            state: State::empty_for(&limit),
            limit,
            held: CounterHolds::default(),
            second: None,
            proxies,
            replicas: replicas.collect(),
            admitted: Vec::new(),
            faults: true,
            has_late_reports: false,
            rls_per_s: 0,
            asked_rls: 0,
            admitted_over_rls: 0,
            random,
        }
    }

    fn chance(&mut self, per_s: f64) -> bool {
        self.random.random_bool((per_s * STEP_US as f64 / 1e6).min(1.0))
    }

    fn random_delay_us(&mut self) -> u64 {
        self.random.random_range(1_000..40_000)
    }

    fn step(&mut self) {
        self.now += STEP_US;
        if self.faults {
            self.make_faults();
        }
        for index in 0..self.proxies.len() {
            self.step_proxy(index);
        }
        for index in 0..self.replicas.len() {
            self.step_replica(index);
        }
        if self.rls_per_s > 0 && self.chance(self.rls_per_s as f64) {
            self.charge_rls();
        }
    }

    /// A request that asks over RLS.
    fn charge_rls(&mut self) {
        self.asked_rls += 1;
        let now = Time::from_micros(self.now);
        let hold = self.held.total_hold().and_then(|hold| hold.keep_or_settle(&self.limit, &mut self.state, now));
        if hold.is_none() {
            self.held.clear_total();
        }
        let limit = hold.map_or(self.limit, |hold| hold.lower_limit(&self.limit));
        if self.state.charge(&limit, now, ChargeRequest::new(Hits::Charge(1), 0)).admitted {
            self.admitted_over_rls += 1;
            self.admitted.push(self.now);
        }
    }

    fn make_faults(&mut self) {
        for index in 0..self.proxies.len() {
            if self.chance(0.02) {
                self.proxies[index].demand_per_s = [0, 1, 5, 50, 500][self.random.random_range(0..5)];
            }
            if self.chance(0.005) {
                self.proxies[index].frozen_until = self.now + self.random.random_range(0..9_000_000);
            }
            if self.chance(0.005) && self.proxies[index].cut_at.is_none() {
                self.proxies[index].cut_at = Some(self.now + self.random.random_range(0..10_000_000));
            }
            if self.chance(0.001) {
                self.proxies[index].is_dead = true;
            }
        }
        for index in 0..self.replicas.len() {
            if self.chance(0.003) {
                self.replicas[index].frozen_until = self.now + self.random.random_range(0..25_000_000);
            }
            if self.chance(0.002) && self.replicas.len() > 1 {
                self.kill_replica(index);
            }
        }
    }

    /// Another process takes its place, with another identity.
    fn kill_replica(&mut self, index: usize) {
        let id = PoolId(self.random.random());
        let division = Division::new(self.divided_limits(), Time::from_micros(self.now));
        let replica = &mut self.replicas[index];
        (replica.division, replica.id, replica.frozen_until) = (division, id, 0);
        (replica.due, replica.wakes_at) = (BTreeSet::new(), None);
        for proxy in self.proxies.iter_mut().filter(|proxy| proxy.replica == Some(index)) {
            proxy.lose_stream();
        }
    }

    fn step_proxy(&mut self, index: usize) {
        let (now, delay) = (self.now, self.random_delay_us());
        let next_replica = self.random.random_range(0..self.replicas.len());
        let rest = self.proxies[index].demand_per_s * STEP_US % 1_000_000;
        let one_more = self.random.random_bool(rest as f64 / 1e6);
        let proxy = &mut self.proxies[index];
        if proxy.cut_at.is_some_and(|at| at <= now) {
            proxy.cut_at = None;
            let (replica, is_joined) = (proxy.replica, proxy.is_known);
            proxy.lose_stream();
            if let (Some(replica), true) = (replica, is_joined) {
                self.leave(replica, index);
            }
            return;
        }
        if proxy.is_dead || proxy.frozen_until > now {
            return;
        }
        while proxy.cut_at.is_none() && proxy.inbox.front().is_some_and(|(_, at, _)| *at <= now) {
            if let Some((sent, _, assignment)) = proxy.inbox.pop_front() {
                proxy.receive(assignment, now);
                proxy.acknowledgements.push_back((now + delay, sent + 1));
            }
        }
        let mean = proxy.demand_per_s * STEP_US / 1_000_000;
        let mut requests = mean + u64::from(one_more);
        while pop_front_if(&mut proxy.requests, |at| *at <= now).is_some() {
            requests += 1;
        }
        let passed = proxy.take_requests(requests, now);
        self.admitted.extend((0..passed).map(|_| now));
        let proxy = &mut self.proxies[index];
        let is_first = !proxy.is_known && requests > 0 && proxy.replica.is_some();
        let is_due = now >= proxy.next_report;
        if is_due {
            proxy.next_report = now + proxy.report_us;
            proxy.replica.get_or_insert(next_replica);
        }
        if is_first || (is_due && (proxy.is_known || requests > 0)) {
            proxy.is_known = true;
            let (allowed, denied) = match is_first {
                // The others come with the next report.
                true => (0, 1),
                false => (std::mem::take(&mut proxy.allowed), std::mem::take(&mut proxy.denied)),
            };
            proxy.denied -= u64::from(is_first);
            // Envoy 1.40 tells whole seconds; who reports faster tells more.
            let unit_us = proxy.report_us.min(1_000_000);
            let elapsed_us = if is_first { 0 } else { (now - proxy.reported) / unit_us * unit_us };
            proxy.reported = now;
            let usage = Usage { allowed, denied, elapsed_us, received: Time::default() };
            if proxy.cut_at.is_none() {
                let at = proxy.outbox.back().map_or(0, |(at, _)| *at).max(now + delay);
                proxy.outbox.push_back((at, usage));
            }
        }
    }

    fn leave(&mut self, replica: usize, proxy: usize) {
        let now = Time::from_micros(self.now);
        let division = &mut self.replicas[replica].division;
        if let Some(at) = division.holders.iter().position(|holder| holder.key == proxy) {
            division.leave(at, now);
        }
    }

    fn step_replica(&mut self, index: usize) {
        let now_us = self.now;
        let now = Time::from_micros(now_us);
        let replica = &mut self.replicas[index];
        if replica.is_dead || replica.frozen_until > now_us {
            return;
        }
        if now_us - replica.last_tick > 750_000 {
            replica.received_from = replica.last_tick;
        } else if now_us - replica.last_tick >= STEP_US {
            replica.received_from = 0;
        }
        let received = if replica.received_from > 0 { Time::from_micros(replica.received_from) } else { now };
        replica.last_tick = now_us;
        let is_woken = replica.wakes_at.is_some_and(|at| at <= now_us) || (self.faults && self.chance(1.0));
        let mut has_reports = false;
        for proxy in 0..self.proxies.len() {
            has_reports |= self.take_messages(index, proxy, received);
        }
        if !is_woken && !has_reports {
            return;
        }
        self.settle(index);
        let replica = &mut self.replicas[index];
        if is_woken {
            replica.wakes_at = None;
            replica.due.extend(replica.division.holders.iter().map(|holder| holder.key));
        }
        let Replica { division, due, .. } = &mut self.replicas[index];
        let told = division.find_holders_to_tell(now);
        due.extend(told.into_iter().map(|at| division.holders[at].key));
        while let Some(proxy) = self.replicas[index].due.pop_first() {
            self.assign(index, proxy);
        }
        let Replica { division, wakes_at, .. } = &mut self.replicas[index];
        let next = division.next_event(now).map(|next| next.as_micros() + 20_000);
        *wakes_at = [next, *wakes_at].into_iter().flatten().min();
        let (reserved, held) = (division.reserved(0), division.pools[0].hits.held);
        // With faults, hits that were charged when an assignment ended may be reported after that: they are charged
        // twice, and lower what is held twice.
        assert!(self.faults || self.has_late_reports || reserved <= held, "{reserved} are in use of {held}");
    }

    /// Takes what came from a proxy; returns whether there were reports.
    fn take_messages(&mut self, index: usize, proxy_index: usize, received: Time) -> bool {
        let now = Time::from_micros(self.now);
        let (proxy, replica) = (&mut self.proxies[proxy_index], &mut self.replicas[index]);
        if proxy.replica != Some(index) {
            return false;
        }
        let Replica { division, due, .. } = replica;
        let mut has_reports = false;
        while let Some((_, usage)) = pop_front_if(&mut proxy.outbox, |(at, _)| *at <= self.now) {
            let at = division.holders.iter().position(|holder| holder.key == proxy_index);
            let at = at.unwrap_or_else(|| division.join(proxy_index, true, now));
            division.record_report(at, Usage { received, ..usage }, now);
            due.insert(proxy_index);
            has_reports = true;
        }
        while let Some((_, sent)) = pop_front_if(&mut proxy.acknowledgements, |(at, _)| *at <= self.now) {
            if let Some(at) = division.holders.iter().position(|holder| holder.key == proxy_index) {
                division.record_ping_ack(at, Time::from_micros(sent), now);
            }
            has_reports = true;
        }
        has_reports
    }

    fn assign(&mut self, index: usize, proxy: usize) {
        let (now_us, delay) = (self.now, self.random_delay_us());
        let division = &mut self.replicas[index].division;
        let Some(at) = division.holders.iter().position(|holder| holder.key == proxy) else { return };
        if let Some(assignment) = division.assign(at, Time::from_micros(now_us)) {
            let proxy = &mut self.proxies[proxy];
            let at = proxy.inbox.back().map_or(0, |(_, at, _)| *at).max(now_us + delay);
            proxy.inbox.push_back((now_us, at, assignment));
        }
    }

    /// Asks the store.
    fn settle(&mut self, index: usize) {
        let now = Time::from_micros(self.now);
        let is_answer_lost = self.faults && self.random.random_bool(0.05);
        let Replica { division, .. } = &mut self.replicas[index];
        division.expire(now);
        division.record_decision_demand(std::mem::take(&mut self.asked_rls), now);
        let pools = division.pools.len();
        for pool in 0..pools {
            self.settle_pool(index, pool, is_answer_lost);
        }
    }

    fn settle_pool(&mut self, index: usize, pool: usize, is_answer_lost: bool) {
        let now = Time::from_micros(self.now);
        let Replica { division, id, .. } = &mut self.replicas[index];
        let Some(request) = division.next_pool_request(pool, now) else { return };
        let (counter, held) = match &mut self.second {
            Some(Counter { limit, state, held }) if pool == 1 => (StateWithLimit { limit, state }, held),
            _ => (StateWithLimit { limit: &self.limit, state: &mut self.state }, &mut self.held),
        };
        let answer = held.charge_used_and_grant(counter, *id, request, now);
        if is_answer_lost {
            return division.record_unanswered_request(pool, &request);
        }
        division.record_answer(pool, &request, answer, now);
    }

    fn divided_limits(&self) -> Vec<DividedLimit> {
        let second = self.second.iter().map(|counter| &counter.limit);
        [&self.limit].into_iter().chain(second).map(DividedLimit::new).collect()
    }

    /// Hits in the aligned window with most of them.
    fn most_in_a_window(&self) -> u64 {
        let window_us = self.limit.period_us();
        let windows = self.admitted.chunk_by(|one, other| one / window_us == other / window_us);
        windows.map(|hits| hits.len() as u64).max().unwrap_or(0)
    }

    /// Maximum by which the hits in any span are above `burst` and `rate` per period.
    fn most_above_bucket(&self, burst: u64, rate: u64) -> f64 {
        let per_us = rate as f64 * 1.0005 / self.limit.period_us() as f64;
        let (mut level, mut last, mut most) = (0.0_f64, 0, f64::MIN);
        for at in &self.admitted {
            level = (level - per_us * (at - last) as f64).max(0.0) + 1.0;
            last = *at;
            most = most.max(level);
        }
        most - burst as f64
    }
}

impl Proxy {
    fn lose_stream(&mut self) {
        self.replica = None;
        self.inbox.clear();
        self.outbox.clear();
        self.acknowledgements.clear();
        // What it counted since its last report is never reported.
        (self.allowed, self.denied) = (0, 0);
        self.cut_at = None;
    }
}

fn limit(algorithm: Algorithm, hits: u32, unit: Unit, bucket: Option<u32>) -> Limit {
    let period = Period::new(unit, 1).expect("one unit is a period");
    Limit::new(&LimitSpec { bucket_size: bucket, ..LimitSpec::new(algorithm, hits.into(), period) })
        .expect("the limit is valid")
}

fn window(hits: u32, seconds: u32) -> Limit {
    let period = Period::new(Unit::Second, seconds).expect("some seconds are a period");
    Limit::new(&LimitSpec::new(Algorithm::FixedWindow, hits.into(), period)).expect("the limit is valid")
}

fn bucket(hits: u32, capacity: u32, seconds: u32) -> Limit {
    let period = Period::new(Unit::Second, seconds).expect("some seconds are a period");
    Limit::new(&LimitSpec {
        bucket_size: Some(capacity),
        ..LimitSpec::new(Algorithm::TokenBucket, hits.into(), period)
    })
    .expect("the limit is valid")
}

fn run(mut model: Model, seconds: u64) -> Model {
    // Envoys, and clients whose reports come as often as they are told.
    let report_us = [REPORT_US, REPORT_US, 1_000_000, 200_000][model.random.random_range(0..4)];
    for index in 0..model.proxies.len() {
        model.proxies[index].demand_per_s = [1, 20, 200, 500][model.random.random_range(0..4)];
        model.proxies[index].report_us = report_us;
    }
    for _ in 0..seconds * 1_000_000 / STEP_US {
        model.step();
    }
    model
}

proptest! {
    #![proptest_config(kit::costly_property(24))]

    #[test]
    fn lent_hits_stay_within_the_limit_in_every_window(
        seed: u64, hits in 20..3000_u32, proxies in 1..6_usize, replicas in 1..4_usize, rls in 0..2_u64,
    ) {
        let limit = limit(Algorithm::FixedWindow, hits, Unit::Minute, None);
        let model = Model { rls_per_s: rls * 20, ..Model::new(seed, limit, proxies, replicas) };
        let model = run(model, 240);
        prop_assert!(model.most_in_a_window() <= u64::from(hits), "{} of {hits}", model.most_in_a_window());
    }

    #[test]
    fn lent_tokens_stay_within_the_bucket(
        seed: u64, hits in 60..3000_u32, proxies in 1..6_usize, replicas in 1..4_usize, rls in 0..2_u64,
    ) {
        let limit = limit(Algorithm::TokenBucket, hits, Unit::Minute, Some(hits * 2));
        let model = Model { rls_per_s: rls * 20, ..Model::new(seed, limit, proxies, replicas) };
        let model = run(model, 240);
        let above = model.most_above_bucket(u64::from(hits) * 2, hits.into());
        prop_assert!(above <= 2.0, "{above} above {hits}");
    }

    #[test]
    fn rates_of_windows_stay_within_two_limits_in_a_period(
        seed: u64, hits in 10..200_u32, proxies in 1..6_usize, replicas in 1..4_usize,
    ) {
        let limit = limit(Algorithm::FixedWindow, hits, Unit::Second, None);
        let model = run(Model::new(seed, limit, proxies, replicas), 240);
        // What the algorithm admits in any span: a limit at once, and one in each period.
        let above = model.most_above_bucket(hits.into(), hits.into());
        prop_assert!(above <= 2.0, "{above} above {hits}");
    }

    #[test]
    fn rates_of_longer_windows_stay_within_two_limits_in_a_period(
        seed: u64, hits in 20..400_u32, seconds in 2..19_u32, proxies in 1..6_usize, replicas in 1..4_usize,
    ) {
        let period = Period::new(Unit::Second, seconds).expect("some seconds are a period");
        let limit = Limit::new(&LimitSpec::new(Algorithm::FixedWindow, hits.into(), period)).expect("the limit is valid");
        let model = run(Model::new(seed, limit, proxies, replicas), 240);
        let above = model.most_above_bucket(hits.into(), hits.into());
        prop_assert!(above <= 2.0, "{above} above {hits}");
    }

    #[test]
    fn rates_of_buckets_stay_within_the_bucket(
        seed: u64, hits in 10..200_u32, times in 1..10_u32, proxies in 1..6_usize, replicas in 1..4_usize,
        rls in 0..2_u64,
    ) {
        let limit = limit(Algorithm::TokenBucket, hits, Unit::Second, Some(hits * times));
        let model = Model { rls_per_s: rls * 20, ..Model::new(seed, limit, proxies, replicas) };
        let model = run(model, 240);
        let above = model.most_above_bucket(u64::from(hits * times), hits.into());
        prop_assert!(above <= 2.0, "{above} above {hits}");
    }
}
