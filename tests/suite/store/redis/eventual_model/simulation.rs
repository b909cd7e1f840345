//! A run: replicas, the messages between them and Redis, and time that moves from one event to the next.
//!
//! The simulation uses [`EventualTable`] as the processes do: a charge that is not admitted locally is sent with a
//! lease, or waits for the call in flight, and is retried when that has ended.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::request::Hits;
use tollkeeper::store::charge::{MAX_CHARGES_PER_CALL, OwnedCharge};
use tollkeeper::store::redis::eventual::descriptor::EventualDescriptor;
use tollkeeper::store::redis::eventual::{
    AdmitContext, DescriptorStateReport, LeaseArguments, LeasePurpose, LeaseTicket, LocalDecision, OwnLease,
    build_full_refund,
};
use tollkeeper::store::stats::EventualHitTotals;

use super::ledger::{By, Use};
use super::redis::{ChargeResults, Redis, States};
use super::replica::{PlaceClaim, Replica};
use super::scenario::{Adjustment, Plan, ReplicaEvent};
use kit::seeded_random::Chance;
use tokio::time::Instant;

/// Interval between searches for expired leases, in microseconds.
const OFTEN: u64 = 20_000;

/// Result of a run.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Admitted hits of each key, in order of time.
    pub(super) uses: Vec<Vec<Use>>,
    /// Refunds and resets of each key, at the time at which Redis ran them, in that order.
    pub(super) adjustments: Vec<Vec<(u64, Adjustment)>>,
    /// Number of requests.
    pub(super) requests: u64,
    /// Number of calls to Redis, returns included.
    pub(super) calls: u64,
    /// Number of returns.
    pub(super) returns: u64,
}

/// Process of a replica.
#[derive(Clone, Copy, Debug)]
struct Who {
    replica: usize,
    life: u32,
}

#[derive(Debug)]
enum Event {
    /// The next request arrives.
    Arrives(usize),
    /// A message arrives at Redis.
    Reaches(Who, Message),
    /// A reply arrives.
    Hears(Who, Reply),
    /// A call times out.
    GivesUp(Who, usize, u64),
    /// A lease ends.
    Ends(Who, usize, LeaseTicket),
    /// A claim is due for renewal.
    Beats(Who),
    /// A refund or reset is sent.
    Adjusts(usize),
    /// A replica loads other limits.
    Reloads(usize),
    Lifecycle(usize),
}

#[derive(Debug)]
enum Message {
    Call(Call),
    Return(usize, Box<OwnedCharge>, LeaseArguments),
    Adjust(usize, Adjustment, LeaseArguments),
    Claim { sent: Instant },
    Leave,
}

#[derive(Debug)]
struct Call {
    key: usize,
    number: u64,
    commands: Vec<OwnedCharge>,
    sent: Instant,
    leased: u64,
    descriptor: Box<EventualDescriptor>,
}

#[derive(Debug)]
enum Reply {
    Call(Call, (Vec<ChargeResults>, States), Time),
    Claim { sent: Instant, before: Option<Time>, now: Time },
}

/// Scheduled event: its time, its number, which orders events of one time, and the event.
#[derive(Debug)]
struct Due(u64, u64, Event);

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

/// State of a run.
pub(super) struct World<'p> {
    plan: &'p Plan,
    chance: Chance,
    /// Time of Redis, in microseconds.
    now: u64,
    due: BinaryHeap<Reverse<Due>>,
    serial: u64,
    redis: Redis,
    replicas: Vec<Replica>,
    outcome: Outcome,
    /// Statistics of processes that have ended.
    pub(super) usage: EventualHitTotals,
}

impl<'p> World<'p> {
    /// Executes a run.
    pub(super) fn live(plan: &'p Plan, seed: u64) -> (Outcome, EventualHitTotals) {
        let mut chance = Chance::new(!seed);
        let began = Instant::now();
        let replicas = (0..plan.replicas).map(|_| {
            // Each replica has its own monotonic clock.
            let base = began + Duration::from_micros(chance.below(1 << 40));
            Replica::new(base, plan.bytes, plan.keys.len())
        });
        let replicas = replicas.collect();
        let mut world = Self {
            plan,
            chance,
            now: plan.start,
            due: BinaryHeap::new(),
            serial: 0,
            redis: Redis::new(&plan.keys),
            replicas,
            outcome: Outcome {
                uses: vec![Vec::new(); plan.keys.len()],
                adjustments: vec![Vec::new(); plan.keys.len()],
                ..Outcome::default()
            },
            usage: EventualHitTotals::default(),
        };
        for replica in 0..plan.replicas {
            world.begin(replica, plan.places);
        }
        for (number, arrival) in plan.arrivals.iter().enumerate() {
            world.at(arrival.at, Event::Arrives(number));
        }
        for (number, (at, ..)) in plan.replica_changes.iter().enumerate() {
            world.at(*at, Event::Lifecycle(number));
        }
        for (number, (at, ..)) in plan.adjustments.iter().enumerate() {
            world.at(*at, Event::Adjusts(number));
        }
        for (number, (at, ..)) in plan.reloads.iter().enumerate() {
            world.at(*at, Event::Reloads(number));
        }
        // Messages in flight at the end may still arrive. No two events happen at one time.
        while let Some(Reverse(Due(at, _, event))) = world.due.pop() {
            world.now = at.max(world.now + 1);
            world.happens(event);
        }
        for replica in 0..plan.replicas {
            world.gone(replica);
        }
        for uses in &mut world.outcome.uses {
            uses.sort_by_key(|it| it.at);
        }
        (world.outcome, world.usage)
    }

    fn at(&mut self, at: u64, event: Event) {
        self.serial += 1;
        self.due.push(Reverse(Due(at, self.serial, event)));
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Arrives(number) => self.arrives(number),
            Event::Reaches(who, message) => self.reaches(who, message),
            Event::Hears(who, reply) => self.hears(who, reply),
            Event::GivesUp(who, key, number) => {
                if self.is(who) && self.replicas[who.replica].keys[key].call == Some(number) {
                    self.is_over(who.replica, key);
                }
            }
            Event::Ends(who, key, leased) => self.ends(who, key, leased),
            Event::Beats(who) => self.beats(who),
            Event::Adjusts(number) => self.adjusts(number),
            Event::Reloads(number) => {
                let (_, replica, key) = self.plan.reloads[number];
                let it = &mut self.replicas[replica];
                if it.alive {
                    std::mem::swap(&mut it.descriptors[key], &mut it.others[key]);
                }
            }
            Event::Lifecycle(number) => {
                let (_, replica, event) = self.plan.replica_changes[number];
                self.apply(replica, event);
            }
        }
    }

    fn is(&self, who: Who) -> bool {
        let replica = &self.replicas[who.replica];
        replica.alive && replica.life == who.life
    }

    fn who(&self, replica: usize) -> Who {
        Who { replica, life: self.replicas[replica].life }
    }

    /// Monotonic clock of a replica.
    fn instant(&self, replica: usize) -> Instant {
        self.replicas[replica].base + Duration::from_micros(self.now - self.plan.start)
    }

    fn context(&self, replica: usize, key: usize, again: bool) -> AdmitContext {
        let (at, it) = (self.instant(replica), &self.replicas[replica]);
        let now = Time::from_micros(self.now.saturating_add_signed(it.ahead));
        AdmitContext { at, now, may_use_share: it.may_use_share(key, at, self.plan.claim), is_retry: again }
    }

    // Replicas.

    fn arrives(&mut self, number: usize) {
        let arrival = self.plan.arrivals[number];
        let replica = match arrival.replica {
            Some(replica) => replica,
            None => self.chance.place(self.plan.replicas),
        };
        if !self.replicas[replica].alive {
            return;
        }
        self.outcome.requests += 1;
        if self.chance.one_in(20) {
            let turn = self.chance.place(2);
            self.replicas[replica].eventual.sweep(self.instant(replica), turn, 2);
        }
        let key = arrival.key;
        let request = ChargeRequest::new(Hits::Charge(arrival.hits), 0);
        let command = OwnedCharge::new(self.replicas[replica].descriptors[key].counters.clone(), request);
        match self.admit(replica, key, &command, false) {
            Some(lease_ahead) => {
                if lease_ahead && self.replicas[replica].keys[key].call.is_none() {
                    self.lead(replica, key, Vec::new());
                }
            }
            None if self.replicas[replica].keys[key].call.is_some() => {
                let until = self.now + self.plan.network.timeout;
                self.replicas[replica].keys[key].waiting.push_back((command, until));
            }
            None => self.lead(replica, key, vec![command]),
        }
    }

    /// True if a charge is admitted locally; then, true if the next lease is due.
    fn admit(&mut self, replica: usize, key: usize, command: &OwnedCharge, again: bool) -> Option<bool> {
        let context = self.context(replica, key, again);
        let it = &self.replicas[replica];
        if command.counters != it.descriptors[key].counters {
            return None;
        }
        let before = it.eventual.stats();
        let LocalDecision::Local { lease_ahead, .. } = it.eventual.try_admit(&it.descriptors[key], command, context)
        else {
            return None;
        };
        let after = it.eventual.stats();
        let Hits::Charge(hits) = command.request.hits else { unreachable!("all take") };
        let by = if after.from_shares > before.from_shares { By::Share } else { By::Lease };
        assert_eq!(
            after.from_shares - before.from_shares + after.from_leases - before.from_leases,
            hits,
            "what is counted"
        );
        self.outcome.uses[key].push(Use { at: self.now, hits, by });
        Some(lease_ahead)
    }

    /// Sends a call, and after it the calls of waiting charges.
    fn lead(&mut self, replica: usize, key: usize, commands: Vec<OwnedCharge>) {
        if !self.calls(replica, key, commands) {
            self.is_over(replica, key);
        }
    }

    /// Sends a call, with a lease if demand requires one; returns false if there is nothing to send.
    fn calls(&mut self, replica: usize, key: usize, mut commands: Vec<OwnedCharge>) -> bool {
        let sent = self.instant(replica);
        let live = match self.plan.live {
            Some(live) => live,
            None => self.chance.between(1, 2 * self.plan.replicas as u64),
        };
        let it = &self.replicas[replica];
        let leased = it.eventual.hits_to_lease(&it.descriptors[key], sent, live);
        let descriptor = Box::new(it.descriptors[key].clone());
        if leased > 0 {
            let request = ChargeRequest::new(Hits::Charge(leased), 0);
            commands.push(OwnedCharge::new(descriptor.counters.clone(), request));
        }
        if commands.is_empty() {
            return false;
        }
        self.outcome.calls += 1;
        self.serial += 1;
        let (who, number) = (self.who(replica), self.serial);
        self.replicas[replica].keys[key].call = Some(number);
        self.at(self.now + self.plan.network.timeout, Event::GivesUp(who, key, number));
        self.send(who, Message::Call(Call { key, number, commands, sent, leased, descriptor }));
        true
    }

    fn is_over(&mut self, replica: usize, key: usize) {
        loop {
            let now = self.now;
            let queue = &mut self.replicas[replica].keys[key];
            queue.call = None;
            queue.waiting.retain(|(_, until)| *until >= now);
            if queue.waiting.is_empty() {
                return;
            }
            let count = queue.waiting.len().min(MAX_CHARGES_PER_CALL);
            let batch: Vec<OwnedCharge> = queue.waiting.drain(..count).map(|(command, _)| command).collect();
            let left: Vec<OwnedCharge> =
                batch.into_iter().filter(|command| self.admit(replica, key, command, true).is_none()).collect();
            if !left.is_empty() {
                self.calls(replica, key, left);
                return;
            }
        }
    }

    fn hears(&mut self, who: Who, reply: Reply) {
        if !self.is(who) {
            return;
        }
        match reply {
            Reply::Call(call, (results, states), now) => self.hears_of_call(who, call, (results, states), now),
            Reply::Claim { sent, before, now } => {
                let at = self.instant(who.replica);
                let place_claim = &mut self.replicas[who.replica].place_claim;
                if place_claim.is_none_or(|place_claim| place_claim.sent < sent) {
                    *place_claim = before.map(|before| PlaceClaim { sent, before, reply_time: (now, at) });
                }
            }
        }
    }

    fn hears_of_call(&mut self, who: Who, call: Call, (mut results, states): (Vec<ChargeResults>, States), now: Time) {
        let Call { key, number, mut commands, sent, leased, descriptor } = call;
        let plan = self.plan;
        let passed = |results: &ChargeResults| {
            results.iter().zip(&plan.keys[key]).all(|(result, it)| result.admitted || it.shadow)
        };
        let lease = (leased > 0).then(|| (commands.pop(), results.pop())).and_then(|(_, results)| results);
        if self.replicas[who.replica].keys[key].call != Some(number) {
            // It timed out: its results are dropped.
            return;
        }
        for (command, _) in commands.iter().zip(&results).filter(|(_, results)| passed(results)) {
            let Hits::Charge(hits) = command.request.hits else { unreachable!("all take") };
            self.outcome.uses[key].push(Use { at: now.as_micros(), hits, by: By::Redis });
        }
        let leased = if lease.as_ref().is_some_and(passed) { leased } else { 0 };
        let it = &mut self.replicas[who.replica];
        if let Some(leased) =
            it.eventual.record_report(&descriptor, DescriptorStateReport { sent, now, states, leased })
        {
            it.out.push((key, leased));
            let end = u64::try_from(leased.end.saturating_duration_since(it.base).as_micros()).unwrap() + plan.start;
            let checked_at = end.max(self.now) + self.chance.below(OFTEN);
            self.at(checked_at, Event::Ends(who, key, leased));
        }
        self.is_over(who.replica, key);
    }

    fn ends(&mut self, who: Who, key: usize, ticket: LeaseTicket) {
        if !self.is(who) {
            return;
        }
        let it = &mut self.replicas[who.replica];
        it.out.retain(|(_, other)| other.serial != ticket.serial);
        let left = it.eventual.end_lease(it.descriptors[key].id, ticket.serial).saturating_sub(ticket.refilled);
        let Some(until) = ticket.void_from.filter(|_| left > 0) else { return };
        let request = ChargeRequest::new(Hits::Refund(left), 0);
        let command = OwnedCharge {
            counters: self.plan.keys[key].clone(),
            request,
            dry_run: false,
            void_from: Some(until),
            slot: None,
        };
        self.outcome.calls += 1;
        self.outcome.returns += 1;
        let own = smallvec![OwnLease { lease: ticket.recorded, done: ticket.recorded.hits }];
        self.send(who, Message::Return(key, Box::new(command), LeaseArguments { purpose: LeasePurpose::Return, own }));
    }

    fn adjusts(&mut self, number: usize) {
        let (_, replica, key, adjustment) = self.plan.adjustments[number];
        let it = &mut self.replicas[replica];
        if !it.alive {
            return;
        }
        let path = it.descriptors[key].id.path;
        let leases = match adjustment {
            Adjustment::Refund(_) => LeaseArguments {
                purpose: LeasePurpose::Charge { requested: 0, kept_us: 0 },
                own: it.eventual.own_leases(path),
            },
            Adjustment::Reset => LeaseArguments { purpose: LeasePurpose::Reset, own: it.eventual.end_leases(path) },
        };
        self.send(self.who(replica), Message::Adjust(key, adjustment, leases));
    }

    fn beats(&mut self, who: Who) {
        if !self.is(who) || self.now > self.plan.end {
            return;
        }
        let sent = self.instant(who.replica);
        self.send(who, Message::Claim { sent });
        self.at(self.now + self.plan.claim / 3, Event::Beats(who));
    }

    // Start and stop of replicas.

    fn apply(&mut self, replica: usize, event: ReplicaEvent) {
        match (event, self.replicas[replica].alive) {
            (ReplicaEvent::Joins, false) => self.begin(replica, self.replicas[replica].places),
            (ReplicaEvent::Crashes, true) => self.gone(replica),
            (ReplicaEvent::Leaves, true) => self.leaves(replica),
            (ReplicaEvent::Rolls(count), alive) => {
                if alive {
                    self.leaves(replica);
                }
                self.begin(replica, count);
            }
            (ReplicaEvent::Joins, true) | (ReplicaEvent::Crashes | ReplicaEvent::Leaves, false) => {}
        }
    }

    fn begin(&mut self, replica: usize, count: u32) {
        const WRONG: u64 = 600_000_000;
        let ahead = i64::try_from(self.chance.below(2 * WRONG)).unwrap() - i64::try_from(WRONG).unwrap();
        let it = &mut self.replicas[replica];
        it.ahead = ahead;
        it.begin(self.plan, count);
        self.beats(self.who(replica));
    }

    fn leaves(&mut self, replica: usize) {
        let who = self.who(replica);
        for (key, leased) in std::mem::take(&mut self.replicas[replica].out) {
            self.ends(who, key, leased);
        }
        self.gone(replica);
        self.send(who, Message::Leave);
    }

    fn gone(&mut self, replica: usize) {
        let it = &mut self.replicas[replica];
        if std::mem::replace(&mut it.alive, false) {
            let usage = it.eventual.stats();
            self.usage.from_shares += usage.from_shares;
            self.usage.from_leases += usage.from_leases;
            self.usage.leased += usage.leased;
            self.usage.returned += usage.returned;
        }
    }

    // Messages, and Redis.

    fn is_in(&self, spans: &[(u64, u64)]) -> Option<u64> {
        spans.iter().filter(|(from, to)| (*from..*to).contains(&self.now)).map(|(_, to)| *to).max()
    }

    /// Arrival time of a message sent now; `None` if it is lost.
    fn travel(&mut self) -> Option<u64> {
        let network = self.plan.network;
        let lost = network.lost_in > 0 && self.chance.one_in(network.lost_in);
        if lost || self.is_in(&self.plan.cut).is_some() {
            return None;
        }
        let slow = network.slow_in > 0 && self.chance.one_in(network.slow_in);
        let (min, max) = if slow { network.slow } else { network.usual };
        Some(self.now + self.chance.between(min, max))
    }

    fn send(&mut self, who: Who, message: Message) {
        if let Some(at) = self.travel() {
            let (min, max) = if let Message::Return(..) = message { self.plan.network.returns } else { (0, 0) };
            let at = at + self.chance.between(min, max);
            self.at(at, Event::Reaches(who, message));
        }
    }

    fn reaches(&mut self, who: Who, message: Message) {
        if let Some(thaws) = self.is_in(&self.plan.frozen) {
            return self.at(thaws, Event::Reaches(who, message));
        }
        let (now, owner) = (Time::from_micros(self.now), (who.replica as u64 + 1) << 32 | u64::from(who.life));
        let reply = match message {
            Message::Call(call) => {
                let purpose = LeasePurpose::Charge {
                    requested: call.leased,
                    kept_us: call.descriptor.budget.lease_record_lifetime_us(),
                };
                let leases = LeaseArguments { purpose, own: SmallVec::new() };
                let leases = Some(&leases).filter(|_| call.leased > 0);
                let found = self.redis.call(call.key, &call.commands, leases, now);
                Some(Reply::Call(call, found, now))
            }
            Message::Return(key, command, leases) => {
                self.redis.call(key, &[*command], Some(&leases), now);
                None
            }
            Message::Adjust(key, adjustment, leases) => {
                let mut command = build_full_refund(self.plan.keys[key].clone());
                if let Adjustment::Refund(hits) = adjustment {
                    command.request.hits = Hits::Refund(hits);
                }
                self.redis.call(key, &[command], Some(&leases), now);
                self.outcome.adjustments[key].push((self.now, adjustment));
                None
            }
            Message::Claim { sent } => {
                let places = &mut self.redis.places;
                let count = usize::try_from(self.replicas[who.replica].places).unwrap();
                Some(Reply::Claim { sent, before: places.claim(owner, count, (now, self.plan.claim)), now })
            }
            Message::Leave => {
                self.redis.places.leave(owner, now);
                None
            }
        };
        if let Some((reply, at)) = reply.zip(self.travel()) {
            self.at(at, Event::Hears(who, reply));
        }
    }
}
