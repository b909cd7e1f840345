//! Memcached servers that hold counters, and access to them.
//!
//! A list of servers keeps its order, and a server may be in it twice: both decide which server holds a key. Files are
//! named, not read; connections read them.
//!
//! Decides: both or none of `MEMCACHE_HOST_PORT` and `MEMCACHE_SRV`; connections to a memcached server.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use super::address::Endpoint;
use super::counters::{BACKEND_TYPE, KeyFormat, OverLimitCacheSettings, read_expiration_jitter, read_key_prefix};
use super::problem::InvalidSetting;
use super::redis::{TOLLKEEPER_KEY_FORMAT, TOLLKEEPER_REPLICAS, TOLLKEEPER_STORE_TIMEOUT};
use super::setting::{AnySetting as _, settings};
use super::tls::{StoreTls, StoreTlsVariables};
use super::value::text::TextList;
use super::values::Values;

settings! { "Counters in memcache", only read "with BACKEND_TYPE=memcache";
    MEMCACHE_HOST_PORT: TextList = "",
        "servers, host:port or path; their order decides which holds a counter" .often_set();
    MEMCACHE_MAX_IDLE_CONNS: i64 = "2", "idle connections to each server, at most 128; 0 or less: 2";
    MEMCACHE_SRV: String = "", "DNS SRV record `_service._proto.name`, instead of MEMCACHE_HOST_PORT";
    MEMCACHE_SRV_REFRESH: Duration = "0", "interval of reading that record; 0: once"
        .only_read("with BACKEND_TYPE=memcache and MEMCACHE_SRV");
    MEMCACHE_TLS: bool = "false", "connect over TLS";
    MEMCACHE_TLS_CLIENT_CERT: Option<PathBuf> = "", "client certificate for memcache (PEM)"
        .only_read("with BACKEND_TYPE=memcache and MEMCACHE_TLS=true");
    MEMCACHE_TLS_CLIENT_KEY: Option<PathBuf> = "", "private key of the client certificate (PEM)"
        .only_read("with BACKEND_TYPE=memcache and MEMCACHE_TLS=true");
    MEMCACHE_TLS_CACERT: Option<PathBuf> = "", "CA certificates beside the system's (PEM)"
        .only_read("with BACKEND_TYPE=memcache and MEMCACHE_TLS=true");
    MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION: bool = "false", "accept a trusted certificate for another name"
        .only_read("with BACKEND_TYPE=memcache and MEMCACHE_TLS=true");
}

static CERTIFICATE_VARIABLES: StoreTlsVariables = StoreTlsVariables {
    ca: &MEMCACHE_TLS_CACERT,
    certificate: &MEMCACHE_TLS_CLIENT_CERT,
    key: &MEMCACHE_TLS_CLIENT_KEY,
    skip_hostname: &MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION,
};

/// Counters in memcached, shared by all replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemcacheSettings {
    /// Servers that share the counters.
    pub servers: MemcacheServers,
    /// Connections to each server that are kept open, 1 to 128.
    pub max_idle: NonZeroUsize,
    /// TLS of connections; `None` means plaintext.
    pub tls: Option<StoreTls>,
    /// Time limit of a call, 1 ms to 10 s.
    pub timeout: Duration,
    /// Number of replicas that share the limits while a server is unavailable and each counts for itself; `None` means
    /// one.
    pub replicas: Option<NonZeroU32>,
    /// Prefix of all keys, at most 256 bytes.
    pub key_prefix: String,
    /// Format of keys.
    pub key_format: KeyFormat,
    /// Upper bound of the random time added to the TTL of keys in `KeyFormat::Ratelimit`, in whole seconds, at most a
    /// year.
    pub expiration_jitter: Duration,
    /// Cache of exceeded limits.
    pub over_limit_cache: OverLimitCacheSettings,
}

/// Servers that share the counters; the place of a server in the list decides which keys it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemcacheServers {
    /// At least one server, in the order given.
    List(Vec<Endpoint>),
    /// Servers of a DNS SRV record.
    Srv {
        /// Name of the record, `_service._proto.name`.
        name: String,
        /// Interval of reading it; zero means once.
        refresh: Duration,
    },
}

/// `host:port,host:port`, or `srv _service._proto.name`.
impl fmt::Display for MemcacheServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::List(servers) => {
                for (place, server) in servers.iter().enumerate() {
                    write!(f, "{}{server}", if place == 0 { "" } else { "," })?;
                }
                Ok(())
            }
            Self::Srv { name, .. } => write!(f, "srv {name}"),
        }
    }
}

impl MemcacheSettings {
    /// Reads the settings; what is wrong is noted in `values`.
    pub(super) fn from_values(values: &mut Values) -> Self {
        let key_format = values.get(&TOLLKEEPER_KEY_FORMAT);
        let servers = read_servers(values);
        Self {
            tls: read_tls(values, &servers),
            servers,
            max_idle: read_max_idle_connections(values),
            timeout: values.get(&TOLLKEEPER_STORE_TIMEOUT),
            replicas: values.get(&TOLLKEEPER_REPLICAS),
            key_prefix: read_key_prefix(values),
            key_format,
            expiration_jitter: read_expiration_jitter(values, key_format),
            over_limit_cache: OverLimitCacheSettings::from_values(values),
        }
    }
}

/// Reads the servers; an empty list after a problem.
fn read_servers(values: &mut Values) -> MemcacheServers {
    let (list, srv) = (values.get(&MEMCACHE_HOST_PORT).0, values.get(&MEMCACHE_SRV));
    match (list.is_empty(), srv.is_empty()) {
        (true, true) => {
            values.add_problem(&BACKEND_TYPE, "there are no servers", "give MEMCACHE_HOST_PORT or MEMCACHE_SRV");
        }
        (false, false) => {
            values.add_problem(&MEMCACHE_HOST_PORT, "MEMCACHE_SRV is set too", "unset one of them");
        }
        (true, false) if is_srv_name(&srv) => {
            return MemcacheServers::Srv { name: srv, refresh: values.get(&MEMCACHE_SRV_REFRESH) };
        }
        (true, false) => {
            values.add_problem(&MEMCACHE_SRV, "not the name of an SRV record", "give _service._proto.name");
        }
        (false, true) => match list.iter().map(|server| parse_memcached_address(server.trim())).collect() {
            Ok(servers) => return MemcacheServers::List(servers),
            Err(InvalidSetting { what, fix }) => values.add_problem(&MEMCACHE_HOST_PORT, what, fix),
        },
    }
    MemcacheServers::List(Vec::new())
}

/// Parses `host:port`, or the path of a unix socket.
fn parse_memcached_address(text: &str) -> Result<Endpoint, InvalidSetting> {
    if text.starts_with('/') {
        return Ok(Endpoint::Unix(text.into()));
    }
    let fix = "give host:port,host:port, IPv6 in brackets";
    Endpoint::parse_host_port(text, None).map_err(|_| InvalidSetting::new("not a list of servers", fix))
}

/// Returns `true` for `_service._proto.name`.
fn is_srv_name(text: &str) -> bool {
    let mut labels = text.trim_end_matches('.').splitn(3, '.');
    let mut label = |prefix: &str| {
        let name = labels.next().and_then(|label| label.strip_prefix(prefix)).unwrap_or_default();
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
    };
    text.len() <= 253 && label("_") && label("_") && label("")
}

fn read_tls(values: &mut Values, servers: &MemcacheServers) -> Option<StoreTls> {
    if !values.get(&MEMCACHE_TLS) {
        return None;
    }
    if let MemcacheServers::List(servers) = servers
        && servers.iter().any(|server| matches!(server, Endpoint::Unix(_)))
    {
        let fix = format!("unset it, or give host:port as {}", MEMCACHE_HOST_PORT.name());
        values.add_problem(&MEMCACHE_TLS, "a unix socket has no TLS", fix);
    }
    Some(CERTIFICATE_VARIABLES.read_tls(values))
}

/// Reads the number of connections; 0 or less means the default, as in envoyproxy/ratelimit.
fn read_max_idle_connections(values: &mut Values) -> NonZeroUsize {
    const DEFAULT_CONNECTIONS: NonZeroUsize = NonZeroUsize::new(2).expect("it is not 0");
    const MAX_CONNECTIONS: NonZeroUsize = NonZeroUsize::new(128).expect("it is not 0");
    let connections = usize::try_from(values.get(&MEMCACHE_MAX_IDLE_CONNS)).ok().and_then(NonZeroUsize::new);
    let connections = connections.unwrap_or(DEFAULT_CONNECTIONS);
    if connections > MAX_CONNECTIONS {
        values.add_notice(
            &MEMCACHE_MAX_IDLE_CONNS,
            format!("is more than the maximum of {MAX_CONNECTIONS}, which is used"),
        );
        values.mark_difference_from_envoy_ratelimit(&MEMCACHE_MAX_IDLE_CONNS, "the maximum is 128, which is used");
    }
    connections.min(MAX_CONNECTIONS)
}
