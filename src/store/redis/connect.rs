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

use super::failure::{RedisError, Refused};
use super::line::{self, End, Line};
use super::send::send_and_tell;
use super::{knock, tls};
use crate::settings::redis::{Credentials, Endpoint, Tls};

/// The system closes a connection whose packets have not been confirmed for so long.
const UNCONFIRMED: Duration = Duration::from_secs(5);

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
    pub(super) line: Line,
    /// Tells why it ended, when it has.
    pub(super) end: End,
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

    /// What the system says.
    fn of_system(error: &io::Error, entrance: &Entrance) -> Self {
        let text = line::in_words(error);
        let of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        match of_tls.filter(|_| entrance.tls.is_some()).map(tls_advice) {
            Some(advice) => Self::misconfigured(format!("the TLS handshake failed: {text}; {advice}")),
            None => Self { kind: RedisError::Broken, text },
        }
    }

    /// What the server says to its first commands.
    fn of_server(refused: &Refused, text: &str, entrance: &Entrance) -> Self {
        let kind = match refused {
            Refused::Failed(RedisError::BadReply) => RedisError::Broken,
            Refused::Failed(kind) => *kind,
            Refused::NoScript | Refused::Moved(_) | Refused::ChargeRequest(_) => RedisError::BadReply,
        };
        let text = match kind {
            RedisError::Unauthenticated => format!("{text}; look at {}", auth_setting(entrance)),
            _ => text.to_owned(),
        };
        Self { kind, text }
    }
}

/// The text of an error reply, fit for a log.
pub(super) fn shortened(text: &str) -> String {
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

/// Opens a connection.
pub(super) async fn dial(endpoint: &Endpoint, entrance: &Entrance) -> Result<Connection, DialError> {
    let credentials = read_credentials(entrance)?;
    let tls = entrance.tls.as_ref().map(tls::config).transpose().map_err(DialError::misconfigured)?;
    let by_tls = tls.is_some();
    let opened = timeout(entrance.dial_timeout, open(endpoint, entrance, tls, credentials)).await;
    let late = || Err(DialError { kind: RedisError::Timeout, text: "no answer in time".to_owned() });
    match opened.unwrap_or_else(|_| late()) {
        // A server that speaks otherwise hangs up or waits for more: from here that looks like an outage.
        Err(error) if matches!(error.kind, RedisError::Timeout | RedisError::Broken) => {
            Err(knock::misunderstood(endpoint, by_tls).await.map_or(error, DialError::misconfigured))
        }
        outcome => outcome,
    }
}

async fn open(
    endpoint: &Endpoint,
    entrance: &Entrance,
    tls: Option<ClientConfig>,
    credentials: Option<(Option<String>, String)>,
) -> Result<Connection, DialError> {
    let opened = match endpoint {
        Endpoint::Tcp { host, port } => open_tcp(host, *port, tls).await,
        Endpoint::Unix(path) => UnixStream::connect(path).await.map(Line::open),
    };
    let (line, end) = opened.map_err(|error| DialError::of_system(&error, entrance))?;
    match introduce(&line, credentials, entrance.database).await {
        Ok(()) => Ok(Connection { line, end }),
        Err((Refused::Failed(RedisError::Broken), text)) => {
            let why = end.await.unwrap_or_else(|_| io::Error::other(text));
            Err(DialError::of_system(&why, entrance))
        }
        Err((refused, text)) => Err(DialError::of_server(&refused, &text, entrance)),
    }
}

async fn open_tcp(host: &str, port: u16, tls: Option<ClientConfig>) -> io::Result<(Line, End)> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    #[cfg(target_os = "linux")]
    SockRef::from(&stream).set_tcp_user_timeout(Some(UNCONFIRMED))?;
    match tls {
        None => Ok(Line::open(stream)),
        Some(config) => {
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            TlsConnector::from(Arc::new(config)).connect(name, stream).await.map(Line::open)
        }
    }
}

/// Says who enters, selects the database, and hears whether the server listens at all.
async fn introduce(
    line: &Line,
    credentials: Option<(Option<String>, String)>,
    database: Option<u8>,
) -> Result<(), (Refused, String)> {
    if let Some((user, password)) = &credentials {
        let mut words: SmallVec<[&[u8]; 3]> = SmallVec::from_slice(&[&b"AUTH"[..]]);
        words.extend(user.as_ref().map(|user| user.as_bytes()));
        words.push(password.as_bytes());
        send_and_tell(line, &words).await?;
    }
    if let Some(database) = database {
        send_and_tell(line, &[b"SELECT", database.to_string().as_bytes()]).await?;
    }
    match send_and_tell(line, &[b"PING"]).await {
        // A user who may do what the rules need may need no more.
        Err((Refused::Failed(RedisError::Misconfigured), _)) => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Who enters now. A file holds `password` or `user:password`; space at its end is no part of it.
fn read_credentials(entrance: &Entrance) -> Result<Option<(Option<String>, String)>, DialError> {
    match &entrance.credentials {
        Credentials::None => Ok(None),
        Credentials::Inline { user, password } => Ok(Some((user.clone(), password.reveal().to_owned()))),
        Credentials::File(path) => {
            let text = read_secret(path).map_err(|error| {
                let setting = auth_setting(entrance);
                DialError::misconfigured(format!("{setting}: cannot read {}: {error}", path.display()))
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

impl Entrance {
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
