//! What the debug listener lets an operator do beside looking: only with the token, and never without a line in the
//! log.
//!
//! The token is compared as a hash, so that the time it takes tells nothing of it, and a file with it is read at each
//! call, so that a new one holds at once. Every call that asks for something here is logged, refused ones too, with
//! where it came from; what is logged of a request is what it named, never the token.

use std::net::SocketAddr;

use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequestParts, Query, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::json;
use super::report_pages::bad_query;
use super::routes::{AppState, failure, pretty, text};
use crate::decide::explain::descriptor_text;
use crate::grpc::decode;
use crate::grpc::service::DEFAULT_DEADLINE;
use crate::settings::listeners::AdminToken;
use crate::settings::report::effective;
use crate::telemetry::logs::{self, AUDIT, Level};

/// Where a request came from.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Somebody who has shown the token.
#[derive(Debug)]
pub(super) struct Admin {
    peer: String,
}

impl FromRequestParts<AppState> for Admin {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Response> {
        let peer = parts.extensions.get().map_or_else(|| "unknown".to_owned(), |Peer(address)| address.to_string());
        let why = match &state.admin {
            None => (StatusCode::FORBIDDEN, NO_TOKEN.to_owned()),
            Some(token) => match expected(token).await {
                Err(why) => (StatusCode::INTERNAL_SERVER_ERROR, why),
                Ok(expected) if shown(&parts.headers).is_some_and(|shown| blake3::hash(shown) == expected) => {
                    return Ok(Self { peer });
                }
                Ok(_) => (StatusCode::UNAUTHORIZED, "send the token as `Authorization: Bearer TOKEN`".to_owned()),
            },
        };
        tracing::warn!(target: AUDIT, peer, path = parts.uri.path(), status = why.0.as_u16(), "admin call refused");
        let mut response = failure(why.0, why.1 + "\n");
        if why.0 == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        Err(response)
    }
}

const NO_TOKEN: &str = "this needs a token: set TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE";
/// The longest token that a file is read for, in bytes.
const MAX_TOKEN_BYTES: usize = 4096;

/// The hash of the token; an error is for the caller and names the setting.
async fn expected(token: &AdminToken) -> Result<blake3::Hash, String> {
    let path = match token {
        AdminToken::Text(token) => return Ok(blake3::hash(token.reveal().as_bytes())),
        AdminToken::File(path) => path.clone(),
    };
    let read = tokio::task::spawn_blocking(move || std::fs::read(path)).await;
    let failed = |why: &str| Err(format!("TOLLKEEPER_ADMIN_TOKEN_FILE: {why}"));
    match read {
        Ok(Ok(file)) => match file.trim_ascii() {
            token if token.len() < AdminToken::MIN_BYTES => failed("the file holds no token that is long enough"),
            token if token.len() > MAX_TOKEN_BYTES => failed("the file holds too much to be a token"),
            token => Ok(blake3::hash(token)),
        },
        Ok(Err(error)) => failed(&error.to_string()),
        Err(_) => failed("it could not be read"),
    }
}

fn shown(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// `/settings`: every setting as it is in force, secrets masked.
pub(super) async fn settings() -> Response {
    pretty(&effective(std::env::vars_os()))
}

/// Which counters to list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Which {
    domain: String,
    rule: String,
    most: Option<usize>,
}

/// Counters that one call lists, at most.
const MAX_LISTED_COUNTERS: usize = 1000;

/// `/counters`: the counters of a rule.
pub(super) async fn counters(
    admin: Admin,
    State(state): State<AppState>,
    which: Result<Query<Which>, QueryRejection>,
) -> Response {
    let Query(which) = match which {
        Ok(which) => which,
        Err(why) => return bad_query(&why),
    };
    tracing::warn!(target: AUDIT, peer = admin.peer, domain = which.domain, rule = which.rule, "counters listed");
    let service = &state.collector.service;
    let Some(loaded) = service.rules.load_full() else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "no rate limit configuration loaded\n");
    };
    let domain = loaded.rules.domain(&which.domain);
    let Some(domain) = domain else { return text(StatusCode::NOT_FOUND, "there is no such domain\n") };
    let rule = loaded.rules.rules().find(|rule| rule.rule.path == which.rule);
    let Some(rule) = rule else {
        return text(StatusCode::NOT_FOUND, "there is no such rule: /rlconfig and /rules have their names\n");
    };
    let most = which.most.unwrap_or(100).clamp(1, MAX_LISTED_COUNTERS);
    let context = service.context(Some(&loaded), DEFAULT_DEADLINE);
    match service.decider.list_counters(context, (&loaded.rules, domain, rule), most).await {
        Ok(listing) => pretty(&listing),
        Err(error) => text(StatusCode::BAD_GATEWAY, format!("{error}\n")),
    }
}

/// What became of the counters of a request.
#[derive(Debug, Serialize)]
struct Reset {
    /// Counters that were there, by descriptor.
    reset: Vec<u64>,
}

/// `POST /reset`: lets go of the counters that a request, as for `/json`, would charge from.
pub(super) async fn reset(admin: Admin, State(state): State<AppState>, body: Bytes) -> Response {
    let request = match json::request_from_json(&body) {
        Ok(request) => request,
        Err(error) => return text(StatusCode::BAD_REQUEST, format!("{error}\n")),
    };
    if request.descriptors.len() > MAX_RESET_DESCRIPTORS {
        return text(
            StatusCode::BAD_REQUEST,
            format!("at most {MAX_RESET_DESCRIPTORS} descriptors are reset at once\n"),
        );
    }
    let service = &state.collector.service;
    let Some(loaded) = service.rules.load_full() else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "no rate limit configuration loaded\n");
    };
    let context = service.context(Some(&loaded), DEFAULT_DEADLINE);
    let request = decode::request(&request);
    let outcome = service.decider.reset_counters(context, &request).await;
    let counters = outcome.as_ref().map_or(0, |reset| reset.iter().sum::<u64>());
    let descriptors = request.descriptors.iter().map(descriptor_text).collect::<Vec<_>>().join("; ");
    let domain = request.domain;
    tracing::warn!(target: AUDIT, peer = admin.peer, domain, descriptors, counters, "counters reset");
    match outcome {
        Ok(reset) => pretty(&Reset { reset }),
        Err(error) => text(StatusCode::BAD_GATEWAY, format!("{error}\n")),
    }
}

/// Descriptors that one call resets, at most.
const MAX_RESET_DESCRIPTORS: usize = 100;

/// `/log_level`: what is logged.
pub(super) async fn log_level() -> Response {
    text(StatusCode::OK, format!("{}\n", logs::current().name()))
}

/// `PUT /log_level`: logs what the body names and graver, until the process ends.
pub(super) async fn set_log_level(admin: Admin, body: Bytes) -> Response {
    let Some(level) = std::str::from_utf8(body.trim_ascii()).ok().and_then(Level::from_name) else {
        let names = Level::NAMES.join(", ");
        return text(StatusCode::BAD_REQUEST, format!("the body is to be a level and no more: {names}\n"));
    };
    // Said before it is so: whoever reads the log knows from where on it tells more, or less.
    let (peer, from, to) = (admin.peer, logs::current().name(), level.name());
    tracing::warn!(target: AUDIT, peer, from, to, "log level changed");
    match logs::set(level) {
        Ok(()) => log_level().await,
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}
