//! Clients that report what they like, over as many streams as they like: others get their part, and the limit again soon.

use super::*;

const SECOND_STEPS: u64 = 1_000_000 / STEP_US;

/// An honest proxy, which asks for more than the limit, beside streams of a hostile client.
struct Attack {
    model: Model,
    limit: u64,
}

impl Attack {
    fn new(limit: Limit) -> Self {
        let mut model = Model { faults: false, has_late_reports: true, ..Model::new(1, limit, 1, 1) };
        model.proxies[0].client = Some([192, 0, 2, 1].into());
        let per_s = u64::from(limit.requests_per_unit()) * 1_000_000 / limit.period_us();
        model.proxies[0].demand_per_s = (2 * per_s).max(2);
        Self { model, limit: limit.requests_per_unit().into() }
    }

    /// Opens streams of the hostile client, which report these numbers each second.
    fn open_streams(&mut self, streams: usize, (allowed, denied): (u64, u64)) {
        for _ in 0..streams {
            let mut proxy = Proxy::new(0, self.model.now, &mut self.model.random);
            (proxy.client, proxy.lies, proxy.next_report) =
                (Some([192, 0, 2, 66].into()), Some((allowed, denied)), self.model.now);
            self.model.proxies.push(proxy);
        }
    }

    fn close_streams(&mut self) {
        self.model.proxies.iter_mut().skip(1).for_each(|proxy| proxy.cut_at = Some(self.model.now));
        self.model.step();
        self.model.proxies.truncate(1);
    }

    /// Part of the limit that the honest proxy admits in so many periods of time.
    fn admitted_part(&mut self, seconds: u64) -> f64 {
        let before = self.model.admitted.len();
        (0..seconds * SECOND_STEPS).for_each(|_| self.model.step());
        let of_limit = self.limit as f64 * seconds as f64 * 1e6 / self.model.limit.period_us() as f64;
        (self.model.admitted.len() - before) as f64 / of_limit
    }
}

/// Limits that are assigned as rates, and that are lent.
fn limits() -> [(&'static str, Limit); 4] {
    [
        ("500 a second, bucket", limit(Algorithm::TokenBucket, 500, Unit::Second, Some(500))),
        ("600 a minute", limit(Algorithm::FixedWindow, 600, Unit::Minute, None)),
        ("600 a minute, sliding", limit(Algorithm::SlidingWindowCounter, 600, Unit::Minute, None)),
        ("600 a minute, bucket", limit(Algorithm::TokenBucket, 600, Unit::Minute, Some(600))),
    ]
}

const MANY: (u64, u64) = (u64::MAX, 0);
const DENIED: (u64, u64) = (0, 1_000_000_000);

/// Four of its streams count: a fifth is left for the other, as with five honest proxies.
#[test]
fn streams_of_one_client_leave_others_a_part() {
    for (name, limit) in limits() {
        for (lies, are_first) in [(DENIED, false), (DENIED, true), ((1, 0), false)] {
            let mut attack = Attack::new(limit);
            let demand = attack.model.proxies[0].demand_per_s;
            if are_first {
                attack.model.proxies[0].demand_per_s = 0;
            } else {
                attack.admitted_part(60);
            }
            attack.open_streams(60, lies);
            attack.admitted_part(30);
            attack.model.proxies[0].demand_per_s = demand;
            attack.admitted_part(60);
            let part = attack.admitted_part(60);
            // What is lent goes to whoever says that it used it.
            let least = if lies == DENIED { 0.16 } else { 0.1 };
            assert!(part > least, "{name}, streams that report {lies:?}, first: {are_first}: {part}");
        }
    }
}

#[test]
fn what_a_stream_claimed_is_over_soon_after_it() {
    for (name, limit) in limits() {
        for lies in [MANY, DENIED] {
            let mut attack = Attack::new(limit);
            attack.admitted_part(60);
            attack.open_streams(1, lies);
            attack.admitted_part(3);
            attack.close_streams();
            let after = [(); 3].map(|()| attack.admitted_part(60));
            // A window, or an assignment, ends in the first minute. A sliding window is used less if all is asked for.
            assert!(after[1] > 0.8 && after[2] > 0.8, "{name}, {lies:?}: {after:?}");
        }
    }
}

#[test]
fn streams_one_after_the_other_leave_others_a_part() {
    for (name, limit) in limits() {
        let mut attack = Attack::new(limit);
        attack.admitted_part(60);
        let mut parts = 0.0;
        for _ in 0..60 {
            attack.open_streams(5, (1, 0));
            parts += attack.admitted_part(2);
            attack.close_streams();
        }
        assert!(parts / 60.0 > 0.12, "{name}: {}", parts / 60.0);
    }
}
