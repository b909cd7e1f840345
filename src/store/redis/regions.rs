//! Limits over several regions: each region decides in its own Redis, from what the global Redis granted it.
//!
//! Decides: why regions together keep a global limit: the proof.
//!
//! # Terms
//!
//! - *Region*: replicas with one Redis, which decides their requests. n regions share a limit of L hits per period P.
//! - *Global Redis*: the one that all regions reach, slowly. *Global time* is that of the node that has the counter.
//! - *Reserve* r: the part that a region always has, floor(floor(L x `reserve`) / n). M = L - n x r is granted.
//! - *Grant*: hits of one window, or hits of a token bucket until a stated global time (*prepaid* hits).
//! - *Cut-off allowance*: hits per tumbling period of a region whose global time is unknown, or that is cut off.
//! - *Grant request*: a charge that leaves little opens it on the region's counter, and its process asks the global
//!   Redis. *Return*: unused hits of a grant go back.
//! - *Epoch*: time of the last reset of a limit, in global time.
//! - *Overshoot* O: L x `max_overshoot`.
//!
//! # Promise
//!
//! In any span of one period, all regions together admit at most what the algorithm could admit in a span of that
//! length, plus O. This holds for any delays, losses and partitions between the regions and the global Redis, for
//! processes and regions that stop, for clocks that are any time apart, drift by up to 500 ppm and jump, and for
//! regions that are removed, replaced or set up under a name in use. A step of a clock by a second or less makes a span
//! shorter by that. It excludes:
//!
//! - what a Redis loses in a failover or through eviction;
//! - what `on_region_loss` `local` and `allow` admit;
//! - the parts of a region whose Redis is copied, until the registry has found the copy, 25 s after both reported, or
//!   until the lease ends that a copy took along, if it is cut off;
//! - what processes admit that start in the first seconds after a jump of a clock forwards;
//! - regions that are moved to another global Redis or prefix while the others stay: both grant, and notices tell so.
//!
//! # Proof
//!
//! 1. *Global time is never wrong, only unknown.* A process knows the offset of each server's clock from its own as an
//!    interval: the server read its clock between sending and answer. The interval widens by 1000 ppm of the time
//!    since. Each call carries the difference of both intervals, and the times of the region's Redis between which it
//!    holds ([`calls`]). If the call runs at another time (a clock jumped, or another server answers), it knows
//!    nothing.
//! 2. *Windows.* The global Redis grants in window w what the algorithm admits of M
//!    ([`global_window`](crate::limit::algorithm::global_window)). A region admits a granted hit only while global time
//!    may lie in w; if it may lie in w + 1 too, the hit is also charged to the reserve of w + 1. Each window has its
//!    reserve once. So in every global window the regions admit at most what was granted for it plus n x r:
//!    - fixed_window: at most M + n x r = L.
//!    - sliding_window_counter: the granted hits are those of the algorithm under M; a span meets two windows, so the
//!      reserves add at most 2 x n x r, and the algorithm itself admits up to twice its limit in a span.
//! 3. *Token bucket.* The global Redis spends the tokens of a grant at once, from a bucket of rate M
//!    ([`global_bucket`](crate::limit::algorithm::global_bucket)). A region admits these hits only while global time is
//!    surely before their end, T after the grant. So in a span s the regions admit at most what that bucket grants in a
//!    span s + T. Its capacity is that of M less what refills in T, plus O / 4 at most. Beside it each region has a
//!    bucket of rate and capacity r, which refills up to the lower end of global time
//!    ([`region_bucket`](crate::limit::algorithm::region_bucket)): never twice, but of an uncertainty w at most
//!    r x w / P late. Its capacity is lowered by that, less r x P x O / 2L. So a span s admits at most the bucket plus
//!    L x s / P plus O / 2.
//! 4. *Allowances.* The cut-off allowance of `share` is floor(O / 4n) per tumbling period, of which a span meets two
//!    ([`CutOffAllowanceUse`](crate::limit::algorithm::region::CutOffAllowanceUse)). The processes of a
//!    region that lost its Redis have as many together ([`Fallback`](crate::store::fallback::Fallback)). So all regions
//!    have at most O, and of a token_bucket, where each is half of that, O / 2. A call at a time at which it cannot run
//!    has none, because absence of the counter is no proof that nothing was used.
//! 5. *A grant is used once.* The charge that leaves little opens a request, whose identity is its time at the region's
//!    Redis. The counter takes one answer to its open request
//!    ([`GrantCycle`](crate::limit::algorithm::region::GrantCycle)); a late, repeated or lost answer wastes hits that
//!    the global Redis counts as granted. If the asking process stops, another charge opens the next request after 3 s.
//!    So the region's Redis decides who asks.
//! 6. *Returns* are taken out of the region's counter before the global Redis takes them back, and only in their
//!    window.
//! 7. *Refunds* return at most what the region used of its reserve and of the current grant.
//! 8. *Rules that change.* Each call carries M and r by its own rules. Granted hits stay below the largest M, and the
//!    reserves below the largest n x r, so the largest limit within the span counts, and while regions load another
//!    `reserve`, the difference of both reserves too.
//! 9. *Leases* of eventual limits ([`eventual`](super::eventual)) are charged in the region's counter before any of
//!    their hits is admitted. There are no shares, and no leases while global time is unknown or the region is cut off.
//!    Those of a window or of prepaid hits end before these, so steps 2 and 3 hold. Those of a region's own tokens are
//!    admitted later by their life t at most: r x t / P is at most O / 4, and the uncertainty of step 3 gets O / 4.
//!    Unused ones of a window are returned before it may end, those of a bucket are lost. A refund leaves lent hits
//!    charged. After a reset lent hits are still admitted or returned, for 1.2 s at most.
//! 10. *Regions.* At any time, the regions that use their parts of a limit have one list, and each is one Redis
//!     ([`standing`]): a region uses them for the lease V after a report without a conflict, by a clock that is fast
//!     enough, and the registry knows of each Redis until when that may be, by a clock that is slow enough. Whoever has
//!     another list, or another Redis of the same name, waits for that time. A change of the list is followed by a
//!     period without parts, so no span has parts of two lists. A copy of a Redis is found by fencing tokens
//!     ([`registry`]). Grants need none of this: the global Redis counts them, whoever asks. Regions that it does not
//!     know have their part of M kept back, so that regions with several global Redis share M.
//! 11. *Jumps of clocks.* A grant by a global clock that jumped is discarded, and for a period nothing is requested and
//!     no grant used. What was granted before is then out of every span, so windows that repeat do no harm. A jump of a
//!     region's clock may let counters expire: the call that meets it gets nothing, and then the parts are unused for a
//!     period.
//! 12. *Lost data.* A region's Redis that is lost takes its grants and its reserve with it: absence grants nothing but
//!     the reserve of the window. What its failover forgets of a window's use may be admitted once more, as for a
//!     strict limit. What a failover of the global Redis forgets may be granted once more; with
//!     `TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS=1` a grant is used only after a replica has it.
//!
//! The arithmetic is pure: what counters of windows and of buckets share is in
//! [`region`](crate::limit::algorithm::region), and each has a file of its own beside it. The scripts in `lua/regions/`
//! do the same. [`GlobalGrantClient`] composes the parts that ask and answer.

pub mod calls;
pub mod registry;
pub mod standing;
pub mod region_notices;
mod heartbeat;
pub mod grant_encoding;
pub mod demand;
pub(super) mod grants;
pub mod resets;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use self::calls::{ClockOffsets, GLOBAL_REDIS_TIMEOUT, GlobalRedisHealthCheck, compute_global_view};
use self::grants::{GrantRequest, GrantRequestQueue, GrantWorker, UnusedHitReturner};
use self::heartbeat::RegionHeartbeat;
use self::region_notices::collect_region_notices;
use self::resets::{GlobalResetClient, RegionCounterToReset};
use self::standing::RegionStanding;
use super::deployments::Deployments;
use crate::limit::algorithm::region::{GlobalTimeAndStanding, RegionHitsByAllotment};
use crate::settings::redis::RedisSettings;
use crate::settings::redis::regions::RegionSettings;
use crate::store::client::connect::Network;
use crate::store::client::redis::connect::ConnectOptions;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::deployment_context::DeploymentOptions;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::node::Node;
use crate::store::client::redis::server_clock::{ClockJumps, InstantRange};
use crate::store::stats::{GrantCounts, RegionStats, ServerClockStats};

/// Longest time after sending for which a call's view of global time holds. A call that runs later has no view; one
/// that runs earlier allows for an unnoticed jump of this length.
const MAX_GLOBAL_TIME_VALIDITY: Duration = Duration::from_millis(250);

/// Client of the global Redis, and the standing of this region. Dropping it ends its tasks.
#[derive(Debug)]
pub struct GlobalGrantClient {
    settings: RegionSettings,
    /// Client of the global Redis.
    pub(super) client: Arc<Deployment>,
    region: Arc<Deployment>,
    standing: Arc<RegionStanding>,
    clock_jumps: Arc<ClockJumps>,
    counts: Arc<GrantCounts>,
    requests: GrantRequestQueue,
    returns: Arc<UnusedHitReturner>,
    resets: GlobalResetClient,
    heartbeat: AbortHandle,
    workers: [AbortHandle; 3],
}

impl Drop for GlobalGrantClient {
    fn drop(&mut self) {
        self.heartbeat.abort();
        self.workers.iter().for_each(AbortHandle::abort);
    }
}

impl GlobalGrantClient {
    /// Starts to connect and to report; `None` if there is only one region. Needs a tokio runtime.
    pub(super) fn start(settings: &RedisSettings, deployments: &Deployments, network: &Network) -> Option<Arc<Self>> {
        let regions = settings.regions.clone()?;
        let clock_jumps = Arc::clone(&deployments.clock_jumps);
        let global_clock_jumps = Arc::new(clock_jumps.for_other_deployment());
        let client = Arc::new(connect_to_global_redis(settings, &regions, network, global_clock_jumps));
        let region = Arc::clone(&deployments.main.client);
        let heartbeat = RegionHeartbeat::new(&regions, &settings.key_prefix, Arc::clone(&region), Arc::clone(&client));
        let standing = Arc::clone(&heartbeat.standing);
        let heartbeat = tokio::spawn(async move { heartbeat.run().await }).abort_handle();
        let counts = Arc::<GrantCounts>::default();
        let returns = Arc::new(UnusedHitReturner::new(Arc::clone(&client), Arc::clone(&region), Arc::clone(&counts)));
        let (requests, opened_requests) = GrantRequestQueue::new(Arc::clone(&counts));
        let worker = GrantWorker {
            global: Arc::clone(&client),
            region: Arc::clone(&region),
            settings: regions.clone(),
            standing: Arc::clone(&standing),
            counts: Arc::clone(&counts),
            returns: Arc::clone(&returns),
        };
        let answering = tokio::spawn(async move { worker.run(opened_requests).await }).abort_handle();
        let returning = Arc::clone(&returns);
        let returning = tokio::spawn(async move { returning.run().await }).abort_handle();
        let resets = GlobalResetClient::new(Arc::clone(&client), Arc::clone(&region), &settings.key_prefix);
        let following = resets.clone();
        let following = tokio::spawn(async move { following.apply_resets_repeatedly().await }).abort_handle();
        Some(Arc::new(Self {
            settings: regions,
            client,
            region,
            standing,
            clock_jumps,
            counts,
            requests,
            returns,
            resets,
            heartbeat,
            workers: [answering, returning, following],
        }))
    }

    /// Returns the view of the global Redis for a call on `region` that is sent and ends `within` a range. The counters
    /// have the same hash slot in both. `period_us` is the longest period of the limits.
    ///
    /// Takes no lock and allocates nothing.
    pub(super) fn view_for_call(
        &self,
        region: &Node,
        key_slot: impl FnOnce() -> u16,
        period_us: u64,
        within: InstantRange,
    ) -> GlobalTimeAndStanding {
        let within = InstantRange { until: within.until.min(within.from + MAX_GLOBAL_TIME_VALIDITY), ..within };
        let offsets = region.clock().offset(within).and_then(|region| {
            let global = self.client.clock_offset(key_slot, within)?;
            Some(ClockOffsets { region, global })
        });
        let view = offsets.map_or(GlobalTimeAndStanding::UNKNOWN, |offsets| compute_global_view(offsets, within));
        self.standing.restrict_view(view, period_us, within.from)
    }

    /// Returns true if this region may use its own part of limits with this period, in microseconds.
    pub(super) fn may_use_region_parts(&self, period_us: u64) -> bool {
        !self.standing.restrict_view(GlobalTimeAndStanding::UNKNOWN, period_us, Instant::now()).parts_unusable
    }

    /// Requests a grant in the background.
    pub(super) fn request_grant(&self, request: GrantRequest) {
        self.requests.push(request);
    }

    /// Counts hits that a call admitted.
    pub(super) fn count_admitted_hits(&self, admitted: RegionHitsByAllotment) {
        self.counts.add_used_hits(admitted);
    }

    /// Resets counters in the global Redis, and lets all regions follow.
    ///
    /// # Errors
    /// The global Redis failed.
    pub(super) async fn reset(&self, counters: &[RegionCounterToReset], deadline: Instant) -> Result<(), RedisError> {
        self.resets.reset(counters, deadline).await
    }

    /// Returns unused hits to the global Redis, because the process stops.
    pub(super) async fn return_unused_hits(&self) {
        self.returns.return_all_now().await;
    }

    /// Returns statistics of the regions.
    pub(super) fn stats(&self) -> RegionStats {
        let at = Instant::now();
        let clocks = [("region", &self.region), ("global", &self.client)];
        let clocks = clocks.into_iter().flat_map(|(deployment, client)| {
            client.nodes().into_iter().map(move |node| ServerClockStats {
                deployment,
                address: node.endpoint().to_string(),
                uncertainty_us: node
                    .clock()
                    .offset(InstantRange { from: at, until: at })
                    .map(|offset| offset.width_us()),
            })
        });
        RegionStats {
            region: self.settings.own_region_name().to_owned(),
            regions: self.settings.names.clone(),
            connected: self.standing.has_global_connection(at),
            us_since_answer: self.standing.us_since_global_answer(at),
            us_since_change: self.standing.findings().us_since_change(at),
            clocks: clocks.collect(),
            clock_jumps: self.clock_jumps.count(),
            grants: self.counts.totals(at),
            notices: collect_region_notices(&self.standing, at),
            misconfiguration: self.client.misconfiguration().map(|text| text.to_string()),
        }
    }
}

/// Starts to connect to the global Redis.
fn connect_to_global_redis(
    settings: &RedisSettings,
    regions: &RegionSettings,
    network: &Network,
    clock_jumps: Arc<ClockJumps>,
) -> Deployment {
    let global = &regions.global;
    let connect = ConnectOptions::for_distant_servers(global, network);
    let probe = GlobalRedisHealthCheck {
        prefix: settings.key_prefix.clone(),
        auth_setting: connect.auth_setting(),
        waits_for_replicas: regions.wait_replicas > 0,
    };
    let options = DeploymentOptions {
        connections: global.connections.get(),
        call_timeout: GLOBAL_REDIS_TIMEOUT,
        optional_commands: None,
        health_check: Box::new(probe),
        connect,
        clock_jumps,
    };
    Deployment::start(global.topology.clone(), options)
}
