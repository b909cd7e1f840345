//! Counters in Redis: deployments, credentials, TLS and replicas.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use crate::settings::choices::{DeploymentKind, KeyFormat, SocketKind};
use crate::settings::condition::Condition;
use crate::settings::secret::Secret;
use crate::settings::setting::{Support, settings};
use crate::settings::value::number::{DurationRange, IntRange};
use crate::settings::value::size::{ByteSize, SizeRange};
use crate::settings::value::text::SecretUrl;

const CONNECT_TIMEOUT: DurationRange = DurationRange::new(Duration::from_millis(1), Duration::from_secs(3600));
const STORE_TIMEOUT: DurationRange = DurationRange::new(Duration::from_millis(1), Duration::from_secs(10));
const DEFAULT_MAX_REPLICAS: NonZeroU32 = NonZeroU32::new(16).expect("it is not 0");

const PIPELINED: Support =
    Support::NoEffect { when: Condition::IsNot("0"), why: "commands are pipelined without waiting" };
const ALL_AT_ONCE: Support =
    Support::NoEffect { when: Condition::IsNot("1"), why: "all nodes are always called in parallel" };
const NO_POOL: Support =
    Support::NoEffect { when: Condition::IsNot("WAIT"), why: "connections are shared, so none is ever missing" };
const NO_LONGER_READ: Support =
    Support::NoEffect { when: Condition::Set, why: "envoyproxy/ratelimit no longer reads it either" };

const fn starts_anyway(default: &'static str) -> Support {
    let why = "the start does not wait for Redis, and connection attempts never end";
    Support::NoEffect { when: Condition::IsNot(default), why }
}

settings! { "Counters in Redis";
    REDIS_SOCKET_TYPE: SocketKind = SocketKind::Unix, "kind of address in REDIS_URL of a single server: host:port or path"
        .differs(Condition::Never, "not set, the form of REDIS_URL decides");
    REDIS_TYPE: DeploymentKind = DeploymentKind::Single, "kind of deployment";
    REDIS_URL: SecretUrl = "/var/run/nutcracker/ratelimit.sock",
        "host:port, path or redis://user:password@host:port/db; cluster: a list; sentinel: primary,host:port,..."
        .differs(Condition::Never, "rediss:// is TLS; nodes of a cluster that are found later get the user and password too");
    REDIS_POOL_SIZE: NonZeroUsize = NonZeroUsize::MIN, "connections to each node"
        .differs(Condition::Never, "the default there is 10; one connection carries all calls; the maximum is 128");
    REDIS_AUTH: Option<Secret> = None, "password or user:password; takes precedence over REDIS_URL";
    TOLLKEEPER_REDIS_AUTH_FILE: Option<PathBuf> = None,
        "file that holds REDIS_AUTH; read at each connection attempt and when it changes";
    REDIS_TLS: bool = false, "connect over TLS";
    REDIS_TLS_CLIENT_CERT: Option<PathBuf> = None, "client certificate, PEM file; for both deployments";
    REDIS_TLS_CLIENT_KEY: Option<PathBuf> = None, "private key of the client certificate, PEM file";
    REDIS_TLS_CACERT: Option<PathBuf> = None, "CA certificates beside the system's, PEM file; for both deployments";
    REDIS_TLS_SKIP_HOSTNAME_VERIFICATION: bool = false, "accept a trusted certificate for another name";
    REDIS_TIMEOUT: Duration = Duration::from_secs(10), "time limit of a connection attempt; no response waits for it"
        .allowed(CONNECT_TIMEOUT);
    TOLLKEEPER_STORE_TIMEOUT: Duration = Duration::from_millis(15),
        "time limit of a call to Redis; then the rule's on_store_error or TOLLKEEPER_ON_STORE_ERROR applies"
        .allowed(STORE_TIMEOUT);
    TOLLKEEPER_REPLICAS: Option<NonZeroU32> = None,
        "divisor of limits while Redis is unavailable; not set: the number of replicas last seen"
        .allowed(IntRange::new(1, 100_000));
    TOLLKEEPER_MAX_REPLICAS: NonZeroU32 = DEFAULT_MAX_REPLICAS,
        "maximum number of replicas that share an eventual limit; must be equal in all replicas"
        .allowed(IntRange::new(1, 1000));
    TOLLKEEPER_KEY_FORMAT: KeyFormat = KeyFormat::Tollkeeper,
        "format of keys; ratelimit: strict fixed windows are shared with envoyproxy/ratelimit";
    TOLLKEEPER_EVENTUAL_BYTES: ByteSize = 64 << 20,
        "approximate memory for descriptors with `consistency: eventual`; further ones are counted strictly"
        .allowed(SizeRange::new(0, 1 << 40));
    REDIS_HEALTH_CHECK_ACTIVE_CONNECTION: bool = false, "report unhealthy without a connection to Redis";
    REDIS_SENTINEL_AUTH: Option<Secret> = None, "password or user:password for the sentinels";
    TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE: Option<PathBuf> = None, "file that holds REDIS_SENTINEL_AUTH";
    REDIS_PIPELINE_WINDOW: Duration = Duration::ZERO, "time to gather commands for a pipeline" .support(PIPELINED);
    REDIS_PIPELINE_LIMIT: i64 = 0, "number of commands in a pipeline" .support(PIPELINED);
    REDIS_CLUSTER_PIPELINE_PARALLELISM: i64 = 1, "number of nodes called in parallel"
        .allowed(IntRange::at_least(0)) .support(ALL_AT_ONCE);
    REDIS_POOL_ON_EMPTY_BEHAVIOR: String = "WAIT", "WAIT, CREATE or ERROR" .support(NO_POOL);
    REDIS_STARTUP_INITIAL_INTERVAL: Duration = Duration::from_secs(1), "first delay between connection attempts at start"
        .support(starts_anyway("1s"));
    REDIS_STARTUP_MAX_INTERVAL: Duration = Duration::from_secs(30), "longest delay between connection attempts at start"
        .support(starts_anyway("30s"));
    REDIS_STARTUP_MAX_ELAPSED_TIME: Duration = Duration::ZERO, "time limit of connection attempts at start; 0 means none"
        .support(starts_anyway("0"));
    REDIS_CLOSE_CONNECTION_ON_READONLY_ERROR: bool = false, "reconnect when Redis reports that it is read-only"
        .no_effect(Condition::True, "it is always so");
    REDIS_PERSECOND: bool = false, "count limits per second in another Redis";
    REDIS_PERSECOND_SOCKET_TYPE: SocketKind = SocketKind::Unix, "REDIS_SOCKET_TYPE for limits per second"
        .differs(Condition::Never, "not set, the form of REDIS_PERSECOND_URL decides");
    REDIS_PERSECOND_TYPE: DeploymentKind = DeploymentKind::Single, "REDIS_TYPE for limits per second";
    REDIS_PERSECOND_URL: SecretUrl = "/var/run/nutcracker/ratelimitpersecond.sock", "REDIS_URL for limits per second"
        .differs(Condition::Never, "the same as for REDIS_URL");
    REDIS_PERSECOND_POOL_SIZE: NonZeroUsize = NonZeroUsize::MIN, "REDIS_POOL_SIZE for limits per second"
        .differs(Condition::Never, "the same as for REDIS_POOL_SIZE");
    REDIS_PERSECOND_AUTH: Option<Secret> = None, "REDIS_AUTH for limits per second";
    TOLLKEEPER_REDIS_PERSECOND_AUTH_FILE: Option<PathBuf> = None, "TOLLKEEPER_REDIS_AUTH_FILE for limits per second";
    REDIS_PERSECOND_TLS: bool = false, "REDIS_TLS for limits per second";
    REDIS_PERSECOND_TIMEOUT: Duration = Duration::from_secs(10), "REDIS_TIMEOUT for limits per second"
        .allowed(CONNECT_TIMEOUT);
    REDIS_PERSECOND_SENTINEL_AUTH: Option<Secret> = None, "REDIS_SENTINEL_AUTH for limits per second";
    TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE: Option<PathBuf> = None,
        "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE for limits per second";
    REDIS_PERSECOND_PIPELINE_WINDOW: Duration = Duration::ZERO, "REDIS_PIPELINE_WINDOW for limits per second"
        .support(PIPELINED);
    REDIS_PERSECOND_PIPELINE_LIMIT: i64 = 0, "REDIS_PIPELINE_LIMIT for limits per second" .support(PIPELINED);
    REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM: i64 = 1, "REDIS_CLUSTER_PIPELINE_PARALLELISM for limits per second"
        .allowed(IntRange::at_least(0)) .support(ALL_AT_ONCE);
    REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR: String = "WAIT", "REDIS_POOL_ON_EMPTY_BEHAVIOR for limits per second"
        .support(NO_POOL);
    REDIS_POOL_ON_EMPTY_WAIT_DURATION: String = "", "removed from envoyproxy/ratelimit" .support(NO_LONGER_READ);
    REDIS_PERSECOND_POOL_ON_EMPTY_WAIT_DURATION: String = "", "removed from envoyproxy/ratelimit"
        .support(NO_LONGER_READ);
}
