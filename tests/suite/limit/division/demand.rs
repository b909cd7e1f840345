//! Use of a limit: what passes of the requests that one limiter admits, by patterns of demand and by faults.
//!
//! The patterns are those of `tests/bench/quota.py`, which does the same with real proxies.

use rand::RngExt as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    Skewed,
    Even,
    Moving,
    Bursty,
}

/// A limit of 50 a second or of 600 a minute.
fn bench_limit(unit: Unit, algorithm: Algorithm) -> Limit {
    limit(algorithm, if unit == Unit::Second { 50 } else { 600 }, unit, None)
}

/// Times of requests at three proxies, from 0 on.
fn generate_request_times(pattern: Pattern, limit: &Limit, seconds: f64, random: &mut StdRng) -> Vec<(f64, usize)> {
    let is_second = limit.period_us() == 1_000_000;
    // The bucket starts with the hits of a minute more.
    let factor = if !is_second && limit.algorithm() == Algorithm::TokenBucket { 2.0 } else { 1.0 };
    let rate = 1.4 * factor * limit.requests_per_unit() as f64 * 1e6 / limit.period_us() as f64;
    let mut exponential = |mean: f64| -mean * (1.0 - random.random::<f64>()).ln();
    let mut requests = Vec::new();
    if pattern == Pattern::Bursty {
        let (count, length, every) = if is_second { (280, 1.0, 12.0) } else { (280, 2.0, 60.0 / factor) };
        for proxy in 0..3 {
            let mut start = exponential(every);
            while start < seconds {
                requests.extend((0..count).map(|index| (start + length * f64::from(index) / f64::from(count), proxy)));
                start += exponential(every);
            }
        }
        requests.sort_by(|one, other| one.0.total_cmp(&other.0));
        return requests;
    }
    let mut at = exponential(1.0 / rate);
    while at < seconds {
        #[expect(clippy::cast_possible_truncation, reason = "some minutes")]
        let first = (at / 20.0) as usize % 3;
        let weights = match pattern {
            Pattern::Skewed => [0.8, 0.15, 0.05],
            Pattern::Moving => [0, 1, 2].map(|proxy| if proxy == first { 0.9 } else { 0.05 }),
            Pattern::Even | Pattern::Bursty => [1.0 / 3.0; 3],
        };
        let drawn = exponential(1.0);
        let drawn = 1.0 - (-drawn).exp();
        let proxy = if drawn < weights[0] {
            0
        } else if drawn < weights[0] + weights[1] {
            1
        } else {
            2
        };
        requests.push((at, proxy));
        at += exponential(1.0 / rate);
    }
    requests
}

/// Times of the requests that one limiter admits.
fn admit_with_one_limiter(requests: &[u64], limit: &Limit) -> Vec<u64> {
    let mut state = State::empty_for(limit);
    let charge = ChargeRequest::new(Hits::Charge(1), 0);
    requests.iter().copied().filter(|at| state.charge(limit, Time::from_micros(*at), charge).admitted).collect()
}

/// A run with a pattern of demand.
struct Run {
    model: Model,
    began: u64,
    ideal: Vec<u64>,
}

impl Run {
    fn new(seed: u64, limit: Limit, pattern: Pattern, seconds: u32, replicas: usize) -> Self {
        let mut model = Model { faults: false, ..Model::new(seed, limit, 3, replicas) };
        let began = model.now;
        let demand = generate_request_times(pattern, &limit, seconds.into(), &mut StdRng::seed_from_u64(seed + 1000));
        #[expect(clippy::cast_possible_truncation, reason = "some minutes")]
        let micros = |at: f64| began + (at * 1e6) as u64;
        for (at, proxy) in &demand {
            model.proxies[*proxy].requests.push_back(micros(*at));
        }
        let times: Vec<u64> = demand.iter().map(|(at, _)| micros(*at)).collect();
        Self { model, began, ideal: admit_with_one_limiter(&times, &limit) }
    }

    fn advance_to(&mut self, second: u64) {
        while self.model.now < self.began + second * 1_000_000 {
            self.model.step();
        }
    }

    /// Part of what one limiter admits between two seconds that passed.
    fn admitted_part(&self, from: u64, to: u64) -> f64 {
        let is_inside = |at: &&u64| (self.began + from * 1_000_000..self.began + to * 1_000_000).contains(*at);
        self.model.admitted.iter().filter(is_inside).count() as f64 / self.ideal.iter().filter(is_inside).count() as f64
    }
}

/// Mean over seeds.
fn mean_over_seeds(run: impl Fn(u64) -> f64) -> f64 {
    const SEEDS: u64 = 16;
    (0..SEEDS).map(run).sum::<f64>() / SEEDS as f64
}

/// Use in runs of 130 s.
fn mean_use(unit: Unit, algorithm: Algorithm, pattern: Pattern) -> f64 {
    mean_over_seeds(|seed| {
        let mut run = Run::new(seed, bench_limit(unit, algorithm), pattern, 130, 1);
        run.advance_to(130);
        run.admitted_part(0, 130)
    })
}

#[test]
fn most_of_a_limit_is_used_whatever_the_demand() {
    // Measured, less two or three points: a change that costs more is to be seen.
    let least = [
        (Unit::Second, Algorithm::FixedWindow, [0.93, 0.97, 0.76, 0.36]),
        (Unit::Second, Algorithm::TokenBucket, [0.93, 0.96, 0.75, 0.33]),
        (Unit::Minute, Algorithm::FixedWindow, [0.94, 0.95, 0.92, 0.72]),
        (Unit::Minute, Algorithm::TokenBucket, [0.92, 0.94, 0.91, 0.76]),
    ];
    for (unit, algorithm, least) in least {
        for (pattern, least) in
            [Pattern::Skewed, Pattern::Even, Pattern::Moving, Pattern::Bursty].into_iter().zip(least)
        {
            let used = mean_use(unit, algorithm, pattern);
            assert!(used >= least, "{unit:?}, {algorithm}, {pattern:?}: {used:.3} of {least}");
        }
    }
}

#[test]
fn share_follows_demand_sooner_if_reports_come_each_second_or_below() {
    for report_us in [1_000_000, 200_000] {
        for (unit, algorithm, least) in [
            (Unit::Second, Algorithm::FixedWindow, 0.87),
            (Unit::Second, Algorithm::TokenBucket, 0.86),
            (Unit::Minute, Algorithm::FixedWindow, 0.97),
            (Unit::Minute, Algorithm::TokenBucket, 0.95),
        ] {
            let used = mean_over_seeds(|seed| {
                let mut run = Run::new(seed, bench_limit(unit, algorithm), Pattern::Moving, 130, 1);
                run.model.proxies.iter_mut().for_each(|proxy| proxy.report_us = report_us);
                run.advance_to(130);
                run.admitted_part(0, 130)
            });
            assert!(used >= least, "{unit:?}, {algorithm}, a report each {report_us} us: {used:.3} of {least}");
        }
    }
}

/// Part of what one limiter would admit that proxies admit from `from` to `to`, for a fixed window and a token bucket,
/// with `event` after 45 s.
fn admitted_part_after(replicas: usize, event: impl Fn(&mut Run), from: u64, to: u64) -> [f64; 2] {
    [Algorithm::FixedWindow, Algorithm::TokenBucket].map(|algorithm| {
        mean_over_seeds(|seed| {
            let mut run = Run::new(seed, bench_limit(Unit::Second, algorithm), Pattern::Even, 120, replicas);
            run.advance_to(45);
            run.model.has_late_reports = true;
            event(&mut run);
            run.advance_to(to);
            run.admitted_part(from, to)
        })
    })
}

#[test]
fn rates_return_after_a_replica_stood_still() {
    let shares = admitted_part_after(
        1,
        |run| {
            run.model.replicas[0].frozen_until = run.model.now + 20_000_000;
            // The proxies notice, and come back with new streams.
            run.advance_to(51);
            run.model.proxies.iter_mut().for_each(Proxy::lose_stream);
            run.advance_to(64);
            let now = Time::from_micros(run.model.now);
            let division = &mut run.model.replicas[0].division;
            while !division.holders.is_empty() {
                division.leave(0, now);
            }
        },
        65,
        95,
    );
    assert!(shares.iter().all(|share| *share > 0.9), "{shares:?}");
}

#[test]
fn rates_go_on_while_a_replica_is_restarted() {
    let kill = |run: &mut Run| {
        run.model.kill_replica(0);
        run.model.replicas[0].frozen_until = run.model.now + 3_000_000;
    };
    let shares = admitted_part_after(1, kill, 45, 75);
    assert!(shares.iter().all(|share| *share > 0.9), "{shares:?}");
}

#[test]
fn replicas_share_by_their_demand() {
    for (unit, algorithm, least) in [
        (Unit::Second, Algorithm::FixedWindow, 0.94),
        (Unit::Second, Algorithm::TokenBucket, 0.94),
        (Unit::Minute, Algorithm::FixedWindow, 0.88),
        (Unit::Minute, Algorithm::TokenBucket, 0.95),
    ] {
        let share = mean_over_seeds(|seed| {
            let mut run = Run::new(seed, bench_limit(unit, algorithm), Pattern::Even, 120, 2);
            run.advance_to(120);
            run.admitted_part(10, 120)
        });
        assert!(share > least, "{unit:?}, {algorithm}: {share:.3}");
    }
}

#[test]
fn proxies_of_a_dead_replica_get_their_part_from_another() {
    let kill = |run: &mut Run| {
        run.model.kill_replica(1);
        run.model.replicas[1].is_dead = true;
        let lost = run.model.proxies.iter_mut().filter(|proxy| proxy.replica.is_none());
        lost.for_each(|proxy| proxy.replica = Some(0));
    };
    let shares = admitted_part_after(2, kill, 45, 75);
    assert!(shares.iter().all(|share| *share > 0.9), "{shares:?}");
}

#[test]
fn decisions_over_rls_get_their_part() {
    for (unit, algorithm) in [Unit::Second, Unit::Minute]
        .into_iter()
        .flat_map(|unit| [Algorithm::FixedWindow, Algorithm::TokenBucket].map(|algorithm| (unit, algorithm)))
    {
        let limit = bench_limit(unit, algorithm);
        let half = 7 * limit.requests_per_unit() * 1_000_000 / limit.period_us() / 10;
        let mut model = Model { faults: false, rls_per_s: half, ..Model::new(3, limit, 2, 1) };
        model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = half / 2);
        (0..130 * 1_000_000 / STEP_US).for_each(|_| model.step());
        let part = model.admitted_over_rls as f64 / model.admitted.len() as f64;
        assert!((0.4..0.6).contains(&part), "{unit:?}, {algorithm}: {part:.3}");
    }
}

#[test]
fn smaller_limit_is_kept_once_assignments_have_ended() {
    for (hits, algorithm) in [(25, Algorithm::FixedWindow), (25, Algorithm::TokenBucket), (20, Algorithm::FixedWindow)]
    {
        let mut run = Run::new(1, bench_limit(Unit::Second, algorithm), Pattern::Even, 130, 1);
        run.advance_to(45);
        run.model.limit = limit(algorithm, hits, Unit::Second, None);
        run.model.has_late_reports = true;
        run.model.replicas[0].division.change_limits([DividedLimit::new(&run.model.limit)]);
        run.advance_to(70);
        run.model.admitted.clear();
        run.advance_to(130);
        let above = run.model.most_above_bucket(hits.into(), hits.into());
        assert!(above <= 2.0, "{algorithm}: {above} above {hits}");
    }
}
