//! Opening of connections: socket, TLS and credentials.

use std::io;

use rustls::ClientConfig;
use smallvec::SmallVec;
use tokio::time::timeout;

use super::connect_options::{AuthCredentials, ConnectOptions};
use super::connection::Connection;
use super::error::{RedisConnectError, RedisError, ReplyError};
use super::send::{ErrorWithText, error_kind, send_with_error_text};
use crate::settings::endpoint::Endpoint;
use crate::settings::store_tls::StoreTls;
use crate::store_client::connect::Connected;
use crate::store_client::stream::{self, io_error_text};
use crate::store_client::tls_advice::TlsSettingNames;
use crate::store_client::tls_mismatch::{self, PlaintextProbe, TlsMismatch};

const TLS_SETTINGS: TlsSettingNames = TlsSettingNames {
    prefix: "REDIS",
    address: "REDIS_URL",
    plaintext: "unset REDIS_TLS and write redis:// in REDIS_URL",
    server: "Redis",
};
const PLAINTEXT_PROBE: PlaintextProbe = PlaintextProbe { command: b"PING\r\n", replies: b"+-" };

/// Connects to a server and logs in.
///
/// # Errors
/// The server cannot be reached in time, or rejects the credentials; the text names the setting to check.
pub(crate) async fn connect(
    endpoint: &Endpoint,
    options: &ConnectOptions,
) -> Result<Connected<Connection>, RedisConnectError> {
    let credentials = options.read_auth_credentials()?;
    let tls = options.tls.as_ref().map(StoreTls::config).transpose();
    let tls = tls.map_err(|unusable| RedisConnectError::misconfigured(unusable.to_string()))?;
    let uses_tls = tls.is_some();
    let outcome = timeout(options.connect_timeout, open(endpoint, options, tls, credentials)).await;
    let late = || Err(RedisConnectError { kind: RedisError::Timeout, text: "no answer in time".to_owned() });
    match outcome.unwrap_or_else(|_| late()) {
        // A server with the other protocol closes the connection or waits for more, which looks like an outage.
        Err(error) if matches!(error.kind, RedisError::Timeout | RedisError::Broken) => {
            let mismatch = tls_mismatch::detect(endpoint, uses_tls, &PLAINTEXT_PROBE).await;
            Err(mismatch
                .map_or(error, |mismatch| RedisConnectError::misconfigured(mismatch_advice(mismatch).to_owned())))
        }
        outcome => outcome,
    }
}

async fn open(
    endpoint: &Endpoint,
    options: &ConnectOptions,
    tls: Option<ClientConfig>,
    credentials: Option<AuthCredentials>,
) -> Result<Connected<Connection>, RedisConnectError> {
    let stream = stream::open(endpoint, tls).await.map_err(|error| socket_error(&error, options))?;
    let (connection, closed) = Connection::open_boxed(stream);
    match handshake(&connection, credentials, options.database).await {
        Ok(()) => Ok(Connected { connection, closed }),
        Err((ReplyError::Failed(RedisError::Broken), text)) => {
            let reason = closed.await.unwrap_or_else(|_| io::Error::other(text));
            Err(socket_error(&reason, options))
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

const fn mismatch_advice(mismatch: TlsMismatch) -> &'static str {
    match mismatch {
        TlsMismatch::ServerLacksTls => "the server speaks no TLS: unset REDIS_TLS, and write redis:// in the URL",
        TlsMismatch::ServerNeedsTls => "the server speaks TLS: set REDIS_TLS=true, or write rediss:// in the URL",
    }
}

fn socket_error(error: &io::Error, options: &ConnectOptions) -> RedisConnectError {
    let text = io_error_text(error);
    match options.tls.as_ref().and_then(|_| TLS_SETTINGS.advice(error)) {
        Some(advice) => RedisConnectError::misconfigured(format!("the TLS handshake failed: {text}; {advice}")),
        None => RedisConnectError { kind: RedisError::Broken, text },
    }
}

fn login_error(error: &ReplyError, text: String, options: &ConnectOptions) -> RedisConnectError {
    let kind = match error {
        ReplyError::Failed(RedisError::BadReply) => RedisError::Broken,
        error => error_kind(error),
    };
    let text = match kind {
        RedisError::Unauthenticated => format!("{text}; look at {}", options.auth_setting()),
        _ => text,
    };
    RedisConnectError { kind, text }
}
