//! Counters: in this process, or in Redis or memcached with this process as the fallback.
//!
//! Callers use the verbs of [`Store`] and do not know which backend answers. A memory store is *immediate*: it
//! completes every operation without waiting, and needs neither a future nor a deadline. Any other store answers by the
//! caller's deadline.
//!
//! Decides: that nothing is charged when no time is left; how many replicas divide a share at the start.
//! Decides: which stores can hold hits for RLQS.

pub mod client;
pub mod error;
pub mod charge;
pub mod health;
pub mod stats;
pub mod decision_demand;
pub mod holders;
pub mod memory;
pub mod fallback;
pub mod over_limit_cache;
pub mod window_key;
pub mod redis;
pub mod memcache;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::Either;
use smallvec::SmallVec;
use tokio::time::Instant;

use self::charge::{ChargeContext, CommitMode};
use self::client::connect::Host;
use self::client::memcache::protocol::MemcacheError;
use self::client::redis::connect;
use self::decision_demand::DecisionDemand;
use self::error::{ChargeError, CounterCommandError};
use self::fallback::Fallback;
use self::health::StoreHealth;
use self::holders::SlotHolderTable;
use self::memcache::Memcache;
use self::memory::MemoryStore;
use self::redis::Redis;
use self::stats::StoreStats;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{Charge, ChargeRequest};
use crate::limit::hold::{HoldAnswer, HoldRequest, PoolId};
use crate::limit::request::Hits;
use crate::limit::slot_table::SlotSummary;
use crate::settings::counters::KeyFormat;
use crate::settings::problem::UnusableSetting;
use crate::settings::redis::RedisSettings;
use crate::settings::store::StoreSettings;
use crate::store::charge::{ChargeResults, DeferredOutcomes, LimitAdmissions, StoreOutcome};
use crate::store::client::redis::error::RedisError;
use crate::store::redis::key::OwnedCounterPath;
use crate::store::redis::scan::KeyScanResult;
use crate::telemetry::traces::SpanRef;

/// Counters of all rules.
#[derive(Debug)]
pub struct Store {
    backend: StoreBackend,
    /// Demand of decisions on counters that this process holds a part of.
    pub decision_demand: DecisionDemand,
}

/// Implementations of a store: a closed set, so that the memory store needs neither a box nor dynamic dispatch.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a process has one store")]
enum StoreBackend {
    /// Each process counts for itself.
    Memory(MemoryStore),
    /// All replicas share the counters.
    Redis(Arc<Redis>),
    /// All replicas share the counters.
    Memcache(Box<Memcache>),
}

/// Inputs of store operations that come from the request.
#[derive(Clone, Copy, Debug)]
pub struct StoreContext<'r> {
    /// Time of the request; counters in Redis follow the time of Redis instead.
    pub now: Time,
    /// Latest time for answers from Redis or memcached; `None`: the caller leaves no time for a call. The memory store
    /// ignores it.
    pub deadline: Option<Instant>,
    /// Span of the decision, which calls belong to, if the request is sampled.
    pub span_ref: Option<&'r SpanRef>,
    /// Time of the charge of each descriptor, if it differs from `now`: a replay of charges that Redis timed. The
    /// memory store uses them; empty in a server.
    pub charge_times: &'r [Time],
}

impl StoreContext<'_> {
    /// Time of the charge of the descriptor at `index`, in the memory store.
    fn charge_time(&self, index: usize) -> Time {
        self.charge_times.get(index).copied().unwrap_or(self.now)
    }
}

impl From<StoreBackend> for Store {
    fn from(backend: StoreBackend) -> Self {
        Self { backend, decision_demand: DecisionDemand::default() }
    }
}

impl From<MemoryStore> for Store {
    fn from(memory: MemoryStore) -> Self {
        StoreBackend::Memory(memory).into()
    }
}

impl From<Redis> for Store {
    fn from(redis: Redis) -> Self {
        Arc::new(redis).into()
    }
}

impl From<Arc<Redis>> for Store {
    fn from(redis: Arc<Redis>) -> Self {
        StoreBackend::Redis(redis).into()
    }
}

impl From<Memcache> for Store {
    fn from(memcache: Memcache) -> Self {
        StoreBackend::Memcache(Box::new(memcache)).into()
    }
}

impl Store {
    /// Opens the store that the settings select. A shared store connects in the background; call within a tokio
    /// runtime. An Envoy that is silent for `holder_timeout` loses its slots.
    pub fn open(settings: &StoreSettings, capacity_bytes: u64, holder_timeout: Duration) -> Self {
        match settings {
            StoreSettings::Memory => {
                let memory = MemoryStore::new(capacity_bytes);
                memory.slot_holders().set_timeout(holder_timeout);
                memory.into()
            }
            StoreSettings::Redis(settings) => {
                Self::open_redis(settings, capacity_bytes, holder_timeout, &Host::default())
            }
            // It has no slots.
            StoreSettings::Memcache(settings) => Memcache::start(settings, capacity_bytes).into(),
        }
    }

    /// Opens the store in Redis, as [`Store::open`] does, for a process on `host`.
    pub fn open_redis(settings: &RedisSettings, capacity_bytes: u64, holder_timeout: Duration, host: &Host) -> Self {
        let replicas = settings.replicas.unwrap_or(NonZeroU32::MIN);
        let fallback = Fallback::new(capacity_bytes, replicas);
        // Before heartbeats are exchanged, as often as the timeout demands.
        fallback.slot_holders().set_timeout(holder_timeout);
        let redis = Redis::start_on_host(settings, fallback, host);
        redis.claim_replica_place();
        redis.into()
    }

    /// True for the memory store, which completes every operation without waiting.
    pub const fn is_immediate(&self) -> bool {
        matches!(self.backend, StoreBackend::Memory(_))
    }

    /// Upper bound on the duration of a charge; zero for an immediate store.
    pub fn timeout(&self) -> Duration {
        match &self.backend {
            StoreBackend::Memory(_) => Duration::ZERO,
            StoreBackend::Redis(redis) => redis.timeout(),
            StoreBackend::Memcache(memcache) => memcache.timeout(),
        }
    }

    /// Makes all charges of a request, each with the index of its descriptor, and passes their outcomes to `each`.
    ///
    /// An immediate store is done when the call returns `None`; any other store returns the future that makes the
    /// charges.
    pub fn charge_all<'a>(
        &self,
        charges: impl Iterator<Item = (usize, Charge<'a>)>,
        context: StoreContext<'_>,
        mut each: impl FnMut(usize, &Charge<'a>, Result<StoreOutcome, ChargeError>),
    ) -> Option<impl Future<Output = ()>> {
        let charges = charges.inspect(|(_, charge)| self.decision_demand.record(charge));
        match &self.backend {
            StoreBackend::Memory(memory) => {
                for (index, charge) in charges {
                    let now = context.charge_time(index);
                    let outcome =
                        memory.charge(&charge, now).map(|results| StoreOutcome::from_store_results(results, now));
                    each(index, &charge, outcome.map_err(ChargeError::from));
                }
                None
            }
            shared => Some(shared.charge_in_shared_store(charges, CommitMode::Commit, context, each)),
        }
    }

    /// Peeks at the counters of all charges, ignoring their hits, and passes the outcomes to `each`.
    pub async fn peek_all<'a>(
        &self,
        charges: impl Iterator<Item = (usize, Charge<'a>)>,
        context: StoreContext<'_>,
        mut each: impl FnMut(usize, &Charge<'a>, Result<StoreOutcome, ChargeError>),
    ) {
        let charges = charges.map(|(index, mut charge)| {
            charge.request = ChargeRequest { hits: Hits::Peek, is_sent_by_client: false, ..charge.request };
            (index, charge)
        });
        match &self.backend {
            StoreBackend::Memory(memory) => {
                for (index, charge) in charges {
                    let now = context.now;
                    let outcome =
                        memory.charge(&charge, now).map(|results| StoreOutcome::from_store_results(results, now));
                    each(index, &charge, outcome.map_err(ChargeError::from));
                }
            }
            shared => shared.charge_in_shared_store(charges, CommitMode::DryRun, context, each).await,
        }
    }

    /// Makes charges that no answer waits for, each with the index of its descriptor: at once in memory, and in Redis
    /// within the timeout of the store, whatever the deadline of `context` is. What can be sent is sent on return.
    /// Releases of slots that Redis fails to make are repeated later. Must be called within a tokio runtime.
    pub fn charge_without_waiting(
        &self,
        charges: &[(usize, Charge<'_>)],
        context: StoreContext<'_>,
    ) -> DeferredOutcomes {
        match &self.backend {
            StoreBackend::Memory(memory) => {
                let charges = charges.iter();
                let outcomes = charges.map(|(index, charge)| {
                    let now = context.charge_time(*index);
                    let outcome =
                        memory.charge(charge, now).map(|results| StoreOutcome::from_store_results(results, now));
                    outcome.map_err(ChargeError::from)
                });
                DeferredOutcomes::Ready(outcomes.collect())
            }
            StoreBackend::Redis(redis) => {
                let charges: SmallVec<[Charge<'_>; 2]> = charges.iter().map(|(_, charge)| charge.clone()).collect();
                let deadline = Instant::now() + redis.timeout();
                let context = ChargeContext { now: context.now, deadline, span_ref: context.span_ref };
                if charges.iter().any(Charge::is_release) {
                    return DeferredOutcomes::send_charges(redis.charge_and_repeat_releases(&charges, context));
                }
                DeferredOutcomes::send_charges(redis.charge_without_waiting(&charges, context))
            }
            // Rules for memcache have no lists of limits, so no charges of this kind.
            StoreBackend::Memcache(_) => {
                DeferredOutcomes::Ready(charges.iter().map(|_| Err(MemcacheError::Unsupported.into())).collect())
            }
        }
    }

    /// Makes charges that give back the slots of a rejected request. Redis makes them later, and again if it fails.
    /// Must be called within a tokio runtime.
    pub fn give_back_slots(&self, charges: &[(usize, Charge<'_>)], context: StoreContext<'_>) {
        match &self.backend {
            StoreBackend::Memory(_) | StoreBackend::Memcache(_) => drop(self.charge_without_waiting(charges, context)),
            StoreBackend::Redis(redis) => {
                let charges: SmallVec<[Charge<'_>; 2]> = charges.iter().map(|(_, charge)| charge.clone()).collect();
                let deadline = Instant::now() + redis.timeout();
                let context = ChargeContext { now: context.now, deadline, span_ref: context.span_ref };
                drop(redis.charge_and_repeat_releases(&charges, context));
            }
        }
    }

    /// Passes to `each` which limits of a charge would admit it; charges nothing. Returns as [`Store::charge_all`]
    /// does.
    pub fn dry_run_all<'a>(
        &self,
        charges: impl Iterator<Item = (usize, Charge<'a>)>,
        context: StoreContext<'_>,
        mut each: impl FnMut(usize, &Charge<'a>, Result<LimitAdmissions, ChargeError>),
    ) -> Option<impl Future<Output = ()>> {
        match &self.backend {
            StoreBackend::Memory(memory) => {
                for (index, charge) in charges {
                    each(index, &charge, Ok(memory.peek_admissions(&charge, context.charge_time(index))));
                }
                None
            }
            shared => {
                let admits = |outcome: StoreOutcome| outcome.results.iter().map(|result| result.admitted).collect();
                let each = move |index: usize, charge: &Charge<'a>, outcome: Result<StoreOutcome, ChargeError>| {
                    each(index, charge, outcome.map(admits));
                };
                Some(shared.charge_in_shared_store(charges, CommitMode::DryRun, context, each))
            }
        }
    }

    /// Upper bound on a call to the servers of the store; zero if it has none.
    pub fn call_timeout(&self) -> Duration {
        match &self.backend {
            StoreBackend::Memory(_) => Duration::ZERO,
            StoreBackend::Redis(redis) => redis.timeout(),
            StoreBackend::Memcache(memcache) => memcache.timeout(),
        }
    }

    /// Charges the fallback counters of this process, for a charge that the store failed to decide.
    pub fn charge_fallback(&self, charge: &Charge<'_>, now: Time) -> ChargeResults {
        match &self.backend {
            StoreBackend::Memory(memory) => memory.charge_in_overflow_shard(charge, now),
            StoreBackend::Redis(redis) => redis.fallback().charge(charge, now),
            StoreBackend::Memcache(memcache) => memcache.fallback().charge(charge, now),
        }
    }

    /// Sums the slots of each concurrent limit of a charge, and the reservations of each limit that has some, by
    /// `deadline`; `None` where they cannot be read.
    pub async fn summarize_slots(&self, charge: &Charge<'_>, now: Time, deadline: Instant) -> Vec<Option<SlotSummary>> {
        let limits = charge.counters.iter().enumerate().filter(|(_, counter)| counter.limit.follows_streams());
        let mut summaries = Vec::new();
        for (index, counter) in limits {
            summaries.push(match &self.backend {
                StoreBackend::Memory(memory) if counter.limit.reservations().is_some() => {
                    Some(memory.summarize_reservations(charge.path_hash, counter.tag, now).marked_as_reservations())
                }
                StoreBackend::Memory(memory) => Some(memory.summarize_slots(charge.path_hash, counter.tag, now)),
                StoreBackend::Redis(redis) => redis.summarize_slots(charge, index, now, deadline).await.ok(),
                StoreBackend::Memcache(_) => None,
            });
        }
        summaries
    }

    /// Returns true if this process gave out slots while the store failed.
    pub fn has_fallback_slots(&self) -> bool {
        match &self.backend {
            StoreBackend::Memory(_) | StoreBackend::Memcache(_) => false,
            StoreBackend::Redis(redis) => redis.fallback().has_slots_or_reservations(),
        }
    }

    /// Envoys that hold slots.
    pub fn slot_holders(&self) -> &SlotHolderTable {
        match &self.backend {
            StoreBackend::Memory(memory) => memory.slot_holders(),
            StoreBackend::Redis(redis) => redis.fallback().slot_holders(),
            StoreBackend::Memcache(memcache) => memcache.fallback().slot_holders(),
        }
    }

    /// Returns which limits of a charge [`Store::charge_fallback`] would admit; charges nothing.
    pub fn dry_run_fallback(&self, charge: &Charge<'_>, now: Time) -> LimitAdmissions {
        match &self.backend {
            StoreBackend::Memory(memory) => memory.peek_admissions(charge, now),
            StoreBackend::Redis(redis) => redis.fallback().peek_admissions(charge, now),
            StoreBackend::Memcache(memcache) => memcache.fallback().peek_admissions(charge, now),
        }
    }

    /// Adjusts what a pool holds on the only counter of the charge, whose hits are ignored: charges what it used, and
    /// grants what it wants as far as that fits. The memory store answers without waiting, any other by the deadline of
    /// `context`. A limit that cannot be held ([`Store::reason_against_holds`]) is neither charged nor granted.
    ///
    /// After an error, the caller must assume that the request was carried out and that it was not: what it reported as
    /// used may have been charged, and what it held may be held on.
    pub fn adjust_hold(
        &self,
        charge: &Charge<'_>,
        pool: PoolId,
        request: HoldRequest,
        context: StoreContext<'_>,
    ) -> impl Future<Output = Result<HoldAnswer, ChargeError>> + Send + use<> {
        let is_refused =
            charge.counters.first().is_none_or(|counter| self.reason_against_holds(counter.limit).is_some());
        let now = context.now;
        let pending = match &self.backend {
            _ if is_refused => Either::Left(Ok(HoldAnswer::nothing_granted(now))),
            StoreBackend::Memory(memory) => {
                Either::Left(memory.adjust_hold(charge, pool, request, now).map_err(ChargeError::from))
            }
            StoreBackend::Redis(redis) => match context.deadline {
                Some(deadline) => {
                    let context = ChargeContext { now, deadline, span_ref: context.span_ref };
                    Either::Right(redis.adjust_hold(charge, pool, request, context))
                }
                None => Either::Left(Err(RedisError::NoTime.into())),
            },
            // Refused above.
            StoreBackend::Memcache(_) => Either::Left(Err(MemcacheError::Unsupported.into())),
        };
        async move {
            match pending {
                Either::Left(answer) => answer,
                Either::Right(call) => call.await.map_err(ChargeError::from),
            }
        }
    }

    /// Adjusts a hold on the fallback counters of this process, under its share of the limit, while the store fails.
    ///
    /// # Errors
    /// The counters of this process are full.
    pub fn adjust_fallback_hold(
        &self,
        charge: &Charge<'_>,
        pool: PoolId,
        request: HoldRequest,
        now: Time,
    ) -> Result<HoldAnswer, ChargeError> {
        let is_refused = charge.counters.first().is_none_or(|counter| counter.limit.reason_against_holds().is_some());
        let answer = match &self.backend {
            _ if is_refused => Ok(HoldAnswer::nothing_granted(now)),
            StoreBackend::Memory(memory) => memory.adjust_hold(charge, pool, request, now),
            StoreBackend::Redis(redis) => redis.fallback().adjust_hold(charge, pool, request, now),
            StoreBackend::Memcache(memcache) => memcache.fallback().adjust_hold(charge, pool, request, now),
        };
        Ok(answer?)
    }

    /// Reason why hits of the limit cannot be held in this store, for people; `None` if they can.
    pub fn reason_against_holds(&self, limit: &Limit) -> Option<&'static str> {
        match &self.backend {
            StoreBackend::Memory(_) => limit.reason_against_holds(),
            StoreBackend::Redis(redis) if redis.uses_own_key_format() => limit.reason_against_holds(),
            StoreBackend::Redis(_) => Some(HOLD_REFUSAL_IN_RATELIMIT_FORMAT),
            StoreBackend::Memcache(_) => Some(HOLD_REFUSAL_IN_MEMCACHE),
        }
    }

    /// True if the store can list its paths. The memory store keeps hashes of keys only; memcached lists none.
    pub const fn can_list_counters(&self) -> bool {
        matches!(self.backend, StoreBackend::Redis(_))
    }

    /// Lists up to `max` paths of a domain that have counters and pass `filter`; `None` if the store lists no paths.
    ///
    /// # Errors
    /// The store failed, or its user may not run SCAN.
    pub async fn list_counter_paths(
        &self,
        domain: &str,
        max: usize,
        deadline: Instant,
        filter: impl FnMut(&OwnedCounterPath) -> bool,
    ) -> Result<Option<KeyScanResult>, CounterCommandError> {
        Ok(match &self.backend {
            StoreBackend::Memory(_) | StoreBackend::Memcache(_) => None,
            StoreBackend::Redis(redis) => Some(redis.list_counter_paths(domain, max, deadline, filter).await?),
        })
    }

    /// Source of the rows of tables, which needs no store.
    pub fn table_row_source(&self) -> TableRowSource {
        TableRowSource(match &self.backend {
            StoreBackend::Redis(redis) => Some(Arc::clone(redis)),
            StoreBackend::Memory(_) | StoreBackend::Memcache(_) => None,
        })
    }

    /// Deletes the counters of a charge; returns how many existed.
    ///
    /// # Errors
    /// The store failed, or its user may not run UNLINK.
    pub async fn reset_counters(
        &self,
        charge: &Charge<'_>,
        now: Time,
        deadline: Instant,
    ) -> Result<u64, CounterCommandError> {
        Ok(match &self.backend {
            StoreBackend::Memory(memory) => memory.reset(charge) as u64,
            StoreBackend::Redis(redis) => redis.reset(charge, now, deadline).await?,
            StoreBackend::Memcache(memcache) => memcache.reset(charge, now, deadline).await?,
        })
    }

    /// Forgets what this process caches about the counters of a charge, but no counter and no share.
    pub fn forget_cached(&self, charge: &Charge<'_>, now: Time) {
        if let StoreBackend::Redis(redis) = &self.backend {
            redis.forget_cached(charge, now);
        }
    }

    /// Statistics since the start.
    pub fn stats(&self) -> StoreStats {
        match &self.backend {
            StoreBackend::Memory(memory) => StoreStats { store: "memory", memory: memory.memory_usage(), shared: None },
            StoreBackend::Redis(redis) => {
                StoreStats { store: "redis", memory: redis.fallback().memory_usage(), shared: Some(redis.stats()) }
            }
            StoreBackend::Memcache(memcache) => {
                let (memory, stats) = (memcache.fallback().memory_usage(), memcache.stats());
                StoreStats { store: "memcache", memory, shared: Some(stats) }
            }
        }
    }

    /// Reports to `health` until it is dropped. A memory store is always healthy: it returns at once.
    pub async fn report_health_repeatedly(&self, health: &StoreHealth) {
        match &self.backend {
            StoreBackend::Memory(_) => {}
            StoreBackend::Redis(redis) => redis.report_health_repeatedly(health).await,
            StoreBackend::Memcache(memcache) => memcache.report_health_repeatedly(health).await,
        }
    }

    /// Drops expired entries from one of `parts` equal parts of the counters in this process: the one at `part`.
    pub fn sweep(&self, now: Time, part: usize, parts: usize) {
        match &self.backend {
            StoreBackend::Memory(memory) => memory.sweep(now, part, parts),
            StoreBackend::Redis(redis) => redis.sweep(now, part, parts),
            StoreBackend::Memcache(memcache) => memcache.sweep(now, part, parts),
        }
    }

    /// Returns leased hits and releases this process's slot. Takes up to 1 s.
    pub async fn shutdown(&self) {
        match &self.backend {
            StoreBackend::Memory(_) | StoreBackend::Memcache(_) => {}
            StoreBackend::Redis(redis) => redis.shutdown().await,
        }
    }
}

impl StoreBackend {
    /// Makes all charges of a request, and waits for the outcomes: those in one store are sent together.
    async fn charge_in_shared_store<'a>(
        &self,
        charges: impl Iterator<Item = (usize, Charge<'a>)>,
        mode: CommitMode,
        context: StoreContext<'_>,
        mut each: impl FnMut(usize, &Charge<'a>, Result<StoreOutcome, ChargeError>),
    ) {
        let mut indices: SmallVec<[usize; 2]> = SmallVec::new();
        let mut requested: SmallVec<[Charge<'a>; 2]> = SmallVec::new();
        for (index, charge) in charges {
            indices.push(index);
            requested.push(charge);
        }
        let StoreContext { now, deadline, span_ref, .. } = context;
        let context = deadline.map(|deadline| ChargeContext { now, deadline, span_ref });
        let requested_at = indices.into_iter().zip(&requested);
        match (self, context.filter(|_| !requested.is_empty())) {
            (Self::Redis(redis), Some(context)) => {
                let outcomes = redis.charge_all(&requested, mode, context).await;
                for ((index, charge), outcome) in requested_at.zip(outcomes) {
                    each(index, charge, outcome.map_err(ChargeError::from));
                }
            }
            (Self::Memcache(memcache), Some(context)) => {
                let outcomes = memcache.charge_all(&requested, mode, context).await;
                for ((index, charge), outcome) in requested_at.zip(outcomes) {
                    each(index, charge, outcome.map_err(ChargeError::from));
                }
            }
            (Self::Redis(_), None) => {
                requested_at.for_each(|(index, charge)| each(index, charge, Err(RedisError::NoTime.into())));
            }
            (Self::Memcache(_), None) => {
                requested_at.for_each(|(index, charge)| each(index, charge, Err(MemcacheError::NoTime.into())));
            }
            (Self::Memory(memory), _) => {
                for (index, charge) in requested_at {
                    let outcome =
                        memory.charge(charge, now).map(|results| StoreOutcome::from_store_results(results, now));
                    each(index, charge, outcome.map_err(ChargeError::from));
                }
            }
        }
    }
}

/// Reason why nothing is held in Redis in the key format of envoyproxy/ratelimit.
const HOLD_REFUSAL_IN_RATELIMIT_FORMAT: &str =
    "TOLLKEEPER_KEY_FORMAT=ratelimit: counters that envoyproxy/ratelimit also counts cannot be divided";
/// Reason why nothing is held in memcached.
const HOLD_REFUSAL_IN_MEMCACHE: &str =
    "BACKEND_TYPE=memcache: memcached cannot change a counter and its holds in one step";

/// Returns the reason why hits of a limit cannot be held in a store with these settings, for people; `None` if they
/// can.
pub fn hold_refusal_in_store(limit: &Limit, settings: &StoreSettings) -> Option<&'static str> {
    match settings {
        StoreSettings::Memory => limit.reason_against_holds(),
        StoreSettings::Redis(redis) if redis.key_format == KeyFormat::Tollkeeper => limit.reason_against_holds(),
        StoreSettings::Redis(_) => Some(HOLD_REFUSAL_IN_RATELIMIT_FORMAT),
        StoreSettings::Memcache(_) => Some(HOLD_REFUSAL_IN_MEMCACHE),
    }
}

/// Finds files that do not prevent the start and without which the store does not connect.
pub fn find_settings_with_unusable_files(settings: &StoreSettings) -> Vec<UnusableSetting> {
    match settings {
        StoreSettings::Memory => Vec::new(),
        StoreSettings::Redis(redis) => {
            let deployments = [Some(&redis.main), redis.per_second.as_ref()].into_iter().flatten();
            deployments.flat_map(connect::find_settings_with_unusable_files).collect()
        }
        StoreSettings::Memcache(memcache) => {
            memcache.tls.as_ref().and_then(|tls| tls.build_client_config().err()).into_iter().collect()
        }
    }
}

/// Source of the rows of tables: the Redis of the counters, if they are there.
#[derive(Clone, Debug)]
pub struct TableRowSource(Option<Arc<Redis>>);

impl TableRowSource {
    /// Reads the rows of values of a table by `deadline`, one result for each; `None`: there is no row.
    ///
    /// # Errors
    /// Redis failed, or counters are not in Redis.
    pub async fn read(
        &self,
        table: &str,
        values: &[&[u8]],
        deadline: Instant,
    ) -> Vec<Result<Option<Bytes>, RedisError>> {
        match &self.0 {
            Some(redis) => redis.read_table_rows(table, values, deadline).await,
            None => vec![Err(RedisError::Misconfigured); values.len()],
        }
    }
}
