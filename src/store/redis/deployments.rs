//! Redis deployments that hold the counters, the choice between them, and the health check of their servers: a charge
//! like those of the rules, on keys that expire.
//!
//! Decides: which descriptor goes to the per-second Redis (`deployment_for`).
//! Decides: which command probes Redis, and what it must accept (`CounterProbe`).

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::incrby::DroppedRefunds;
use super::key;
use super::script::{CallTime, encode_charges, script_for_countings};
use crate::base::clock::Time;
use crate::limit::algorithm::Algorithm;
use crate::limit::charge::{Charge, ChargeRequest};
use crate::limit::period::{Period, Unit};
use crate::limit::request::Hits;
use crate::limit::{Limit, LimitSpec};
use crate::settings::counters::KeyFormat;
use crate::settings::redis::RedisSettings;
use crate::settings::redis::deployment::DeploymentSettings;
use crate::store::charge::{OwnedCharge, OwnedCounter};
use crate::store::client::connect::Network;
use crate::store::client::redis::connect::ConnectOptions;
use crate::store::client::redis::deployment::{Deployment, DeploymentStats};
use crate::store::client::redis::deployment_context::DeploymentOptions;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::health_check::{CommandWords, HealthCheck, OptionalCommands};
use crate::store::client::server_status::ServerStatus;
use crate::store::stats::PoolStats;

/// The deployment of `REDIS_URL`, and that of `REDIS_PERSECOND_URL` if it is set.
#[derive(Debug)]
pub(super) struct Deployments {
    pub(super) main: Arc<CounterDeployment>,
    per_second: Option<Arc<CounterDeployment>>,
}

/// Statistics of the servers that keep counters, and of the connections to them.
#[derive(Debug, Default)]
pub(super) struct ConnectionStats {
    /// Each once, by address.
    pub(super) servers: Vec<ServerStatus>,
    pub(super) pools: Vec<PoolStats>,
}

/// Deployment that holds counters, and its number of dropped refunds.
#[derive(Debug)]
pub(super) struct CounterDeployment {
    pub(super) client: Arc<Deployment>,
    pub(super) dropped_refunds: DroppedRefunds,
}

impl Deployments {
    /// Starts to connect.
    pub(super) fn start(settings: &RedisSettings, network: &Network) -> Self {
        let start = |deployment| {
            Arc::new(CounterDeployment {
                client: Arc::new(start_deployment(settings, deployment, network)),
                dropped_refunds: DroppedRefunds::default(),
            })
        };
        let (main, per_second) = (start(&settings.main), settings.per_second.as_ref().map(start));
        Self { main, per_second }
    }

    /// Returns the clients of all deployments.
    pub(super) fn clients(&self) -> impl Iterator<Item = &Deployment> {
        self.iter().map(|deployment| &*deployment.client)
    }

    /// Returns the number of refunds that were dropped.
    pub(super) fn refunds_dropped(&self) -> u64 {
        self.iter().map(|deployment| deployment.dropped_refunds.total()).sum()
    }

    /// Returns the servers and the connections of all deployments.
    pub(super) fn connection_stats(&self) -> ConnectionStats {
        let main = ("redis_pool", Some(&self.main));
        let per_second = ("redis_per_second_pool", self.per_second.as_ref());
        let mut stats = ConnectionStats::default();
        for (name, deployment) in [main, per_second] {
            let Some(deployment) = deployment else { continue };
            let DeploymentStats { open_connection_count, opened_connections_total, servers } =
                deployment.client.stats();
            stats.servers.extend(servers);
            stats.pools.push(PoolStats { name, open_connection_count, opened_connections_total });
        }
        ServerStatus::merge_by_address(&mut stats.servers);
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

fn start_deployment(settings: &RedisSettings, deployment: &DeploymentSettings, network: &Network) -> Deployment {
    let connect = ConnectOptions::new(deployment, network);
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
    };
    Deployment::start(deployment.topology.clone(), options)
}

/// Commands that a health check tries: those that count the hits of most rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProbeKind {
    /// Scripts.
    Script,
    /// INCRBY and EXPIRE, for users and servers without scripts.
    Incrby,
}

/// Health check that charges hits.
#[derive(Debug)]
struct CounterProbe {
    kind: ProbeKind,
    prefix: String,
    /// Settings that hold the credentials, for messages.
    auth_setting: &'static str,
    /// Argument of the script.
    argument: Bytes,
}

/// Algorithms of the script: one that keeps numbers, and the one that keeps a list.
const PROBED_ALGORITHMS: [Algorithm; 2] = [Algorithm::FixedWindow, Algorithm::SlidingWindowLog];

/// Number of keys that a script must see together before calls share a command: a proxy over two servers has all of
/// them on one in one of 32 768 cases.
const MERGE_CHECK_KEY_COUNT: u32 = 16;

/// Lifetime of the key of an INCRBY probe, in seconds.
const PROBE_KEY_LIFETIME_S: &[u8] = b"60";

impl CounterProbe {
    /// Creates a probe that writes to keys with `prefix`.
    fn new(kind: ProbeKind, prefix: &str, auth_setting: &'static str) -> Self {
        let counters = PROBED_ALGORITHMS.map(|algorithm| {
            let period = Period::new(Unit::Second, 1).expect("a second is a period");
            let limit = Limit::new(&LimitSpec::new(algorithm, 1, period)).expect("so plain a limit is valid");
            OwnedCounter { limit, shadow: false, quota: false, tag: 0 }
        });
        let charge = OwnedCharge::new(counters.into_iter().collect(), ChargeRequest::new(Hits::Charge(1), 0));
        // No probed counter follows a calendar, which the time of this process would choose the window of.
        let argument = encode_charges(&[charge], CallTime::Server { about: Time::default() });
        Self { kind, prefix: prefix.to_owned(), auth_setting, argument }
    }

    /// Scripts, if most rules do not need them.
    fn optional_commands(&self) -> Option<OptionalCommands> {
        (self.kind == ProbeKind::Incrby).then(|| OptionalCommands {
            prefix: b"EVAL",
            consequence: "cannot count rules in redis other than plain fixed windows",
            advice: self.describe_script_requirements(),
        })
    }

    /// Permissions and server version that scripts need.
    fn describe_script_requirements(&self) -> String {
        format!(
            "the user ({}) needs `+eval +evalsha +time +get +set +setrange +pexpire +@list` on all keys that begin with \
             `{}tk1:`, and the server must be Redis 5.0 or newer, which lets a script read the time before it writes",
            self.auth_setting, self.prefix
        )
    }

    fn probe_key(&self, hash_tag: u32, name: &str) -> Bytes {
        let mut key: BytesMut = key::key_head(&self.prefix);
        key.extend_from_slice(format!("{hash_tag}}}:{name}").as_bytes());
        key.freeze()
    }
}

impl HealthCheck for CounterProbe {
    fn commands(&self, hash_tag: u32) -> Vec<CommandWords> {
        let word = Bytes::from_static;
        let key = self.probe_key(hash_tag, "probe");
        match self.kind {
            ProbeKind::Script => {
                let text = Bytes::from_static(script_for_countings(PROBED_ALGORITHMS.into_iter()).text.as_bytes());
                let log_key = self.probe_key(hash_tag, "probe_log");
                vec![vec![word(b"EVAL"), text, word(b"2"), key, log_key, self.argument.clone()]]
            }
            ProbeKind::Incrby => {
                vec![
                    vec![word(b"INCRBY"), key.clone(), word(b"1")],
                    vec![word(b"EXPIRE"), key, word(PROBE_KEY_LIFETIME_S)],
                ]
            }
        }
    }

    fn keys_for_merge_check(&self) -> Vec<Bytes> {
        match self.kind {
            ProbeKind::Script => (0..MERGE_CHECK_KEY_COUNT).map(|tag| self.probe_key(tag, "merge_probe")).collect(),
            ProbeKind::Incrby => Vec::new(),
        }
    }

    fn advice(&self, error: RedisError, text: &str) -> String {
        const WITHOUT_SCRIPTS: &str = "TOLLKEEPER_KEY_FORMAT=ratelimit counts plain fixed windows without scripts";
        match error {
            RedisError::Misconfigured if text.contains("non deterministic") => {
                format!(
                    "the server is too old: a script may read the time and then write from Redis 5.0 on; \
                     {WITHOUT_SCRIPTS}"
                )
            }
            RedisError::Misconfigured if text.contains("unknown command") => {
                format!("{text}: is it a sentinel? That wants REDIS_TYPE=sentinel; {WITHOUT_SCRIPTS}")
            }
            RedisError::Misconfigured if self.kind == ProbeKind::Script => {
                format!("{text}: {}; {WITHOUT_SCRIPTS}", self.describe_script_requirements())
            }
            RedisError::Misconfigured => {
                format!("{text}: the user ({}) needs `+ping +incrby +expire +get` on all keys", self.auth_setting)
            }
            RedisError::Unauthenticated => format!("{text}; look at {}", self.auth_setting),
            RedisError::Timeout | RedisError::Broken => error.to_string(),
            _ => format!("{error}: {text}"),
        }
    }
}
