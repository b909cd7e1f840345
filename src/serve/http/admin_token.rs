//! Authentication of admin requests by a bearer token.
//!
//! Tokens are compared by hash, so the time of the comparison reveals nothing. A token file is read on each request, so
//! a new token is valid at once. Wrong tokens are bounded. Every request is logged with the client's address, rejected
//! ones too; the token never is.
//!
//! Decides: how an admin token is compared, when its file is read, which status a refusal has.
//! Decides: the audit log, and as whom (`AuthenticatedAdmin`).

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;

use super::app_state::AppState;
use super::response::{respond_error, respond_text};
use super::token_attempts::{TokenAttempt, TokenAttemptResult};
use crate::settings::listeners::AdminToken;
use crate::settings::listeners::TOLLKEEPER_ADMIN_TOKEN_FILE;
use crate::settings::problem::UnusableSetting;
use crate::settings::setting::AnySetting as _;
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
        let Err(rejection) = authenticate_request(state, address.map(|address| address.ip()), &parts.headers).await
        else {
            return Ok(Self { peer, path: parts.uri.path().to_owned() });
        };
        let status = rejection.status_code();
        let (path, code) = (parts.uri.path(), status.as_u16());
        let suppressed = match rejection {
            // A client may send these at any rate.
            TokenRejection::TooManyWrong(_) => REFUSAL_LOG_THROTTLE.allow(state.collector.service.clock.now()),
            _ => Some(0),
        };
        if let Some(suppressed) = suppressed {
            tracing::warn!(target: AUDIT_TARGET, peer, path, status = code, suppressed, "admin request rejected");
        }
        let mut response = respond_error(status, format!("{rejection}\n"));
        if let Some((name, value)) = rejection.response_header() {
            response.headers_mut().insert(name, value);
        }
        Err(response)
    }
}

/// Lines about clients that sent too many wrong tokens.
static REFUSAL_LOG_THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(10));

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
    #[error("too many wrong tokens: no token is accepted for {} s", .0.as_secs() + 1)]
    TooManyWrong(Duration),
}

impl TokenRejection {
    const fn status_code(&self) -> StatusCode {
        match self {
            Self::NotConfigured => StatusCode::FORBIDDEN,
            Self::Unusable(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Wrong => StatusCode::UNAUTHORIZED,
            Self::TooManyWrong(_) => StatusCode::TOO_MANY_REQUESTS,
        }
    }

    fn response_header(&self) -> Option<(HeaderName, HeaderValue)> {
        match self {
            Self::Wrong => Some((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
            Self::TooManyWrong(left) => Some((header::RETRY_AFTER, HeaderValue::from(left.as_secs() + 1))),
            Self::NotConfigured | Self::Unusable(_) => None,
        }
    }
}

/// Compares the token of a request.
async fn authenticate_request(
    state: &AppState,
    peer: Option<IpAddr>,
    headers: &HeaderMap,
) -> Result<(), TokenRejection> {
    let token = state.admin_token.as_ref().ok_or(TokenRejection::NotConfigured)?;
    let expected = hash_configured_token(token).await.map_err(TokenRejection::Unusable)?;
    let presented = parse_bearer_token(headers).ok_or(TokenRejection::Wrong)?;
    let is_right = blake3::hash(presented) == expected;
    match state.token_attempts.check_and_record_attempt(TokenAttempt { peer, is_right, now: Instant::now() }) {
        TokenAttemptResult::Accepted => Ok(()),
        TokenAttemptResult::Wrong => Err(TokenRejection::Wrong),
        TokenAttemptResult::Refused(left) => Err(TokenRejection::TooManyWrong(left)),
    }
}

/// Hash of the configured token; an error names the setting.
async fn hash_configured_token(token: &AdminToken) -> Result<blake3::Hash, String> {
    let path = match token {
        AdminToken::Text(token) => return Ok(blake3::hash(token.reveal().as_bytes())),
        AdminToken::File(path) => path.clone(),
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
        token if token.len() < AdminToken::MIN_TOKEN_BYTES => Err("the token in the file is too short".to_owned()),
        token if token.len() > MAX_TOKEN_FILE_BYTES => Err("the file is too large for a token".to_owned()),
        token => Ok(blake3::hash(token)),
    }
}

/// Problem with the file of a token, if there is one.
pub fn find_unusable_token_file(token: &AdminToken) -> Option<UnusableSetting> {
    let AdminToken::File(path) = token else { return None };
    let what = hash_token_file(path).err()?;
    let setting = TOLLKEEPER_ADMIN_TOKEN_FILE.name();
    Some(UnusableSetting { setting, shown: path.display().to_string(), what })
}

fn parse_bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}
