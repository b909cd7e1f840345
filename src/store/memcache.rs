//! Counters in memcached, shared by all replicas: strict fixed windows that count rejected hits.
//!
//! A charge is one increment at the server that holds its key. The number that the increment returns decides, so
//! concurrent charges are exact. A missing key is added; if another charge added it first, this one increments it. A
//! command without a reply is never repeated, because it may have run. The window is that of this process's clock.
//! Every charge ends by its deadline, with an outcome or an error. A counter is lost when memcached evicts it, restarts
//! or leaves the list of servers.
//!
//! Decides: which limits memcached counts.
//! Decides: what a charge, peek or refund does in memcached, also if two replicas begin a counter.
//! Decides: when memcached is said to be lost; the deadline of a call (`CallDeadlines`).

pub mod counter_key;

use std::num::NonZeroU32;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::Instant;

use self::counter_key::{CounterKey, MemcacheKeyScheme};
use super::charge::{
    CallDeadlines, ChargeContext, ChargeResults, CommitMode, DecidedBy, DetachOnDrop, OwnedCharge, OwnedCounter,
    StoreOutcome, set_span_server, start_call_span,
};
use super::client::deadline::timeout_with_grace;
use super::client::memcache::ServerList;
use super::client::memcache::protocol::{MemcacheError, MemcacheReply, parse_number};
use super::client::memcache::server::{MemcacheConnectOptions, MemcacheServer};
use super::client::server_status::ServerStatus;
use super::fallback::Fallback;
use super::health::{HealthReading, StoreHealth};
use super::over_limit_cache::{CallTimes, OverLimitCache};
use super::stats::{ChargeStats, CommandCount, PoolStats, SharedStoreStats};
use super::window_key::ExpiryJitter;
use crate::base::clock::{Clock, Time};
use crate::limit::algorithm::joint_charge::charge_together;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::{Algorithm, fixed_window};
use crate::limit::charge::{Charge, MAX_COUNT};
use crate::limit::request::Hits;
use crate::limit::{Consistency, StoreFailurePolicy};
use crate::settings::memcache::MemcacheSettings;
use crate::telemetry::traces::SpanRef;

/// Outcome of one charge.
type MemcacheOutcome = Result<StoreOutcome, MemcacheError>;

/// Counters in memcached.
#[derive(Debug)]
pub struct Memcache {
    shared: Arc<DetachedCallState>,
    keys: MemcacheKeyScheme,
    timeout: Duration,
    stats: ChargeStats,
}

/// State that calls need after their caller has gone.
#[derive(Debug)]
struct DetachedCallState {
    servers: ServerList,
    over_limit_cache: OverLimitCache,
    fallback: Fallback,
    calls: AtomicU64,
    commands: CommandStats,
}

/// Call for one charge, in owned form.
struct MemcacheCall {
    key: CounterKey,
    charge: OwnedCharge,
    /// Hash of the counter, for the over-limit cache.
    id: u128,
    /// Hash of the path, which the fallback counters are keyed by.
    path: u128,
    now: Time,
    span_ref: Option<SpanRef>,
}

impl Memcache {
    /// Starts to connect in the background; the fallback, of about `capacity_bytes`, decides while a server is away.
    /// Must be called within a tokio runtime.
    pub fn start(settings: &MemcacheSettings, capacity_bytes: u64) -> Self {
        let options = MemcacheConnectOptions {
            tls: settings.tls.clone(),
            connections: settings.max_idle.get(),
            call_timeout: settings.timeout,
        };
        let cache = settings.over_limit_cache;
        Self {
            shared: Arc::new(DetachedCallState {
                servers: ServerList::start(&settings.servers, options),
                over_limit_cache: OverLimitCache::new(
                    cache.capacity_bytes,
                    cache.caches_counting_windows,
                    Instant::now(),
                ),
                fallback: Fallback::new(capacity_bytes, settings.replicas.unwrap_or(NonZeroU32::MIN)),
                calls: AtomicU64::new(0),
                commands: CommandStats::default(),
            }),
            keys: MemcacheKeyScheme {
                prefix: settings.key_prefix.clone(),
                format: settings.key_format,
                jitter: ExpiryJitter::up_to(settings.expiration_jitter),
            },
            timeout: settings.timeout,
            stats: ChargeStats::default(),
        }
    }

    /// Returns the counters that decide while a server is away.
    pub fn fallback(&self) -> &Fallback {
        &self.shared.fallback
    }

    /// Returns the upper bound on the duration of a charge.
    pub const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Makes all charges of a request; returns one outcome for each, in their order, by the deadline of `context`.
    pub(super) async fn charge_all(
        &self,
        charges: &[Charge<'_>],
        mode: CommitMode,
        context: ChargeContext<'_>,
    ) -> Vec<MemcacheOutcome> {
        let guard = self.stats.begin_charges(charges.len());
        let outcomes = match has_repeated_counter(charges) {
            true => self.charge_each_counter_in_order(charges, mode, context).await,
            false => join_all(charges.iter().map(|charge| self.charge(charge, mode, context))).await,
        };
        guard.finish(&outcomes, |error| *error == MemcacheError::Timeout);
        outcomes
    }

    /// Makes charges of different counters at once, and those of one counter one after the other: a refund or a peek
    /// sees what the charges before it have counted.
    async fn charge_each_counter_in_order(
        &self,
        charges: &[Charge<'_>],
        mode: CommitMode,
        context: ChargeContext<'_>,
    ) -> Vec<MemcacheOutcome> {
        let first_of = |charge: &Charge<'_>| charges.iter().position(|other| has_same_counters(other, charge));
        let charge_followers = async |first: usize| {
            let mut outcomes = Vec::new();
            for (index, charge) in charges.iter().enumerate() {
                if first_of(charge) == Some(first) {
                    outcomes.push((index, self.charge(charge, mode, context).await));
                }
            }
            outcomes
        };
        let leaders = charges.iter().enumerate().filter(|(index, charge)| first_of(charge) == Some(*index));
        let mut outcomes = join_all(leaders.map(|(index, _)| charge_followers(index))).await.concat();
        outcomes.sort_unstable_by_key(|(index, _)| *index);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }

    async fn charge(&self, charge: &Charge<'_>, mode: CommitMode, context: ChargeContext<'_>) -> MemcacheOutcome {
        let ChargeContext { now, deadline, span_ref } = context;
        let Some(mut call) = self.prepare_call(charge, mode, now) else { return Err(MemcacheError::Unsupported) };
        let started = Instant::now();
        let shared = &self.shared;
        if let Some(results) = shared.over_limit_cache.find_rejection(call.id, slice::from_ref(&call.charge), started) {
            return Ok(StoreOutcome { results, decided_by: DecidedBy::OverLimitCache, now });
        }
        call.span_ref = span_ref.cloned();
        let CallDeadlines { call: call_deadline, caller } = CallDeadlines::new(deadline, started, self.timeout);
        let detached = Arc::clone(shared);
        let call = DetachOnDrop::new(async move { detached.charge_on_server(call, call_deadline).await });
        let results = match caller {
            Some(until) => timeout_with_grace(call, until).await.unwrap_or(Err(MemcacheError::Timeout)),
            None => call.await,
        };
        results.map(|results| StoreOutcome::from_store_results(results, now))
    }

    /// Prepares a call; `None` if an increment cannot count the charge.
    fn prepare_call(&self, charge: &Charge<'_>, mode: CommitMode, now: Time) -> Option<MemcacheCall> {
        let [counter] = &*charge.counters else { return None };
        let limit = *counter.limit;
        let is_supported = limit.algorithm() == Algorithm::FixedWindow
            && limit.consistency() == Consistency::Strict
            && limit.counts_rejected_hits();
        if !is_supported {
            return None;
        }
        let counter = OwnedCounter { limit, shadow: counter.shadow, quota: counter.quota, tag: counter.tag };
        let owned = OwnedCharge {
            dry_run: mode == CommitMode::DryRun,
            ..OwnedCharge::new(SmallVec::from_iter([counter]), charge.request)
        };
        let key = self.keys.counter_key(charge, now)?;
        Some(MemcacheCall {
            key,
            charge: owned,
            id: charge.path_hash ^ counter.tag,
            path: charge.path_hash,
            now,
            span_ref: None,
        })
    }

    /// Deletes the counter of a charge, in memcached and in the caches of this process; returns 1 if it existed.
    ///
    /// # Errors
    /// The server failed.
    pub(super) async fn reset(&self, charge: &Charge<'_>, now: Time, deadline: Instant) -> Result<u64, MemcacheError> {
        let call = self.prepare_call(charge, CommitMode::Commit, now).ok_or(MemcacheError::Unsupported)?;
        let server = self.shared.servers.server_for_key(&call.key.bytes, deadline).await?;
        let deleted = match server.call(&[b"delete", &call.key.bytes], deadline).await? {
            MemcacheReply::Deleted => 1,
            MemcacheReply::Missing => 0,
            _ => return Err(MemcacheError::BadReply),
        };
        self.shared.over_limit_cache.remove(call.id);
        self.shared.fallback.reset(charge);
        Ok(deleted)
    }

    /// Returns statistics since the start.
    pub fn stats(&self) -> SharedStoreStats {
        let servers = self.shared.servers.servers();
        let mut statuses = servers.iter().map(|server| server.status()).collect();
        ServerStatus::merge_by_address(&mut statuses);
        SharedStoreStats {
            charges: self.stats.requested(),
            calls: self.shared.calls.load(Ordering::Relaxed),
            abandoned: self.stats.abandoned(),
            refunds_dropped: None,
            rejected_locally: self.shared.over_limit_cache.rejected_charge_count(),
            latency: self.stats.latency(),
            eventual: None,
            regions: None,
            servers: statuses,
            pools: vec![PoolStats {
                name: "memcache_pool",
                open_connection_count: servers.iter().map(|server| server.open_connection_count()).sum(),
                opened_connections_total: servers.iter().map(|server| server.opened_connections_total()).sum(),
            }],
            commands: self.shared.commands.counts(),
        }
    }

    /// Drops expired entries from one of `parts` equal parts of the tables in this process: the part with index `part`.
    pub fn sweep(&self, now: Time, part: usize, parts: usize) {
        self.shared.fallback.sweep(now, part, parts);
        self.shared.over_limit_cache.sweep(Instant::now(), part, parts);
    }

    /// Reports to `health` until it is dropped. The store is lost if a server does not take charges: it holds keys.
    pub async fn report_health_repeatedly(&self, health: &StoreHealth) {
        let servers = &self.shared.servers;
        let read = || HealthReading {
            is_lost: !servers.are_all_available(),
            failure: servers
                .servers()
                .iter()
                .find(|server| !server.is_available())
                .and_then(|server| server.last_failure()),
            misconfiguration: servers.servers().iter().find_map(|server| server.misconfiguration()),
            unserved_slots: None,
        };
        health.record_repeatedly(read).await;
    }
}

/// Returns `true` if several charges count in one counter.
fn has_repeated_counter(charges: &[Charge<'_>]) -> bool {
    (1..charges.len()).any(|index| charges[..index].iter().any(|other| has_same_counters(other, &charges[index])))
}

fn has_same_counters(one: &Charge<'_>, other: &Charge<'_>) -> bool {
    let tags = |charge: &Charge<'_>| charge.counters.first().map(|counter| counter.tag);
    one.path_hash == other.path_hash && tags(one) == tags(other)
}

impl DetachedCallState {
    /// Counts the hits of a call and decides, by `deadline`; updates the caches of this process.
    async fn charge_on_server(&self, call: MemcacheCall, deadline: Instant) -> Result<ChargeResults, MemcacheError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let hits = if call.charge.dry_run { Hits::Peek } else { call.charge.request.hits };
        let verb = match hits {
            Hits::Peek => "get",
            Hits::Charge(_) => "incr",
            Hits::Refund(_) => "decr",
        };
        let mut span = start_call_span("memcached", call.span_ref.as_slice(), verb, 1);
        let sent = Instant::now();
        let counted = async {
            let server = self.servers.server_for_key(&call.key.bytes, deadline).await?;
            if let Some(span) = &mut span {
                set_span_server(span, server.endpoint());
            }
            let counter = MemcacheCounter { server, key: &call.key, deadline, stats: &self.commands };
            let count = counter.count_hits(hits).await?;
            Ok((count, counter.server))
        };
        let counted: Result<_, MemcacheError> = counted.await;
        if let (Some(span), Err(error)) = (&mut span, &counted) {
            span.set_error(error.name(), error.to_string());
        }
        drop(span);
        let (count, server) = counted?;
        let mut states = [State::FixedWindow(fixed_window::State { count, last: call.now })];
        let results = call.compute_results(&mut states);
        let times = CallTimes { sent, answered: Instant::now() };
        server.record_answer(sent, times.answered);
        self.over_limit_cache.record_results(call.id, slice::from_ref(&call.charge), slice::from_ref(&results), times);
        for OwnedCounter { limit, shadow, tag, .. } in &call.charge.counters {
            if !shadow && limit.on_store_error() == StoreFailurePolicy::Local {
                self.fallback.store_reported_states(call.path, &[(*limit, *tag)], &states, call.now);
            }
        }
        Ok(results)
    }
}

impl MemcacheCall {
    /// Computes the results from the count before the charge, and applies the charge to it.
    fn compute_results(&self, states: &mut [State; 1]) -> ChargeResults {
        let limits = self.charge.joint_limits();
        match self.charge.dry_run {
            true => charge_together(&limits, &mut states.clone(), self.now, self.charge.request),
            false => charge_together(&limits, states, self.now, self.charge.request),
        }
    }
}

/// Number of times that a missing key is added; more are needed only if the server drops what it stores.
const MAX_ADD_ATTEMPTS: usize = 3;

/// A counter at its server.
struct MemcacheCounter<'a> {
    server: Arc<MemcacheServer>,
    key: &'a CounterKey,
    deadline: Instant,
    stats: &'a CommandStats,
}

impl MemcacheCounter<'_> {
    /// Counts hits, or reads the count for a peek; returns the count before.
    ///
    /// # Errors
    /// The server failed, or the value is not a number.
    async fn count_hits(&self, hits: Hits) -> Result<u64, MemcacheError> {
        match hits {
            Hits::Peek | Hits::Charge(0) | Hits::Refund(0) => self.read_count().await,
            Hits::Charge(hits) => Ok(count_before(self.charge_hits(hits).await?, hits)),
            Hits::Refund(hits) => self.refund_hits(hits).await,
        }
    }

    async fn read_count(&self) -> Result<u64, MemcacheError> {
        let outcome = self.server.call(&[b"get", &self.key.bytes], self.deadline).await;
        self.stats.record_get(&outcome);
        match outcome? {
            MemcacheReply::Missing => Ok(0),
            MemcacheReply::Value(value) => parse_number(&value).ok_or(MemcacheError::WrongType),
            _ => Err(MemcacheError::BadReply),
        }
    }

    /// Returns the count after the charge.
    async fn charge_hits(&self, hits: u64) -> Result<u64, MemcacheError> {
        for _ in 0..MAX_ADD_ATTEMPTS {
            if let Some(after) = self.send_incr_or_decr(b"incr", hits).await? {
                self.trim_to_max(after, hits).await;
                return Ok(after);
            }
            if self.add_key(hits).await? {
                return Ok(hits);
            }
        }
        Err(MemcacheError::NoWrites)
    }

    /// Lowers a count above its maximum, by this charge's hits at most. All charges together so leave the maximum: a
    /// count never wraps, and envoyproxy/ratelimit can read it.
    async fn trim_to_max(&self, after: u64, hits: u64) {
        let excess = after.saturating_sub(self.key.max_count).min(hits);
        if excess > 0 {
            // The charge is counted; if this fails, a later one lowers the count.
            let _untrimmed = self.send_incr_or_decr(b"decr", excess).await;
        }
    }

    /// Returns the count before the refund, as far as the reply tells: a decrement stops at 0.
    async fn refund_hits(&self, hits: u64) -> Result<u64, MemcacheError> {
        Ok(match self.send_incr_or_decr(b"decr", hits).await? {
            None => 0,
            Some(after) => after.saturating_add(hits),
        })
    }

    /// Returns the count after `incr` or `decr`; `None` if the key is missing.
    async fn send_incr_or_decr(&self, verb: &[u8], hits: u64) -> Result<Option<u64>, MemcacheError> {
        let hits = hits.to_string();
        let outcome = self.server.call(&[verb, &self.key.bytes, hits.as_bytes()], self.deadline).await;
        self.stats.record_increment_or_decrement(&outcome);
        match outcome? {
            MemcacheReply::Missing => Ok(None),
            MemcacheReply::Number(after) => Ok(Some(after)),
            _ => Err(MemcacheError::BadReply),
        }
    }

    /// Adds the key; returns false if it exists.
    async fn add_key(&self, hits: u64) -> Result<bool, MemcacheError> {
        let value = hits.min(self.key.max_count).to_string();
        let expiration = self.key.expiration_s(Clock::System.now().as_micros() / 1_000_000).to_string();
        let length = value.len().to_string();
        let words: [&[u8]; 6] =
            [b"add", &self.key.bytes, b"0", expiration.as_bytes(), length.as_bytes(), value.as_bytes()];
        let outcome = self.server.call(&words, self.deadline).await;
        self.stats.record_add(&outcome);
        match outcome? {
            MemcacheReply::Stored => Ok(true),
            MemcacheReply::NotStored => Ok(false),
            _ => Err(MemcacheError::BadReply),
        }
    }
}

/// Returns the count before an increment. A count that wrapped counts as the maximum: it was far above any limit.
pub const fn count_before(after: u64, hits: u64) -> u64 {
    match after.checked_sub(hits) {
        Some(before) if before < MAX_COUNT => before,
        _ => MAX_COUNT,
    }
}

/// Commands since the start, by outcome.
#[derive(Debug, Default)]
struct CommandStats {
    increments: OutcomeCounts,
    adds: OutcomeCounts,
    gets: OutcomeCounts,
}

/// Outcomes of one command.
#[derive(Debug, Default)]
struct OutcomeCounts {
    success: AtomicU64,
    /// The key is missing, or for `add` exists.
    miss: AtomicU64,
    error: AtomicU64,
}

impl CommandStats {
    /// Counts an increment or a decrement.
    fn record_increment_or_decrement(&self, outcome: &Result<MemcacheReply, MemcacheError>) {
        self.increments.record(outcome);
    }

    /// Counts an `add`.
    fn record_add(&self, outcome: &Result<MemcacheReply, MemcacheError>) {
        self.adds.record(outcome);
    }

    /// Counts a `get` of one key.
    fn record_get(&self, outcome: &Result<MemcacheReply, MemcacheError>) {
        self.gets.record(outcome);
    }

    /// Counts by command and outcome.
    fn counts(&self) -> Vec<CommandCount> {
        let Self { increments, adds, gets } = self;
        let count = |name, code, count| CommandCount { name, code: Some(code), count };
        let [gets_found, gets_missed, gets_failed] = gets.load();
        let [added, not_stored, adds_failed] = adds.load();
        let [incremented, missed, increments_failed] = increments.load();
        let found = gets_found + gets_missed;
        vec![
            count("memcache.multiget", "success", found),
            count("memcache.multiget", "error", gets_failed),
            count("memcache.increment", "success", incremented),
            count("memcache.increment", "miss", missed),
            count("memcache.increment", "error", increments_failed),
            count("memcache.add", "success", added),
            count("memcache.add", "error", adds_failed),
            count("memcache.add", "not_stored", not_stored),
            CommandCount { name: "memcache.keys_requested", code: None, count: found + gets_failed },
            CommandCount { name: "memcache.keys_found", code: None, count: gets_found },
        ]
    }
}

impl OutcomeCounts {
    fn record(&self, outcome: &Result<MemcacheReply, MemcacheError>) {
        let count = match outcome {
            Ok(MemcacheReply::Missing | MemcacheReply::NotStored) => &self.miss,
            Ok(_) => &self.success,
            Err(_) => &self.error,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    fn load(&self) -> [u64; 3] {
        [&self.success, &self.miss, &self.error].map(|count| count.load(Ordering::Relaxed))
    }
}
