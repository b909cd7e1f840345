//! Redis deployments that hold the counters, and the choice between them.

use std::sync::Arc;

use super::incrby::refund_script_support::RefundScriptSupport;
use super::probe::{CounterProbe, ProbeKind};
use crate::limit::Limit;
use crate::limit::charge::Charge;
use crate::limit::period::Unit;
use crate::settings::counters::KeyFormat;
use crate::settings::redis::RedisSettings;
use crate::settings::redis::deployment::DeploymentSettings;
use crate::store::client::redis::connect_options::ConnectOptions;
use crate::store::client::redis::deployment::{Deployment, DeploymentStats};
use crate::store::client::redis::deployment_context::DeploymentOptions;
use crate::store::client::redis::server_clock::ClockJumps;
use crate::store::stats::{PoolStats, StoreServerStats};

/// The deployment of `REDIS_URL`, and that of `REDIS_PERSECOND_URL` if it is set.
#[derive(Debug)]
pub(super) struct Deployments {
    pub(super) main: Arc<CounterDeployment>,
    pub(super) per_second: Option<Arc<CounterDeployment>>,
    /// Jumps of the clocks of all their servers.
    pub(super) clock_jumps: Arc<ClockJumps>,
}

/// Statistics of the servers that keep counters, and of the connections to them.
#[derive(Debug, Default)]
pub(super) struct ConnectionStats {
    pub(super) servers: Vec<StoreServerStats>,
    pub(super) pools: Vec<PoolStats>,
}

/// Deployment that holds counters, and its support of the refund script.
#[derive(Debug)]
pub(super) struct CounterDeployment {
    pub(super) client: Arc<Deployment>,
    pub(super) refunds: RefundScriptSupport,
}

impl Deployments {
    /// Starts to connect.
    pub(super) fn start(settings: &RedisSettings) -> Self {
        let clock_jumps = Arc::<ClockJumps>::default();
        let start = |deployment| {
            Arc::new(CounterDeployment {
                client: Arc::new(start_deployment(settings, deployment, Arc::clone(&clock_jumps))),
                refunds: RefundScriptSupport::default(),
            })
        };
        let (main, per_second) = (start(&settings.main), settings.per_second.as_ref().map(start));
        Self { main, per_second, clock_jumps }
    }

    /// Returns the clients of all deployments.
    pub(super) fn clients(&self) -> impl Iterator<Item = &Deployment> {
        self.iter().map(|deployment| &*deployment.client)
    }

    /// Returns the number of refunds that were dropped.
    pub(super) fn refunds_dropped(&self) -> u64 {
        self.iter().map(|deployment| deployment.refunds.dropped_refunds()).sum()
    }

    /// Returns the servers and the connections of all deployments.
    pub(super) fn connection_stats(&self) -> ConnectionStats {
        let main = ("redis_pool", Some(&self.main));
        let per_second = ("redis_per_second_pool", self.per_second.as_ref());
        let mut stats = ConnectionStats::default();
        for (name, deployment) in [main, per_second] {
            let Some(deployment) = deployment else { continue };
            let DeploymentStats { open_connection_count, opened_connections_total, nodes } = deployment.client.stats();
            let server = |(address, is_breaker_open)| StoreServerStats { address, is_breaker_open };
            stats.servers.extend(nodes.into_iter().map(server));
            stats.pools.push(PoolStats { name, open_connection_count, opened_connections_total });
        }
        stats
    }

    fn iter(&self) -> impl Iterator<Item = &CounterDeployment> {
        [&self.main].into_iter().chain(&self.per_second).map(|deployment| &**deployment)
    }

    /// Returns the deployment of a charge: that for limits per second, if its descriptor has no other limits and none
    /// that regions share. Only the main one has the identity of the region.
    pub(super) fn deployment_for(&self, charge: &Charge<'_>, is_global: bool) -> &Arc<CounterDeployment> {
        match &self.per_second {
            Some(per_second) if !is_global && charge.counters.iter().all(|counter| is_per_second(counter.limit)) => {
                per_second
            }
            Some(_) | None => &self.main,
        }
    }
}

fn is_per_second(limit: &Limit) -> bool {
    limit.period().unit() == Unit::Second && limit.period().multiplier() == 1
}

fn start_deployment(
    settings: &RedisSettings,
    deployment: &DeploymentSettings,
    clock_jumps: Arc<ClockJumps>,
) -> Deployment {
    let connect = ConnectOptions::new(deployment);
    let kind = match settings.key_format {
        KeyFormat::Tollkeeper => ProbeKind::Script,
        KeyFormat::Ratelimit => ProbeKind::Incrby,
    };
    let probe = CounterProbe::new(kind, &settings.key_prefix, connect.auth_setting());
    let options = DeploymentOptions {
        connections: deployment.connections.get(),
        call_timeout: settings.timeout,
        optional_commands: probe.optional_commands(),
        health_check: Box::new(probe),
        connect,
        clock_jumps,
    };
    Deployment::start(deployment.topology.clone(), options)
}
