//! Redis deployments that hold counters, and access to them.
//!
//! A deployment is the server, sentinel group or cluster that one `REDIS_URL` names. The types here are validated:
//! addresses, names and credentials only need to be used.

pub(crate) mod read;

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use siphasher::sip::SipHasher13;

use super::choices::KeyFormat;
use super::credentials::Credentials;
use super::endpoint::Endpoint;
use super::store_tls::StoreTls;

/// Counters in Redis, shared by all replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// Deployment of the counters.
    pub main: DeploymentSettings,
    /// Deployment of the counters of limits per second; `None` means `main`.
    pub per_second: Option<DeploymentSettings>,
    /// Regions that share limits with `scope: global`; `None` means that there is only one.
    pub regions: Option<RegionSettings>,
    /// Time limit of a call, 1 ms to 10 s.
    pub timeout: Duration,
    /// Number of replicas that share the limits while Redis is unavailable and each counts for itself; `None` means the
    /// number last seen.
    pub replicas: Option<NonZeroU32>,
    /// Maximum number of replicas that share an eventual limit, 1 to 1000.
    pub max_replicas: NonZeroU32,
    /// Approximate memory for descriptors with `consistency: eventual`, in bytes.
    pub eventual_bytes: usize,
    /// Prefix of all keys, at most 256 bytes.
    pub key_prefix: String,
    /// Format of keys.
    pub key_format: KeyFormat,
    /// Upper bound of the random time added to the TTL of keys in `KeyFormat::Ratelimit`, in whole seconds, at most a
    /// year.
    pub expiration_jitter: Duration,
    /// Cache of exceeded limits.
    pub over_limit_cache: OverLimitCacheSettings,
    /// `true` if the process is unhealthy without a connection.
    pub health_needs_connection: bool,
}

/// Cache of limits that Redis has just reported as exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimitCacheSettings {
    /// Memory of the cache, in bytes; 0 means no cache.
    pub capacity_bytes: usize,
    /// `true` if fixed windows that count rejected hits are cached too; hits rejected here are then not counted.
    pub caches_counting_windows: bool,
}

/// Regions that share limits, and the Redis that all of them reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionSettings {
    /// Index of this region in `names`.
    pub index: usize,
    /// Names of all regions in their order, 2 to 64, without duplicates.
    pub names: Vec<String>,
    /// Deployment that all regions reach.
    pub global: DeploymentSettings,
    /// Number of its replicas that must have a grant before it is used, 0 or 1.
    pub wait_replicas: u32,
}

impl RegionSettings {
    /// Returns the name of this region.
    pub fn name(&self) -> &str {
        &self.names[self.index]
    }

    /// Returns the number of this region.
    pub fn number(&self) -> u32 {
        region_number(self.name())
    }
}

/// Number of a region in the global Redis: a hash of its name, so it stays when the list of regions changes.
pub fn region_number(name: &str) -> u32 {
    let [_, _, _, _, number @ ..] = SipHasher13::new().hash(name.as_bytes()).to_be_bytes();
    u32::from_be_bytes(number)
}

/// One server, a primary with its replicas, or a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeploymentSettings {
    /// The variable that names it, for error messages.
    pub setting: &'static str,
    /// Its servers.
    pub topology: TopologySettings,
    /// Number of the database; 0 in a cluster.
    pub database: u8,
    /// Credentials for its servers.
    pub credentials: Credentials,
    /// TLS of connections; `None` means plaintext.
    pub tls: Option<StoreTls>,
    /// Connections to each node, at most 128.
    pub connections: NonZeroUsize,
    /// Time limit of a connection attempt, 1 ms to 1 h; responses do not wait for it.
    pub connect_timeout: Duration,
}

/// Kind and addresses of the servers of a deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopologySettings {
    /// One server.
    Single(Endpoint),
    /// A primary that sentinels monitor.
    Sentinel {
        /// Name of the primary at the sentinels.
        primary: String,
        /// At least one sentinel, over TCP.
        sentinels: Vec<Endpoint>,
        /// Credentials for the sentinels.
        credentials: Credentials,
    },
    /// A cluster, of which at least one node is known, over TCP.
    Cluster(Vec<Endpoint>),
}

/// Kind and addresses without credentials: `single host:port`.
impl fmt::Display for TopologySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, endpoints) = match self {
            Self::Single(endpoint) => ("single".to_owned(), std::slice::from_ref(endpoint)),
            Self::Sentinel { primary, sentinels, .. } => (format!("sentinel {primary}"), &**sentinels),
            Self::Cluster(endpoints) => ("cluster".to_owned(), &**endpoints),
        };
        f.write_str(&what)?;
        for (place, endpoint) in endpoints.iter().enumerate() {
            write!(f, "{}{endpoint}", if place == 0 { " " } else { "," })?;
        }
        Ok(())
    }
}
