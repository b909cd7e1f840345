//! Proxies that come, lose their streams and come back while others want more than the limit: nobody is denied for
//! long. Replicas whose load moved away give their hold back.

use super::*;
use tollkeeper::limit::division::holder::MARGIN_US;
use tollkeeper::limit::division::ledger::RATE_TTL_S;

/// Longest time that an assignment of a rate stays in use after its stream is lost, or its proxy died, if the proxy
/// acknowledged it.
const LONGEST_USE_US: u64 = RATE_TTL_S as u64 * 1_000_000 + MARGIN_US;

/// A limit of `hits` in `seconds`, and who asks for it: the first proxy for twice as much, others once in 5 s.
struct Contention {
    model: Model,
    began: u64,
    period_us: u64,
    /// Since when each proxy has had nothing that admits a request.
    denied_since: Vec<Option<u64>>,
    longest_denial_us: u64,
}

impl Contention {
    fn new(hits: u32, seconds: u32, proxies: usize, is_bucket: bool) -> Self {
        let period = Period::new(Unit::Second, seconds).expect("some seconds are a period");
        let algorithm = if is_bucket { Algorithm::TokenBucket } else { Algorithm::FixedWindow };
        let limit = Limit::new(&LimitSpec::new(algorithm, hits.into(), period)).expect("the limit is valid");
        let mut contention = Self::of(7, limit, proxies);
        contention.model.proxies[0].demand_per_s = u64::from(hits * 2 / seconds);
        contention
    }

    fn of(seed: u64, limit: Limit, proxies: usize) -> Self {
        let mut model = Model { faults: false, has_late_reports: true, ..Model::new(seed, limit, 0, 1) };
        let (began, period_us) = (model.now, limit.period_us());
        (0..proxies).for_each(|_| add_proxy(&mut model));
        Self { model, began, period_us, denied_since: Vec::new(), longest_denial_us: 0 }
    }

    fn advance_to(&mut self, second: u64) {
        while self.model.now < self.began + second * 1_000_000 {
            self.model.step();
            self.denied_since.resize(self.model.proxies.len(), None);
            for (proxy, since) in self.model.proxies.iter().zip(&mut self.denied_since) {
                let has_tokens = matches!(&proxy.assigned, Some((Strategy::Tokens(bucket), ..)) if bucket.max > 0);
                if has_tokens || !proxy.is_known || proxy.is_dead {
                    *since = None;
                } else {
                    let since = *since.get_or_insert(self.model.now);
                    self.longest_denial_us = self.longest_denial_us.max(self.model.now - since);
                }
            }
        }
    }

    fn add_asking_proxy(&mut self, demand_per_s: u64) {
        add_proxy(&mut self.model);
        self.model.proxies.last_mut().expect("it was added").demand_per_s = demand_per_s;
    }

    /// Asserts that no proxy was denied for longer than others need to give something up, and its bucket to be full
    /// again.
    fn assert_denied_for_less_than_a_bucket(&self, until_given_up_us: u64, what: &str) {
        let most_us = until_given_up_us + self.period_us;
        let denied_s = self.longest_denial_us as f64 / 1e6;
        assert!(self.longest_denial_us <= most_us, "{what}: denied for {denied_s} s");
    }

    /// Cuts all streams: the proxies come back with their next reports.
    fn cut_streams(&mut self) {
        for index in 0..self.model.proxies.len() {
            self.model.proxies[index].lose_stream();
            self.model.leave(0, index);
        }
    }

    /// Asserts that no proxy was denied for longer than `periods` beyond the use of a lost stream's assignment, that
    /// little of the buckets rests, and that the bound holds.
    fn assert_nobody_is_denied(&self, periods: u64, what: &str) {
        let most_us = LONGEST_USE_US + 6_000_000 + periods * self.period_us;
        let division = &self.model.replicas[0].division;
        let pool = &division.pools[0];
        let parts: Vec<_> = division.holders.iter().map(|holder| holder.rates[0].now).collect();
        let in_use: u64 = parts.iter().map(|part| part.bucket).sum();
        let resting = pool.reserved_buckets(0, &division.holders) - in_use;
        let denied_s = self.longest_denial_us as f64 / 1e6;
        assert!(self.longest_denial_us <= most_us, "{what}: denied for {denied_s} s, {parts:?}");
        assert!(resting <= pool.hits.held / 4, "{what}: {resting} of {} rest, {parts:?}", pool.hits.held);
        let limit = limit_of(&self.model);
        let above = self.model.most_above_bucket(limit, limit);
        assert!(above <= 2.0, "{what}: {above} above {limit}");
    }
}

fn limit_of(model: &Model) -> u64 {
    model.limit.requests_per_unit()
}

/// Adds a proxy that asks once in 5 s.
fn add_proxy(model: &mut Model) {
    let mut proxy = Proxy::new(0, model.now, &mut model.random);
    proxy.requests = (0..600).map(|index| model.now + 100_000 + index * 5_000_000).collect();
    model.proxies.push(proxy);
}

/// Limits: hits, and seconds of the period.
const LIMITS: [(u32, u32); 4] = [(1000, 1), (1000, 10), (100, 1), (30, 2)];

#[test]
fn proxies_whose_streams_are_lost_get_a_share_again() {
    for ((hits, seconds), is_bucket) in LIMITS.into_iter().flat_map(|limit| [(limit, false), (limit, true)]) {
        let mut contention = Contention::new(hits, seconds, 3, is_bucket);
        contention.advance_to(60);
        contention.cut_streams();
        contention.advance_to(260);
        contention.assert_nobody_is_denied(2, &format!("{hits} in {seconds} s, {is_bucket}"));
        // The idle ones alone.
        for index in 1..3 {
            contention.model.proxies[index].lose_stream();
            contention.model.leave(0, index);
        }
        contention.advance_to(460);
        contention.assert_nobody_is_denied(2, &format!("{hits} in {seconds} s, {is_bucket}, idle ones"));
    }
}

#[test]
fn newcomers_get_a_share_from_proxies_that_keep_theirs() {
    for (old, new) in [(2, 10), (10, 10), (3, 3), (20, 1)] {
        for (hits, seconds) in LIMITS.into_iter().filter(|(hits, _)| *hits as usize > 4 * (old + new)) {
            for demand_of_newcomers in [0, hits * 2 / seconds] {
                let mut contention = Contention::new(hits, seconds, old, false);
                contention.advance_to(60);
                for _ in 0..new {
                    add_proxy(&mut contention.model);
                    let newcomer = contention.model.proxies.last_mut().expect("it was added");
                    newcomer.demand_per_s = demand_of_newcomers.into();
                }
                contention.advance_to(300);
                let what = format!("{hits} in {seconds} s, {old} and {new} with {demand_of_newcomers}");
                contention.assert_nobody_is_denied(1, &what);
            }
        }
    }
}

#[test]
fn newcomer_among_proxies_that_all_want_more_gets_a_share() {
    for (old, new) in [(20, 1), (10, 1), (4, 12)] {
        for (hits, seconds) in [(1000, 1), (1000, 10)] {
            let mut contention = Contention::new(hits, seconds, old, false);
            contention.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = u64::from(hits / seconds));
            contention.advance_to(60);
            (0..new).for_each(|_| add_proxy(&mut contention.model));
            contention.advance_to(200);
            contention.assert_nobody_is_denied(1, &format!("{hits} in {seconds} s, {old} busy and {new}"));
        }
    }
}

#[test]
fn replica_whose_load_moved_away_gives_its_hold_back() {
    for (hits, seconds) in LIMITS {
        let period = Period::new(Unit::Second, seconds).expect("some seconds are a period");
        let limit =
            Limit::new(&LimitSpec::new(Algorithm::FixedWindow, hits.into(), period)).expect("the limit is valid");
        let mut model = Model { faults: false, has_late_reports: true, ..Model::new(7, limit, 0, 2) };
        (0..6).for_each(|_| add_proxy(&mut model));
        (0..6).for_each(|index| model.proxies[index].replica = Some(index % 2));
        let advance = |model: &mut Model, seconds: u64| (0..seconds * 100).for_each(|_| model.step());
        let busy = u64::from(hits * 2 / seconds);
        model.proxies[0].demand_per_s = busy;
        advance(&mut model, 60);
        (model.proxies[0].demand_per_s, model.proxies[1].demand_per_s) = (0, busy);
        advance(&mut model, 60 + 6 * u64::from(seconds));
        let held = [0, 1].map(|index: usize| model.replicas[index].division.pools[0].hits.held);
        assert!(held[1] >= u64::from(hits) * 3 / 5, "{hits} in {seconds} s: {held:?} held");
    }
}

#[test]
fn newcomers_get_a_share_after_a_proxy_died() {
    for (limit, old, new) in [
        (window(60, 5), 4, 2),
        (window(50, 5), 3, 2),
        (window(50, 19), 2, 2),
        (window(100, 10), 4, 2),
        (window(70, 10), 3, 4),
        (bucket(100, 50, 10), 2, 2),
        (bucket(60, 120, 9), 2, 3),
        (bucket(40, 40, 9), 2, 2),
    ] {
        for seed in 0..8 {
            let mut contention = Contention::of(seed, limit, old);
            contention.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 500);
            contention.advance_to(40);
            contention.add_asking_proxy(20);
            contention.advance_to(55);
            contention.model.proxies[0].is_dead = true;
            (0..new).for_each(|_| contention.add_asking_proxy(20));
            contention.advance_to(110);
            // The dead one may have been told to give something up, which is in use until its assignment ends.
            let what = format!("{limit:?}, {old} and {new}, seed {seed}");
            contention.assert_denied_for_less_than_a_bucket(LONGEST_USE_US, &what);
        }
    }
}

#[test]
fn newcomers_of_small_limits_get_a_share_whatever_the_algorithm() {
    for seed in 0..200_u64 {
        let mut random = SmallRng::seed_from_u64(seed);
        let (old, new) = (random.random_range(2..5_u32), random.random_range(1..4_u32));
        let seconds = [2, 5, 9, 19][random.random_range(0..4)];
        let hits = random.random_range(10..16) * (old + new);
        let limit = match seed % 3 {
            0 => window(hits, seconds),
            1 => bucket(hits, hits * random.random_range(1..=(19 / seconds).max(1)), seconds),
            _ => bucket(hits, (hits / 2).max(2 * (old + new)), seconds),
        };
        let is_cut = random.random_bool(0.5);
        let demand_per_s = [20, 50, 500][random.random_range(0..3)];
        let mut contention = Contention::of(seed, limit, old as usize);
        contention.model.proxies.iter_mut().for_each(|proxy| proxy.demand_per_s = 500);
        contention.advance_to(40);
        (0..new).for_each(|_| contention.add_asking_proxy(demand_per_s));
        contention.advance_to(60);
        if is_cut {
            contention.model.proxies[0].lose_stream();
            contention.model.leave(0, 0);
        }
        contention.advance_to(110);
        let what = format!("{limit:?}, {old} and {new}, seed {seed}");
        contention.assert_denied_for_less_than_a_bucket(LONGEST_USE_US, &what);
    }
}
