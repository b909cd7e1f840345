//! Opening of connections: socket, TLS and credentials.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use smallvec::SmallVec;
use socket2::SockRef;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::connect_error::ConnectError;
use super::connect_options::{AuthCredentials, ConnectOptions};
use super::connection::{Closed, Connection};
use super::error::{RedisError, ReplyError, io_error_text};
use super::send::{ErrorWithText, error_kind, send_with_error_text};
use super::tls_mismatch;
use crate::settings::endpoint::Endpoint;
use crate::settings::store_tls::StoreTls;

/// Time after which the kernel closes a connection with unacknowledged data.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(5);

/// Connection that is ready for commands.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) connection: Connection,
    /// Receives the reason once the connection is closed.
    pub(crate) closed: Closed,
}

/// Connects to a server and logs in.
///
/// # Errors
/// The server cannot be reached in time, or rejects the credentials; the text names the setting to check.
pub(crate) async fn connect(endpoint: &Endpoint, options: &ConnectOptions) -> Result<Connected, ConnectError> {
    let credentials = options.read_auth_credentials()?;
    let tls = options.tls.as_ref().map(StoreTls::config).transpose();
    let tls = tls.map_err(|unusable| ConnectError::misconfigured(unusable.to_string()))?;
    let uses_tls = tls.is_some();
    let outcome = timeout(options.connect_timeout, open(endpoint, options, tls, credentials)).await;
    let late = || Err(ConnectError { kind: RedisError::Timeout, text: "no answer in time".to_owned() });
    match outcome.unwrap_or_else(|_| late()) {
        // A server with the other protocol closes the connection or waits for more, which looks like an outage.
        Err(error) if matches!(error.kind, RedisError::Timeout | RedisError::Broken) => {
            Err(tls_mismatch::detect(endpoint, uses_tls).await.map_or(error, ConnectError::misconfigured))
        }
        outcome => outcome,
    }
}

async fn open(
    endpoint: &Endpoint,
    options: &ConnectOptions,
    tls: Option<ClientConfig>,
    credentials: Option<AuthCredentials>,
) -> Result<Connected, ConnectError> {
    let opened = match endpoint {
        Endpoint::Tcp { host, port } => open_tcp(host, *port, tls).await,
        Endpoint::Unix(path) => UnixStream::connect(path).await.map(Connection::open),
    };
    let (connection, closed) = opened.map_err(|error| socket_error(&error, options))?;
    match handshake(&connection, credentials, options.database).await {
        Ok(()) => Ok(Connected { connection, closed }),
        Err((ReplyError::Failed(RedisError::Broken), text)) => {
            let reason = closed.await.unwrap_or_else(|_| io::Error::other(text));
            Err(socket_error(&reason, options))
        }
        Err((error, text)) => Err(login_error(&error, text, options)),
    }
}

async fn open_tcp(host: &str, port: u16, tls: Option<ClientConfig>) -> io::Result<(Connection, Closed)> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    #[cfg(target_os = "linux")]
    SockRef::from(&stream).set_tcp_user_timeout(Some(TCP_USER_TIMEOUT))?;
    match tls {
        None => Ok(Connection::open(stream)),
        Some(config) => {
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            TlsConnector::from(Arc::new(config)).connect(name, stream).await.map(Connection::open)
        }
    }
}

/// Sends AUTH, SELECT and PING.
async fn handshake(
    connection: &Connection,
    credentials: Option<AuthCredentials>,
    database: Option<u8>,
) -> Result<(), ErrorWithText> {
    if let Some(AuthCredentials { user, password }) = &credentials {
        let mut words: SmallVec<[&[u8]; 3]> = SmallVec::from_slice(&[&b"AUTH"[..]]);
        words.extend(user.as_ref().map(|user| user.as_bytes()));
        words.push(password.as_bytes());
        send_with_error_text(connection, &words).await?;
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

fn socket_error(error: &io::Error, options: &ConnectOptions) -> ConnectError {
    let text = io_error_text(error);
    let tls_error = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls_error.filter(|_| options.tls.is_some()).map(tls_advice) {
        Some(advice) => ConnectError::misconfigured(format!("the TLS handshake failed: {text}; {advice}")),
        None => ConnectError { kind: RedisError::Broken, text },
    }
}

fn login_error(error: &ReplyError, text: String, options: &ConnectOptions) -> ConnectError {
    let kind = match error {
        ReplyError::Failed(RedisError::BadReply) => RedisError::Broken,
        error => error_kind(error),
    };
    let text = match kind {
        RedisError::Unauthenticated => format!("{text}; look at {}", options.auth_setting()),
        _ => text,
    };
    ConnectError { kind, text }
}

/// Setting to check after a failed TLS handshake.
fn tls_advice(error: &rustls::Error) -> &'static str {
    const ADVICE: [(&str, &str); 7] = [
        (
            "NotValidForName",
            "the host in REDIS_URL is not a name of the server's certificate; \
         REDIS_TLS_SKIP_HOSTNAME_VERIFICATION=true skips this check",
        ),
        ("InvalidCertificate", "REDIS_TLS_CACERT names the authorities that are trusted"),
        ("CertificateRequired", "REDIS_TLS_CLIENT_CERT and REDIS_TLS_CLIENT_KEY name the certificate to show"),
        ("AlertReceived", "does the server accept the certificate of REDIS_TLS_CLIENT_CERT?"),
        ("InvalidMessage", "does the server speak TLS? If not, unset REDIS_TLS and write redis:// in REDIS_URL"),
        ("PeerIncompatible", "the server offers neither TLS 1.2 nor 1.3 as is needed"),
        ("PeerMisbehaved", "is the server a Redis?"),
    ];
    let name = format!("{error:?}");
    ADVICE.iter().find(|(kind, _)| name.contains(kind)).map_or("look at REDIS_TLS_CACERT", |(_, advice)| *advice)
}
