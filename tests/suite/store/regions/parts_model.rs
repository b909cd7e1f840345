//! Parts of regions in schedules of cuts, changed lists, replaced and copied Redis, and jumps of the global clock: no
//! span of a period has the parts of two Redis of one name, or of two lists.
//!
//! The scripts and the standing are those of the product; time, processes and the network are simulated, a second at a
//! time. A copy may use its parts until it is found.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::region::GlobalTimeAndStanding;
use tollkeeper::store::client::redis::server_clock::{
    ClockJumps, ClockReading, InstantRange, ServerClock, process_time_us,
};
use tollkeeper::store::redis::regions::registry::{FencingToken, IdentityCall, RegionRedisId, RegionReport};
use tollkeeper::store::redis::regions::standing::{
    CallTimes, ClockAndConnectionEvents, OwnRegionSettings, RegionStanding,
};

use super::membership::{SECOND, START, Scripts, hash};
use kit::redis::{self as servers, Server};
use kit::seeded_random::Chance;
use tokio::time::Instant;

/// Period of the limit, and lease of the parts, in seconds.
const PERIOD: u64 = 60;
const LEASE: u64 = 60;
/// Time until a copy is found.
const COPY_FOUND_AFTER: u64 = 25;

const TWO: &[&str] = &["eu", "us"];
const THREE: &[&str] = &["asia", "eu", "us"];

/// Settings of a process.
#[derive(Clone, Copy)]
struct Place {
    name: &'static str,
    list: &'static [&'static str],
    /// Number of the region's Redis.
    redis: u8,
}

/// A process of a region.
struct Process {
    place: Place,
    standing: RegionStanding,
    global_clock: ServerClock,
    proposal: RegionRedisId,
    accepted: FencingToken,
    reaches_global: bool,
}

impl Process {
    fn new(place: Place, proposal: RegionRedisId) -> Self {
        let region = Arc::<ClockJumps>::default();
        let global = Arc::new(region.for_other_deployment());
        let own = OwnRegionSettings::with_names(place.name, place.list, Duration::from_secs(LEASE));
        Self {
            place,
            global_clock: ServerClock::new(Arc::clone(&global)),
            standing: RegionStanding::new(
                own,
                ClockAndConnectionEvents {
                    region_jumps: region,
                    global_jumps: global,
                    ..ClockAndConnectionEvents::default()
                },
            ),
            proposal,
            accepted: FencingToken::NONE,
            reaches_global: true,
        }
    }
}

/// Regions, their Redis and the global one.
struct World {
    server: Server,
    scripts: Scripts,
    origin: Instant,
    second: u64,
    /// Seconds by which the clock of the global Redis is ahead.
    global_ahead: i64,
    processes: Vec<Process>,
    /// Last second in which the parts of each Redis were used, by name, list and number of the Redis.
    used: BTreeMap<(&'static str, &'static [&'static str], u8), u64>,
    /// Second until which copies may use their parts.
    copied_until: u64,
    ids: u8,
    breaches: Vec<String>,
}

impl World {
    fn new() -> Self {
        let server = servers::options().start();
        Self {
            scripts: Scripts::new(&server),
            server,
            origin: Instant::now(),
            second: 0,
            global_ahead: 0,
            processes: Vec::new(),
            used: BTreeMap::new(),
            copied_until: 0,
            ids: 0,
            breaches: Vec::new(),
        }
    }

    fn at(&self) -> Instant {
        self.origin + Duration::from_secs(self.second)
    }

    fn start(&mut self, place: Place) -> usize {
        self.ids += 1;
        self.processes.push(Process::new(place, RegionRedisId([self.ids; 16])));
        self.processes.len() - 1
    }

    /// Starts the regions eu and us, with the Redis 1 and 2, and waits for their parts.
    fn start_two(&mut self) {
        for (name, redis) in [("eu", 1), ("us", 2)] {
            self.start(Place { name, list: TWO, redis });
        }
        self.run(5);
        assert!(self.uses(1) && self.uses(2), "a first start does not wait");
    }

    fn key(redis: u8) -> String {
        format!("tk1:{{identity}}{redis}")
    }

    /// Copies the identity of one Redis to another.
    fn copy(&mut self, from: u8, to: u8) {
        self.server.query::<i64>(&["COPY", &Self::key(from), &Self::key(to), "REPLACE"]);
        self.copied_until = self.second + COPY_FOUND_AFTER;
    }

    /// Returns true if any process uses the parts of a Redis now.
    fn uses(&self, redis: u8) -> bool {
        self.used.iter().any(|((_, _, used), second)| *used == redis && *second == self.second)
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.second += 1;
            for index in 0..self.processes.len() {
                self.step(index);
            }
            self.check();
        }
    }

    fn step(&mut self, index: usize) {
        let at = self.at();
        let us = process_time_us(at);
        let times = CallTimes { sent_us: us, answered_us: us };
        let now = START.plus_us(self.second * SECOND);
        let global_now = Time::from_micros(now.as_micros().saturating_add_signed(self.global_ahead * 1_000_000));
        let process = &mut self.processes[index];
        let Place { name, list, redis } = process.place;
        let findings = process.standing.findings();
        let lease_us = findings.lease_ends_us().map_or(0, |ends_us| u64::try_from(ends_us - us).unwrap_or(0));
        let call = IdentityCall {
            claim: findings.build_identity_claim(process.proposal),
            list: hash(list),
            other_list_changed_ago_us: findings.us_since_registry_change(us),
            leased_until: if lease_us == 0 { Time::default() } else { now.plus_us(lease_us) },
            jumped_ago_us: None,
            accepted: process.accepted,
            proposal: FencingToken::random(),
        };
        let identity = self.scripts.call_identity(&Self::key(redis), &call, now);
        process.standing.record_identity(&identity, times);
        // The first report only reads the clock.
        for _ in 0..2 {
            if !process.reaches_global {
                break;
            }
            let range = InstantRange { from: at, until: at };
            let offset = process.global_clock.offset(range);
            let sent = offset.map_or(Time::default(), |offset| Time::from_micros((us + offset.hi_us).unsigned_abs()));
            let RegionReport { id, fence, .. } = report_of(&identity.identity);
            let jumped_ago_us = process.standing.us_since_global_jump_to_report(us);
            let lease_us = LEASE * SECOND;
            let report = RegionReport { name, id, fence, list: hash(list), sent, lease_us, jumped_ago_us };
            let reply = self.scripts.call_registry(report, global_now);
            process.global_clock.record(&ClockReading { within: range, server: global_now });
            process.standing.record_registry(&reply, times);
            if reply.accepted {
                process.accepted = fence.next;
            }
            if offset.is_some() {
                break;
            }
        }
        if !process.standing.restrict_view(GlobalTimeAndStanding::UNKNOWN, PERIOD * SECOND, at).parts_unusable {
            self.used.insert((name, list, redis), self.second);
        }
    }

    fn check(&mut self) {
        let recent: Vec<_> = self.used.iter().filter(|(_, second)| **second + PERIOD > self.second).collect();
        for (index, ((name, list, redis), _)) in recent.iter().enumerate() {
            for ((other_name, other_list, other_redis), _) in &recent[index + 1..] {
                let is_other_redis = name == other_name && redis != other_redis;
                // Within one Redis the parts are counted together.
                let is_other_list = list != other_list && redis != other_redis;
                if self.second > self.copied_until + PERIOD && (is_other_redis || is_other_list) {
                    self.breaches.push(format!(
                        "{}: {name} {list:?} {redis}, {other_name} {other_list:?} {other_redis}",
                        self.second
                    ));
                }
            }
        }
    }

    /// Runs until the parts of a Redis are used; returns after how many seconds.
    fn run_until_used(&mut self, redis: u8) -> u64 {
        let start = self.second;
        self.run(1);
        while !self.uses(redis) {
            self.run(1);
            assert!(self.second < start + 1000, "the parts of {redis} never come back");
        }
        self.second - start
    }

    fn finish(self) {
        assert_eq!(self.breaches, Vec::<String>::new());
    }
}

fn report_of(identity: &tollkeeper::store::redis::regions::registry::RegionIdentity) -> RegionReport<'static> {
    RegionReport {
        name: "",
        id: identity.id,
        fence: identity.fence,
        list: hash(TWO),
        sent: Time::default(),
        lease_us: 0,
        jumped_ago_us: None,
    }
}

#[test]
fn removed_region_that_runs_on_loses_its_parts_before_the_others_divide_them() {
    let mut world = World::new();
    for (name, redis) in [("asia", 3), ("eu", 1), ("us", 2)] {
        world.start(Place { name, list: THREE, redis });
    }
    world.run(5);
    world.processes[0].reaches_global = false;
    world.run(10);
    assert!(world.uses(3), "it goes on for its lease");
    world.processes.truncate(1);
    let start = world.second;
    for (name, redis) in [("eu", 1), ("us", 2)] {
        world.start(Place { name, list: TWO, redis });
    }
    let waited = world.run_until_used(1);
    assert!((100..=115).contains(&waited), "the lease and a period: {waited}");
    assert!(!world.uses(3) && world.second > start);
    // It comes back, and rests with the others.
    world.processes[0].reaches_global = true;
    world.run(200);
    assert!(![1, 2, 3].iter().any(|&redis| world.uses(redis)), "the lists differ");
    world.finish();
}

#[test]
fn changed_list_rests_for_a_period_if_all_regions_report_it() {
    let mut world = World::new();
    world.start_two();
    world.processes.clear();
    for (name, redis) in [("asia", 3), ("eu", 1), ("us", 2)] {
        world.start(Place { name, list: THREE, redis });
    }
    let waited = world.run_until_used(1);
    assert!((60..=65).contains(&waited), "{waited}");
    world.run(5);
    assert!(world.uses(2) && world.uses(3));
    world.finish();
}

#[test]
fn impostor_of_a_cut_off_region_waits_for_its_lease() {
    let mut world = World::new();
    world.start_two();
    world.processes[0].reaches_global = false;
    world.run(30);
    assert!(world.uses(1));
    world.start(Place { name: "eu", list: TWO, redis: 9 });
    let waited = world.run_until_used(9);
    assert!((85..=95).contains(&waited), "{waited}");
    world.processes[0].reaches_global = true;
    world.run(100);
    assert!(!world.uses(1) && !world.uses(9) && world.uses(2), "both rest, and the other region does not");
    // The impostor is gone.
    world.processes.truncate(2);
    assert!(world.run_until_used(1) <= 125);
    world.finish();
}

#[test]
fn replaced_redis_gets_its_parts_after_the_lease_of_the_old_one() {
    let mut world = World::new();
    world.start_two();
    world.processes.remove(0);
    world.start(Place { name: "eu", list: TWO, redis: 9 });
    let waited = world.run_until_used(9);
    assert!((118..=123).contains(&waited), "{waited}");
    world.finish();
}

#[test]
fn copies_of_a_redis_are_found_and_one_heals() {
    let mut world = World::new();
    world.start_two();
    // A second process of the same region, which starts and dies, is no copy.
    let second = world.start(Place { name: "eu", list: TWO, redis: 1 });
    world.run(50);
    world.processes.remove(second);
    world.run(50);
    assert!(world.uses(1));
    world.copy(1, 9);
    world.start(Place { name: "eu", list: TWO, redis: 9 });
    world.run(COPY_FOUND_AFTER);
    for _ in 0..100 {
        world.run(1);
        assert!(!world.uses(1) && !world.uses(9) && world.uses(2), "{}", world.second);
    }
    world.processes.truncate(2);
    let waited = world.run_until_used(1);
    assert!(waited <= 125, "{waited}");
    world.finish();
}

#[test]
fn restored_snapshot_heals_after_a_lease() {
    let mut world = World::new();
    world.start_two();
    world.copy(1, 8);
    world.run(60);
    world.processes.remove(0);
    world.copy(8, 1);
    world.start(Place { name: "eu", list: TWO, redis: 1 });
    world.run(COPY_FOUND_AFTER);
    assert!(!world.uses(1));
    assert!(world.run_until_used(1) <= 125);
    world.finish();
}

#[test]
fn failover_that_forgets_the_last_token_changes_nothing() {
    let mut world = World::new();
    world.start_two();
    for _ in 0..30 {
        world.server.query::<i64>(&["COPY", &World::key(1), "before", "REPLACE"]);
        world.run(3);
        world.server.query::<i64>(&["COPY", "before", &World::key(1), "REPLACE"]);
        world.run(1);
        assert!(world.uses(1), "{}", world.second);
    }
    world.finish();
}

#[test]
fn random_schedules_never_use_parts_twice() {
    for seed in 1..=6 {
        let (mut chance, mut world) = (Chance::new(seed), World::new());
        world.start_two();
        let mut quiet_until = 0;
        for _ in 0..120 {
            let index = usize::try_from(chance.below(world.processes.len() as u64)).expect("it is small");
            match chance.below(10) {
                0..=2 => world.processes[index].reaches_global ^= true,
                3 if world.second > quiet_until => {
                    let redis = u8::try_from(1 + chance.below(4)).expect("it is small");
                    let name = TWO[usize::from(redis) % 2];
                    let list = if chance.one_in(3) { THREE } else { TWO };
                    world.start(Place { name, list, redis });
                }
                4 if world.processes.len() > 1 => {
                    world.processes.remove(index);
                }
                5 if chance.one_in(4) => {
                    let ahead = chance.below(400);
                    world.global_ahead = i64::try_from(ahead).expect("it is small") - 200;
                    quiet_until = world.second + 10;
                }
                _ => {}
            }
            world.run(1 + chance.below(12));
        }
        assert_eq!(world.breaches, Vec::<String>::new(), "seed {seed}");
    }
}
