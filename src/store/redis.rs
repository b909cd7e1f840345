//! Counters in Redis or Valkey, shared by all replicas.
//!
//! One call decides all limits of a descriptor: a script on the node that owns their keys. The script returns the
//! states of the counters, and the algorithms of this program compute the results from them, so that Redis and memory
//! cannot disagree. All calls of a request are sent together: one round trip, in a cluster too, or two with
//! `STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT`, which runs them dry first. Charges on a counter whose call is in flight
//! are coalesced into the next call. Every charge ends by its deadline, with an outcome or an error.
//!
//! Counters follow the clock of Redis, not of replicas. After a failover to a server whose clock is behind, time stands
//! still until it catches up.
//!
//! [`Redis`] composes the parts: it groups the charges of a request, answers those that this process may decide
//! ([`eventual`], [`OverLimitCache`]), and submits the others to `calls`.
//!
//! Decides: which charges of a request share a counter (`group_charges`); whose clock counts (`client_clock`).
//! Decides: when Redis is said to be lost; what this process forgets at a `/reset`.
//! Decides: how long the end waits for returned leases (`RETURN_LEASES_TIMEOUT`).

pub mod eventual;
mod hold_call;
mod global_answers;
mod calls;
mod prepared_call;
mod deployments;
pub mod key;
pub mod script;
pub mod incrby;
mod holder_exchange;
mod slots;
pub mod replicas;
pub mod regions;
pub mod scan;
pub mod table_rows;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use self::calls::{CallRole, ChargeOutcome, ChargeProgress, PendingChargeGroups, PendingCharges, RedisCallSender};
use self::deployments::{ConnectionStats, Deployments};
use self::eventual::descriptor::EventualDescriptor;
use self::eventual::local_admission::LocalAdmission;
use self::eventual::{LocalDecision, build_full_refund};
use self::holder_exchange::HolderExchange;
use self::key::{CounterSetId, KeyScheme};
use self::prepared_call::PreparedCall;
use self::regions::RegionClient;
use self::replicas::{ReplicaHeartbeat, ReplicaMembership};
use self::scan::{ScanOptions, scan_paths};
use self::script::encode_slot;
use super::charge::{CallDeadlines, DecidedBy, StoreOutcome};
use crate::base::clock::Time;
use crate::limit::Consistency;
use crate::limit::charge::{Charge, ChargeRequest};
use crate::limit::hold::{HoldAnswer, HoldRequest, PoolId};
use crate::settings::redis::RedisSettings;
use crate::store::charge::{ChargeBatch, ChargeContext, CommitMode, MAX_CHARGES_PER_CALL, OwnedCharge, OwnedCounter};
use crate::store::client::connect::Host;
use crate::store::client::redis::error::RedisError;
use crate::store::error::CounterCommandError;
use crate::store::fallback::Fallback;
use crate::store::health::{HealthReading, StoreHealth};
use crate::store::over_limit_cache::OverLimitCache;
use crate::store::redis::key::OwnedCounterPath;
use crate::store::redis::scan::KeyScanResult;
use crate::store::stats::{ChargeStats, EventualSharingStats, SharedStoreStats};

/// Upper bound on returning leased hits at shutdown.
const RETURN_LEASES_TIMEOUT: Duration = Duration::from_secs(1);

/// Counters in Redis.
#[derive(Debug)]
pub struct Redis {
    deployments: Deployments,
    keys: KeyScheme,
    /// Client of the global Redis; `None` if there is only one region.
    region: Option<Arc<RegionClient>>,
    calls: Arc<RedisCallSender>,
    heartbeat: ReplicaHeartbeat,
    stats: ChargeStats,
    /// True if counters follow the clock of charges instead of the server's: in tests.
    client_clock: bool,
    lease_reaper: AbortHandle,
    /// Shares heartbeats of Envoys that hold slots.
    _holder_exchange: HolderExchange,
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.lease_reaper.abort();
    }
}

impl Redis {
    /// Starts to connect in the background; `fallback` decides while Redis is away. Must be called within a tokio
    /// runtime.
    pub fn start(settings: &RedisSettings, fallback: Fallback) -> Self {
        Self::start_on_host(settings, fallback, &Host::default())
    }

    /// As [`Redis::start`], but counters follow the time of the charges: for tests with a manual clock.
    pub fn start_with_client_clock(settings: &RedisSettings, fallback: Fallback) -> Self {
        Self::start_with_clock(settings, fallback, &Host::default(), true)
    }

    /// As [`Redis::start`], on a host of a simulation.
    pub fn start_on_host(settings: &RedisSettings, fallback: Fallback, host: &Host) -> Self {
        Self::start_with_clock(settings, fallback, host, false)
    }

    fn start_with_clock(settings: &RedisSettings, fallback: Fallback, host: &Host, client_clock: bool) -> Self {
        let deployments = Deployments::start(settings, &host.network);
        let replicas = Arc::new(ReplicaMembership::new(settings.max_replicas));
        // A configured number of replicas is not replaced by the live count.
        let live_count = settings.replicas.is_none().then(|| fallback.replica_count().clone());
        let heartbeat =
            ReplicaHeartbeat::new(Arc::clone(&replicas), &deployments.main.client, &settings.key_prefix, live_count);
        // A rejection expires in real time, not in the time of the charges.
        let cache_bytes = if client_clock { 0 } else { settings.over_limit_cache.capacity_bytes };
        let over_limit_cache =
            OverLimitCache::new(cache_bytes, settings.over_limit_cache.caches_counting_windows, Instant::now());
        let local_admission = LocalAdmission::new(settings.eventual_bytes, replicas, !client_clock);
        let calls =
            RedisCallSender::new(local_admission, over_limit_cache, fallback, host.clock.clone(), settings.timeout);
        let calls = Arc::new(calls);
        let reaped = Arc::clone(&calls);
        let lease_reaper = tokio::spawn(async move { reaped.reap_leases().await }).abort_handle();
        // A pool follows the clock of its Redis.
        let region = (!client_clock).then(|| RegionClient::start(settings, &deployments, &host.network)).flatten();
        let holder_exchange = HolderExchange::start(&calls, &deployments.main.client, &settings.key_prefix);
        Self {
            deployments,
            _holder_exchange: holder_exchange,
            keys: KeyScheme::new(settings, region.as_ref().map(|region| Arc::clone(region.answers()))),
            region,
            calls,
            heartbeat,
            stats: ChargeStats::default(),
            client_clock,
            lease_reaper,
        }
    }

    /// Returns the counters that decide while Redis is away.
    pub fn fallback(&self) -> &Fallback {
        &self.calls.fallback
    }

    /// Returns true if counters have tollkeeper's own keys, not those of envoyproxy/ratelimit.
    pub fn uses_own_key_format(&self) -> bool {
        self.keys.uses_own_format()
    }

    /// Returns the place of this replica and the number of live replicas.
    pub fn replica_membership(&self) -> &ReplicaMembership {
        self.heartbeat.replica_membership()
    }

    /// Returns the upper bound on the duration of a charge.
    pub fn timeout(&self) -> Duration {
        self.calls.timeout()
    }

    /// Claims a place for shares of eventual limits, now and from then on, and counts live replicas. Called again, it
    /// renews the claim at once. Needs scripts, so it does nothing in the key format of envoyproxy/ratelimit. Must be
    /// called within a tokio runtime.
    pub fn claim_replica_place(&self) {
        if self.keys.uses_own_format() {
            self.heartbeat.start();
        }
    }

    /// Makes all charges of a request; returns one outcome for each, in their order, by the deadline of `context`.
    ///
    /// The time of the counters is that of Redis.
    pub async fn charge_all(
        &self,
        charges: &[Charge<'_>],
        mode: CommitMode,
        context: ChargeContext<'_>,
    ) -> SmallVec<[ChargeOutcome; 2]> {
        let guard = self.stats.begin_charges(charges.len());
        let outcomes = self.submit_charges(charges, mode, context).wait_for_outcomes().await;
        guard.finish(&outcomes, |error| *error == RedisError::Timeout);
        outcomes
    }

    /// Makes charges that no answer waits for. They are in the order of arrival from now on; their calls are sent when
    /// the future is polled.
    pub fn charge_without_waiting(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        context: ChargeContext<'_>,
    ) -> impl Future<Output = SmallVec<[ChargeOutcome; 2]>> + Send + use<> {
        let (redis, count) = (Arc::clone(self), charges.len());
        let groups = self.submit_charges(charges, CommitMode::Commit, context);
        async move {
            let guard = redis.stats.begin_charges(count);
            let outcomes = groups.wait_for_outcomes().await;
            guard.finish(&outcomes, |error| *error == RedisError::Timeout);
            outcomes
        }
    }

    /// Submits all groups of charges before the first await, so that their calls are sent together.
    fn submit_charges(
        &self,
        charges: &[Charge<'_>],
        mode: CommitMode,
        context: ChargeContext<'_>,
    ) -> PendingChargeGroups {
        let mut groups = PendingChargeGroups::with_capacity(charges.len());
        if let [charge] = charges {
            let group = ChargeGroup::of_single_charge(&self.keys, charge, mode, context.now);
            self.decide_or_join_call(group, charges, context, &mut groups);
            return groups;
        }
        for group in group_charges(&self.keys, charges, mode, context.now) {
            self.decide_or_join_call(group, charges, context, &mut groups);
        }
        groups
    }

    /// Decides a group in this process if possible; otherwise prepares its call, or adds it to the call in flight.
    ///
    /// A prepared call is sent when [`PendingChargeGroups`] is first polled.
    fn decide_or_join_call(
        &self,
        group: ChargeGroup,
        charges: &[Charge<'_>],
        context: ChargeContext<'_>,
        groups: &mut PendingChargeGroups,
    ) {
        let ChargeContext { now, deadline, span_ref } = context;
        let calls = &*self.calls;
        let charge = &charges[group.indices[0]];
        let eventual = self.build_eventual_descriptor(&group);
        if let Some(eventual) = &eventual
            && let Some(outcome) = self.admit_locally(&group, charge, eventual, now)
        {
            return groups.set_outcome_without_call(&group.indices, outcome);
        }
        let started = Instant::now();
        if let Some(results) = calls.over_limit_cache.find_rejection(group.id.counters, &group.charges, started) {
            let outcome = StoreOutcome { results, decided_by: DecidedBy::OverLimitCache, now };
            return groups.set_outcome_without_call(&group.indices, outcome);
        }
        let mut deadlines = CallDeadlines::new(deadline, started, self.timeout());
        let progress = match self.calls.join_or_lead(group.id.counters, group.charges, context) {
            CallRole::Follower { outcomes, beyond_next_call } => {
                if beyond_next_call {
                    // The call that will take these charges may end after their caller's deadline.
                    deadlines.caller = Some(deadline);
                }
                ChargeProgress::Following(outcomes)
            }
            CallRole::Leader(charges) => {
                let mut call = self.prepare_call(charge, group.id, eventual, now);
                call.span_refs = span_ref.cloned().into_iter().collect();
                ChargeProgress::Leading(self.calls.lead_call(call, charges, deadlines.call))
            }
        };
        groups.add_group(PendingCharges { progress, caller_deadline: deadlines.caller, indices: group.indices });
    }

    /// Returns the counters of a group if the limits of all of them are eventual.
    ///
    /// Here strict limits, the default, leave [`eventual`] out: their charges are never admitted locally. Their calls
    /// ([`PreparedCall::eventual`] is `None`) charge no lease; only if they refund hits, they tell the leases of this
    /// process, as eventual rules may share the counters.
    fn build_eventual_descriptor(&self, group: &ChargeGroup) -> Option<EventualDescriptor> {
        let first = group.charges.first()?;
        if first.counters.iter().any(|counter| counter.limit.consistency() == Consistency::Strict) {
            return None;
        }
        self.calls.local_admission.build_eventual_descriptor(group.id.path, first)
    }

    /// Admits a single charge from a lease or a share, and requests the next lease when it is time.
    fn admit_locally(
        &self,
        group: &ChargeGroup,
        charge: &Charge<'_>,
        eventual: &EventualDescriptor,
        now: Time,
    ) -> Option<StoreOutcome> {
        let [owned] = &*group.charges else { return None };
        if owned.dry_run {
            return None;
        }
        let at = Instant::now();
        match self.calls.local_admission.try_admit(eventual, owned, now, at) {
            LocalDecision::Local { outcome, lease_ahead } => {
                // A call in flight requests a lease itself.
                if lease_ahead
                    && let CallRole::Leader(no_charges) =
                        self.calls.join_or_lead(group.id.counters, ChargeBatch::new(), ChargeContext::new(now, at))
                {
                    let call = self.prepare_call(charge, group.id, Some(eventual.clone()), now);
                    self.calls.spawn_call(call, no_charges, at + self.timeout());
                }
                Some(outcome)
            }
            LocalDecision::CallRedis => None,
        }
    }

    fn prepare_call(
        &self,
        charge: &Charge<'_>,
        id: CounterSetId,
        eventual: Option<EventualDescriptor>,
        now: Time,
    ) -> PreparedCall {
        let region = self.region.as_ref().filter(|_| self.keys.has_region_part(charge)).cloned();
        PreparedCall {
            slot: charge.slot.map(|slot| encode_slot(slot, self.fallback().slot_holders(), now)),
            command: self.keys.choose_command(charge, now),
            id,
            deployment: Arc::clone(self.deployments.deployment_for(charge, region.is_some())),
            region,
            now,
            client_clock: self.client_clock,
            eventual,
            span_refs: Vec::new(),
        }
    }

    /// Adjusts the hold of a pool on the only counter of a charge: see [`CounterHolds::charge_used_and_grant`]. The
    /// time is that of Redis. The call is sent when the future is first polled.
    ///
    /// [`CounterHolds::charge_used_and_grant`]: crate::limit::hold::CounterHolds::charge_used_and_grant
    pub fn adjust_hold(
        &self,
        charge: &Charge<'_>,
        pool: PoolId,
        request: HoldRequest,
        context: ChargeContext<'_>,
    ) -> impl Future<Output = Result<HoldAnswer, RedisError>> + Send + use<> {
        let group = ChargeGroup::of_single_charge(&self.keys, charge, CommitMode::Commit, context.now);
        let counter = group.charges.first().and_then(|charge| charge.counters.first().copied());
        let mut call = self.prepare_call(charge, group.id, None, context.now);
        call.span_refs = context.span_ref.cloned().into_iter().collect();
        let calls = Arc::clone(&self.calls);
        async move {
            let counter = counter.ok_or(RedisError::Misconfigured)?;
            calls.count_sent_call();
            call.adjust_hold(&counter, pool, request, context.deadline).await
        }
    }

    /// Lists up to `max_paths` paths of a domain that have counters and pass `filter`, by `deadline`.
    ///
    /// Counters in the key format of envoyproxy/ratelimit are never listed: their keys do not tell where a value ends.
    ///
    /// # Errors
    /// A node could not be scanned, or its user may not run SCAN.
    pub async fn list_counter_paths(
        &self,
        domain: &str,
        max_paths: usize,
        deadline: Instant,
        filter: impl FnMut(&OwnedCounterPath) -> bool,
    ) -> Result<KeyScanResult, RedisError> {
        let nodes = self.deployments.clients().flat_map(|deployment| deployment.nodes()).collect();
        scan_paths(nodes, ScanOptions { prefix: self.keys.prefix(), domain, max_paths, deadline }, filter).await
    }

    /// Deletes the counters of a charge, in Redis and in the caches of this process; returns how many existed. Hits
    /// that other replicas have leased stay charged. These replicas drop cached rejections within a second.
    ///
    /// # Errors
    /// Redis failed, or its user may not run UNLINK.
    pub async fn reset(&self, charge: &Charge<'_>, now: Time, deadline: Instant) -> Result<u64, CounterCommandError> {
        let ChargeGroup { id, charges, .. } =
            ChargeGroup::of_single_charge(&self.keys, charge, CommitMode::Commit, now);
        let Some(owned) = charges.into_iter().next() else { return Ok(0) };
        let own = self.calls.local_admission.end_own_leases(id.path);
        let call = self.prepare_call(charge, id, None, now);
        let deleted = call.reset(&build_full_refund(owned.counters), own, deadline).await?;
        self.calls.over_limit_cache.remove(id.counters);
        self.fallback().reset(charge);
        Ok(deleted)
    }

    /// Forgets what this process caches about the counters of a charge: known rejections and leases, whose hits are not
    /// returned. A used share stays used.
    pub fn forget_cached(&self, charge: &Charge<'_>, now: Time) {
        let ChargeGroup { id, .. } = ChargeGroup::of_single_charge(&self.keys, charge, CommitMode::Commit, now);
        let _ended = self.calls.local_admission.end_own_leases(id.path);
        self.calls.over_limit_cache.remove(id.counters);
    }

    /// Returns statistics since the start.
    pub fn stats(&self) -> SharedStoreStats {
        let calls = &*self.calls;
        let (table, replica_membership) = (calls.local_admission.table(), self.replica_membership());
        let ConnectionStats { servers, pools } = self.deployments.connection_stats();
        SharedStoreStats {
            charges: self.stats.requested(),
            calls: calls.calls_sent(),
            abandoned: self.stats.abandoned(),
            refunds_dropped: Some(self.deployments.refunds_dropped()),
            rejected_locally: calls.over_limit_cache.rejected_charge_count(),
            latency: self.stats.latency(),
            eventual: Some(EventualSharingStats {
                hits: table.stats(),
                descriptors: table.descriptor_count(),
                place: replica_membership.place(),
                max_replicas: replica_membership.max_replicas().get(),
                live_replicas: replica_membership.live_replicas().map(NonZeroU32::get),
            }),
            regions: self.region.as_ref().map(|region| region.stats()),
            servers,
            pools,
            commands: Vec::new(),
        }
    }

    /// Drops expired entries from one of `parts` equal parts of the tables in this process: the part with index `part`.
    pub fn sweep(&self, now: Time, part: usize, parts: usize) {
        let (at, calls) = (Instant::now(), &self.calls);
        calls.fallback.sweep(now, part, parts);
        calls.over_limit_cache.sweep(at, part, parts);
        calls.local_admission.sweep(at, part, parts);
    }

    /// Reports to `health` until it is dropped. The store is lost if a deployment has no server that takes charges.
    pub async fn report_health_repeatedly(&self, health: &StoreHealth) {
        let read = || {
            let lost = self.deployments.clients().find(|deployment| !deployment.has_available_node());
            HealthReading {
                is_lost: lost.is_some(),
                failure: lost.and_then(|deployment| deployment.last_failure()),
                misconfiguration: self.deployments.clients().find_map(|deployment| deployment.misconfiguration()),
                unserved_slots: self.deployments.clients().find_map(|deployment| deployment.unserved_slots()),
            }
        };
        health.record_repeatedly(read).await;
    }

    /// Returns leased hits, and hits of the region that it does not need, and releases the place of this process; takes up to 1 s. Later
    /// charges use neither the place nor these leases; what they lease themselves is not returned.
    pub async fn shutdown(&self) {
        let return_leases = async {
            if timeout(RETURN_LEASES_TIMEOUT, self.calls.return_leases()).await.is_err() {
                tracing::warn!("shutdown: not all leased hits could be returned to redis in time: they stay charged");
            }
        };
        let tell_used_hits = async {
            if let Some(region) = &self.region
                && timeout(RETURN_LEASES_TIMEOUT, region.tell_used_hits()).await.is_err()
            {
                tracing::warn!("shutdown: the global redis could not be told of all used hits in time");
            }
        };
        tokio::join!(return_leases, tell_used_hits, self.heartbeat.stop());
    }
}

/// Number of charges up to which a search is faster than a hash table.
const MAX_CHARGES_FOR_LINEAR_SEARCH: usize = 16;

/// Charges of one request on the same counters.
struct ChargeGroup {
    id: CounterSetId,
    charges: ChargeBatch,
    /// Index of each charge in the request.
    indices: SmallVec<[usize; 1]>,
}

impl ChargeGroup {
    /// Creates a group of one charge, which has this index in the request.
    fn of_single_charge(keys: &KeyScheme, charge: &Charge<'_>, mode: CommitMode, now: Time) -> Self {
        Self {
            id: keys.counter_set_id(charge, now),
            charges: SmallVec::from_iter([copy_charge(keys, charge, mode)]),
            indices: smallvec![0],
        }
    }
}

/// Groups the charges of a request, each group in their order.
fn group_charges(keys: &KeyScheme, charges: &[Charge<'_>], mode: CommitMode, now: Time) -> SmallVec<[ChargeGroup; 2]> {
    let mut groups: SmallVec<[ChargeGroup; 2]> = SmallVec::with_capacity(charges.len());
    let mut group_of = HashMap::new();
    for (index, charge) in charges.iter().enumerate() {
        let id = keys.counter_set_id(charge, now);
        let owned = copy_charge(keys, charge, mode);
        let known = if charges.len() <= MAX_CHARGES_FOR_LINEAR_SEARCH {
            groups.iter().rposition(|group| group.id.counters == id.counters)
        } else {
            group_of.get(&id.counters).copied()
        };
        match known.filter(|&known| groups[known].charges.len() < MAX_CHARGES_PER_CALL) {
            Some(known) => {
                groups[known].charges.push(owned);
                groups[known].indices.push(index);
            }
            None => {
                if charges.len() > MAX_CHARGES_FOR_LINEAR_SEARCH {
                    group_of.insert(id.counters, groups.len());
                }
                let charges = SmallVec::from_iter([owned]);
                groups.push(ChargeGroup { id, charges, indices: smallvec![index] });
            }
        }
    }
    groups
}

/// Copies a charge, so that a call can outlive its request.
fn copy_charge(keys: &KeyScheme, charge: &Charge<'_>, mode: CommitMode) -> OwnedCharge {
    let counters: SmallVec<[OwnedCounter; 1]> = charge
        .counters
        .iter()
        .map(|counter| OwnedCounter {
            limit: keys.limit_as_counted(counter.limit),
            shadow: counter.shadow,
            quota: counter.quota,
            tag: counter.tag,
        })
        .collect();
    // If no limit delays, the longest delay must not make equal charges look different.
    let may_delay = counters.iter().any(|counter| counter.limit.max_wait_us() > 0);
    let max_delay_us = if may_delay { charge.request.max_delay_us } else { 0 };
    let request = ChargeRequest { max_delay_us, ..charge.request };
    let (dry_run, slot) = (mode == CommitMode::DryRun, charge.slot.copied().map(Box::new));
    OwnedCharge { dry_run, slot, ..OwnedCharge::new(counters, request) }
}
