//! Client of memcached servers: the servers in their order, and the choice of the server that holds a key.
//!
//! The choice is that of envoyproxy/ratelimit, whatever the format of keys: the CRC-32 of the key, modulo the number of
//! servers. A server that is away keeps its keys, because other replicas may still reach it.
//!
//! The client keeps connections to every server open and sends commands with a deadline, each once. It knows nothing of
//! limits. `memcache-async`, the only public client that runs over any stream, allocates whatever length a server
//! announces, so the few replies that counters need are decoded in `protocol`.
//!
//! Decides: which memcached server has a key (`server_index`).
//! Decides: order, number (`MAX_SERVERS`) and refresh of the servers of an SRV record.

pub mod protocol;
pub(crate) mod server;
pub mod srv_records;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::SetOnce;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use self::protocol::MemcacheError;
use self::server::{MemcacheConnectOptions, MemcacheServer};
use self::srv_records::query_srv_records;
use super::deadline::timeout_with_grace;
use crate::settings::address::Endpoint;
use crate::settings::memcache::MemcacheServers;
use crate::telemetry::log_throttle::ErrorDedup;

/// Pause after a failed query of the SRV record, until the first one has succeeded.
const FIRST_SRV_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum interval of queries, so that a misread setting does not flood the resolver.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Servers that share the counters; dropping the list stops the queries.
#[derive(Debug)]
pub(crate) struct ServerList {
    shared: Arc<SharedServerList>,
    refresh: Option<AbortHandle>,
}

/// Servers in use, shared with the task that replaces them.
#[derive(Debug)]
struct SharedServerList {
    options: Arc<MemcacheConnectOptions>,
    servers: ArcSwap<Vec<Arc<MemcacheServer>>>,
    /// Set once servers are known, or the first query has failed.
    known: SetOnce<()>,
}

impl Drop for ServerList {
    fn drop(&mut self) {
        if let Some(task) = &self.refresh {
            task.abort();
        }
    }
}

impl ServerList {
    /// Starts to connect to the servers, and returns at once. Needs a tokio runtime.
    pub(crate) fn start(servers: &MemcacheServers, options: MemcacheConnectOptions) -> Self {
        let shared = Arc::new(SharedServerList {
            options: Arc::new(options),
            servers: ArcSwap::default(),
            known: SetOnce::new(),
        });
        let refresh = match servers {
            MemcacheServers::List(endpoints) => {
                shared.replace_servers(endpoints);
                None
            }
            MemcacheServers::Srv { name, refresh } => Some(
                tokio::spawn(refresh_servers_repeatedly(Arc::clone(&shared), name.clone(), *refresh)).abort_handle(),
            ),
        };
        Self { shared, refresh }
    }

    /// Returns the server that holds `key`; waits only for the first query of an SRV record.
    ///
    /// # Errors
    /// No server is known by `deadline`.
    pub(crate) async fn server_for_key(
        &self,
        key: &[u8],
        deadline: Instant,
    ) -> Result<Arc<MemcacheServer>, MemcacheError> {
        if !self.shared.known.initialized() {
            timeout_with_grace(self.shared.known.wait(), deadline).await.ok_or(MemcacheError::Timeout)?;
        }
        let servers = self.shared.servers.load();
        servers.get(server_index(key, servers.len())).map(Arc::clone).ok_or(MemcacheError::Unreachable)
    }

    /// Servers in use, each once.
    pub(crate) fn servers(&self) -> Vec<Arc<MemcacheServer>> {
        let mut servers: Vec<Arc<MemcacheServer>> = Vec::new();
        for server in self.shared.servers.load().iter() {
            if !servers.iter().any(|known| Arc::ptr_eq(known, server)) {
                servers.push(Arc::clone(server));
            }
        }
        servers
    }

    /// Returns true if every server accepts calls, and there is one.
    pub(crate) fn are_all_available(&self) -> bool {
        let servers = self.shared.servers.load();
        !servers.is_empty() && servers.iter().all(|server| server.is_available())
    }
}

impl SharedServerList {
    /// Puts servers into use, in this order; those that are in use already keep their connections.
    fn replace_servers(&self, endpoints: &[Endpoint]) {
        let mut servers: Vec<Arc<MemcacheServer>> = Vec::with_capacity(endpoints.len());
        let current = self.servers.load();
        for endpoint in endpoints {
            let known = servers.iter().chain(current.iter()).find(|server| server.endpoint() == endpoint);
            let server = known.map(Arc::clone);
            servers.push(server.unwrap_or_else(|| MemcacheServer::start(endpoint.clone(), Arc::clone(&self.options))));
        }
        self.servers.store(Arc::new(servers));
        let _already_set = self.known.set(());
    }
}

/// Index of the server that holds `key`; 0 if there are less than two.
pub fn server_index(key: &[u8], servers: usize) -> usize {
    if servers < 2 { 0 } else { crc32fast::hash(key) as usize % servers }
}

/// Queries the SRV record until it names servers, and then at each interval unless that is zero. A failed query leaves
/// the servers as they are.
async fn refresh_servers_repeatedly(list: Arc<SharedServerList>, name: String, refresh: Duration) {
    let mut errors = ErrorDedup::default();
    loop {
        match query_endpoints(&name).await {
            Ok(endpoints) => {
                let servers = list.servers.load();
                if !servers.iter().map(|server| server.endpoint()).eq(&endpoints) {
                    tracing::info!(name, servers = endpoints.len(), "MEMCACHE_SRV: servers changed");
                    list.replace_servers(&endpoints);
                }
                errors.forget_errors();
                if refresh.is_zero() {
                    return;
                }
            }
            Err(error) => {
                let _already_set = list.known.set(());
                if errors.should_log(&error) {
                    tracing::warn!(name, "MEMCACHE_SRV: cannot find memcached servers: {error}");
                }
            }
        }
        let is_known = !list.servers.load().is_empty();
        sleep(if is_known { refresh.max(MIN_REFRESH_INTERVAL) } else { FIRST_SRV_RETRY_INTERVAL }).await;
    }
}

/// Upper bound on a query of the SRV record, its repetitions included.
const SRV_QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of servers; each has connections and tasks.
const MAX_SERVERS: usize = 1000;

/// Queries the servers of an SRV record, sorted by their text as envoyproxy/ratelimit sorts them: the order decides
/// which server holds a key. The system's resolver configuration is read for each query.
///
/// # Errors
/// The text says why there are no servers.
async fn query_endpoints(name: &str) -> Result<Vec<Endpoint>, String> {
    let records = timeout(SRV_QUERY_TIMEOUT, query_srv_records(name)).await;
    let records = records.map_err(|_| "no answer in time".to_owned())??;
    let offered = records.into_iter().filter(|target| target.port != 0 && target.host != ".");
    let mut found: Vec<(String, u16)> = offered.map(|target| (target.host, target.port)).collect();
    if found.is_empty() {
        return Err("the record names no servers".to_owned());
    }
    if found.len() > MAX_SERVERS {
        return Err(format!("the record names {} servers; the maximum is {MAX_SERVERS}", found.len()));
    }
    sort_servers(&mut found);
    Ok(found.into_iter().map(|(host, port)| Endpoint::Tcp { host, port }).collect())
}

/// Sorts by the text `host:port`.
pub fn sort_servers(servers: &mut [(String, u16)]) {
    servers.sort_by_cached_key(|(host, port)| format!("{host}:{port}"));
}
