//! One Redis deployment: the server, sentinel group or cluster that one `REDIS_URL` names.
//!
//! Deployments differ only in their variables, so each is read by a list of variables. Contradictions are problems that
//! name both variables. What is read is validated: addresses, names and credentials only need to be used.
//!
//! Decides: addresses, database and TLS of Redis that contradict each other; the largest pool.

use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

use super::addresses::{AddressVariables, Addresses, DeploymentKind, RedisAddress, SocketKind};
use crate::settings::address::Endpoint;
use crate::settings::credentials::{CredentialVariables, Credentials};
use crate::settings::setting::{AnySetting as _, Setting};
use crate::settings::tls::{StoreTls, StoreTlsVariables};
use crate::settings::value::text::SecretUrl;
use crate::settings::values::Values;

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

/// Name of a deployment's address, if a flag of a command gives it instead of a variable.
pub const URL_FLAG: &str = "--url";

/// The variables of one deployment.
pub(crate) struct DeploymentVariables {
    pub(crate) url: AddressVariables,
    /// `None`: there is one connection to each node.
    pub(crate) connections: Option<&'static Setting<NonZeroUsize>>,
    pub(crate) connect_timeout: &'static Setting<Duration>,
    /// `None`: the URL decides.
    pub(crate) tls: Option<&'static Setting<bool>>,
    pub(crate) server: CredentialVariables,
    pub(crate) sentinels: CredentialVariables,
}

impl DeploymentVariables {
    /// Reads the deployment, with certificates that all deployments share; what is wrong is noted in `values`.
    pub(crate) fn read_deployment(&self, values: &mut Values, certificates: &StoreTlsVariables) -> DeploymentSettings {
        let kind = self.url.deployment_kind(values);
        let Addresses { primary, first, others } = self.url.read_addresses(values);
        let is_unix = self.url.given_socket_kind(values) == Some(SocketKind::Unix);
        if let (Some(socket), true) = (self.url.socket, is_unix && kind != DeploymentKind::Single) {
            values.mark_ignored(socket, "nodes of a cluster and sentinels always use TCP");
        }
        let urls: Vec<&RedisAddress> = std::iter::once(&first).chain(&others).collect();
        let login = if kind == DeploymentKind::Sentinel { &self.sentinels } else { &self.server };
        let in_url = read_common_credentials(values, self.url.url, &urls, login);
        let database = self.read_common_database(values, kind, &urls);
        let tls = self.read_tls(values, certificates, &urls);
        let endpoints = || urls.iter().map(|url| url.endpoint.clone()).collect();
        let (topology, credentials) = match kind {
            DeploymentKind::Sentinel => {
                // The URL names the sentinels, so its credentials are for them.
                let credentials = self.sentinels.read_credentials(values, in_url, self.url.url);
                let topology = TopologySettings::Sentinel { primary, sentinels: endpoints(), credentials };
                (topology, self.server.read_credentials(values, Credentials::None, self.url.url))
            }
            DeploymentKind::Single | DeploymentKind::Cluster => {
                let is_cluster = kind == DeploymentKind::Cluster;
                if is_cluster && in_url != Credentials::None {
                    values.mark_difference_from_envoy_ratelimit(
                        self.url.url,
                        "nodes that are found later get the user and password too",
                    );
                }
                let topology = if is_cluster {
                    TopologySettings::Cluster(endpoints())
                } else {
                    TopologySettings::Single(first.endpoint.clone())
                };
                (topology, self.server.read_credentials(values, in_url, self.url.url))
            }
        };
        if let (Credentials::Identity(identity), None) = (&credentials, &tls) {
            let what =
                "sends its tokens without TLS, which clouds refuse: set REDIS_TLS, or write rediss:// in the URL";
            values.add_notice_about_variable(identity.setting, what);
        }
        let (connections, connect_timeout) = (self.read_connection_count(values), values.get(self.connect_timeout));
        let setting = self.url.url.name();
        DeploymentSettings { setting, topology, database, credentials, tls, connections, connect_timeout }
    }

    fn read_common_database(&self, values: &mut Values, kind: DeploymentKind, urls: &[&RedisAddress]) -> u8 {
        let mut databases = urls.iter().filter_map(|url| url.database);
        let first = databases.next().unwrap_or(0);
        if databases.any(|other| other != first) {
            values.add_problem(self.url.url, "its addresses have different databases", "give the same to all");
        } else if first != 0 && kind == DeploymentKind::Cluster {
            values.add_problem(self.url.url, "a cluster has only database 0", "leave the database out");
        }
        first
    }

    fn read_tls(
        &self,
        values: &mut Values,
        certificates: &StoreTlsVariables,
        urls: &[&RedisAddress],
    ) -> Option<StoreTls> {
        let url_setting = self.url.url;
        let by_url = urls.iter().any(|url| url.tls == Some(true));
        if by_url {
            values.mark_difference_from_envoy_ratelimit(url_setting, "rediss:// is TLS");
        }
        if by_url && urls.iter().any(|url| url.tls == Some(false)) {
            let fix = "give rediss:// to all for TLS, or to none";
            values.add_problem(url_setting, "it has both redis:// and rediss://", fix);
        }
        let by_setting = self.tls.is_some_and(|tls| values.get(tls));
        if let (true, false, Some(tls)) = (by_url, by_setting, self.tls.filter(|tls| values.is_set(*tls))) {
            let what = format!("{} says rediss://, which is TLS", url_setting.name());
            values.add_problem(tls, what, format!("unset it, or write redis:// in {}", url_setting.name()));
        }
        if !by_url && !by_setting {
            return None;
        }
        if let Some(tls) = self.tls
            && urls.iter().any(|url| matches!(url.endpoint, Endpoint::Unix(_)))
        {
            let fix = format!("unset it, or give host:port as {}", url_setting.name());
            values.add_problem(tls, "a unix socket has no TLS", fix);
        }
        Some(certificates.read_tls(values))
    }

    /// Reads the number of connections, up to a maximum: an environment with more is not wrong.
    fn read_connection_count(&self, values: &mut Values) -> NonZeroUsize {
        const MAX_CONNECTIONS: NonZeroUsize = NonZeroUsize::new(128).expect("it is not 0");
        let Some(setting) = self.connections else { return NonZeroUsize::MIN };
        let connections = values.get(setting);
        if connections > MAX_CONNECTIONS {
            values.add_notice(setting, format!("is more than the maximum of {MAX_CONNECTIONS}, which is used"));
            values.mark_difference_from_envoy_ratelimit(setting, "the maximum is 128, which is used");
        }
        connections.min(MAX_CONNECTIONS)
    }
}

/// Returns the credentials in the addresses of a URL; adds a problem if they differ.
fn read_common_credentials(
    values: &mut Values,
    url: &Setting<SecretUrl>,
    urls: &[&RedisAddress],
    login: &CredentialVariables,
) -> Credentials {
    let mut given = urls.iter().map(|url| &url.credentials).filter(|credentials| **credentials != Credentials::None);
    let first = given.next().cloned().unwrap_or(Credentials::None);
    if given.any(|other| *other != first) {
        let instead = login.auth.map(|auth| format!(", or leave them out and give {}", auth.name()));
        let fix = format!("give the same to all{}", instead.unwrap_or_default());
        values.add_problem(url, "its addresses have different users or passwords", fix);
    }
    first
}
