//! Opening of connections: options (credentials, TLS, database, timeout), the socket, and the login.
//!
//! Files with credentials and certificates are read for each connection, so that rotating them needs no restart.
//!
//! Decides: login to Redis: AUTH, SELECT, no HELLO (`handshake`); a new password or token (`log_in_again`).
//! Decides: contents of a file with a password (line break, white space, colon), an empty or missing file.
//! Decides: time of a connection attempt (`REDIS_TIMEOUT`, `MAX_CONNECT_TIME`); what sentinels share with Redis.
//! Decides: how long a discovery may take (`DISCOVERY_QUERY_TIMEOUT`).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use rustls::ClientConfig;
use smallvec::SmallVec;
use tokio::time::timeout;

use super::connection::{Connection, ErrorWithText, error_kind, send_with_error_text};
use super::error::{RedisConnectError, RedisError, ReplyError};
use crate::settings::address::Endpoint;
use crate::settings::credentials::{CredentialFile, Credentials};
use crate::settings::problem::UnusableSetting;
use crate::settings::redis::deployment::{DeploymentSettings, TopologySettings, URL_FLAG};
use crate::settings::tls::StoreTls;
use crate::store::client::connect::{
    Connected, Network, PlaintextProbe, ServerToConnect, TlsAdviceTexts, TlsFailureDiagnosis,
};
use crate::store::client::supervised_server::ConnectFileHashes;
use crate::store::client::tokens::TokenSource;

/// Upper bound on a connection attempt, regardless of REDIS_TIMEOUT.
///
/// The kernel backs off SYN retransmits exponentially; a new attempt finds a recovered server sooner.
const MAX_CONNECT_TIME: Duration = Duration::from_secs(1);
/// Upper bound on a connection attempt to a distant server: TCP, TLS and login are up to five round trips.
const MAX_DISTANT_CONNECT_TIME: Duration = Duration::from_secs(5);
/// Upper bound on a query of discovery, and on connecting for it.
const DISCOVERY_QUERY_TIMEOUT: Duration = Duration::from_millis(400);
/// Upper bound on a query of a distant server.
const DISTANT_DISCOVERY_QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Options of connections to the servers of a deployment, or to its sentinels.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Environment variable that names the servers, for messages.
    pub(crate) setting: &'static str,
    /// True for sentinels, which have their own credentials.
    pub(crate) is_sentinel: bool,
    /// How addresses are found that no setting names.
    pub(super) announcer: Option<AddressAnnouncer>,
    /// Credentials for AUTH.
    pub(crate) credentials: Credentials,
    /// Source of the tokens, if the credentials are an identity.
    pub(super) tokens: Option<Arc<TokenSource>>,
    /// TLS options; `None` for plaintext.
    pub(crate) tls: Option<StoreTls>,
    /// Database to SELECT; `None` for database 0.
    pub(crate) database: Option<u8>,
    /// Upper bound on connecting, TLS handshake and login included.
    pub(crate) connect_timeout: Duration,
    /// Upper bound on a query of discovery, and on connecting for it.
    pub(crate) query_timeout: Duration,
    /// Consequence of a failing server, for logs.
    pub(crate) on_failure: &'static str,
    /// Decisions need the servers.
    pub(crate) decides: bool,
    /// Environment variable that bounds a call; `None` if none does.
    pub(crate) timeout_setting: Option<&'static str>,
    /// Opens the connections.
    pub(crate) network: Network,
}

/// Servers that tell the addresses of others.
#[derive(Clone, Debug)]
pub(super) struct AddressAnnouncer {
    /// True for sentinels, false for the nodes of a cluster.
    is_sentinel: bool,
    /// The addresses that a setting names.
    configured: Vec<Endpoint>,
}

impl AddressAnnouncer {
    /// Those of a deployment; `None` if it is one server.
    fn of(topology: &TopologySettings) -> Option<Self> {
        let (is_sentinel, configured) = match topology {
            TopologySettings::Single(_) => return None,
            TopologySettings::Sentinel { sentinels, .. } => (true, sentinels),
            TopologySettings::Cluster(seeds) => (false, seeds),
        };
        Some(Self { is_sentinel, configured: configured.to_vec() })
    }

    /// Advice if the certificate of the server at `endpoint` has other names; `None` if a setting names its host.
    fn certificate_name_advice(&self, endpoint: &Endpoint) -> Option<String> {
        let is_host = |other: &Endpoint| match (endpoint, other) {
            (Endpoint::Tcp { host, .. }, Endpoint::Tcp { host: other, .. }) => host == other,
            (endpoint, other) => endpoint == other,
        };
        if self.configured.iter().any(is_host) {
            return None;
        }
        let (who, fix) = match self.is_sentinel {
            true => {
                ("the sentinels name", "`sentinel resolve-hostnames yes` and `sentinel announce-hostnames yes` there")
            }
            false => (
                "the cluster announces",
                "cluster-announce-hostname on each node and cluster-preferred-endpoint-type to hostname (Redis 7.0)",
            ),
        };
        Some(format!(
            "{who} {endpoint}, which is not a name of that server's certificate: set {fix}, or \
             REDIS_TLS_SKIP_HOSTNAME_VERIFICATION=true, which skips this check"
        ))
    }
}

/// User and password for AUTH.
struct AuthCredentials {
    /// User; `None` for the default user.
    user: Option<String>,
    password: String,
}

impl ConnectOptions {
    /// Returns the options for the servers of a deployment.
    pub(crate) fn new(settings: &DeploymentSettings, network: &Network) -> Self {
        Self {
            setting: settings.setting,
            is_sentinel: false,
            announcer: AddressAnnouncer::of(&settings.topology),
            credentials: settings.credentials.clone(),
            tokens: find_token_source(&settings.credentials),
            tls: settings.tls.clone(),
            database: (settings.database != 0).then_some(settings.database),
            connect_timeout: settings.connect_timeout.min(MAX_CONNECT_TIME),
            query_timeout: DISCOVERY_QUERY_TIMEOUT,
            on_failure: "`on_store_error` decides",
            decides: true,
            timeout_setting: Some("TOLLKEEPER_STORE_TIMEOUT"),
            network: network.clone(),
        }
    }

    /// Returns the options for servers whose failure changes no decision; `on_failure` is its consequence.
    pub fn for_noncritical_servers(settings: &DeploymentSettings, on_failure: &'static str) -> Self {
        Self { on_failure, decides: false, timeout_setting: None, ..Self::new(settings, &Network::default()) }
    }

    /// Returns the options for servers in other parts of the world, which no decision waits for.
    pub(crate) fn for_distant_servers(settings: &DeploymentSettings, network: &Network) -> Self {
        Self {
            connect_timeout: settings.connect_timeout.min(MAX_DISTANT_CONNECT_TIME),
            query_timeout: DISTANT_DISCOVERY_QUERY_TIMEOUT,
            on_failure: "this region gets no grants",
            timeout_setting: None,
            ..Self::new(settings, network)
        }
    }

    /// Returns the options for the sentinels of the same deployment.
    pub(super) fn for_sentinels(&self, credentials: &Credentials) -> Self {
        let (credentials, tokens) = (credentials.clone(), find_token_source(credentials));
        Self { is_sentinel: true, credentials, tokens, database: None, ..self.clone() }
    }

    /// Names the settings that hold the credentials, for messages; `None` if there are none.
    pub(crate) fn login_setting(&self) -> Option<&'static str> {
        (self.credentials != Credentials::None).then(|| self.auth_setting())
    }

    /// Names the settings that hold the credentials, for messages.
    pub fn auth_setting(&self) -> &'static str {
        match &self.credentials {
            Credentials::File(file) => return file.setting,
            Credentials::Identity(identity) => return identity.setting,
            Credentials::None | Credentials::Inline { .. } => {}
        }
        match (self.setting, self.is_sentinel) {
            ("TOLLKEEPER_DECISION_LOG_REDIS_URL", false) => {
                "TOLLKEEPER_DECISION_LOG_REDIS_AUTH, its _FILE or the password in TOLLKEEPER_DECISION_LOG_REDIS_URL"
            }
            ("TOLLKEEPER_DECISION_LOG_REDIS_URL", true) => "the password in TOLLKEEPER_DECISION_LOG_REDIS_URL",
            (URL_FLAG, false) => "TOLLKEEPER_DECISION_LOG_REDIS_AUTH, its _FILE or the password in --url",
            (URL_FLAG, true) => "the password in --url",
            ("TOLLKEEPER_GLOBAL_REDIS_URL", false) => {
                "TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE or the password in TOLLKEEPER_GLOBAL_REDIS_URL"
            }
            ("TOLLKEEPER_GLOBAL_REDIS_URL", true) => {
                "TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE or the password in TOLLKEEPER_GLOBAL_REDIS_URL"
            }
            ("REDIS_PERSECOND_URL", false) => "REDIS_PERSECOND_AUTH or the password in REDIS_PERSECOND_URL",
            ("REDIS_PERSECOND_URL", true) => "REDIS_PERSECOND_SENTINEL_AUTH or the password in REDIS_PERSECOND_URL",
            (_, false) => "REDIS_AUTH or the password in REDIS_URL",
            (_, true) => "REDIS_SENTINEL_AUTH or the password in REDIS_URL",
        }
    }

    /// Reads the credentials; a file holds `password` or `user:password`, and white space at its end is ignored. Waits
    /// for the first token of an identity, at most as long as a connection attempt may take.
    ///
    /// # Errors
    /// The file cannot be read, or there is no token yet.
    async fn read_auth_credentials(&self) -> Result<Option<AuthCredentials>, RedisConnectError> {
        match &self.credentials {
            Credentials::None => Ok(None),
            Credentials::Inline { user, password } => {
                Ok(Some(AuthCredentials { user: user.clone(), password: password.reveal().to_owned() }))
            }
            Credentials::File(CredentialFile { setting, path }) => {
                let text = read_trimmed_file(path).map_err(|error| {
                    RedisConnectError::misconfigured(format!("{setting}: cannot read {}: {error}", path.display()))
                })?;
                Ok(Some(match text.split_once(':') {
                    Some((user, password)) if !user.is_empty() => {
                        AuthCredentials { user: Some(user.to_owned()), password: password.to_owned() }
                    }
                    Some((_, password)) => AuthCredentials { user: None, password: password.to_owned() },
                    None => AuthCredentials { user: None, password: text },
                }))
            }
            Credentials::Identity(identity) => {
                let token = match &self.tokens {
                    Some(source) => source.wait_for_token(self.connect_timeout).await,
                    None => None,
                };
                let Some(token) = token else {
                    let reason =
                        self.last_token_renewal_error().unwrap_or_else(|| "its source has not answered yet".to_owned());
                    let text = format!("{}: there is no token: {reason}", identity.setting);
                    return Err(RedisConnectError::misconfigured(text));
                };
                let password = token.password.reveal().to_owned();
                Ok(Some(AuthCredentials { user: token.user.clone(), password }))
            }
        }
    }

    /// Returns the settings whose files cannot be used to connect.
    fn find_settings_with_unusable_files(&self) -> Vec<UnusableSetting> {
        let credentials = match &self.credentials {
            Credentials::File(CredentialFile { setting, path }) => {
                read_trimmed_file(path).err().map(|error| UnusableSetting {
                    setting,
                    shown: path.display().to_string(),
                    what: format!("it cannot be read: {error}"),
                })
            }
            Credentials::None | Credentials::Inline { .. } | Credentials::Identity(_) => None,
        };
        let tls = self.tls.as_ref().and_then(|tls| tls.build_client_config().err());
        credentials.into_iter().chain(tls).collect()
    }

    /// Hashes of the files that connecting reads, to detect changes; `None` if connecting reads none.
    pub(crate) fn hash_connect_files(&self) -> Option<ConnectFileHashes> {
        let credentials = match &self.credentials {
            Credentials::File(file) => Some(&file.path),
            Credentials::None | Credentials::Inline { .. } | Credentials::Identity(_) => None,
        };
        let certificates = self.tls.iter().flat_map(StoreTls::certificate_paths);
        match &self.tokens {
            Some(source) => {
                let token = source.last_token();
                let password = token.as_ref().map_or("", |token| token.password.reveal());
                Some(ConnectFileHashes::of_token(password, certificates))
            }
            None => ConnectFileHashes::of_files(credentials, certificates),
        }
    }

    /// Text of the last failure to renew the token; `None` without tokens or without a failure.
    fn last_token_renewal_error(&self) -> Option<String> {
        self.tokens.as_ref()?.last_error()
    }
}

/// Returns the settings whose files cannot be used to connect to a deployment, now or later.
pub fn find_settings_with_unusable_files(settings: &DeploymentSettings) -> Vec<UnusableSetting> {
    let servers = ConnectOptions::new(settings, &Network::default());
    let sentinels = match &settings.topology {
        TopologySettings::Sentinel { credentials, .. } => Some(servers.for_sentinels(credentials)),
        TopologySettings::Single(_) | TopologySettings::Cluster(_) => None,
    };
    [Some(servers), sentinels].iter().flatten().flat_map(ConnectOptions::find_settings_with_unusable_files).collect()
}

/// Returns the source of the tokens of an identity.
fn find_token_source(credentials: &Credentials) -> Option<Arc<TokenSource>> {
    match credentials {
        Credentials::Identity(identity) => Some(TokenSource::for_identity(identity)),
        Credentials::None | Credentials::Inline { .. } | Credentials::File(_) => None,
    }
}

fn read_trimmed_file(path: &Path) -> io::Result<String> {
    let text = fs::read_to_string(path)?;
    Ok(text.trim_end_matches(['\n', '\r', ' ', '\t']).to_owned())
}

const TLS_FAILURE_DIAGNOSIS: TlsFailureDiagnosis = TlsFailureDiagnosis {
    tls_settings: TlsAdviceTexts {
        prefix: "REDIS",
        address: "REDIS_URL",
        plaintext: "unset REDIS_TLS and write redis:// in REDIS_URL",
        server: "Redis",
    },
    plaintext_probe: PlaintextProbe { command: b"PING\r\n", replies: b"+-" },
    server_lacks_tls: "the server speaks no TLS: unset REDIS_TLS, and write redis:// in the URL",
    server_needs_tls: "the server speaks TLS: set REDIS_TLS=true, or write rediss:// in the URL",
};

/// Connects to a server and logs in.
///
/// # Errors
/// The server cannot be reached in time, or rejects the credentials; the text names the setting to check.
pub(crate) async fn connect(
    endpoint: &Endpoint,
    options: &ConnectOptions,
) -> Result<Connected<Connection>, RedisConnectError> {
    let credentials = options.read_auth_credentials().await?;
    let tls = options.tls.as_ref().map(StoreTls::build_client_config).transpose();
    let tls = tls.map_err(|unusable| RedisConnectError::misconfigured(unusable.to_string()))?;
    let server = ServerToConnect { network: &options.network, endpoint, uses_tls: tls.is_some() };
    let open = open_connection(endpoint, options, tls, credentials);
    TLS_FAILURE_DIAGNOSIS.connect_or_diagnose(server, options.connect_timeout, open).await
}

async fn open_connection(
    endpoint: &Endpoint,
    options: &ConnectOptions,
    tls: Option<ClientConfig>,
    credentials: Option<AuthCredentials>,
) -> Result<Connected<Connection>, RedisConnectError> {
    let uses_tls = tls.is_some();
    let name_advice = || options.announcer.as_ref().and_then(|announcer| announcer.certificate_name_advice(endpoint));
    let socket_error = |error: &io::Error| TLS_FAILURE_DIAGNOSIS.socket_error(error, uses_tls, name_advice());
    let stream = options.network.connect(endpoint, tls).await.map_err(|error| socket_error(&error))?;
    let (connection, closed) = Connection::on_boxed_stream(stream);
    let has_user = credentials.as_ref().is_some_and(|credentials| credentials.user.is_some());
    match handshake(&connection, credentials, options.database).await {
        Ok(()) => Ok(Connected { connection, closed }),
        Err((ReplyError::Failed(RedisError::Broken), text)) => {
            let reason = closed.await.unwrap_or_else(|_| io::Error::other(text));
            Err(socket_error(&reason))
        }
        Err((error, text)) => Err(login_error(&error, text, has_user, options)),
    }
}

/// Sends AUTH, SELECT and PING.
async fn handshake(
    connection: &Connection,
    credentials: Option<AuthCredentials>,
    database: Option<u8>,
) -> Result<(), ErrorWithText> {
    if let Some(credentials) = &credentials {
        authenticate(connection, credentials).await?;
    }
    if let Some(database) = database {
        send_with_error_text(connection, &[b"SELECT", database.to_string().as_bytes()]).await?;
    }
    match send_with_error_text(connection, &[b"PING"]).await {
        // The user may lack the permission for PING and still have all that calls need.
        Err((ReplyError::Failed(RedisError::Misconfigured), _)) => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Sends AUTH.
async fn authenticate(connection: &Connection, credentials: &AuthCredentials) -> Result<(), ErrorWithText> {
    let AuthCredentials { user, password } = credentials;
    let mut words: SmallVec<[&[u8]; 3]> = SmallVec::from_slice(&[&b"AUTH"[..]]);
    words.extend(user.as_ref().map(|user| user.as_bytes()));
    words.push(password.as_bytes());
    send_with_error_text(connection, &words).await.map(drop)
}

/// Reads the credentials again and logs in on an open connection; calls in flight are not disturbed.
///
/// # Errors
/// The file cannot be read, or the server does not accept the credentials in time; the connection keeps its old login.
pub(crate) async fn log_in_again(connection: &Connection, options: &ConnectOptions) -> Result<(), RedisConnectError> {
    let Some(credentials) = options.read_auth_credentials().await? else { return Ok(()) };
    match timeout(options.connect_timeout, authenticate(connection, &credentials)).await {
        Ok(outcome) => outcome.map_err(|(error, text)| login_error(&error, text, credentials.user.is_some(), options)),
        Err(_) => Err(RedisConnectError { kind: RedisError::Timeout, text: "AUTH got no answer in time".to_owned() }),
    }
}

/// Builds the error for a failed AUTH, SELECT or PING; names the setting if the credentials are wrong.
fn login_error(error: &ReplyError, text: String, has_user: bool, options: &ConnectOptions) -> RedisConnectError {
    let kind = match error {
        ReplyError::Failed(RedisError::BadReply) => RedisError::Broken,
        error => error_kind(error),
    };
    let text = match kind {
        RedisError::Unauthenticated => {
            let stale =
                options.last_token_renewal_error().map(|error| format!(", whose token is not renewed: {error}"));
            // The user is not shown: of a password with a colon it is a part.
            let split = if has_user && !matches!(options.credentials, Credentials::Identity(_)) {
                " (what stands before the colon was taken as the user: write `:PASSWORD` if a password has a \
                 colon and there is no user)"
            } else {
                ""
            };
            format!("{text}; look at {}{split}{}", options.auth_setting(), stale.unwrap_or_default())
        }
        _ => text,
    };
    RedisConnectError { kind, text }
}
