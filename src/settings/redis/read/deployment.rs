//! Reading of one Redis deployment.

use std::num::NonZeroUsize;
use std::time::Duration;

use super::addresses::{Addresses, UrlSettings};
use super::credentials::{CredentialSettings, same_credentials};
use crate::settings::choices::{DeploymentKind, SocketKind};
use crate::settings::credentials::Credentials;
use crate::settings::endpoint::Endpoint;
use crate::settings::redis::{DeploymentSettings, TopologySettings};
use crate::settings::setting::{AnySetting, Setting};
use crate::settings::store_tls::{StoreTls, StoreTlsSettings};
use crate::settings::table::decision_log::*;
use crate::settings::table::redis::*;
use crate::settings::table::regions::*;
use crate::settings::url::Url;
use crate::settings::values::Values;

/// Settings of a deployment.
pub(super) struct DeploymentReader {
    url: UrlSettings,
    connections: &'static Setting<NonZeroUsize>,
    connect_timeout: &'static Setting<Duration>,
    tls: &'static Setting<bool>,
    server: CredentialSettings,
    sentinels: CredentialSettings,
}

pub(super) static MAIN: DeploymentReader = DeploymentReader {
    url: UrlSettings { url: &REDIS_URL, kind: &REDIS_TYPE, socket: Some(&REDIS_SOCKET_TYPE) },
    connections: &REDIS_POOL_SIZE,
    connect_timeout: &REDIS_TIMEOUT,
    tls: &REDIS_TLS,
    server: CredentialSettings { auth: &REDIS_AUTH, file: &TOLLKEEPER_REDIS_AUTH_FILE },
    sentinels: CredentialSettings { auth: &REDIS_SENTINEL_AUTH, file: &TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE },
};

pub(super) static PER_SECOND: DeploymentReader = DeploymentReader {
    url: UrlSettings {
        url: &REDIS_PERSECOND_URL,
        kind: &REDIS_PERSECOND_TYPE,
        socket: Some(&REDIS_PERSECOND_SOCKET_TYPE),
    },
    connections: &REDIS_PERSECOND_POOL_SIZE,
    connect_timeout: &REDIS_PERSECOND_TIMEOUT,
    tls: &REDIS_PERSECOND_TLS,
    server: CredentialSettings { auth: &REDIS_PERSECOND_AUTH, file: &TOLLKEEPER_REDIS_PERSECOND_AUTH_FILE },
    sentinels: CredentialSettings {
        auth: &REDIS_PERSECOND_SENTINEL_AUTH,
        file: &TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE,
    },
};

/// Redis of the decision log. What it does not set is that of the counters, except credentials.
pub(super) static STREAM: DeploymentReader = DeploymentReader {
    url: UrlSettings {
        url: &TOLLKEEPER_DECISION_LOG_REDIS_URL,
        kind: &TOLLKEEPER_DECISION_LOG_REDIS_TYPE,
        socket: None,
    },
    connections: &REDIS_POOL_SIZE,
    connect_timeout: &REDIS_TIMEOUT,
    tls: &TOLLKEEPER_DECISION_LOG_REDIS_TLS,
    server: CredentialSettings {
        auth: &TOLLKEEPER_DECISION_LOG_REDIS_AUTH,
        file: &TOLLKEEPER_DECISION_LOG_REDIS_AUTH_FILE,
    },
    sentinels: CredentialSettings {
        auth: &TOLLKEEPER_DECISION_LOG_REDIS_SENTINEL_AUTH,
        file: &TOLLKEEPER_DECISION_LOG_REDIS_SENTINEL_AUTH_FILE,
    },
};

/// Redis that all regions reach.
pub(super) static GLOBAL: DeploymentReader = DeploymentReader {
    url: UrlSettings { url: &TOLLKEEPER_GLOBAL_REDIS_URL, kind: &TOLLKEEPER_GLOBAL_REDIS_TYPE, socket: None },
    connections: &TOLLKEEPER_GLOBAL_REDIS_POOL_SIZE,
    connect_timeout: &TOLLKEEPER_GLOBAL_REDIS_TIMEOUT,
    tls: &TOLLKEEPER_GLOBAL_REDIS_TLS,
    server: CredentialSettings { auth: &TOLLKEEPER_GLOBAL_REDIS_AUTH, file: &TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE },
    sentinels: CredentialSettings {
        auth: &TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH,
        file: &TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE,
    },
};

/// Settings of certificates, for all deployments.
pub(super) static CERTIFICATES: StoreTlsSettings = StoreTlsSettings {
    ca: &REDIS_TLS_CACERT,
    certificate: &REDIS_TLS_CLIENT_CERT,
    key: &REDIS_TLS_CLIENT_KEY,
    skip_hostname: &REDIS_TLS_SKIP_HOSTNAME_VERIFICATION,
};

impl DeploymentReader {
    /// Returns all settings of the deployment.
    pub(super) fn all(&self) -> impl Iterator<Item = &'static dyn AnySetting> {
        let others: [&'static dyn AnySetting; 9] = [
            self.url.kind,
            self.url.url,
            self.connections,
            self.connect_timeout,
            self.tls,
            self.server.auth,
            self.server.file,
            self.sentinels.auth,
            self.sentinels.file,
        ];
        self.url.socket.into_iter().map(|socket| -> &'static dyn AnySetting { socket }).chain(others)
    }

    /// Reads the deployment; what is wrong is noted in `values`.
    pub(super) fn read(&self, values: &mut Values) -> DeploymentSettings {
        let kind = values.get(self.url.kind);
        let Addresses { primary, first, others } = self.url.read(values);
        let is_unix = self.url.given_socket(values) == Some(SocketKind::Unix);
        if let (Some(socket), true) = (self.url.socket, is_unix && kind != DeploymentKind::Single) {
            values.ignore(socket, "nodes of a cluster and sentinels always use TCP");
        }
        let urls: Vec<&Url> = std::iter::once(&first).chain(&others).collect();
        let login = if kind == DeploymentKind::Sentinel { &self.sentinels } else { &self.server };
        let in_url = same_credentials(values, self.url.url, &urls, login);
        let database = self.same_database(values, kind, &urls);
        let tls = self.tls(values, &urls);
        let endpoints = || urls.iter().map(|url| url.endpoint.clone()).collect();
        let (topology, credentials) = match kind {
            DeploymentKind::Sentinel => {
                // The URL names the sentinels, so its credentials are for them.
                let credentials = self.sentinels.read(values, in_url, self.url.url);
                let topology = TopologySettings::Sentinel { primary, sentinels: endpoints(), credentials };
                (topology, self.server.read(values, Credentials::None, self.url.url))
            }
            DeploymentKind::Single | DeploymentKind::Cluster => {
                values.ignore_if_changed(self.sentinels.auth, "there are no sentinels");
                values.ignore_if_changed(self.sentinels.file, "there are no sentinels");
                let is_cluster = kind == DeploymentKind::Cluster;
                if is_cluster && in_url != Credentials::None {
                    values.difference(self.url.url, "nodes that are found later get the user and password too");
                }
                let topology = if is_cluster {
                    TopologySettings::Cluster(endpoints())
                } else {
                    TopologySettings::Single(first.endpoint.clone())
                };
                (topology, self.server.read(values, in_url, self.url.url))
            }
        };
        let (connections, connect_timeout) = (self.connections(values), values.get(self.connect_timeout));
        let setting = self.url.url.name();
        DeploymentSettings { setting, topology, database, credentials, tls, connections, connect_timeout }
    }

    fn same_database(&self, values: &mut Values, kind: DeploymentKind, urls: &[&Url]) -> u8 {
        let mut databases = urls.iter().filter_map(|url| url.database);
        let first = databases.next().unwrap_or(0);
        if databases.any(|other| other != first) {
            values.problem(self.url.url, "its addresses have different databases", "give the same to all");
        } else if first != 0 && kind == DeploymentKind::Cluster {
            values.problem(self.url.url, "a cluster has only database 0", "leave the database out");
        }
        first
    }

    fn tls(&self, values: &mut Values, urls: &[&Url]) -> Option<StoreTls> {
        let url_setting = self.url.url;
        let by_url = urls.iter().any(|url| url.tls == Some(true));
        if by_url {
            values.difference(url_setting, "rediss:// is TLS");
        }
        if by_url && urls.iter().any(|url| url.tls == Some(false)) {
            let fix = "give rediss:// to all for TLS, or to none";
            values.problem(url_setting, "it has both redis:// and rediss://", fix);
        }
        if by_url && values.is_set(self.tls) && !values.get(self.tls) {
            let what = format!("{} says rediss://, which is TLS", url_setting.name());
            values.problem(self.tls, what, format!("unset it, or write redis:// in {}", url_setting.name()));
        }
        if !by_url && !values.get(self.tls) {
            return None;
        }
        if urls.iter().any(|url| matches!(url.endpoint, Endpoint::Unix(_))) {
            let fix = format!("unset it, or give host:port as {}", url_setting.name());
            values.problem(self.tls, "a unix socket has no TLS", fix);
        }
        Some(CERTIFICATES.read(values))
    }

    /// Reads the number of connections, up to a maximum: an environment with more is not wrong.
    fn connections(&self, values: &mut Values) -> NonZeroUsize {
        const MAX_CONNECTIONS: NonZeroUsize = NonZeroUsize::new(128).expect("it is not 0");
        let connections = values.get(self.connections);
        if connections > MAX_CONNECTIONS {
            values.notice(self.connections, format!("is more than the maximum of {MAX_CONNECTIONS}, which is used"));
            values.difference(self.connections, "the maximum is 128, which is used");
        }
        connections.min(MAX_CONNECTIONS)
    }
}
