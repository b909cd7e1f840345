//! Authentication of admin requests by a bearer token.
//!
//! Tokens are compared by hash, so the time of the comparison reveals nothing. A token file is read on each request, so
//! a new token is valid at once. Every request is logged with the client's address, rejected ones too; the token never
//! is.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;

use super::app_state::AppState;
use super::response;
use crate::settings::listeners::AdminToken;
use crate::settings::problem::UnusableSetting;
use crate::settings::setting::AnySetting as _;
use crate::settings::table::listeners::TOLLKEEPER_ADMIN_TOKEN_FILE;
use crate::telemetry::logs::AUDIT;

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
    /// Logs and returns a response to a request that cannot be fulfilled.
    pub(super) fn reject(&self, status: StatusCode, reason: impl Display) -> Response {
        let Self { peer, path } = self;
        tracing::warn!(target: AUDIT, peer, path, status = status.as_u16(), "admin request rejected");
        response::text(status, format!("{reason}\n"))
    }
}

/// Maximum size of a token file in bytes.
const MAX_TOKEN_BYTES: usize = 4096;

impl FromRequestParts<AppState> for AuthenticatedAdmin {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Response> {
        let address = parts.extensions.get();
        let peer = address.map_or_else(|| "unknown".to_owned(), |ClientAddress(address)| address.to_string());
        let (status, reason) = match authenticate(state.admin_token.as_ref(), &parts.headers).await {
            Ok(()) => return Ok(Self { peer, path: parts.uri.path().to_owned() }),
            Err(rejection) => rejection,
        };
        let (path, code) = (parts.uri.path(), status.as_u16());
        tracing::warn!(target: AUDIT, peer, path, status = code, "admin request rejected");
        let mut response = response::error(status, reason + "\n");
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        Err(response)
    }
}

/// Compares the token of a request; an error is the status and the reason for the client.
async fn authenticate(token: Option<&AdminToken>, headers: &HeaderMap) -> Result<(), (StatusCode, String)> {
    let Some(token) = token else {
        let reason = "this page needs a token: set TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE";
        return Err((StatusCode::FORBIDDEN, reason.to_owned()));
    };
    let expected = expected_hash(token).await.map_err(|reason| (StatusCode::INTERNAL_SERVER_ERROR, reason))?;
    match bearer_token(headers) {
        Some(token) if blake3::hash(token) == expected => Ok(()),
        _ => Err((StatusCode::UNAUTHORIZED, "send the token as `Authorization: Bearer TOKEN`".to_owned())),
    }
}

/// Hash of the configured token; an error names the setting.
async fn expected_hash(token: &AdminToken) -> Result<blake3::Hash, String> {
    let path = match token {
        AdminToken::Text(token) => return Ok(blake3::hash(token.reveal().as_bytes())),
        AdminToken::File(path) => path.clone(),
    };
    match tokio::task::spawn_blocking(move || hash_of_file(&path)).await {
        Ok(read) => read.map_err(|reason| format!("TOLLKEEPER_ADMIN_TOKEN_FILE: {reason}")),
        Err(_) => Err("TOLLKEEPER_ADMIN_TOKEN_FILE: the file cannot be read".to_owned()),
    }
}

/// Hash of the token in a file.
fn hash_of_file(path: &Path) -> Result<blake3::Hash, String> {
    let file = std::fs::read(path).map_err(|error| error.to_string())?;
    match file.trim_ascii() {
        token if token.len() < AdminToken::MIN_BYTES => Err("the token in the file is too short".to_owned()),
        token if token.len() > MAX_TOKEN_BYTES => Err("the file is too large for a token".to_owned()),
        token => Ok(blake3::hash(token)),
    }
}

/// Problem with the file of a token, if there is one.
pub fn unusable_file(token: &AdminToken) -> Option<UnusableSetting> {
    let AdminToken::File(path) = token else { return None };
    let what = hash_of_file(path).err()?;
    let setting = TOLLKEEPER_ADMIN_TOKEN_FILE.name();
    Some(UnusableSetting { setting, shown: path.display().to_string(), what })
}

fn bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}
