//! Rules that change while proxies decide: the bound holds, and larger assignments end after their time to live.

use super::*;
use tollkeeper::limit::division::holder::MARGIN_US;
use tollkeeper::limit::division::ledger::RATE_TTL_S;

/// Time in which assignments of a limit that was replaced may be in use: the clock of a proxy may be slow.
const LONGEST_USE_US: u64 = RATE_TTL_S as u64 * 1_000_000 + 2 * MARGIN_US;

/// Level of the hits in a span, by what the limits admit that are in use in it.
struct SpanLevel {
    level: f64,
    capacity: u64,
}

/// Hits in spans, by what a limit and those that it replaced admit: those that are in use at some time of the span.
struct Bound {
    /// Limits of the counter, with the time until which they may be in use.
    limits: Vec<(Limit, u64)>,
    /// Hits that the counter of the last limit admits beside those of the counter before it.
    room_of_new_counter: u64,
    /// Spans that begin when a limit goes out of use: what passed by it counts in the levels before.
    levels: Vec<SpanLevel>,
    most_above: f64,
}

impl Bound {
    fn new(limit: Limit) -> Self {
        Self {
            limits: vec![(limit, u64::MAX)],
            room_of_new_counter: 0,
            levels: vec![SpanLevel { level: 0.0, capacity: 0 }],
            most_above: f64::MIN,
        }
    }

    fn replace(&mut self, limit: Limit, now: u64) {
        if let Some((_, until)) = self.limits.last_mut() {
            *until = now + LONGEST_USE_US;
        }
        self.limits.push((limit, u64::MAX));
    }

    fn admit(&mut self, hits: usize, now: u64) {
        let known = self.limits.len();
        self.limits.retain(|(_, until)| *until > now);
        if self.limits.len() < known {
            self.room_of_new_counter = 0;
            self.levels.push(SpanLevel { level: 0.0, capacity: 0 });
        }
        let limits = || self.limits.iter().map(|(limit, _)| DividedLimit::new(limit));
        let capacity = limits().map(|limit| limit.capacity).max().unwrap_or(0) + self.room_of_new_counter;
        let per_us =
            limits().map(|limit| limit.hits as f64 / (limit.period_s as f64 * 1e6)).fold(0.0, f64::max) * 1.0005;
        for span in &mut self.levels {
            span.capacity = span.capacity.max(capacity);
            span.level = (span.level - per_us * STEP_US as f64).max(0.0) + hits as f64;
            self.most_above = self.most_above.max(span.level - span.capacity as f64);
        }
    }
}

/// A model whose limits change, with the bound of each.
struct Reloading {
    model: Model,
    began: u64,
    bounds: Vec<Bound>,
    counted: usize,
}

impl Reloading {
    fn new(seed: u64, limits: &[Limit], proxies: usize) -> Self {
        let mut model = Model { faults: false, has_late_reports: true, ..Model::new(seed, limits[0], proxies, 1) };
        model.second = limits.get(1).map(|limit| Counter {
            limit: *limit,
            state: State::empty_for(limit),
            held: CounterHolds::default(),
        });
        model.replicas[0].division = Division::new(model.divided_limits(), Time::from_micros(model.now));
        model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 500);
        let bounds = limits.iter().copied().map(Bound::new).collect();
        Self { began: model.now, model, bounds, counted: 0 }
    }

    fn advance_by(&mut self, millis: u64) {
        let end = self.model.now + millis * 1000;
        while self.model.now < end {
            self.model.step();
            let hits = self.model.admitted.len() - self.counted;
            self.counted += hits;
            self.bounds.iter_mut().for_each(|bound| bound.admit(hits, self.model.now));
        }
    }

    /// Changes the limits of the key, of the same counters.
    fn reload(&mut self, limits: &[Limit]) {
        self.model.limit = limits[0];
        if let (Some(second), Some(limit)) = (&mut self.model.second, limits.get(1)) {
            second.limit = *limit;
        }
        for (bound, limit) in self.bounds.iter_mut().zip(limits) {
            bound.replace(*limit, self.model.now);
        }
        let limits = self.model.divided_limits();
        for replica in &mut self.model.replicas {
            replica.division.change_limits(limits.iter().copied());
            replica.wakes_at = Some(self.model.now);
        }
    }

    /// Changes the period of the only limit: it counts on another counter then, which a division of its own divides.
    fn change_period(&mut self, limit: Limit) {
        let now = Time::from_micros(self.model.now);
        self.bounds[0].replace(limit, self.model.now);
        self.bounds[0].room_of_new_counter = DividedLimit::new(&limit).capacity;
        (self.model.limit, self.model.state, self.model.held) =
            (limit, State::empty_for(&limit), CounterHolds::default());
        let replica = &mut self.model.replicas[0];
        let mut division = Division::new([DividedLimit::new(&limit)], now);
        for holder in &replica.division.holders {
            let index = division.join(holder.key, true, now);
            division.holders[index].has_unknown_assignment = true;
        }
        replica.division = division;
        replica.wakes_at = Some(self.model.now);
    }

    fn add_busy_proxy(&mut self) {
        let mut proxy = Proxy::new(0, self.model.now, &mut self.model.random);
        proxy.demand_per_s = 500;
        self.model.proxies.push(proxy);
    }

    fn most_above(&self) -> f64 {
        self.bounds.iter().map(|bound| bound.most_above).fold(f64::MIN, f64::max)
    }

    fn assert_within_bound(&self, what: &str) {
        let above: Vec<f64> = self.bounds.iter().map(|bound| bound.most_above).collect();
        let seconds = (self.model.now - self.began) / 1_000_000;
        assert!(self.most_above() <= 2.0, "{what}: {above:.1?} above the limits in {seconds} s");
    }
}

#[test]
fn limit_that_was_lowered_is_kept_when_newcomers_arrive() {
    for (before, after) in [
        (window(1000, 19), window(50, 19)),
        (window(1000, 10), window(100, 10)),
        (window(2000, 19), window(50, 19)),
        (bucket(1000, 1000, 19), bucket(100, 100, 19)),
    ] {
        for (gap_ms, proxies) in [(1000, 1), (2000, 1), (3000, 1), (5000, 2)] {
            let mut reloading = Reloading::new(1, &[before], proxies);
            reloading.advance_by(30_000);
            reloading.reload(&[after]);
            reloading.advance_by(17_500);
            for _ in 0..10 {
                reloading.add_busy_proxy();
                reloading.advance_by(gap_ms);
            }
            reloading.advance_by(30_000);
            reloading.assert_within_bound(&format!("{before:?} to {after:?}, {proxies} and one each {gap_ms} ms"));
        }
    }
}

#[test]
fn tokens_of_a_proxy_count_as_many_after_a_rule_changed() {
    for (before, after) in [
        (bucket(10, 100, 1), bucket(100, 100, 1)),
        (bucket(20, 200, 1), bucket(200, 200, 1)),
        (bucket(100, 150, 10), bucket(1000, 150, 10)),
        (bucket(5, 50, 1), bucket(50, 50, 1)),
        (bucket(100, 20, 1), bucket(100, 1000, 1)),
        (bucket(100, 1000, 1), bucket(100, 20, 1)),
    ] {
        for is_lost in [true, false] {
            let mut reloading = Reloading::new(1, &[before], 1);
            reloading.model.proxies[0].demand_per_s = 1;
            reloading.advance_by(29_900);
            if is_lost {
                // It goes on with its assignment.
                reloading.model.proxies[0].lose_stream();
                reloading.model.proxies[0].next_report = u64::MAX;
                reloading.model.leave(0, 0);
            }
            reloading.model.proxies[0].demand_per_s = 0;
            reloading.advance_by(100);
            reloading.reload(&[after]);
            reloading.advance_by(1000);
            reloading.add_busy_proxy();
            reloading.advance_by(500);
            reloading.model.proxies[0].demand_per_s = 2000;
            reloading.advance_by(60_000);
            reloading.assert_within_bound(&format!("{before:?} to {after:?}, {is_lost}"));
        }
    }
}

#[test]
fn second_limit_is_kept_while_the_first_is_lowered_and_raised() {
    for second in [window(200, 10), window(300, 18), bucket(200, 200, 10), bucket(100, 200, 9)] {
        for (low, low_ms) in [(5, 7000), (20, 7000), (20, 12_000), (60, 9000), (20, 20_000)] {
            for proxies in 1..=3 {
                let first = window(200, 1);
                let mut reloading = Reloading::new(3, &[first, second], proxies);
                for _ in 0..3 {
                    reloading.advance_by(21_000);
                    // Buckets fill, and are emptied just before the change.
                    reloading.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 0);
                    reloading.advance_by(21_000);
                    reloading.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 500);
                    reloading.advance_by(1000);
                    reloading.reload(&[window(low, 1), second]);
                    reloading.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 0);
                    reloading.advance_by(low_ms);
                    reloading.reload(&[first, second]);
                    reloading.advance_by(3000);
                    reloading.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 500);
                }
                reloading.advance_by(20_000);
                reloading.assert_within_bound(&format!("{second:?}, {low} for {low_ms} ms, {proxies}"));
            }
        }
    }
}

#[test]
fn longer_period_is_kept_with_the_same_number_of_tokens() {
    for (before, after) in [(1, 10), (2, 19), (10, 1)] {
        for seed in 0..8 {
            let mut reloading = Reloading::new(seed, &[window(100, before)], 2);
            reloading.advance_by(30_000);
            reloading.change_period(window(100, after));
            reloading.advance_by(60_000);
            reloading.assert_within_bound(&format!("100 in {before} s, then in {after} s, {seed}"));
        }
    }
}

#[test]
fn bucket_that_became_a_little_smaller_is_lowered() {
    for (before, after) in [
        (bucket(200, 133, 3), bucket(600, 120, 3)),
        (bucket(200, 133, 3), bucket(200, 128, 3)),
        (bucket(100, 100, 10), bucket(100, 91, 10)),
    ] {
        for proxies in 1..4 {
            let mut reloading = Reloading::new(1, &[before], proxies);
            reloading.advance_by(20_000);
            reloading.reload(&[after]);
            reloading.advance_by(20_000);
            // Buckets fill, and all tokens are taken.
            reloading.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 1);
            reloading.advance_by(30_000);
            reloading.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 500);
            reloading.advance_by(5000);
            reloading.assert_within_bound(&format!("{before:?} to {after:?}, {proxies}"));
        }
    }
}

proptest! {
    #![proptest_config(kit::costly_property(24))]

    #[test]
    fn rates_stay_within_limits_that_change(
        seed: u64, hits in 20..400_u32, seconds in 1..10_u32, proxies in 1..5_usize, is_bucket: bool,
        changes in prop::collection::vec((1..40_u32, 1..10_u32, 0..3_u8, 500..25_000_u64), 1..8),
        second in prop::option::of((1..20_u32, 1..10_u32)),
    ) {
        let make = |tenths: u32, capacity_tenths: u32| {
            let hits = (hits * tenths / 10).max(1);
            match is_bucket {
                // Full again in less than 20 s.
                true => bucket(hits, (hits * capacity_tenths * 2 / 10 / seconds.max(1)).max(1), seconds),
                false => window(hits, seconds),
            }
        };
        let second = second.map(|(tenths, period)| window((hits * tenths / 10).max(1), period));
        let limits = |first: Limit| [Some(first), second].into_iter().flatten().collect::<Vec<_>>();
        let mut reloading = Reloading::new(seed, &limits(make(10, 10)), proxies);
        reloading.advance_by(20_000);
        for (tenths, capacity_tenths, event, pause_ms) in changes {
            match event {
                0 => reloading.add_busy_proxy(),
                1 => {
                    let proxies = reloading.model.proxies.len();
                    let index = reloading.model.random.random_range(0..proxies);
                    let demand = [0, 1, 20, 500][reloading.model.random.random_range(0..4)];
                    reloading.model.proxies[index].demand_per_s = demand;
                }
                _ => reloading.reload(&limits(make(tenths, capacity_tenths))),
            }
            reloading.advance_by(pause_ms);
        }
        reloading.advance_by(20_000);
        prop_assert!(reloading.most_above() <= 2.0, "{:.1} above", reloading.most_above());
    }
}
