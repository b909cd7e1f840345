//! Regions, their replicas, the links between them, and the global Redis.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::RegionLossPolicy;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::global_bucket::{self, GlobalBucketParameters};
use tollkeeper::limit::algorithm::global_window::{self, GlobalWindowParameters, ReturnedHits};
use tollkeeper::limit::algorithm::region::{CutOffAllowanceUse, GlobalTimeAndStanding, GrantCycle};
use tollkeeper::limit::algorithm::region_bucket::PrepaidHitsGrant;
use tollkeeper::limit::algorithm::region_window::HitsGrant;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, Scope};
use tollkeeper::store::client::redis::server_clock::{
    ClockJumps, ClockReading, InstantRange, ServerClock, process_time_us,
};
use tollkeeper::store::redis::regions::calls::{ClockOffsets, compute_global_view};
use tollkeeper::store::redis::regions::registry::{
    FencingTokens, IdentityReply, RegionIdentity, RegionRedisId, RegistryReply,
};
use tollkeeper::store::redis::regions::standing::{CallTimes, RegionStanding};

use super::ledger::{GrantUse, Use};
use kit::seeded_random::Chance;
use tokio::time::Instant;

/// Period of the limit: 10 s.
pub(super) const PERIOD_US: i64 = 10_000_000;
const SECOND_US: i64 = 1_000_000;
/// Duration of a run.
const END_US: i64 = 9 * PERIOD_US;
/// Time of all Redis at the start, but for their offsets.
const START_US: i64 = 1_783_512_000_000_000;
const STORE_TIMEOUT: Duration = Duration::from_millis(50);
const REPLICAS: usize = 2;
/// Time that prepaid hits last longer than they should, under [`Breakage::LongLife`].
const LONG_LIFE_US: u64 = 60_000_000;

/// Rule that the simulation leaves out, to see that it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Breakage {
    /// Global time is taken as known exactly.
    ExactClock,
    /// The clock of a call is valid at any time of the region's Redis.
    UncheckedJump,
    /// An answer is taken although its request is not open.
    RepeatedGrant,
    /// A grant is taken in any window.
    LateGrant,
    /// What was granted returns if the answer is slow.
    HastyReturn,
    /// Each region takes the reserve of all.
    WholeReserve,
    /// A region resets its counter whenever it is told of a reset, also again.
    RepeatedReset,
    /// Prepaid hits last for a minute longer than the global Redis says.
    LongLife,
}

impl Breakage {
    const WINDOWS: &[Algorithm] = &[Algorithm::FixedWindow, Algorithm::SlidingWindowCounter];
    const BUCKET: &[Algorithm] = &[Algorithm::TokenBucket];

    /// All, with the algorithms that rest on the rule.
    pub(super) const ALL: [(Self, &[Algorithm]); 8] = [
        (Self::ExactClock, Self::WINDOWS),
        (Self::UncheckedJump, Self::WINDOWS),
        (Self::RepeatedGrant, Self::WINDOWS),
        (Self::LateGrant, Self::WINDOWS),
        (Self::HastyReturn, Self::WINDOWS),
        (Self::WholeReserve, Self::WINDOWS),
        (Self::RepeatedReset, Self::WINDOWS),
        (Self::LongLife, Self::BUCKET),
    ];
}

/// Circumstances of a run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    seed: u64,
    pub(super) regions: usize,
    pub(super) limit: Limit,
    /// Limit that regions change to, each at its own time; equal to `limit` in most runs.
    pub(super) changed: Limit,
    /// Chance of a fault in a second, one in this number; 0: none.
    faults: u64,
    breakage: Option<Breakage>,
}

impl Plan {
    pub(super) fn random(algorithm: Algorithm, seed: u64, breakage: Option<Breakage>) -> Self {
        let mut chance = Chance::new(seed);
        let regions = 2 + chance.place(5);
        let hits = u32::try_from(chance.between(200, 2000)).expect("it is small");
        let on_region_loss = chance.pick(&[RegionLossPolicy::Share, RegionLossPolicy::Deny, RegionLossPolicy::Local]);
        let parts = if breakage == Some(Breakage::WholeReserve) { 2 } else { regions };
        let limit = |hits| {
            let parts = NonZeroU16::new(u16::try_from(parts).expect("it is small")).expect("there are regions");
            let scope = GlobalScope { on_region_loss, ..GlobalScope::new(parts) };
            let period = Period::new(Unit::Second, 10).expect("it is a period");
            let spec = LimitSpec { scope: Some(Scope::Global(scope)), ..LimitSpec::new(algorithm, hits, period) };
            Limit::new(&spec).expect("the limit is valid").as_counted_in_region()
        };
        let changed = if chance.one_in(4) { limit(hits / 2 + 50) } else { limit(hits) };
        let regions = if breakage == Some(Breakage::WholeReserve) { regions.max(6) } else { regions };
        Self { seed, regions, limit: limit(hits), changed, faults: chance.pick(&[0, 30, 10, 4]), breakage }
    }

    /// Largest value of both limits.
    pub(super) fn largest(&self, of: impl Fn(&Limit) -> u32) -> u32 {
        of(&self.limit).max(of(&self.changed))
    }

    fn is(&self, breakage: Breakage) -> bool {
        self.breakage == Some(breakage)
    }
}

/// Clock of a machine.
#[derive(Clone, Copy, Debug)]
struct Drifting {
    offset_us: i64,
    ppm: i64,
}

impl Drifting {
    fn at(self, true_us: i64) -> i64 {
        self.offset_us + true_us + true_us * self.ppm / 1_000_000
    }

    fn time(self, true_us: i64) -> Time {
        Time::from_micros(u64::try_from(self.at(true_us)).expect("it is after 1970"))
    }
}

struct Replica {
    clock: Drifting,
    /// Number of its starts.
    incarnation: u64,
    region_clock: ServerClock,
    global_clock: ServerClock,
    standing: RegionStanding,
}

struct Region {
    clock: Drifting,
    limit: Limit,
    state: State,
    replicas: Vec<Replica>,
    /// True time until which nothing passes to the global Redis or back.
    cut_until_us: i64,
    /// Mean time between two requests.
    pause_us: u64,
}

/// Sender of a message, and the time when it sent.
#[derive(Clone, Copy, Debug)]
struct Sender {
    region: usize,
    replica: usize,
    incarnation: u64,
    sent: Instant,
}

#[derive(Clone, Copy, Debug)]
enum Server {
    Region,
    Global,
}

/// Open grant request of a region's counter.
#[derive(Clone, Copy, Debug)]
struct Ask {
    request: u64,
    wanted: u32,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Window(HitsGrant),
    Prepaid(PrepaidHitsGrant),
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A client sends a request to a region.
    Arrive {
        region: usize,
    },
    /// A charge or refund runs in the region's Redis.
    Execute {
        from: Sender,
        clock: GlobalTimeAndStanding,
        hits: Hits,
    },
    Reply {
        from: Sender,
        server: Time,
        ask: Option<Ask>,
    },
    /// A grant request runs in the global Redis.
    Grant {
        from: Sender,
        ask: Ask,
    },
    Granted {
        from: Sender,
        server: Time,
        answer: Answer,
    },
    /// An answer is given to the region's counter.
    Give {
        region: usize,
        clock: GlobalTimeAndStanding,
        answer: Answer,
    },
    /// Unused hits of a window leave the region's counter.
    GiveBack {
        region: usize,
        window: u64,
        epoch: u64,
    },
    TakeBack {
        region: usize,
        unused: ReturnedHits,
    },
    /// An operator resets the limit.
    Reset,
    /// A region learns of a reset.
    FollowReset {
        region: usize,
        epoch: Time,
    },
    Heartbeat {
        region: usize,
        replica: usize,
    },
    /// A server tells its time.
    Tell {
        from: Sender,
        server: Server,
    },
    Told {
        from: Sender,
        server: Server,
        time: Time,
    },
    /// Something may fail.
    Fault,
    ChangeRule {
        region: usize,
    },
}

/// Counts over a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) requests: u64,
    pub(super) admitted: u64,
    pub(super) from_loss: u64,
    /// Grants that a counter took, and that it did not take.
    pub(super) grants: u64,
    pub(super) void_grants: u64,
    /// Calls that ran without a valid clock, or while their process was cut off.
    pub(super) unknown: u64,
    pub(super) cut_off: u64,
    pub(super) jumps: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.admitted += other.admitted;
        self.from_loss += other.from_loss;
        self.grants += other.grants;
        self.void_grants += other.void_grants;
        self.unknown += other.unknown;
        self.cut_off += other.cut_off;
        self.jumps += other.jumps;
    }
}

pub(super) struct World {
    plan: Plan,
    chance: Chance,
    now_us: i64,
    events: BTreeMap<(i64, u64), Event>,
    scheduled: u64,
    origin: Instant,
    global_clock: Drifting,
    windows: global_window::State,
    bucket: global_bucket::State,
    /// True time until which the global Redis runs nothing.
    paused_until_us: i64,
    regions: Vec<Region>,
    pub(super) uses: Vec<Use>,
    /// Time of the global Redis at which the limit was reset.
    pub(super) reset_us: Option<i64>,
    /// Number of times that each region's Redis lost its data, and that its clock jumped.
    pub(super) losses: Vec<i64>,
    pub(super) jumps: Vec<i64>,
    pub(super) tally: Tally,
}

impl World {
    /// Executes a run.
    pub(super) fn live(plan: &Plan) -> Self {
        let mut world = Self::new(plan);
        for region in 0..plan.regions {
            world.schedule(0, Event::Arrive { region });
            for replica in 0..REPLICAS {
                world.schedule(0, Event::Heartbeat { region, replica });
            }
            let changes_at = world.chance.below(u64::try_from(END_US).expect("it is positive"));
            world.schedule(i64::try_from(changes_at).expect("it is small"), Event::ChangeRule { region });
        }
        world.schedule(SECOND_US, Event::Fault);
        if plan.is(Breakage::RepeatedReset) || world.chance.one_in(3) {
            let reset_us = world.chance.below(u64::try_from(END_US).expect("it is positive"));
            world.schedule(signed(reset_us), Event::Reset);
        }
        while let Some(((at, _), event)) = world.events.pop_first() {
            if at > END_US {
                break;
            }
            world.now_us = at;
            world.handle(event);
        }
        world
    }

    fn new(plan: &Plan) -> Self {
        let mut chance = Chance::new(!plan.seed);
        let origin = Instant::now();
        let redis = |chance: &mut Chance| Drifting {
            offset_us: START_US + signed(chance.below(7_200_000_000)),
            ppm: signed(chance.below(1001)) - 500,
        };
        let regions = (0..plan.regions).map(|_| {
            let clock = redis(&mut chance);
            let replicas = (0..REPLICAS).map(|_| {
                let clock = Drifting { offset_us: SECOND_US, ppm: signed(chance.below(1001)) - 500 };
                Replica::start(clock, origin, 0, 0)
            });
            let replicas = replicas.collect();
            // Together the regions want about twice the limit, unevenly.
            let wanted = u64::from(plan.limit.requests_per_unit()) / plan.regions as u64 + 1;
            let pause_us = 2 * 10_000_000 / (wanted * chance.between(1, 4));
            let limit = plan.limit;
            Region { clock, limit, state: State::empty(limit.counting_method()), replicas, cut_until_us: 0, pause_us }
        });
        let regions = regions.collect();
        Self {
            plan: plan.clone(),
            global_clock: redis(&mut chance),
            chance,
            now_us: 0,
            events: BTreeMap::new(),
            scheduled: 0,
            origin,
            windows: global_window::State::default(),
            bucket: global_bucket::State::default(),
            paused_until_us: 0,
            regions,
            uses: Vec::new(),
            reset_us: None,
            losses: vec![0; plan.regions],
            jumps: vec![0; plan.regions],
            tally: Tally::default(),
        }
    }

    fn schedule(&mut self, after_us: i64, event: Event) {
        self.scheduled += 1;
        self.events.insert((self.now_us + after_us, self.scheduled), event);
    }

    /// Time on the way to the region's Redis; some calls are late.
    fn near_us(&mut self) -> i64 {
        signed(if self.chance.one_in(50) { self.chance.between(1000, 400_000) } else { self.chance.between(50, 3000) })
    }

    /// Time on the way to the global Redis; some messages are very slow.
    fn far_us(&mut self) -> i64 {
        let is_slow = self.chance.one_in(40);
        signed(if is_slow { self.chance.between(300_000, 12_000_000) } else { self.chance.between(25_000, 150_000) })
    }

    /// Returns true if a message between a region and the global Redis is lost now.
    fn is_lost(&mut self, region: usize) -> bool {
        self.regions[region].cut_until_us > self.now_us || (self.plan.faults > 0 && self.chance.one_in(30))
    }

    fn instant(&self, region: usize, replica: usize) -> Instant {
        self.regions[region].replicas[replica].instant(self.origin, self.now_us)
    }

    fn sender(&self, region: usize, replica: usize) -> Sender {
        let incarnation = self.regions[region].replicas[replica].incarnation;
        Sender { region, replica, incarnation, sent: self.instant(region, replica) }
    }

    /// Returns the replica of a message, unless it has crashed since.
    fn replica(&self, from: &Sender) -> Option<&Replica> {
        Some(&self.regions[from.region].replicas[from.replica]).filter(|it| it.incarnation == from.incarnation)
    }

    /// Returns the clock that the process passes with a call it sends now.
    fn clock_of_call(&self, region: usize, replica: usize) -> GlobalTimeAndStanding {
        let from = self.instant(region, replica);
        let within = InstantRange { from, until: from + STORE_TIMEOUT };
        let replica = &self.regions[region].replicas[replica];
        let offsets = replica.region_clock.offset(within).zip(replica.global_clock.offset(within));
        let clock = offsets.map(|(region, global)| compute_global_view(ClockOffsets { region, global }, within));
        let period_us = u64::try_from(PERIOD_US).expect("it is positive");
        let mut clock =
            replica.standing.restrict_view(clock.unwrap_or(GlobalTimeAndStanding::UNKNOWN), period_us, from);
        if self.plan.is(Breakage::ExactClock) {
            let middle = i64::midpoint(clock.offset_lo, clock.offset_hi);
            (clock.offset_lo, clock.offset_hi) = (middle, middle);
        }
        if self.plan.is(Breakage::UncheckedJump) && clock.valid_until > Time::default() {
            (clock.valid_from, clock.valid_until) = (Time::default(), Time::from_micros(1 << 53));
        }
        clock
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive { region } => self.arrive(region),
            Event::Execute { from, clock, hits } => self.execute(from, &clock, hits),
            Event::Reply { from, server, ask } => self.reply(from, server, ask),
            Event::Grant { from, ask } => self.grant(from, ask),
            Event::Granted { from, server, answer } => self.granted(from, server, answer),
            Event::Give { region, clock, answer } => self.give(region, &clock, answer),
            Event::GiveBack { region, window, epoch } => self.give_back(region, window, Time::from_micros(epoch)),
            Event::TakeBack { region, unused } => {
                let (now, pool) = (self.global_clock.time(self.now_us), window_pool(&self.regions[region].limit));
                self.windows.take_back(now, pool, unused);
            }
            Event::Reset => self.reset(),
            Event::FollowReset { region, epoch } => self.follow_reset(region, epoch),
            Event::Heartbeat { region, replica } => self.heartbeat(region, replica),
            Event::Tell { from, server } => self.tell(from, server),
            Event::Told { from, server, time } => self.told(from, server, time),
            Event::Fault => self.fault(),
            Event::ChangeRule { region } => self.regions[region].limit = self.plan.changed,
        }
    }

    fn arrive(&mut self, region: usize) {
        let pause_us = self.chance.below(2 * self.regions[region].pause_us + 1);
        self.schedule(signed(pause_us), Event::Arrive { region });
        let replica = self.chance.place(REPLICAS);
        let (from, clock) = (self.sender(region, replica), self.clock_of_call(region, replica));
        let hits = Hits::Charge(self.chance.between(1, 3));
        let after_us = self.near_us();
        self.schedule(after_us, Event::Execute { from, clock, hits });
        self.tally.requests += 1;
    }

    fn execute(&mut self, from: Sender, clock: &GlobalTimeAndStanding, hits: Hits) {
        let region = &mut self.regions[from.region];
        let now = region.clock.time(self.now_us);
        region.state.set_global_view(clock);
        let (request_before, loss_before, granted_before, before) = (
            region.state.open_grant_request_id(),
            cut_off(&region.state),
            granted(&region.state),
            region.state.clone(),
        );
        let result = region.state.charge(&region.limit, now, ChargeRequest::new(hits, 0));
        let (request, loss) = (region.state.open_grant_request_id(), cut_off(&region.state));
        let from_loss = loss.used > if loss.start == loss_before.start { loss_before.used } else { 0 };
        let used = match hits {
            Hits::Charge(hits) if result.admitted => signed(hits),
            Hits::Refund(_) => -signed(result.before.saturating_sub(result.after)),
            Hits::Charge(_) | Hits::Peek => 0,
        };
        let global_us = self.global_clock.at(self.now_us);
        if used != 0 {
            let grant = granted_before.spent(granted(&region.state));
            let longer_us = if self.plan.is(Breakage::LongLife) { LONG_LIFE_US } else { 0 };
            let ended = ended_hits(&before, &region.state, longer_us, global_us);
            self.uses.push(Use { region: from.region, global_us, hits: used, grant, ended, from_loss });
        }
        if let Hits::Charge(_) = hits {
            self.tally.admitted += u64::from(result.admitted);
            self.tally.from_loss += u64::from(result.admitted && from_loss);
            self.tally.unknown += u64::from(now < clock.valid_from || now >= clock.valid_until);
            self.tally.cut_off += u64::from(clock.cut_off);
        }
        let most = u64::from(region.limit.requests_per_unit());
        let wanted = u32::try_from(self.chance.between(1, most)).expect("it is small");
        let ask = (request != request_before && request != 0).then_some(Ask { request, wanted });
        let after_us = self.near_us();
        self.schedule(after_us, Event::Reply { from, server: now, ask });
        if used > 0 && self.chance.one_in(20) {
            let (from, clock) = (self.sender(from.region, from.replica), self.clock_of_call(from.region, from.replica));
            let after_us = 20 * self.near_us();
            self.schedule(after_us, Event::Execute { from, clock, hits: Hits::Refund(used.unsigned_abs()) });
        }
    }

    fn reply(&mut self, from: Sender, server: Time, ask: Option<Ask>) {
        let within = InstantRange { from: from.sent, until: self.instant(from.region, from.replica) };
        let Some(replica) = self.replica(&from) else { return };
        let is_jump = replica.region_clock.record(&ClockReading { within, server });
        self.tally.jumps += u64::from(is_jump.is_some());
        if let Some(ask) = ask {
            let from = Sender { sent: within.until, ..from };
            let after_us = self.far_us();
            if !self.is_lost(from.region) {
                self.schedule(after_us, Event::Grant { from, ask });
            }
        }
    }

    fn grant(&mut self, from: Sender, ask: Ask) {
        if self.paused_until_us > self.now_us {
            return self.schedule(self.paused_until_us - self.now_us, Event::Grant { from, ask });
        }
        let (now, limit) = (self.global_clock.time(self.now_us), self.regions[from.region].limit);
        let next_request_at = Time::from_micros(ask.request).plus_us(1_000_000);
        let answer = if limit.algorithm() == Algorithm::TokenBucket {
            let grant = self.bucket.grant(now, GlobalBucketParameters::from_limit(&limit), ask.wanted);
            let hits = u64::from(grant.hits);
            Answer::Prepaid(PrepaidHitsGrant {
                request: ask.request,
                epoch: self.bucket.epoch.as_micros(),
                hits,
                low: hits / 3,
                start: now,
                end: grant.end,
                exhausted: hits == 0,
                next_request_at,
            })
        } else {
            let grant = self.windows.grant(now, window_pool(&limit), ask.wanted);
            let (hits, exhausted) = (u64::from(grant.hits), grant.hits == 0);
            Answer::Window(HitsGrant {
                request: ask.request,
                window: grant.window,
                epoch: self.windows.epoch.as_micros(),
                hits,
                low: hits / 3,
                exhausted,
                next_request_at,
            })
        };
        if let Answer::Window(HitsGrant { window, hits, epoch, .. }) = answer
            && self.plan.is(Breakage::HastyReturn)
        {
            let unused = ReturnedHits { window, hits, epoch: Time::from_micros(epoch) };
            self.schedule(200_000, Event::TakeBack { region: from.region, unused });
        }
        let after_us = self.far_us();
        if !self.is_lost(from.region) {
            self.schedule(after_us, Event::Granted { from, server: now, answer });
        }
    }

    fn granted(&mut self, from: Sender, server: Time, answer: Answer) {
        let Sender { region, replica: index, sent, .. } = from;
        let until = self.instant(region, index);
        let Some(replica) = self.replica(&from) else { return };
        replica.global_clock.record(&ClockReading { within: InstantRange { from: sent, until }, server });
        replica.standing.record_global_answer_time(process_time_us(until));
        let clock = self.clock_of_call(region, index);
        let times = if self.chance.one_in(10) { 2 } else { 1 };
        for time in 0..times {
            let after_us = self.near_us() + time * signed(self.chance.below(3_000_000));
            self.schedule(after_us, Event::Give { region, clock, answer });
        }
    }

    fn give(&mut self, index: usize, clock: &GlobalTimeAndStanding, answer: Answer) {
        let region = &mut self.regions[index];
        region.state.set_global_view(clock);
        let open_grant_request_id = region.state.open_grant_request_id();
        let is_taken = match (&mut region.state, answer) {
            (State::RegionWindow(state), Answer::Window(mut grant)) => {
                if self.plan.is(Breakage::RepeatedGrant) {
                    state.counts.cycle.open_request = grant.request;
                }
                if self.plan.is(Breakage::LateGrant) {
                    (grant.window, grant.request) = (state.counts.window, open_grant_request_id);
                }
                state.counts.accept_grant(&grant)
            }
            (State::RegionBucket(state), Answer::Prepaid(mut grant)) => {
                if self.plan.is(Breakage::LongLife) {
                    grant.end = grant.end.plus_us(LONG_LIFE_US);
                }
                state.counts.accept_grant(region.limit.region_capacity().into(), &grant)
            }
            _ => false,
        };
        self.tally.grants += u64::from(is_taken);
        self.tally.void_grants += u64::from(!is_taken);
        if let Answer::Window(grant) = answer
            && region.limit.algorithm() == Algorithm::SlidingWindowCounter
        {
            let end_us = signed((grant.window + 1) * u64::try_from(PERIOD_US).expect("it is positive"));
            let rest_us = end_us - SECOND_US - self.global_clock.at(self.now_us);
            self.schedule(rest_us.max(0), Event::GiveBack { region: index, window: grant.window, epoch: grant.epoch });
        }
    }

    /// Resets the limit in the global Redis; the regions learn of it one by one, perhaps more than once.
    fn reset(&mut self) {
        let now = self.global_clock.time(self.now_us);
        self.bucket.reset(now, GlobalBucketParameters::from_limit(&self.plan.limit));
        self.windows.reset(now, window_pool(&self.plan.limit));
        self.reset_us = Some(self.global_clock.at(self.now_us));
        for region in 0..self.plan.regions {
            let times = self.chance.between(1, 3);
            for time in 0..times {
                let after_us = self.far_us() + signed(time) * SECOND_US;
                self.schedule(after_us, Event::FollowReset { region, epoch: now });
            }
        }
    }

    /// Empties the counter of a region that has not followed the reset.
    fn follow_reset(&mut self, region: usize, epoch: Time) {
        if self.is_lost(region) {
            return self.schedule(SECOND_US, Event::FollowReset { region, epoch });
        }
        let Region { state, limit, .. } = &mut self.regions[region];
        let is_repeated = self.plan.breakage == Some(Breakage::RepeatedReset);
        if cycle(state).epoch < epoch.as_micros() || is_repeated {
            *state = State::empty(limit.counting_method());
            cycle_mut(state).epoch = epoch.as_micros();
        }
    }

    fn give_back(&mut self, region: usize, window: u64, epoch: Time) {
        let State::RegionWindow(state) = &mut self.regions[region].state else { return };
        let hits = state.counts.take_unused_hits(window);
        let after_us = self.far_us();
        if hits > 0 && !self.is_lost(region) {
            let unused = ReturnedHits { window, hits, epoch };
            self.schedule(after_us, Event::TakeBack { region, unused });
        }
    }

    fn heartbeat(&mut self, region: usize, replica: usize) {
        self.schedule(SECOND_US, Event::Heartbeat { region, replica });
        let from = self.sender(region, replica);
        let after_us = self.near_us();
        self.schedule(after_us, Event::Tell { from, server: Server::Region });
        let after_us = self.far_us();
        if !self.is_lost(region) {
            self.schedule(after_us, Event::Tell { from, server: Server::Global });
        }
    }

    fn tell(&mut self, from: Sender, server: Server) {
        let (time, after_us) = match server {
            Server::Region => (self.regions[from.region].clock.time(self.now_us), self.near_us()),
            Server::Global if self.paused_until_us > self.now_us => {
                return self.schedule(self.paused_until_us - self.now_us, Event::Tell { from, server });
            }
            Server::Global => (self.global_clock.time(self.now_us), self.far_us()),
        };
        if matches!(server, Server::Region) || !self.is_lost(from.region) {
            self.schedule(after_us, Event::Told { from, server, time });
        }
    }

    fn told(&mut self, from: Sender, server: Server, time: Time) {
        let until = self.instant(from.region, from.replica);
        let Some(replica) = self.replica(&from) else { return };
        let reading = ClockReading { within: InstantRange { from: from.sent, until }, server: time };
        let is_jump = match server {
            Server::Region => replica.region_clock.record(&reading),
            Server::Global => {
                replica.standing.record_global_answer_time(process_time_us(until));
                replica.global_clock.record(&reading)
            }
        };
        self.tally.jumps += u64::from(is_jump.is_some());
    }

    fn fault(&mut self) {
        self.schedule(SECOND_US, Event::Fault);
        if self.plan.faults == 0 {
            return;
        }
        for region in 0..self.plan.regions {
            if !self.chance.one_in(self.plan.faults) {
                continue;
            }
            let span_us = signed(self.chance.between(500_000, 25_000_000));
            match self.chance.below(6) {
                0 | 1 => self.regions[region].cut_until_us = self.now_us + span_us,
                2 => self.paused_until_us = self.now_us + span_us / 4,
                3 => {
                    let index = self.chance.place(REPLICAS);
                    let replica = &mut self.regions[region].replicas[index];
                    *replica = Replica::start(replica.clock, self.origin, self.now_us, replica.incarnation + 1);
                }
                4 => {
                    let jump_us = signed(self.chance.between(2_000_000, 60_000_000));
                    self.regions[region].clock.offset_us += if self.chance.one_in(2) { jump_us } else { -jump_us };
                    self.jumps[region] += 1;
                }
                _ => {
                    let region_state = &mut self.regions[region];
                    region_state.state = State::empty(region_state.limit.counting_method());
                    self.losses[region] += 1;
                }
            }
        }
    }
}

impl Replica {
    fn start(clock: Drifting, origin: Instant, now_us: i64, incarnation: u64) -> Self {
        let jumps = Arc::<ClockJumps>::default();
        let standing = RegionStanding::default();
        let (id, fence) = (RegionRedisId([1; 16]), FencingTokens::default());
        let identity = RegionIdentity { id, list_changed: Time::default(), is_new: false, fence };
        let (now, never) = (Time::from_secs(1), Time::default());
        let reply = IdentityReply { now, identity, leased_until: never, clock_jumped: never };
        let registry = RegistryReply {
            now,
            recorded: true,
            accepted: true,
            list_changed: never,
            contested_until: never,
            clock_jumped: never,
            others: vec![],
        };
        let replica = Self {
            clock,
            incarnation,
            region_clock: ServerClock::new(Arc::clone(&jumps)),
            global_clock: ServerClock::new(jumps),
            standing,
        };
        let us = process_time_us(replica.instant(origin, now_us));
        let times = CallTimes { sent_us: us, answered_us: us };
        replica.standing.record_identity(&reply, times);
        replica.standing.record_registry(&registry, times);
        replica
    }

    fn instant(&self, origin: Instant, now_us: i64) -> Instant {
        origin + Duration::from_micros(u64::try_from(self.clock.at(now_us)).expect("it is after the start"))
    }
}

/// Granted hits that are left of a window.
#[derive(Clone, Copy, Debug, Default)]
struct GrantedHits {
    window: u64,
    left: u64,
}

impl GrantedHits {
    /// Returns the hits that a charge spent; negative for a refund.
    fn spent(self, after: Self) -> GrantUse {
        let left = if self.window == after.window { self.left } else { 0 };
        GrantUse { window: signed(after.window), hits: signed(left) - signed(after.left) }
    }
}

fn granted(state: &State) -> GrantedHits {
    match state {
        State::RegionWindow(state) => GrantedHits { window: state.counts.window, left: state.counts.granted },
        _ => GrantedHits::default(),
    }
}

/// Returns the prepaid hits that a charge spent although they had ended: their end in the state is that of the global
/// Redis, but for `longer_us`.
fn ended_hits(before: &State, after: &State, longer_us: u64, global_us: i64) -> u64 {
    let (State::RegionBucket(before), State::RegionBucket(after)) = (before, after) else { return 0 };
    let generations = [
        (before.counts.earlier, after.counts.earlier, before.counts.earlier_until),
        (before.counts.granted, after.counts.granted, before.counts.granted_until),
    ];
    // Hits that the counter dropped are not spent.
    let offset_hi = i64::try_from(after.last.as_micros()).expect("it is small") + after.view.offset_hi;
    let is_kept = |end: Time| offset_hi < signed(end.as_micros());
    let ended = |end: Time| global_us >= signed(end.as_micros() - longer_us);
    let spent = generations.into_iter().filter(|(_, _, end)| is_kept(*end) && ended(*end));
    spent.map(|(before, after, _)| before.saturating_sub(after)).sum()
}

fn cut_off(state: &State) -> CutOffAllowanceUse {
    cycle(state).cut_off
}

fn cycle(state: &State) -> GrantCycle {
    match state {
        State::RegionWindow(state) => state.counts.cycle,
        State::RegionBucket(state) => state.counts.cycle,
        other => panic!("{other:?} does not count in a region"),
    }
}

fn cycle_mut(state: &mut State) -> &mut GrantCycle {
    match state {
        State::RegionWindow(state) => &mut state.counts.cycle,
        State::RegionBucket(state) => &mut state.counts.cycle,
        other => panic!("{other:?} does not count in a region"),
    }
}

fn window_pool(limit: &Limit) -> GlobalWindowParameters {
    let is_sliding = limit.algorithm() == Algorithm::SlidingWindowCounter;
    GlobalWindowParameters { period_us: limit.period_us(), is_sliding, max: limit.max_granted_hits() }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).expect("it is small")
}
