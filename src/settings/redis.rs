//! Which Redis counters live in, and how it is reached.
//!
//! A deployment is what one `REDIS_URL` names: a server, a master that sentinels watch, or a cluster. What was written
//! is sorted out before it gets here, so that addresses, names and credentials only need to be used. Credentials are
//! never shown, not even to `Debug`: with one colon too many a password becomes half a user. Files are named, not read:
//! whoever connects reads them, each time.

use std::fmt;
use std::net::Ipv6Addr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use super::tls::File;
use super::value::Secret;

/// Counters in Redis, shared by all replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// Where counters are.
    pub main: DeploymentSettings,
    /// Where those of limits per second are; `None`: with the others.
    pub per_second: Option<DeploymentSettings>,
    /// The longest that a charge waits for Redis: 1 ms to 10 s.
    pub timeout: Duration,
    /// How many processes share the limits while Redis is away and each counts for itself; `None`: as many as were
    /// last seen alive.
    pub replicas: Option<NonZeroU32>,
    /// How many processes may have a share of an eventual limit: 1 to 1000.
    pub max_replicas: NonZeroU32,
    /// About how much memory is used for descriptors that are eventually consistent, in bytes.
    pub eventual_bytes: usize,
    /// What every key begins with; at most 256 bytes.
    pub key_prefix: String,
    /// How keys are written.
    pub key_format: KeyFormat,
    /// A counter in `KeyFormat::Ratelimit` outlives its window by a random time below this one, in whole seconds, at
    /// most a year; 0: by none.
    pub expiration_jitter: Duration,
    /// Refusals that are given again without asking.
    pub over_limit_cache: OverLimitCache,
    /// Whether the process is unhealthy without a connection.
    pub health_needs_connection: bool,
}

/// What this process keeps of refusals that Redis has just given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimitCache {
    /// What they may take, in bytes; 0: none is kept.
    pub capacity_bytes: usize,
    /// Whether fixed windows that count refused hits are kept too: what is refused here is then not counted.
    pub counting: bool,
}

/// One server, a master with its replicas, or a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeploymentSettings {
    /// The variable that names it, for messages.
    pub setting: &'static str,
    /// What it is, and where.
    pub topology: TopologySettings,
    /// The number of the database; 0 in a cluster.
    pub database: u8,
    /// What to authenticate with.
    pub credentials: Credentials,
    /// How connections are encrypted; `None`: not at all.
    pub tls: Option<Tls>,
    /// Connections to each node, at most 128.
    pub connections: NonZeroUsize,
    /// The longest that connecting takes, 1 ms to 1 h; no answer waits for it.
    pub dial_timeout: Duration,
}

/// What a deployment is, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopologySettings {
    /// One server.
    Single(Endpoint),
    /// A master that sentinels know.
    Sentinel {
        /// What they call it.
        master: String,
        /// Some of them, over TCP; at least one.
        sentinels: Vec<Endpoint>,
        /// What to authenticate with to them.
        credentials: Credentials,
    },
    /// A cluster: some of its nodes, over TCP; at least one.
    Cluster(Vec<Endpoint>),
}

/// What it is and where, without credentials: `single host:port`.
impl fmt::Display for TopologySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, endpoints) = match self {
            Self::Single(endpoint) => ("single".to_owned(), std::slice::from_ref(endpoint)),
            Self::Sentinel { master, sentinels, .. } => (format!("sentinel {master}"), &**sentinels),
            Self::Cluster(endpoints) => ("cluster".to_owned(), &**endpoints),
        };
        f.write_str(&what)?;
        for (place, endpoint) in endpoints.iter().enumerate() {
            write!(f, "{}{endpoint}", if place == 0 { " " } else { "," })?;
        }
        Ok(())
    }
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// On a port.
    Tcp {
        /// A name or an address; IPv6 without brackets.
        host: String,
        /// 1 at least.
        port: u16,
    },
    /// On a unix socket at this path.
    Unix(PathBuf),
}

/// `host:port`, `[ipv6]:port` or the path.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.parse::<Ipv6Addr>().is_ok() => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// What to authenticate with.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// Nothing.
    None,
    /// What the environment says.
    Inline {
        /// The user; `None`: the default one.
        user: Option<String>,
        /// Its password.
        password: Secret,
    },
    /// What this file says at the time: `password` or `user:password`, with or without a line break at the end.
    File(PathBuf),
}

impl Credentials {
    /// `password`, or `user:password` parted at the first colon. `None` if there is neither.
    pub fn parse(text: &str) -> Option<Self> {
        let (user, password) = text.split_once(':').unwrap_or(("", text));
        let user = (!user.is_empty()).then(|| user.to_owned());
        // A user may need no password.
        (user.is_some() || !password.is_empty()).then(|| Self::Inline { user, password: Secret::new(password) })
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Inline { password, .. } => write!(f, "Inline({password:?})"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

/// How connections are encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Authorities to trust besides those of the system.
    pub ca: Option<File>,
    /// The certificate to show, and its private key.
    pub client: Option<(File, File)>,
    /// Whether a trusted certificate may be for another name.
    pub skip_hostname: bool,
}

/// How keys are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyFormat {
    /// As tollkeeper does, for every algorithm.
    Tollkeeper,
    /// Strict fixed windows as envoyproxy/ratelimit does, byte for byte; the rest as tollkeeper does.
    Ratelimit,
}
