//! No place is usable by two processes within one period, under any faults of processes and messages.
//!
//! Random lives: processes claim, wait for replies that come late or never, renew, crash, stop and restart, some with
//! another number of places, while time passes and the clock of Redis is set back now and then. Abandoned requests
//! still run, later. The possible uses of each process are recorded here by an independent rule; the invariant is
//! checked against that record, to the microsecond.

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use tollkeeper::store::redis::replicas::{CLAIM_DURATION, ClaimAction, ClaimReply, ReplicaMembership};

use super::{SECOND, START, Table};
use kit::redis as servers;
use tokio::time::Instant;

/// Number of processes at a time.
const PROCESSES: usize = 4;
/// Periods of rules, in microseconds.
const PERIODS: [u64; 4] = [SECOND, 20 * SECOND, 60 * SECOND, 3600 * SECOND];

/// Next event, for the process at that index.
#[derive(Clone, Debug)]
enum Event {
    /// Time passes, in microseconds.
    Passes(u64),
    /// Claims, and gets the reply after these microseconds on each way.
    Beats(usize, [u64; 2]),
    /// Sends a claim.
    Sends(usize),
    /// Redis runs its claim.
    Runs(usize),
    /// Receives the reply.
    Hears(usize),
    /// Gives up waiting for the reply.
    GivesUpWaiting(usize),
    /// Redis runs the oldest abandoned request.
    RunsLate,
    /// Crashes; another process with this number of places replaces it.
    Crashes(usize, u32),
    /// Stops in order; Redis runs the release after these microseconds, or late.
    Stops(usize, Option<u64>, u32),
    /// The clock of Redis is set back by these microseconds.
    Back(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let who = 0..PROCESSES;
    let edge = Just(30 * SECOND);
    let passes = prop_oneof![0..SECOND, 8 * SECOND..12 * SECOND, 18 * SECOND..35 * SECOND, edge, 0..200 * SECOND];
    let places = || prop_oneof![4 => Just(2_u32), 1 => 1..4_u32];
    let way = prop_oneof![2 => Just(0), 3 => 0..SECOND / 5, 1 => 0..40 * SECOND];
    prop_oneof![
        6 => passes.prop_map(Event::Passes),
        12 => (who.clone(), [way.clone(), way]).prop_map(|(who, ways)| Event::Beats(who, ways)),
        2 => who.clone().prop_map(Event::Sends),
        2 => who.clone().prop_map(Event::Runs),
        2 => who.clone().prop_map(Event::Hears),
        1 => who.clone().prop_map(Event::GivesUpWaiting),
        1 => Just(Event::RunsLate),
        1 => (who.clone(), places()).prop_map(|(who, places)| Event::Crashes(who, places)),
        1 => (who, proptest::option::of(0..SECOND), places()).prop_map(|(who, at, places)| Event::Stops(who, at, places)),
        1 => (0..100 * SECOND).prop_map(Event::Back),
    ]
}

/// Simulated process.
struct Process {
    /// Its identity.
    owner: u8,
    replicas: ReplicaMembership,
    /// Claim in flight: the time of sending, and the reply of Redis.
    flight: Option<(u64, Option<ClaimReply>)>,
}

/// Time span in which a process may have used a place.
#[derive(Clone, Copy, Debug)]
struct Use {
    owner: u8,
    places: u32,
    place: u32,
    until: u64,
}

struct World<'t> {
    table: &'t mut Table,
    began: Instant,
    /// Microseconds since the start.
    now: u64,
    /// Offset by which the clock of Redis was set back.
    behind: u64,
    processes: Vec<Process>,
    born: u8,
    uses: Vec<Use>,
    late: Vec<(u8, u32, ClaimAction)>,
    /// Number of shares used after another process had the place.
    inherited: usize,
}

impl<'t> World<'t> {
    fn new(table: &'t mut Table) -> Self {
        let mut world = Self {
            table,
            began: Instant::now(),
            now: 0,
            behind: 0,
            processes: Vec::new(),
            born: 0,
            uses: Vec::new(),
            late: Vec::new(),
            inherited: 0,
        };
        for place in 0..PROCESSES {
            let process = world.birth(2);
            world.processes.insert(place, process);
        }
        world
    }

    fn birth(&mut self, places: u32) -> Process {
        self.born += 1;
        Process { owner: self.born, replicas: ReplicaMembership::new(NonZeroU32::new(places).unwrap()), flight: None }
    }

    fn at(&self, now: u64) -> Instant {
        self.began + Duration::from_micros(now)
    }

    fn run(&mut self, owner: u8, places: u32, action: ClaimAction) -> ClaimReply {
        // Long after the epoch, so that the clock can be set back.
        self.table.now.set(START.plus_us((self.now + (1 << 40)).saturating_sub(self.behind)));
        self.table.claim(owner, places, action)
    }

    fn happens(&mut self, event: &Event) {
        match *event {
            Event::Passes(micros) => self.now += micros,
            Event::Back(micros) => self.behind += micros,
            Event::Beats(who, [there, back]) => {
                self.gives_up_waiting(who);
                self.processes[who].flight = Some((self.now, None));
                self.now += there;
                self.runs(who);
                self.now += back;
                self.hears(who);
            }
            Event::Sends(who) => {
                self.gives_up_waiting(who);
                self.processes[who].flight = Some((self.now, None));
            }
            Event::Runs(who) => self.runs(who),
            Event::Hears(who) => self.hears(who),
            Event::GivesUpWaiting(who) => self.gives_up_waiting(who),
            Event::RunsLate => {
                if !self.late.is_empty() {
                    let (owner, places, action) = self.late.remove(0);
                    self.run(owner, places, action);
                }
            }
            Event::Crashes(who, places) => {
                self.gives_up_waiting(who);
                self.processes[who] = self.birth(places);
            }
            Event::Stops(who, run, places) => self.stops(who, run, places),
        }
    }

    fn runs(&mut self, who: usize) {
        let process = &self.processes[who];
        if let Some((sent, None)) = process.flight {
            let reply = self.run(process.owner, process.replicas.max_replicas().get(), ClaimAction::Claim);
            self.processes[who].flight = Some((sent, Some(reply)));
        }
    }

    fn hears(&mut self, who: usize) {
        let received = self.at(self.now);
        let Some((sent, Some(reply))) = self.processes[who].flight else { return };
        let sent_at = self.at(sent);
        let process = &mut self.processes[who];
        process.flight = None;
        process.replicas.record_claim_reply(&reply, sent_at, received);
        if let Some(place) = reply.place {
            let until = sent + u64::try_from(CLAIM_DURATION.as_micros()).unwrap();
            let places = process.replicas.max_replicas().get();
            self.uses.push(Use { owner: process.owner, places, place, until });
        }
    }

    fn gives_up_waiting(&mut self, who: usize) {
        let process = &mut self.processes[who];
        if let Some((_, None)) = process.flight.take() {
            self.late.push((process.owner, process.replicas.max_replicas().get(), ClaimAction::Claim));
        }
    }

    fn stops(&mut self, who: usize, run: Option<u64>, places: u32) {
        self.gives_up_waiting(who);
        let process = &self.processes[who];
        process.replicas.end_place_use();
        let (owner, of) = (process.owner, process.replicas.max_replicas().get());
        for used in self.uses.iter_mut().filter(|used| used.owner == owner) {
            used.until = used.until.min(self.now);
        }
        match run {
            Some(micros) => {
                self.now += micros;
                self.run(owner, of, ClaimAction::Release);
            }
            None => self.late.push((owner, of, ClaimAction::Release)),
        }
        self.processes[who] = self.birth(places);
    }

    /// Checks that a share is usable only one period after all earlier owners of the place.
    fn check(&mut self) -> TestCaseResult {
        for process in &self.processes {
            let (Some(place), places) = (process.replicas.place(), process.replicas.max_replicas().get()) else {
                continue;
            };
            let same = |used: &&Use| used.owner != process.owner && (used.places != places || used.place == place);
            let before: Vec<_> = self.uses.iter().filter(same).collect();
            for period in PERIODS {
                let edges = before.iter().map(|used| used.until + period - 1).filter(|edge| *edge > self.now);
                for at in edges.chain([self.now]) {
                    if process.replicas.may_use_share(period, self.at(at)) {
                        let early = before.iter().find(|used| used.until + period > at);
                        prop_assert!(early.is_none(), "{}: {place} of {places} at {at} after {early:?}", process.owner);
                        self.inherited += usize::from(!before.is_empty());
                    }
                }
            }
            let own = self.uses.iter().filter(|used| used.owner == process.owner);
            let until = own.map(|used| used.until).max().unwrap_or(0);
            prop_assert!(
                !process.replicas.may_use_share(0, self.at(until)),
                "{} is not over at {until}",
                process.owner
            );
        }
        Ok(())
    }
}

#[test]
fn slot_is_usable_by_one_process_within_a_period() {
    let server = servers::options().start();
    let tables = RefCell::new((Table::new(&server), 0_u64));
    let inherited = RefCell::new(0);
    let config = ProptestConfig { source_file: Some(file!()), max_shrink_iters: 2000, ..ProptestConfig::default() };
    let events = proptest::collection::vec(event(), 1..120);
    let outcome = TestRunner::new(config).run(&events, |events| {
        let (table, lives) = &mut *tables.borrow_mut();
        *lives += 1;
        table.key = format!("life:{lives}");
        let mut world = World::new(table);
        for event in &events {
            world.happens(event);
            world.check()?;
        }
        *inherited.borrow_mut() += world.inherited;
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(*inherited.borrow() > 100, "places pass from one to the next");
}
