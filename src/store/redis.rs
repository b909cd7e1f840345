//! Counters in Redis or Valkey, shared by all replicas.
//!
//! One call decides all limits of a descriptor, in one script that runs on the node that owns its keys. The script
//! returns what the counters had used; the pure algorithms then say here what each charge finds, so that Redis and memory
//! can not answer differently. All calls of a request go out at once. Charges on a counter whose call is in flight wait
//! for each other and go together. Whatever Redis does, an answer or an error comes in time.

mod prepared_call;
mod algorithms;
mod coalescer;
pub mod command;
mod incrby;
pub mod eventual;
pub mod key;
mod lead;
mod lend;
pub mod charge_context;
pub mod over_limit_cache;
mod probe;
pub mod readings;
pub mod replicas;
pub mod script;
mod lease_reaper;
mod spans;
pub mod key_scan;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use self::charge_context::ChargeContext;
use self::coalescer::{ChargeBatch, Coalescer, Role};
use self::command::{ChargeCommand, MAX_CHARGES_PER_CALL, OwnedCounter};
use self::eventual::{CallReport, EventualCounters, EventualTable, LeaseTicket, log_beyond_us};
use self::incrby::WindowKey;
use self::lead::{DetachOnDrop, InFlightGuard, Pending, PendingKind, lead};
use self::lease_reaper::LeaseReaper;
use self::over_limit_cache::OverLimitCache;
use self::prepared_call::{Manner, PreparedCall};
use self::probe::{Probe, ProbeKind};
use self::readings::Asked;
use self::replicas::heartbeat::Heartbeat;
use self::script::replay::ScriptOutcome;
use crate::algorithm::ChargeRequest;
use crate::clock::Time;
use crate::counter::Charge;
use crate::limit::period::Unit;
use crate::limit::{Limit, StorePolicy};
use crate::redis::connect_options::ConnectOptions;
use crate::redis::deployment::Deployment;
use crate::redis::deployment_context::DeploymentOptions;
use crate::redis::error::RedisError;
use crate::request::Hits;
use crate::settings::choices::KeyFormat;
use crate::settings::redis::{DeploymentSettings, RedisSettings};
use crate::store::fallback::Fallback;
use crate::store::health::StoreHealth;
use crate::store::outcome::{ChargeResults, DecidedBy, StoreOutcome};
use crate::telemetry::metrics::histogram::Histogram;

/// Times so little apart are the same: one was taken a little later than the other.
const SAME: Duration = Duration::from_millis(1);

/// What came of a charge.
type Answer = Result<StoreOutcome, RedisError>;

/// Counters in Redis.
#[derive(Debug)]
pub struct Redis {
    shared: Arc<Shared>,
    settling: AbortHandle,
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.settling.abort();
    }
}

#[derive(Debug)]
struct Shared {
    main: Arc<Deployment>,
    per_second: Option<Arc<Deployment>>,
    /// What stands in for it.
    local: Fallback,
    heartbeat: Heartbeat,
    coalescer: Coalescer,
    /// What may be given out here.
    eventual: EventualTable,
    settle: LeaseReaper,
    over: OverLimitCache,
    prefix: String,
    format: KeyFormat,
    jitter_s: u64,
    timeout: Duration,
    /// Whether counters follow this process's clock instead of the server's: in tests.
    client_clock: bool,
    calls: AtomicU64,
    charges: AtomicU64,
    abandoned: AtomicU64,
    /// How long charges waited that were not answered here.
    waits: Histogram,
}

/// What becomes of what is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeMode {
    /// It is charged.
    Commit,
    /// Nothing: only what the charge would find is asked.
    DryRun,
}

/// A counter, and the charges of one request on it.
struct Group {
    id: u128,
    path: u128,
    commands: ChargeBatch,
    /// The places of the charges in the request.
    places: SmallVec<[usize; 1]>,
}

impl Redis {
    /// Begins to connect, and returns at once; `local` stands in for it while it is away. To be called within a tokio
    /// runtime.
    pub fn start(settings: &RedisSettings, local: Fallback) -> Self {
        Self::over(Shared::start(settings, local, false))
    }

    /// As [`Redis::start`], but time is what charges say: for tests with a manual clock.
    pub fn start_with_client_clock(settings: &RedisSettings, local: Fallback) -> Self {
        Self::over(Shared::start(settings, local, true))
    }

    fn over(shared: Shared) -> Self {
        let shared = Arc::new(shared);
        let settler = Arc::clone(&shared);
        let settling = tokio::spawn(async move { settler.settle.run(&settler.eventual).await }).abort_handle();
        Self { shared, settling }
    }

    /// Gives back what was leased: before a stop, once nothing is charged any more.
    pub async fn give_back(&self) {
        self.shared.settle.end_all(&self.shared.eventual).await;
    }

    /// What was admitted here, and how.
    pub fn eventual(&self) -> &EventualTable {
        &self.shared.eventual
    }

    /// What stands in for it.
    pub fn local(&self) -> &Fallback {
        &self.shared.local
    }

    /// The longest that a charge may take, waiting included.
    pub fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// Makes all charges of a request at once; one result for each, in their order, not later than the context says.
    ///
    /// The counters' own time is that of Redis.
    pub async fn charge_all(
        &self,
        charges: &[Charge<'_>],
        mode: ChargeMode,
        context: impl Into<ChargeContext<'_>>,
    ) -> SmallVec<[Answer; 2]> {
        let begun = Instant::now();
        let Shared { abandoned, waits, .. } = &*self.shared;
        self.shared.charges.fetch_add(charges.len() as u64, Ordering::Relaxed);
        let mut asked = Asked { abandoned, charges: charges.len() };
        let answers = self.answers(charges, mode, context.into()).await;
        asked.charges = answers.iter().filter(|answer| matches!(answer, Err(RedisError::Timeout))).count();
        let is_known = |answer: &Answer| answer.as_ref().is_ok_and(|found| found.decided_by != DecidedBy::Store);
        if !answers.iter().all(is_known) {
            waits.observe(begun.elapsed());
        }
        answers
    }

    async fn answers(
        &self,
        charges: &[Charge<'_>],
        mode: ChargeMode,
        context: ChargeContext<'_>,
    ) -> SmallVec<[Answer; 2]> {
        let now = context.now;
        if let [charge] = charges {
            let commands = SmallVec::from_iter([command(charge, mode)]);
            let (id, path) = self.shared.id(charge, now);
            let group = Group { id, path, commands, places: SmallVec::from([0]) };
            let mut answers = self.shared.bring(group, charges, context).answers().await;
            return answers.pop().into_iter().collect();
        }
        // All are brought before the first is awaited: so they travel together, and at once.
        let mut places: SmallVec<[usize; 2]> = SmallVec::new();
        let mut pending: SmallVec<[Pending; 2]> = SmallVec::new();
        for group in self.shared.group(charges, mode, now) {
            places.extend_from_slice(&group.places);
            pending.push(self.shared.bring(group, charges, context));
        }
        let answered = join_all(pending.into_iter().map(|pending| pending.answers())).await;
        let mut answers: SmallVec<[Answer; 2]> = charges.iter().map(|_| Err(RedisError::Broken)).collect();
        for (place, answer) in places.into_iter().zip(answered.into_iter().flatten()) {
            answers[place] = answer;
        }
        answers
    }

    /// Drops what has ended from a share of what this process keeps: the `turn`th of `turns`.
    pub fn sweep(&self, now: Time, turn: usize, turns: usize) {
        let at = Instant::now();
        self.shared.local.sweep(now, turn, turns);
        self.shared.over.sweep(at, turn, turns);
        self.shared.eventual.sweep(at, turn, turns);
    }

    /// Tells `health` how the servers are, for as long as it is run: lost if none of a deployment takes charges.
    pub async fn report(&self, health: &StoreHealth) {
        const OFTEN: Duration = Duration::from_millis(100);
        loop {
            health.set_lost(self.shared.routes().any(|route| !route.is_available()));
            let misconfigured = self.shared.routes().find_map(|route| route.misconfigured());
            health.set_misconfigured(misconfigured.as_ref().map(|what| what.as_str()));
            sleep(OFTEN).await;
        }
    }
}

impl Shared {
    fn start(settings: &RedisSettings, local: Fallback, client_clock: bool) -> Self {
        let start = |deployment| Arc::new(start_deployment(settings, deployment));
        // A refusal runs out with real time, not with the time that charges say.
        let over_bytes = if client_clock { 0 } else { settings.over_limit_cache.capacity_bytes };
        let main = start(&settings.main);
        // What is set is not counted.
        let sharers = settings.replicas.is_none().then(|| local.sharers().clone());
        Self {
            heartbeat: Heartbeat::new(settings.max_replicas, &main, &settings.key_prefix, sharers),
            main,
            per_second: settings.per_second.as_ref().map(start),
            local,
            coalescer: Coalescer::default(),
            eventual: EventualTable::new(settings.eventual_bytes),
            settle: LeaseReaper::default(),
            over: OverLimitCache::new(over_bytes, settings.over_limit_cache.caches_counting_windows, Instant::now()),
            prefix: settings.key_prefix.clone(),
            format: settings.key_format,
            jitter_s: settings.expiration_jitter.as_secs(),
            timeout: settings.timeout,
            client_clock,
            calls: AtomicU64::new(0),
            charges: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            waits: Histogram::default(),
        }
    }

    fn routes(&self) -> impl Iterator<Item = &Arc<Deployment>> {
        [&self.main].into_iter().chain(&self.per_second)
    }

    /// Sorts the charges of a request by counter, each in its order of arrival.
    fn group(&self, charges: &[Charge<'_>], mode: ChargeMode, now: Time) -> SmallVec<[Group; 2]> {
        let mut groups: SmallVec<[Group; 2]> = SmallVec::new();
        let mut known = HashMap::new();
        for (place, charge) in charges.iter().enumerate() {
            let (id, path) = self.id(charge, now);
            let command = command(charge, mode);
            // Requests are short as a rule; what is long is looked up, not searched.
            let found = if charges.len() <= 16 {
                groups.iter().rposition(|group| group.id == id)
            } else {
                known.get(&id).copied()
            };
            match found.filter(|&found| groups[found].commands.len() < MAX_CHARGES_PER_CALL) {
                Some(found) => {
                    groups[found].commands.push(command);
                    groups[found].places.push(place);
                }
                None => {
                    if charges.len() > 16 {
                        known.insert(id, groups.len());
                    }
                    let commands = SmallVec::from_iter([command]);
                    groups.push(Group { id, path, commands, places: SmallVec::from([place]) });
                }
            }
        }
        groups
    }

    /// What tells a descriptor's counters from all others: their path and their tags; in the format of
    /// envoyproxy/ratelimit the window too. Beside it the path alone, by which levels are remembered.
    fn id(&self, charge: &Charge<'_>, now: Time) -> (u128, u128) {
        let path = charge.key;
        let tags = charge.counters.iter().fold(0_u128, |tags, counter| tags.rotate_left(1) ^ counter.tag);
        let window = match self.format {
            KeyFormat::Tollkeeper => 0,
            KeyFormat::Ratelimit => {
                let start_s = incrby::start_s(charge, now).unwrap_or(0);
                u128::from(start_s).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
            }
        };
        (path ^ tags ^ window, path)
    }

    /// Sends the charges of one group, or has them wait for the call that is in flight.
    fn bring(self: &Arc<Self>, group: Group, charges: &[Charge<'_>], context: ChargeContext<'_>) -> Pending {
        let ChargeContext { now, until, span_ref } = context;
        let charge = &charges[group.places[0]];
        let lending = self.lending(&group);
        if let Some(lending) = &lending
            && let Some(found) = self.answer_here(&group, charge, lending, now)
        {
            return Pending { way: PendingKind::Known(1, found), until: None };
        }
        let begun = Instant::now();
        if let Some(levels) = self.over.refuse(group.id, &group.commands, begun) {
            let found = StoreOutcome { results: levels, decided_by: DecidedBy::KnownOver };
            return Pending { way: PendingKind::Known(group.commands.len(), found), until: None };
        }
        let deadline = begun + self.timeout;
        // How little time a caller has says nothing about the server: its call goes on without it.
        let mut hurried = until + SAME < deadline;
        let deadline = if hurried { deadline } else { until };
        let way = match self.coalescer.enter(group.id, group.commands, context) {
            Role::Follower { answers, long } => {
                hurried |= long;
                PendingKind::Waits(answers)
            }
            Role::Leader(commands) => {
                let mut place = self.place(charge, (group.id, group.path), lending, now);
                place.span_refs = span_ref.cloned().into_iter().collect();
                let busy = InFlightGuard::new(Arc::clone(self), group.id);
                PendingKind::Led(commands.len(), DetachOnDrop::of(lead(busy, place, commands, deadline)))
            }
        };
        Pending { way, until: hurried.then_some(until) }
    }

    fn place(
        &self,
        charge: &Charge<'_>,
        (id, path): (u128, u128),
        lending: Option<EventualCounters>,
        now: Time,
    ) -> PreparedCall {
        let window = match self.format {
            KeyFormat::Tollkeeper => None,
            KeyFormat::Ratelimit => {
                let jitter_s = if self.jitter_s == 0 { 0 } else { random_below(self.jitter_s) };
                WindowKey::of(&self.prefix, charge, now, jitter_s)
            }
        };
        let manner = window.map_or_else(
            || {
                let algorithms = charge.counters.iter().map(|counter| counter.limit.algorithm());
                Manner::Script(
                    script::compose::script_for(algorithms),
                    key::keys(&self.prefix, &charge.path, &charge.counters),
                )
            },
            Manner::Count,
        );
        let (route, client_clock) = (Arc::clone(self.route(charge)), self.client_clock);
        PreparedCall { manner, id, route, path, now, client_clock, lending, span_refs: Vec::new() }
    }

    /// Where a descriptor is counted: limits per second may have a Redis of their own, if there are no others on it.
    fn route(&self, charge: &Charge<'_>) -> &Arc<Deployment> {
        match &self.per_second {
            Some(route) if charge.counters.iter().all(|counter| is_per_second(counter.limit)) => route,
            _ => &self.main,
        }
    }

    /// Makes a call for these charges, and leases what demand asks for on the way.
    async fn call(
        &self,
        place: &PreparedCall,
        commands: &mut ChargeBatch,
        deadline: Instant,
    ) -> Result<Vec<ChargeResults>, RedisError> {
        let sent = Instant::now();
        let lending = place.lending.as_ref();
        let lent = lending.map_or(0, |lending| self.lease(lending, sent));
        if let Some(EventualCounters { counters, .. }) = lending.filter(|_| lent > 0) {
            let request = ChargeRequest::new(Hits::Charge(lent), 0);
            commands.push(ChargeCommand { counters: counters.clone(), request, dry_run: false, void_from: None });
        }
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut span = place.span(commands.len());
        let outcome = place.call(commands, deadline, span.as_mut()).await;
        if let (Some(span), Err(error)) = (&mut span, &outcome) {
            span.fail(error.name(), error.to_string());
        }
        drop(span);
        let lease = (lent > 0).then(|| commands.pop()).flatten();
        let mut replayed = outcome?;
        let leased = lease.and_then(|_| replayed.results.pop());
        self.over.learn(place.id, commands, &replayed.results, (sent, Instant::now()));
        self.remember(place, commands, &replayed);
        if let Some(lending) = lending {
            // A trial that had no room was not charged, and must not be given back to.
            let whole = leased.as_ref().is_some_and(|levels| levels.iter().all(|level| level.admitted));
            let passed = |levels: ChargeResults| {
                levels.iter().zip(&lending.counters).all(|(level, counted)| level.admitted || !counted.enforced)
            };
            let lent = if leased.is_some_and(passed) { lent } else { 0 };
            let report = CallReport { sent, now: replayed.now, states: replayed.states, lent };
            if let Some(lent) = self.eventual.heard(lending, report) {
                let lent = LeaseTicket { until: lent.until.filter(|_| whole), ..lent };
                self.settle.note(lent, Arc::new(place.clone()));
            }
        }
        Ok(replayed.results)
    }

    /// Keeps what Redis reports where it will be wanted if Redis goes away.
    fn remember(&self, place: &PreparedCall, commands: &ChargeBatch, replayed: &ScriptOutcome) {
        let Some(last) = commands.last() else { return };
        let wanted = |counted: &OwnedCounter| counted.enforced && counted.limit.on_store_error() == StorePolicy::Local;
        if last.counters.iter().any(wanted) {
            let counters: SmallVec<[(Limit, u128); 1]> =
                last.counters.iter().map(|counted| (counted.limit, counted.tag)).collect();
            self.local.remember(place.path, &counters, &replayed.states, place.now);
        }
    }
}

fn is_per_second(limit: &Limit) -> bool {
    limit.period().unit() == Unit::Second && limit.period().multiplier() == 1
}

fn start_deployment(settings: &RedisSettings, deployment: &DeploymentSettings) -> Deployment {
    let connect = ConnectOptions::new(deployment);
    let kind = match settings.key_format {
        KeyFormat::Tollkeeper => ProbeKind::Script,
        KeyFormat::Ratelimit => ProbeKind::Incrby,
    };
    let probe = Probe::new(kind, &settings.key_prefix, connect.auth_setting());
    let options = DeploymentOptions {
        connections: deployment.connections.get(),
        call_timeout: settings.timeout,
        optional_commands: probe.optional_commands(),
        health_check: Box::new(probe),
        connect,
    };
    Deployment::start(deployment.topology.clone(), options)
}

fn command(charge: &Charge<'_>, mode: ChargeMode) -> ChargeCommand {
    let counted = charge.counters.iter().map(|counter| OwnedCounter {
        limit: counter.limit.lengthened(log_beyond_us(counter.limit)),
        enforced: counter.enforced,
        tag: counter.tag,
    });
    let counters: SmallVec<[OwnedCounter; 1]> = counted.collect();
    // Where nothing is held, how long callers wait must not make equal charges look different.
    let holds = counters.iter().any(|counted| counted.limit.max_wait_us() > 0);
    let request = ChargeRequest { max_delay_us: if holds { charge.request.max_delay_us } else { 0 }, ..charge.request };
    ChargeCommand { counters, request, dry_run: mode == ChargeMode::DryRun, void_from: None }
}

/// A number below `most` that is random enough to spread expiries.
fn random_below(most: u64) -> u64 {
    RandomState::new().hash_one(0_u8) % most
}
