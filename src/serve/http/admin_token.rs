//! Authentication of admin requests by a bearer token.
//!
//! Tokens are compared by hash, so the time of the comparison reveals nothing, and have 16 bytes at least, so nobody
//! guesses one. A token file is read on each request, so a new token is valid at once. Every request with the token is
//! logged with the client's address; of those that are refused a line of each kind each ten seconds, because anybody may
//! send them at any rate. The token never is logged.
//!
//! Decides: how an admin token is compared, when its file is read, which status a refusal has.
//! Decides: the audit log, and as whom (`AuthenticatedAdmin`).

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;

use super::app_state::AppState;
use super::response::{respond_error, respond_text};
use crate::settings::credentials::{CredentialFile, SecretSource};
use crate::settings::problem::UnusableSetting;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::logs::AUDIT_TARGET;

/// Address of the client, as a request extension.
#[derive(Clone, Copy, Debug)]
pub struct ClientAddress(pub SocketAddr);

/// Proof that a request came with the admin token.
#[derive(Debug)]
pub(super) struct AuthenticatedAdmin {
    /// Address of the client, for the log.
    pub(super) peer: String,
    /// Path of the page, for the log.
    pub(super) path: String,
}

impl AuthenticatedAdmin {
    /// Builds the response to a request with a right token that cannot be fulfilled, and writes it to the audit log.
    pub(super) fn reject_with_audit_log(&self, status: StatusCode, reason: impl Display) -> Response {
        let Self { peer, path } = self;
        tracing::warn!(target: AUDIT_TARGET, peer, path, status = status.as_u16(), "admin request rejected");
        respond_text(status, format!("{reason}\n"))
    }
}

/// Maximum size of a token file in bytes.
const MAX_TOKEN_FILE_BYTES: usize = 4096;

impl FromRequestParts<AppState> for AuthenticatedAdmin {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Response> {
        let address = parts.extensions.get().map(|ClientAddress(address)| *address);
        let peer = address.map_or_else(|| "unknown".to_owned(), |address| address.to_string());
        let Err(rejection) = authenticate_request(state, &parts.headers).await else {
            return Ok(Self { peer, path: parts.uri.path().to_owned() });
        };
        let status = rejection.status_code();
        if let Some(suppressed) = rejection.log_throttle().allow(state.collector.service.clock.now()) {
            let (path, status) = (parts.uri.path(), status.as_u16());
            tracing::warn!(target: AUDIT_TARGET, peer, path, status, suppressed, "admin request rejected");
        }
        let mut response = respond_error(status, format!("{rejection}\n"));
        if matches!(rejection, TokenRejection::Wrong) {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        Err(response)
    }
}

/// Interval between lines about requests that are refused for the same reason.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Reason why a request is not authenticated, for the client.
#[derive(Debug, thiserror::Error)]
enum TokenRejection {
    #[error(
        "this server has no admin token: set TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE for the server and \
         restart it"
    )]
    NotConfigured,
    #[error("{0}")]
    Unusable(String),
    #[error("send the token as `Authorization: Bearer TOKEN`")]
    Wrong,
}

impl TokenRejection {
    const fn status_code(&self) -> StatusCode {
        match self {
            Self::NotConfigured => StatusCode::FORBIDDEN,
            Self::Unusable(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Wrong => StatusCode::UNAUTHORIZED,
        }
    }

    fn log_throttle(&self) -> &'static LogThrottle {
        static NOT_CONFIGURED: LogThrottle = LogThrottle::every(REFUSAL_LOG_INTERVAL);
        static UNUSABLE: LogThrottle = LogThrottle::every(REFUSAL_LOG_INTERVAL);
        static WRONG: LogThrottle = LogThrottle::every(REFUSAL_LOG_INTERVAL);
        match self {
            Self::NotConfigured => &NOT_CONFIGURED,
            Self::Unusable(_) => &UNUSABLE,
            Self::Wrong => &WRONG,
        }
    }
}

/// Compares the token of a request.
async fn authenticate_request(state: &AppState, headers: &HeaderMap) -> Result<(), TokenRejection> {
    let token = state.admin_token.as_ref().ok_or(TokenRejection::NotConfigured)?;
    let expected = hash_configured_token(token).await.map_err(TokenRejection::Unusable)?;
    let presented = parse_bearer_token(headers).ok_or(TokenRejection::Wrong)?;
    if blake3::hash(presented) == expected { Ok(()) } else { Err(TokenRejection::Wrong) }
}

/// Hash of the configured token; an error names the setting.
async fn hash_configured_token(token: &SecretSource) -> Result<blake3::Hash, String> {
    let path = match token {
        SecretSource::Text(token) => return Ok(blake3::hash(token.reveal().as_bytes())),
        SecretSource::File(file) => file.path.clone(),
    };
    match tokio::task::spawn_blocking(move || hash_token_file(&path)).await {
        Ok(read) => read.map_err(|reason| format!("TOLLKEEPER_ADMIN_TOKEN_FILE: {reason}")),
        Err(_) => Err("TOLLKEEPER_ADMIN_TOKEN_FILE: the file cannot be read".to_owned()),
    }
}

/// Hash of the token in a file.
fn hash_token_file(path: &Path) -> Result<blake3::Hash, String> {
    let file = std::fs::read(path).map_err(|error| error.to_string())?;
    match file.trim_ascii() {
        token if token.len() < SecretSource::MIN_BYTES => Err("the token in the file is too short".to_owned()),
        token if token.len() > MAX_TOKEN_FILE_BYTES => Err("the file is too large for a token".to_owned()),
        token => Ok(blake3::hash(token)),
    }
}

/// Problem with the file of a token, if there is one.
pub fn find_unusable_token_file(token: &SecretSource) -> Option<UnusableSetting> {
    let SecretSource::File(CredentialFile { setting, path }) = token else { return None };
    let what = hash_token_file(path).err()?;
    Some(UnusableSetting { setting, shown: path.display().to_string(), what })
}

fn parse_bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}
