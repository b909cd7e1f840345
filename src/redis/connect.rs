//! One connection to one server: dialled with today's credentials and certificates, and ready for commands.
//!
//! It is never mended: its life is that of the stream below, and whoever owns it dials the next one. Files with
//! credentials and certificates are read at each dial, so that rotating them needs no restart.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use smallvec::SmallVec;
use socket2::SockRef;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::connection::{self, Closed, Connection};
use super::error::{RedisError, ReplyError};
use super::send::send_with_error_text;
use super::{tls, tls_mismatch};
use crate::settings::redis::{Credentials, DeploymentSettings, Endpoint, Tls};

/// The system closes a connection whose packets have not been confirmed for so long.
const UNCONFIRMED: Duration = Duration::from_secs(5);

/// How to enter the servers of a deployment.
#[derive(Clone, Debug)]
pub(crate) struct ConnectOptions {
    /// The variable that names the servers.
    pub(crate) setting: &'static str,
    /// Whether it is that of the sentinels, which have credentials of their own.
    pub(crate) of_sentinels: bool,
    /// Who enters.
    pub(crate) credentials: Credentials,
    /// How the connection is protected.
    pub(crate) tls: Option<Tls>,
    /// The database to select, where that is not 0.
    pub(crate) database: Option<u8>,
    /// The longest that a dial takes, the handshake included.
    pub(crate) dial_timeout: Duration,
}

impl ConnectOptions {
    /// Returns the options for the servers of a deployment.
    pub(crate) fn new(settings: &DeploymentSettings) -> Self {
        Self {
            setting: settings.setting,
            of_sentinels: false,
            credentials: settings.credentials.clone(),
            tls: settings.tls.clone(),
            database: (settings.database != 0).then_some(settings.database),
            dial_timeout: settings.dial_timeout.min(MAX_DIAL_TIME),
        }
    }

    /// The settings that hold the credentials of a deployment.
    pub(crate) fn auth_setting(&self) -> &'static str {
        let is_file = matches!(self.credentials, Credentials::File(_));
        match (self.setting, self.of_sentinels, is_file) {
            ("REDIS_PERSECOND_URL", false, true) => "TOLLKEEPER_REDIS_PERSECOND_AUTH_FILE",
            ("REDIS_PERSECOND_URL", false, false) => "REDIS_PERSECOND_AUTH or the password in REDIS_PERSECOND_URL",
            ("REDIS_PERSECOND_URL", true, true) => "TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE",
            ("REDIS_PERSECOND_URL", true, false) => {
                "REDIS_PERSECOND_SENTINEL_AUTH or the password in REDIS_PERSECOND_URL"
            }
            (_, false, true) => "TOLLKEEPER_REDIS_AUTH_FILE",
            (_, false, false) => "REDIS_AUTH or the password in REDIS_URL",
            (_, true, true) => "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE",
            (_, true, false) => "REDIS_SENTINEL_AUTH or the password in REDIS_URL",
        }
    }
}

/// Upper bound on a connection attempt, regardless of REDIS_TIMEOUT.
///
/// The kernel backs off SYN retransmits exponentially; a new attempt finds a recovered server sooner.
const MAX_DIAL_TIME: Duration = Duration::from_secs(1);

/// A connection; dropping it closes it and fails what is in flight.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) connection: Connection,
    /// Tells why it ended, when it has.
    pub(crate) end: Closed,
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct ConnectError {
    pub(crate) kind: RedisError,
    pub(crate) text: String,
}

impl ConnectError {
    pub(crate) fn misconfigured(text: String) -> Self {
        Self { kind: RedisError::Misconfigured, text }
    }

    /// What the system says.
    fn of_system(error: &io::Error, options: &ConnectOptions) -> Self {
        let text = connection::in_words(error);
        let of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        match of_tls.filter(|_| options.tls.is_some()).map(tls_advice) {
            Some(advice) => Self::misconfigured(format!("the TLS handshake failed: {text}; {advice}")),
            None => Self { kind: RedisError::Broken, text },
        }
    }

    /// What the server says to its first commands.
    fn of_server(refused: &ReplyError, text: &str, options: &ConnectOptions) -> Self {
        let kind = match refused {
            ReplyError::Failed(RedisError::BadReply) => RedisError::Broken,
            ReplyError::Failed(kind) => *kind,
            ReplyError::NoScript | ReplyError::Moved(_) | ReplyError::Ask(_) => RedisError::BadReply,
        };
        let text = match kind {
            RedisError::Unauthenticated => format!("{text}; look at {}", options.auth_setting()),
            _ => text.to_owned(),
        };
        Self { kind, text }
    }
}

/// The text of an error reply, fit for a log.
pub(crate) fn shortened(text: &str) -> String {
    // Some servers quote what they were sent, a password too.
    text.split(", with args").next().unwrap_or_default().chars().take(LONGEST_TEXT).collect()
}

/// Characters of an error that are shown.
const LONGEST_TEXT: usize = 160;

/// What to look at where a handshake failed.
fn tls_advice(error: &rustls::Error) -> &'static str {
    const MARKS: [(&str, &str); 7] = [
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
    ];
    let name = format!("{error:?}");
    MARKS.iter().find(|(mark, _)| name.contains(mark)).map_or("look at REDIS_TLS_CACERT", |(_, advice)| *advice)
}

/// Opens a connection.
pub(crate) async fn dial(endpoint: &Endpoint, options: &ConnectOptions) -> Result<Connected, ConnectError> {
    let credentials = read_credentials(options)?;
    let tls = options.tls.as_ref().map(tls::config).transpose().map_err(ConnectError::misconfigured)?;
    let by_tls = tls.is_some();
    let opened = timeout(options.dial_timeout, open(endpoint, options, tls, credentials)).await;
    let late = || Err(ConnectError { kind: RedisError::Timeout, text: "no answer in time".to_owned() });
    match opened.unwrap_or_else(|_| late()) {
        // A server that speaks otherwise hangs up or waits for more: from here that looks like an outage.
        Err(error) if matches!(error.kind, RedisError::Timeout | RedisError::Broken) => {
            Err(tls_mismatch::detect(endpoint, by_tls).await.map_or(error, ConnectError::misconfigured))
        }
        outcome => outcome,
    }
}

async fn open(
    endpoint: &Endpoint,
    options: &ConnectOptions,
    tls: Option<ClientConfig>,
    credentials: Option<(Option<String>, String)>,
) -> Result<Connected, ConnectError> {
    let opened = match endpoint {
        Endpoint::Tcp { host, port } => open_tcp(host, *port, tls).await,
        Endpoint::Unix(path) => UnixStream::connect(path).await.map(Connection::open),
    };
    let (connection, end) = opened.map_err(|error| ConnectError::of_system(&error, options))?;
    match handshake(&connection, credentials, options.database).await {
        Ok(()) => Ok(Connected { connection, end }),
        Err((ReplyError::Failed(RedisError::Broken), text)) => {
            let why = end.await.unwrap_or_else(|_| io::Error::other(text));
            Err(ConnectError::of_system(&why, options))
        }
        Err((refused, text)) => Err(ConnectError::of_server(&refused, &text, options)),
    }
}

async fn open_tcp(host: &str, port: u16, tls: Option<ClientConfig>) -> io::Result<(Connection, Closed)> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    #[cfg(target_os = "linux")]
    SockRef::from(&stream).set_tcp_user_timeout(Some(UNCONFIRMED))?;
    match tls {
        None => Ok(Connection::open(stream)),
        Some(config) => {
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            TlsConnector::from(Arc::new(config)).connect(name, stream).await.map(Connection::open)
        }
    }
}

/// Says who enters, selects the database, and hears whether the server listens at all.
async fn handshake(
    connection: &Connection,
    credentials: Option<(Option<String>, String)>,
    database: Option<u8>,
) -> Result<(), (ReplyError, String)> {
    if let Some((user, password)) = &credentials {
        let mut words: SmallVec<[&[u8]; 3]> = SmallVec::from_slice(&[&b"AUTH"[..]]);
        words.extend(user.as_ref().map(|user| user.as_bytes()));
        words.push(password.as_bytes());
        send_with_error_text(connection, &words).await?;
    }
    if let Some(database) = database {
        send_with_error_text(connection, &[b"SELECT", database.to_string().as_bytes()]).await?;
    }
    match send_with_error_text(connection, &[b"PING"]).await {
        // A user who may do what the rules need may need no more.
        Err((ReplyError::Failed(RedisError::Misconfigured), _)) => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Who enters now. A file holds `password` or `user:password`; space at its end is no part of it.
fn read_credentials(options: &ConnectOptions) -> Result<Option<(Option<String>, String)>, ConnectError> {
    match &options.credentials {
        Credentials::None => Ok(None),
        Credentials::Inline { user, password } => Ok(Some((user.clone(), password.reveal().to_owned()))),
        Credentials::File(path) => {
            let text = read_secret(path).map_err(|error| {
                let setting = options.auth_setting();
                ConnectError::misconfigured(format!("{setting}: cannot read {}: {error}", path.display()))
            })?;
            Ok(match text.split_once(':') {
                Some((user, password)) if !user.is_empty() => Some((Some(user.to_owned()), password.to_owned())),
                Some((_, password)) => Some((None, password.to_owned())),
                None => Some((None, text)),
            })
        }
    }
}

fn read_secret(path: &Path) -> io::Result<String> {
    let text = std::fs::read_to_string(path)?;
    Ok(text.trim_end_matches(['\n', '\r', ' ', '\t']).to_owned())
}

impl ConnectOptions {
    /// The files that a dial reads.
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let credentials = match &self.credentials {
            Credentials::File(path) => Some(path),
            Credentials::None | Credentials::Inline { .. } => None,
        };
        let ca = self.tls.as_ref().and_then(|tls| tls.ca.as_ref());
        let client = self.tls.as_ref().and_then(|tls| tls.client.as_ref());
        let pair = client.into_iter().flat_map(|(certificate, key)| [certificate, key]);
        credentials.into_iter().chain(ca.into_iter().chain(pair).map(|file| &file.path))
    }

    /// Whether a dial reads any file.
    pub(crate) fn reads_files(&self) -> bool {
        self.files().next().is_some()
    }

    /// What those files say now, to be compared: a change asks for a new connection.
    pub(crate) fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for path in self.files() {
            let contents = std::fs::read(path).unwrap_or_default();
            hasher.update(&(contents.len() as u64).to_le_bytes());
            hasher.update(&contents);
        }
        *hasher.finalize().as_bytes()
    }
}
