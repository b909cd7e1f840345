//! One connection to one server: dialled with today's credentials and certificates, and proved fit before it is used.
//!
//! The client is used for what it does well, speaking the protocol over one connection. It is told never to reconnect,
//! never to repeat a command and never to wait: its life is that of the connection, and whoever owns it dials
//! the next one. Files with credentials and certificates are read at each dial, so that rotating them needs no restart.

use std::future::{Future, poll_fn};
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use fred::clients::Client;
use fred::error::{Error, ErrorKind};
use fred::interfaces::ClientLike;
use fred::types::config::{Config, ConnectionConfig, PerformanceConfig, Server, ServerConfig, TcpConfig, TlsConfig};
use fred::types::{ConnectHandle, RespVersion};

use super::failure::{RedisError, Refused};
use super::{knock, tls};
use crate::settings::redis::{Credentials, Endpoint, Tls};

/// How to enter the servers of a deployment.
#[derive(Clone, Debug)]
pub(super) struct Entrance {
    /// The variable that names the servers.
    pub(super) setting: &'static str,
    /// Whether it is that of the sentinels, which have credentials of their own.
    pub(super) of_sentinels: bool,
    /// Who enters.
    pub(super) credentials: Credentials,
    /// How the line is protected.
    pub(super) tls: Option<Tls>,
    /// The database to select, where that is not 0.
    pub(super) database: Option<u8>,
    /// The longest that a dial takes, the handshake included.
    pub(super) dial_timeout: Duration,
}

/// A connection; dropping it closes it and fails what is in flight.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) client: Client,
    task: Option<ConnectHandle>,
}

impl Connection {
    /// The client, and the task whose end is that of the connection. Aborting it closes the connection.
    pub(super) fn into_parts(mut self) -> (Client, ConnectHandle) {
        (self.client.clone(), self.task.take().expect("it is taken here only"))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(super) struct DialError {
    pub(super) kind: RedisError,
    pub(super) text: String,
}

impl DialError {
    pub(super) fn misconfigured(text: String) -> Self {
        Self { kind: RedisError::Misconfigured, text }
    }

    /// What the client says, with what to look at.
    pub(super) fn from_client(error: &Error, entrance: &Entrance) -> Self {
        let text = in_words(error.details());
        if let Some(advice) = tls_advice(&text).filter(|_| entrance.tls.is_some()) {
            return Self::misconfigured(format!("the TLS handshake failed: {text}; {advice}"));
        }
        let kind = match Refused::from_error(error) {
            Refused::Failed(RedisError::BadReply) => RedisError::Broken,
            Refused::Failed(kind) => kind,
            Refused::NoScript | Refused::Moved(_) | Refused::Ask(_) => RedisError::BadReply,
        };
        match kind {
            RedisError::Timeout => Self { kind, text: "no answer in time".to_owned() },
            RedisError::Unauthenticated => Self { kind, text: format!("{text}; look at {}", auth_setting(entrance)) },
            _ => Self { kind, text },
        }
    }
}

/// What the client makes of an error, without the marks of its making: `Os { code: 111, kind: ConnectionRefused,
/// message: "Connection refused" }` is a refused connection.
pub(super) fn in_words(details: &str) -> String {
    let quoted = |mark: &str| Some(details.split_once(mark)?.1.split_once('"')?.0.to_owned());
    let wrapped = || Some(details.split_once(", error: ")?.1.trim_end_matches([' ', '}']).to_owned());
    let words = quoted("message: \"").or_else(|| quoted("error: \"")).or_else(wrapped);
    let words = words.unwrap_or_else(|| details.trim_end_matches('.').to_owned());
    // Some servers quote what they were sent, a password too.
    words.split(", with args").next().unwrap_or_default().chars().take(LONGEST_TEXT).collect()
}

/// Characters of an error that are shown.
const LONGEST_TEXT: usize = 160;

/// What to look at where a handshake failed; `None` if it was none.
fn tls_advice(text: &str) -> Option<&'static str> {
    const MARKS: [(&str, &str); 8] = [
        (
            "NotValidForName",
            "REDIS_URL names the server otherwise than its certificate does; \
         REDIS_TLS_SKIP_HOSTNAME_VERIFICATION=true does not compare them",
        ),
        ("InvalidCertificate", "REDIS_TLS_CACERT names the authorities that are trusted"),
        ("CertificateRequired", "REDIS_TLS_CLIENT_CERT and REDIS_TLS_CLIENT_KEY name the certificate to show"),
        ("AlertReceived", "does the server accept the certificate of REDIS_TLS_CLIENT_CERT?"),
        ("InvalidMessage", "does the server speak TLS? If not, unset REDIS_TLS and write redis:// in REDIS_URL"),
        ("PeerIncompatible", "the server offers neither TLS 1.2 nor 1.3 as is needed"),
        ("PeerMisbehaved", "is the server a Redis?"),
        ("certificate", "look at REDIS_TLS_CACERT"),
    ];
    MARKS.iter().find(|(mark, _)| text.contains(mark)).map(|(_, advice)| *advice)
}

/// The settings that hold the credentials of a deployment.
pub(super) fn auth_setting(entrance: &Entrance) -> &'static str {
    let is_file = matches!(entrance.credentials, Credentials::File(_));
    match (entrance.setting, entrance.of_sentinels, is_file) {
        ("REDIS_PERSECOND_URL", false, true) => "TOLLKEEPER_REDIS_PERSECOND_AUTH_FILE",
        ("REDIS_PERSECOND_URL", false, false) => "REDIS_PERSECOND_AUTH or the password in REDIS_PERSECOND_URL",
        ("REDIS_PERSECOND_URL", true, true) => "TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE",
        ("REDIS_PERSECOND_URL", true, false) => "REDIS_PERSECOND_SENTINEL_AUTH or the password in REDIS_PERSECOND_URL",
        (_, false, true) => "TOLLKEEPER_REDIS_AUTH_FILE",
        (_, false, false) => "REDIS_AUTH or the password in REDIS_URL",
        (_, true, true) => "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE",
        (_, true, false) => "REDIS_SENTINEL_AUTH or the password in REDIS_URL",
    }
}

/// Opens a connection: RESP3 where the server has it, else RESP2 without HELLO.
pub(super) async fn dial(endpoint: &Endpoint, entrance: &Entrance) -> Result<Connection, DialError> {
    let (user, password) = read_credentials(entrance)?;
    let tls = entrance.tls.as_ref().map(tls::connector).transpose().map_err(DialError::misconfigured)?;
    let config = |version: RespVersion| Config {
        username: user.clone(),
        password: password.clone(),
        server: server(endpoint),
        version,
        database: entrance.database,
        tls: tls.clone().map(TlsConfig::from),
        ..Config::default()
    };
    // The client sends HELLO as one line of words, in which no blank and no quote can stand.
    let is_plain = |word: &Option<String>| {
        word.iter().all(|word| word.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"'\\".contains(&byte)))
    };
    let newest = if is_plain(&user) && is_plain(&password) { RespVersion::RESP3 } else { RespVersion::RESP2 };
    let outcome = match open(config(newest), entrance).await {
        Err(error) if lacks_hello(&error) => open(config(RespVersion::RESP2), entrance).await,
        outcome => outcome,
    };
    match outcome.map_err(|error| DialError::from_client(&error, entrance)) {
        // A server that speaks otherwise hangs up or waits for more: from here that looks like an outage.
        Err(error) if matches!(error.kind, RedisError::Timeout | RedisError::Broken) => {
            Err(knock::misunderstood(endpoint, tls.is_some()).await.map_or(error, DialError::misconfigured))
        }
        outcome => outcome,
    }
}

fn lacks_hello(error: &Error) -> bool {
    let text = error.details();
    text.contains("unknown command") || text.contains("NOPROTO") || text.contains("HELLO")
}

async fn open(config: Config, entrance: &Entrance) -> Result<Connection, Error> {
    let connection = ConnectionConfig {
        connection_timeout: entrance.dial_timeout,
        internal_command_timeout: entrance.dial_timeout,
        max_command_attempts: 1,
        max_redirections: 1,
        disable_cluster_health_check: true,
        tcp: TcpConfig { nodelay: Some(true), ..TcpConfig::default() },
        max_command_buffer_len: super::node::MOST_CALLS,
        ..ConnectionConfig::default()
    };
    let client = Client::new(config, Some(PerformanceConfig::default()), Some(connection), None);
    let mut connected = pin!(client.wait_for_connect());
    // Asked once, it has begun to listen and hears of a connection however fast that comes.
    poll_fn(|context| {
        let _pending = connected.as_mut().poll(context);
        Poll::Ready(())
    })
    .await;
    // From here on whoever gives up closes the connection, also one that is not there yet.
    let connection = Connection { client: client.clone(), task: Some(client.connect()) };
    match tokio::time::timeout(entrance.dial_timeout, connected).await {
        Ok(outcome) => outcome.map(|()| connection),
        Err(_) => Err(Error::new(ErrorKind::Timeout, "no answer to the first command")),
    }
}

fn server(endpoint: &Endpoint) -> ServerConfig {
    match endpoint {
        Endpoint::Tcp { host, port } => ServerConfig::Centralized { server: Server::new(host.as_str(), *port) },
        Endpoint::Unix(path) => ServerConfig::Unix { path: path.clone() },
    }
}

/// Who enters now. A file holds `password` or `user:password`; space at its end is no part of it.
fn read_credentials(entrance: &Entrance) -> Result<(Option<String>, Option<String>), DialError> {
    match &entrance.credentials {
        Credentials::None => Ok((None, None)),
        Credentials::Inline { user, password } => Ok((user.clone(), Some(password.reveal().to_owned()))),
        Credentials::File(path) => {
            let text = read_secret(path).map_err(|error| {
                let setting = auth_setting(entrance);
                DialError::misconfigured(format!("{setting}: cannot read {}: {error}", path.display()))
            })?;
            Ok(match text.split_once(':') {
                Some((user, password)) if !user.is_empty() => (Some(user.to_owned()), Some(password.to_owned())),
                Some((_, password)) => (None, Some(password.to_owned())),
                None => (None, Some(text)),
            })
        }
    }
}

fn read_secret(path: &Path) -> io::Result<String> {
    let text = std::fs::read_to_string(path)?;
    Ok(text.trim_end_matches(['\n', '\r', ' ', '\t']).to_owned())
}

impl Entrance {
    /// The files that a dial reads.
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let credentials = match &self.credentials {
            Credentials::File(path) => Some(path),
            Credentials::None | Credentials::Inline { .. } => None,
        };
        let ca = self.tls.as_ref().and_then(|tls| tls.ca.as_ref());
        let client = self.tls.as_ref().and_then(|tls| tls.client.as_ref());
        credentials.into_iter().chain(ca).chain(client.into_iter().flat_map(|(certificate, key)| [certificate, key]))
    }

    /// Whether a dial reads any file.
    pub(super) fn reads_files(&self) -> bool {
        self.files().next().is_some()
    }

    /// What those files say now, to be compared: a change asks for a new connection.
    pub(super) fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for path in self.files() {
            let contents = std::fs::read(path).unwrap_or_default();
            hasher.update(&(contents.len() as u64).to_le_bytes());
            hasher.update(&contents);
        }
        *hasher.finalize().as_bytes()
    }
}

/// An entrance that several connections share.
pub(super) type Shared = Arc<Entrance>;
