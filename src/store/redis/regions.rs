//! Limits over several regions: each region decides in its own Redis, from its part of a limit and from a pool of hits
//! that it holds at the global Redis.
//!
//! [`region_pool`](crate::limit::algorithm::region_pool) has the arithmetic, and the reason why regions together keep a limit.
//! Terms: *global Redis*: the one that all regions reach, slowly. *Part*: what a region counts alone, the reserve; more
//! while it is cut off. No decision waits for the global Redis.
//!
//! What regions admit together beyond the algorithm's limit L, with overshoot O = L x `max_overshoot`:
//!
//! - `on_region_loss: share` makes the part of a cut-off region larger by O / 4n, a token_bucket's by O / 8n. A span of
//!   one period meets two windows, and a region may lose the global Redis and then its own, whose processes then have
//!   as many together ([`Fallback`](crate::store::fallback::Fallback)): O in all, of a token_bucket O / 2.
//! - Leases of eventual limits ([`eventual`](super::eventual)) are charged in the region before any of their hits is
//!   admitted. Those of windows end with the window that counts them, here and in the global Redis. Those of a
//!   token_bucket live so long that at most O / 4 refills meanwhile.
//!
//! Decides: why regions together keep a global limit: the proof, with `region_pool`.

pub(super) mod calls;
pub mod exchange;
mod heartbeat;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use self::calls::{GLOBAL_REDIS_TIMEOUT, GlobalRedisHealthCheck};
use self::exchange::{PendingRequest, PoolExchange};
use self::heartbeat::RegionHeartbeat;
use super::global_answers::GlobalAnswers;
use super::key::{global_key, holds_key};
use super::script::PoolEffects;
use crate::limit::RegionConnection;
use crate::limit::algorithm::state::State;
use crate::settings::redis::RedisSettings;
use crate::settings::redis::regions::RegionSettings;
use crate::store::charge::OwnedCharge;
use crate::store::client::connect::Network;
use crate::store::client::redis::connect::ConnectOptions;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::deployment_context::DeploymentOptions;
use crate::store::client::redis::error::RedisError;
use crate::store::redis::deployments::Deployments;
use crate::store::stats::{RegionNotice, RegionStats};

/// Client of the global Redis. Dropping it ends its tasks.
#[derive(Debug)]
pub struct RegionClient {
    settings: RegionSettings,
    /// Client of the global Redis.
    pub(super) client: Arc<Deployment>,
    answers: Arc<GlobalAnswers>,
    exchange: Arc<PoolExchange>,
    heartbeat: Arc<RegionHeartbeat>,
    tasks: [AbortHandle; 3],
}

impl Drop for RegionClient {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl RegionClient {
    /// Starts to connect and to report; `None` if there is only one region. Needs a tokio runtime.
    pub(super) fn start(settings: &RedisSettings, deployments: &Deployments, network: &Network) -> Option<Arc<Self>> {
        let regions = settings.regions.clone()?;
        let client = Arc::new(connect_to_global_redis(settings, &regions, network));
        let answers = Arc::new(GlobalAnswers::new());
        let heartbeat = RegionHeartbeat::new(&regions, &settings.key_prefix, Arc::clone(&client), Arc::clone(&answers));
        let heartbeat = Arc::new(heartbeat);
        let region = Arc::clone(&deployments.main.client);
        let (exchange, requests) = PoolExchange::new(&regions, Arc::clone(&client), region, Arc::clone(&answers));
        let exchange = Arc::new(exchange);
        let (reporting, answering, checking) = (Arc::clone(&heartbeat), Arc::clone(&exchange), Arc::clone(&exchange));
        let tasks = [
            tokio::spawn(async move { reporting.run().await }).abort_handle(),
            tokio::spawn(async move { answering.run_requests(requests).await }).abort_handle(),
            tokio::spawn(async move { checking.run_checks().await }).abort_handle(),
        ];
        Some(Arc::new(Self { settings: regions, client, answers, exchange, heartbeat, tasks }))
    }

    /// Answers of the global Redis.
    pub(super) const fn answers(&self) -> &Arc<GlobalAnswers> {
        &self.answers
    }

    /// Records the effects of a call, and sends the requests that it opened, in the background.
    ///
    /// `charge` is any charge of the call; keys and states are those of its counters.
    pub(super) fn record_effects(&self, keys: &[Bytes], charge: &OwnedCharge, states: &[State], effects: &PoolEffects) {
        self.exchange.counts().add_used_hits(effects.taken);
        for &index in &effects.requesting {
            if let Some(counter) = states[index].pool() {
                let pool_key = pool_key_of(keys, charge, index);
                let request = PendingRequest { pool_key, limit: charge.counters[index].limit, pool: counter.pool };
                self.exchange.push(request);
            }
        }
    }

    /// Deletes the counters of global limits in the global Redis. What other regions hold stays with them, and counts
    /// when they tell it.
    ///
    /// # Errors
    /// The global Redis failed, or its user may not run UNLINK.
    pub(super) async fn reset(
        &self,
        keys: &[Bytes],
        charge: &OwnedCharge,
        deadline: Instant,
    ) -> Result<(), RedisError> {
        for (key, _) in keys.iter().zip(&charge.counters).filter(|(_, counter)| counter.limit.is_counted_in_region()) {
            let key = global_key(key);
            let holds = holds_key(&key);
            let mut target = self.client.target_node(&key, deadline).await?;
            while let Err(error) = target.node.call(&[b"UNLINK", &key, &holds], target.asking, deadline).await {
                target.follow_redirection(error)?;
            }
        }
        Ok(())
    }

    /// Tells what was used and gives back what is not needed, because the process stops.
    pub(super) async fn tell_used_hits(&self) {
        self.exchange.check_all_now().await;
    }

    /// Returns statistics of the regions.
    pub(super) fn stats(&self) -> RegionStats {
        let at = Instant::now();
        let misconfigured =
            self.client.misconfiguration().map(|text| RegionNotice::GlobalRedisMisconfigured(text.to_string()));
        RegionStats {
            region: self.settings.own_region_name().to_owned(),
            regions: self.settings.names.clone(),
            connected: self.answers.connection(at) == RegionConnection::Connected,
            since_answer: self.answers.us_since_answer(at).map(Duration::from_micros),
            grants: self.exchange.counts().totals(at),
            notices: self.heartbeat.notices(at).into_iter().chain(misconfigured).collect(),
        }
    }
}

/// Returns the key of the pool of a counter; those of a call are the last of its keys.
fn pool_key_of(keys: &[Bytes], charge: &OwnedCharge, index: usize) -> Bytes {
    let after = charge.counters[index..].iter().filter(|counter| counter.limit.is_counted_in_region()).count();
    keys[keys.len() - after].clone()
}

/// Starts to connect to the global Redis.
fn connect_to_global_redis(settings: &RedisSettings, regions: &RegionSettings, network: &Network) -> Deployment {
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
    };
    Deployment::start(global.topology.clone(), options)
}
