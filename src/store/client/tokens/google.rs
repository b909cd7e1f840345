//! Access tokens of Google Cloud, from the metadata server of a machine or of GKE's workload identity.
//!
//! Decides: where a token of Google Cloud comes from.

use serde_json::Value;

use super::token_fetch::{MAX_LIFETIME_S, Token, TokenError, build_request, call, seconds_field, text_field};
use crate::settings::secret::Secret;

const SERVICE_NAME: &str = "the metadata server of Google Cloud";

/// Gets the access token of the service account, at `now_s`. The user is the default one.
pub(super) fn fetch_token(metadata_host: &str, now_s: u64) -> Result<Token, TokenError> {
    let url = format!("http://{metadata_host}/computeMetadata/v1/instance/service-accounts/default/token");
    let headers = [("metadata-flavor", "Google")];
    let request = build_request(http::Method::GET, &url, &headers, Vec::new())?;
    let reply = call(SERVICE_NAME, request)?.parse_json(SERVICE_NAME)?;
    parse_access_token(SERVICE_NAME, &reply, now_s)
}

/// Reads the JSON of OAuth: `access_token` and `expires_in`.
pub fn parse_access_token(what: &str, reply: &Value, now_s: u64) -> Result<Token, TokenError> {
    let password = Secret::new(text_field(reply, "access_token", what)?);
    let lifetime_s = seconds_field(reply, "expires_in", what)?.min(MAX_LIFETIME_S);
    Ok(Token { user: None, password, expires_at_s: now_s.saturating_add(lifetime_s) })
}
