//! Counters in Redis: deployments, credentials, TLS and replicas.
//!
//! A setting that nothing reads, such as a certificate without TLS, is only ignored: an environment that works
//! elsewhere must not fail here because of it.
//!
//! Decides: `TOLLKEEPER_STORE_TIMEOUT`, `REDIS_TIMEOUT`; the default `REDIS_POOL_SIZE`; password of the sentinels.
//! Decides: health by `REDIS_HEALTH_CHECK_ACTIVE_CONNECTION`.

pub mod addresses;
pub mod deployment;
pub mod regions;

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use self::addresses::{AddressVariables, DeploymentKind, SocketKind};
use self::deployment::{DeploymentSettings, DeploymentVariables};
use self::regions::{
    RegionSettings, TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE, TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_AUTH,
    TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_CACHE_NAME, TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_REGION,
    TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_SERVERLESS, TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_USER_ID,
    TOLLKEEPER_GLOBAL_REDIS_IDENTITY, TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE, TOLLKEEPER_GLOBAL_REDIS_TYPE,
    TOLLKEEPER_GLOBAL_REDIS_URL,
};
use super::cloud_identity::{IdentityVariables, TokenCloud};
use super::counters::{KeyFormat, OverLimitCacheSettings, read_expiration_jitter, read_key_prefix};
use super::credentials::CredentialVariables;
use super::secret::Secret;
use super::setting::settings;
use super::tls::StoreTlsVariables;
use super::value::number::ByteSize;
use super::value::text::SecretUrl;
use super::values::Values;

const PIPELINED: &str = "commands are pipelined without waiting";
const PARALLEL: &str = "all nodes are always called in parallel";
const NO_POOL: &str = "connections are shared, so none is ever missing";
const OBSOLETE: &str = "envoyproxy/ratelimit no longer reads it either";
const START_NEVER_WAITS: &str = "the start does not wait for Redis, and connection attempts never end";

settings! { "Counters in Redis", only read "with counters in Redis";
    REDIS_SOCKET_TYPE: SocketKind = "unix", "address of a single server: host:port or path"
        .differs("not set, the form of REDIS_URL decides") .often_set();
    REDIS_TYPE: DeploymentKind = "SINGLE", "kind of deployment" .often_set();
    REDIS_URL: SecretUrl = "/var/run/nutcracker/ratelimit.sock",
        "host:port, path or redis://user:password@host:port/db; cluster: a list; sentinel: primary,host:port,..."
        .differs("rediss:// is TLS; all nodes of a cluster get the user and password")
        .often_set();
    REDIS_POOL_SIZE: NonZeroUsize = "1", "connections to each node"
        .differs("10 there; one carries all calls; at most 128");
    REDIS_AUTH: Option<Secret> = "", "password or user:password; takes precedence over REDIS_URL";
    REDIS_AUTH_FILE: Option<PathBuf> = "",
        "file that holds REDIS_AUTH; reloaded when it changes"
        .often_set();
    REDIS_AWS_IAM_AUTH: bool = "false", "log in to ElastiCache or MemoryDB as an IAM user";
    REDIS_AWS_IAM_CACHE_NAME: String = "", "name of the cache or cluster"
        .only_read("with counters in Redis and REDIS_AWS_IAM_AUTH=true");
    REDIS_AWS_IAM_USER_ID: String = "", "id of the user"
        .only_read("with counters in Redis and REDIS_AWS_IAM_AUTH=true");
    REDIS_AWS_IAM_REGION: String = "", "region of the cache; empty: AWS_REGION"
        .only_read("with REDIS_AWS_IAM_AUTH=true or REDIS_PERSECOND_AWS_IAM_AUTH=true");
    REDIS_AWS_IAM_SERVERLESS: bool = "false", "the cache is serverless"
        .only_read("with counters in Redis and REDIS_AWS_IAM_AUTH=true");
    TOLLKEEPER_REDIS_IDENTITY: TokenCloud = "none",
        "log in with tokens of this cloud: Memorystore, Azure Managed Redis";
    REDIS_TLS: bool = "false", "connect over TLS" .often_set();
    REDIS_TLS_CLIENT_CERT: Option<PathBuf> = "", "client certificate (PEM), also for REDIS_PERSECOND"
        .only_read("if a connection to Redis has TLS (REDIS_TLS=true, or rediss:// in its URL)");
    REDIS_TLS_CLIENT_KEY: Option<PathBuf> = "", "private key of the client certificate (PEM)"
        .only_read("if a connection to Redis has TLS (REDIS_TLS=true, or rediss:// in its URL)");
    REDIS_TLS_CACERT: Option<PathBuf> = "", "CA certificates beside the system's (PEM), also for REDIS_PERSECOND"
        .only_read("if a connection to Redis has TLS (REDIS_TLS=true, or rediss:// in its URL)")
        .often_set();
    REDIS_TLS_SKIP_HOSTNAME_VERIFICATION: bool = "false", "accept a trusted certificate for another name"
        .only_read("if a connection to Redis has TLS (REDIS_TLS=true, or rediss:// in its URL)");
    REDIS_TIMEOUT: Duration = "10s", "time limit of a connection attempt; no response waits for it"
        .within("1ms to 1h");
    TOLLKEEPER_STORE_TIMEOUT: Duration = "15ms",
        "time limit of a call to Redis; then on_store_error applies"
        .within("1ms to 10s") .only_read("with counters in Redis or memcached") .often_set();
    TOLLKEEPER_REPLICAS: Option<NonZeroU32> = "",
        "divisor of limits while Redis is away; not set: the replicas last seen"
        .within("1 to 100000") .only_read("with counters in Redis or memcached");
    TOLLKEEPER_MAX_REPLICAS: NonZeroU32 = "16",
        "most replicas that share an eventual limit; must be equal in all replicas"
        .within("1 to 1000");
    TOLLKEEPER_KEY_FORMAT: KeyFormat = "tollkeeper",
        "ratelimit: strict fixed windows are shared with envoyproxy/ratelimit"
        .only_read("with counters in Redis or memcached");
    TOLLKEEPER_EVENTUAL_BYTES: ByteSize = "64MiB",
        "memory for eventual descriptors; further ones are counted strictly"
        .within("0 to 1024GiB");
    TOLLKEEPER_TABLE_BYTES: ByteSize = "32MiB",
        "memory for the known rows of each table in Redis"
        .within("1MiB to 1024GiB");
    REDIS_HEALTH_CHECK_ACTIVE_CONNECTION: bool = "false", "report unhealthy without a connection to Redis";
    REDIS_SENTINEL_AUTH: Option<Secret> = "", "password or user:password for the sentinels"
        .only_read("with counters in Redis and REDIS_TYPE=sentinel");
    TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE: Option<PathBuf> = "", "file that holds REDIS_SENTINEL_AUTH"
        .only_read("with counters in Redis and REDIS_TYPE=sentinel");
    REDIS_PIPELINE_WINDOW: Duration = "0", "time to gather commands for a pipeline" .without_effect(PIPELINED);
    REDIS_PIPELINE_LIMIT: i64 = "0", "number of commands in a pipeline" .without_effect(PIPELINED);
    REDIS_CLUSTER_PIPELINE_PARALLELISM: i64 = "1", "number of nodes called in parallel"
        .within("0 or more") .without_effect(PARALLEL);
    REDIS_POOL_ON_EMPTY_BEHAVIOR: String = "WAIT", "WAIT, CREATE or ERROR" .without_effect(NO_POOL);
    REDIS_STARTUP_INITIAL_INTERVAL: Duration = "1s", "first delay between connection attempts at start"
        .without_effect(START_NEVER_WAITS);
    REDIS_STARTUP_MAX_INTERVAL: Duration = "30s", "longest delay between connection attempts at start"
        .without_effect(START_NEVER_WAITS);
    REDIS_STARTUP_MAX_ELAPSED_TIME: Duration = "0", "time limit of connection attempts at start; 0 means none"
        .without_effect(START_NEVER_WAITS);
    REDIS_CLOSE_CONNECTION_ON_READONLY_ERROR: bool = "false", "reconnect when Redis reports that it is read-only"
        .without_effect("it is always so");
    REDIS_PERSECOND: bool = "false", "count limits per second in another Redis";
    REDIS_PERSECOND_SOCKET_TYPE: SocketKind = "unix", "REDIS_SOCKET_TYPE for limits per second"
        .differs("not set, the form of REDIS_PERSECOND_URL decides")
        .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_TYPE: DeploymentKind = "SINGLE", "REDIS_TYPE for limits per second"
        .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_URL: SecretUrl = "/var/run/nutcracker/ratelimitpersecond.sock", "REDIS_URL for limits per second"
        .differs("the same as for REDIS_URL") .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_POOL_SIZE: NonZeroUsize = "1", "REDIS_POOL_SIZE for limits per second"
        .differs("the same as for REDIS_POOL_SIZE") .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_AUTH: Option<Secret> = "", "REDIS_AUTH for limits per second"
        .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_AUTH_FILE: Option<PathBuf> = "", "REDIS_AUTH_FILE for limits per second"
        .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_AWS_IAM_AUTH: bool = "false", "REDIS_AWS_IAM_AUTH for limits per second"
        .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_AWS_IAM_CACHE_NAME: String = "", "REDIS_AWS_IAM_CACHE_NAME for limits per second"
        .only_read("with REDIS_PERSECOND=true and REDIS_PERSECOND_AWS_IAM_AUTH=true");
    REDIS_PERSECOND_AWS_IAM_USER_ID: String = "", "REDIS_AWS_IAM_USER_ID for limits per second"
        .only_read("with REDIS_PERSECOND=true and REDIS_PERSECOND_AWS_IAM_AUTH=true");
    REDIS_PERSECOND_AWS_IAM_SERVERLESS: bool = "false", "REDIS_AWS_IAM_SERVERLESS for limits per second"
        .only_read("with REDIS_PERSECOND=true and REDIS_PERSECOND_AWS_IAM_AUTH=true");
    TOLLKEEPER_REDIS_PERSECOND_IDENTITY: TokenCloud = "none", "TOLLKEEPER_REDIS_IDENTITY for limits per second"
        .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_TLS: bool = "false", "REDIS_TLS for limits per second"
        .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_TIMEOUT: Duration = "10s", "REDIS_TIMEOUT for limits per second"
        .within("1ms to 1h") .only_read("with counters in Redis and REDIS_PERSECOND=true");
    REDIS_PERSECOND_SENTINEL_AUTH: Option<Secret> = "", "REDIS_SENTINEL_AUTH for limits per second"
        .only_read("with counters in Redis and REDIS_PERSECOND_TYPE=sentinel");
    TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE: Option<PathBuf> = "",
        "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE for limits per second"
        .only_read("with counters in Redis and REDIS_PERSECOND_TYPE=sentinel");
    REDIS_PERSECOND_PIPELINE_WINDOW: Duration = "0", "REDIS_PIPELINE_WINDOW for limits per second"
        .without_effect(PIPELINED);
    REDIS_PERSECOND_PIPELINE_LIMIT: i64 = "0", "REDIS_PIPELINE_LIMIT for limits per second" .without_effect(PIPELINED);
    REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM: i64 = "1", "REDIS_CLUSTER_PIPELINE_PARALLELISM for limits per second"
        .within("0 or more") .without_effect(PARALLEL);
    REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR: String = "WAIT", "REDIS_POOL_ON_EMPTY_BEHAVIOR for limits per second"
        .without_effect(NO_POOL);
    REDIS_POOL_ON_EMPTY_WAIT_DURATION: String = "", "removed from envoyproxy/ratelimit" .without_effect(OBSOLETE);
    REDIS_PERSECOND_POOL_ON_EMPTY_WAIT_DURATION: String = "", "removed from envoyproxy/ratelimit"
        .without_effect(OBSOLETE);
}

static MAIN_IDENTITY_VARIABLES: IdentityVariables = IdentityVariables {
    aws_auth: &REDIS_AWS_IAM_AUTH,
    aws_cache_name: &REDIS_AWS_IAM_CACHE_NAME,
    aws_user_id: &REDIS_AWS_IAM_USER_ID,
    aws_is_serverless: &REDIS_AWS_IAM_SERVERLESS,
    aws_region: &REDIS_AWS_IAM_REGION,
    cloud: &TOLLKEEPER_REDIS_IDENTITY,
};

static PER_SECOND_IDENTITY_VARIABLES: IdentityVariables = IdentityVariables {
    aws_auth: &REDIS_PERSECOND_AWS_IAM_AUTH,
    aws_cache_name: &REDIS_PERSECOND_AWS_IAM_CACHE_NAME,
    aws_user_id: &REDIS_PERSECOND_AWS_IAM_USER_ID,
    aws_is_serverless: &REDIS_PERSECOND_AWS_IAM_SERVERLESS,
    aws_region: &REDIS_AWS_IAM_REGION,
    cloud: &TOLLKEEPER_REDIS_PERSECOND_IDENTITY,
};

static MAIN_REDIS_VARIABLES: DeploymentVariables = DeploymentVariables {
    url: AddressVariables { url: &REDIS_URL, kind: Some(&REDIS_TYPE), socket: Some(&REDIS_SOCKET_TYPE) },
    connections: Some(&REDIS_POOL_SIZE),
    connect_timeout: &REDIS_TIMEOUT,
    tls: Some(&REDIS_TLS),
    server: CredentialVariables::new(Some(&REDIS_AUTH), Some(&REDIS_AUTH_FILE)).or_identity(&MAIN_IDENTITY_VARIABLES),
    sentinels: CredentialVariables::new(Some(&REDIS_SENTINEL_AUTH), Some(&TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE)),
};

static PER_SECOND_REDIS_VARIABLES: DeploymentVariables = DeploymentVariables {
    url: AddressVariables {
        url: &REDIS_PERSECOND_URL,
        kind: Some(&REDIS_PERSECOND_TYPE),
        socket: Some(&REDIS_PERSECOND_SOCKET_TYPE),
    },
    connections: Some(&REDIS_PERSECOND_POOL_SIZE),
    connect_timeout: &REDIS_PERSECOND_TIMEOUT,
    tls: Some(&REDIS_PERSECOND_TLS),
    server: CredentialVariables::new(Some(&REDIS_PERSECOND_AUTH), Some(&REDIS_PERSECOND_AUTH_FILE))
        .or_identity(&PER_SECOND_IDENTITY_VARIABLES),
    sentinels: CredentialVariables::new(
        Some(&REDIS_PERSECOND_SENTINEL_AUTH),
        Some(&TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE),
    ),
};

static GLOBAL_IDENTITY_VARIABLES: IdentityVariables = IdentityVariables {
    aws_auth: &TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_AUTH,
    aws_cache_name: &TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_CACHE_NAME,
    aws_user_id: &TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_USER_ID,
    aws_is_serverless: &TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_SERVERLESS,
    aws_region: &TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_REGION,
    cloud: &TOLLKEEPER_GLOBAL_REDIS_IDENTITY,
};

/// Redis that all regions reach.
static GLOBAL_REDIS_VARIABLES: DeploymentVariables = DeploymentVariables {
    url: AddressVariables {
        url: &TOLLKEEPER_GLOBAL_REDIS_URL,
        kind: Some(&TOLLKEEPER_GLOBAL_REDIS_TYPE),
        socket: None,
    },
    connections: Some(&REDIS_POOL_SIZE),
    connect_timeout: &REDIS_TIMEOUT,
    tls: None,
    server: CredentialVariables::new(None, Some(&TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE))
        .or_identity(&GLOBAL_IDENTITY_VARIABLES),
    sentinels: CredentialVariables::new(None, Some(&TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE)),
};

/// Settings of certificates, for all deployments.
pub(super) static CERTIFICATE_VARIABLES: StoreTlsVariables = StoreTlsVariables {
    ca: &REDIS_TLS_CACERT,
    certificate: &REDIS_TLS_CLIENT_CERT,
    key: &REDIS_TLS_CLIENT_KEY,
    skip_hostname: &REDIS_TLS_SKIP_HOSTNAME_VERIFICATION,
};

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
    /// Bounds of look-ups in tables in Redis.
    pub tables: TableLookupSettings,
    /// `true` if the process is unhealthy without a connection.
    pub health_needs_connection: bool,
}

/// Bounds of look-ups in tables in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLookupSettings {
    /// Memory of the known rows of each table, in bytes, at least 1 MiB.
    pub cache_bytes: usize,
    /// Lifetime of a row whose table has no `keep`, 1 s to 24 h.
    pub keep: Duration,
    /// Maximum number of reads of unknown values of a table per second, and in a burst, at least 1.
    pub unknown_reads_per_s: u32,
}

impl Default for TableLookupSettings {
    fn default() -> Self {
        Self { cache_bytes: 32 << 20, keep: Duration::from_secs(300), unknown_reads_per_s: 2000 }
    }
}

impl RedisSettings {
    /// Reads the settings of counters in Redis.
    pub(super) fn from_values(values: &mut Values) -> Self {
        let main = MAIN_REDIS_VARIABLES.read_deployment(values, &CERTIFICATE_VARIABLES);
        let per_second = values
            .get(&REDIS_PERSECOND)
            .then(|| PER_SECOND_REDIS_VARIABLES.read_deployment(values, &CERTIFICATE_VARIABLES));
        let key_format = values.get(&TOLLKEEPER_KEY_FORMAT);
        if key_format == KeyFormat::Ratelimit && regions::are_regions_configured(values) {
            let fix = "unset it, or unset TOLLKEEPER_REGION";
            values.add_problem(&TOLLKEEPER_KEY_FORMAT, "has no limits over several regions", fix);
        }
        let regions = RegionSettings::from_values(values, &main, &GLOBAL_REDIS_VARIABLES, &CERTIFICATE_VARIABLES);
        Self {
            main,
            per_second,
            regions,
            timeout: values.get(&TOLLKEEPER_STORE_TIMEOUT),
            replicas: values.get(&TOLLKEEPER_REPLICAS),
            max_replicas: values.get(&TOLLKEEPER_MAX_REPLICAS),
            eventual_bytes: values.get(&TOLLKEEPER_EVENTUAL_BYTES).to_usize_saturating(),
            key_prefix: read_key_prefix(values),
            key_format,
            expiration_jitter: read_expiration_jitter(values, key_format),
            over_limit_cache: OverLimitCacheSettings::from_values(values),
            tables: TableLookupSettings {
                cache_bytes: values.get(&TOLLKEEPER_TABLE_BYTES).to_usize_saturating(),
                ..TableLookupSettings::default()
            },
            health_needs_connection: values.get(&REDIS_HEALTH_CHECK_ACTIVE_CONNECTION),
        }
    }
}
