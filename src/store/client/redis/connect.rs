//! Opening of connections: socket, TLS and credentials.

use std::io;

use rustls::ClientConfig;
use smallvec::SmallVec;
use tokio::time::timeout;

use super::connect_options::{AuthCredentials, ConnectOptions};
use super::connection::{Connection, ErrorWithText, error_kind, send_with_error_text};
use super::error::{RedisConnectError, RedisError, ReplyError};
use crate::settings::address::Endpoint;
use crate::settings::tls::StoreTls;
use crate::store::client::connect::{ConnectAdvice, Connected, PlaintextProbe, TlsAdviceTexts, connect_to_endpoint};

const CONNECT_ADVICE: ConnectAdvice = ConnectAdvice {
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
    let uses_tls = tls.is_some();
    let open = open_connection(endpoint, options, tls, credentials);
    CONNECT_ADVICE.connect_with_advice(endpoint, uses_tls, options.connect_timeout, open).await
}

async fn open_connection(
    endpoint: &Endpoint,
    options: &ConnectOptions,
    tls: Option<ClientConfig>,
    credentials: Option<AuthCredentials>,
) -> Result<Connected<Connection>, RedisConnectError> {
    let uses_tls = tls.is_some();
    let stream =
        connect_to_endpoint(endpoint, tls).await.map_err(|error| CONNECT_ADVICE.socket_error(&error, uses_tls))?;
    let (connection, closed) = Connection::on_boxed_stream(stream);
    match handshake(&connection, credentials, options.database).await {
        Ok(()) => Ok(Connected { connection, closed }),
        Err((ReplyError::Failed(RedisError::Broken), text)) => {
            let reason = closed.await.unwrap_or_else(|_| io::Error::other(text));
            Err(CONNECT_ADVICE.socket_error(&reason, uses_tls))
        }
        Err((error, text)) => Err(login_error(&error, text, options)),
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
        Ok(outcome) => outcome.map_err(|(error, text)| login_error(&error, text, options)),
        Err(_) => Err(RedisConnectError { kind: RedisError::Timeout, text: "AUTH got no answer in time".to_owned() }),
    }
}

/// Builds the error for a failed AUTH, SELECT or PING; names the setting if the credentials are wrong.
fn login_error(error: &ReplyError, text: String, options: &ConnectOptions) -> RedisConnectError {
    let kind = match error {
        ReplyError::Failed(RedisError::BadReply) => RedisError::Broken,
        error => error_kind(error),
    };
    let text = match kind {
        RedisError::Unauthenticated => {
            let stale =
                options.last_token_renewal_error().map(|error| format!(", whose token is not renewed: {error}"));
            format!("{text}; look at {}{}", options.auth_setting(), stale.unwrap_or_default())
        }
        _ => text,
    };
    RedisConnectError { kind, text }
}
