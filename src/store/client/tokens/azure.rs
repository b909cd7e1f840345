//! Access tokens of Entra for Azure Managed Redis: of managed identities, and of workload identities.
//!
//! The user of Redis is the object id of the identity, which the token holds.
//!
//! Decides: where a token of Microsoft Entra comes from.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::Value;

use super::google::parse_access_token;
use super::token_fetch::{Token, TokenError, build_request, call, encode_form, read_token_file};
use crate::base::text::percent_encode;
use crate::settings::cloud_identity::{EntraSettings, EntraTokenSource};
use crate::settings::secret::Secret;

/// Resource that tokens for Redis are for.
const RESOURCE: &str = "https://redis.azure.com/";
const OAUTH_SCOPE: &str = "https://redis.azure.com/.default";
const ASSERTION_TYPE: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";

/// Gets an access token at `now_s`.
pub(super) fn fetch_token(settings: &EntraSettings, now_s: u64) -> Result<Token, TokenError> {
    let mut token = match &settings.source {
        EntraTokenSource::ManagedIdentity { metadata_url, client_id } => {
            let what = "the instance metadata of Azure";
            let resource = percent_encode(RESOURCE);
            let mut url =
                format!("{metadata_url}/metadata/identity/oauth2/token?api-version=2018-02-01&resource={resource}");
            if let Some(client_id) = client_id {
                url.push_str(&format!("&client_id={}", percent_encode(client_id)));
            }
            let request = build_request(http::Method::GET, &url, &[("metadata", "true")], Vec::new())?;
            let reply = call(what, request)?.parse_json(what)?;
            parse_access_token(what, &reply, now_s)?
        }
        EntraTokenSource::WorkloadIdentity { authority, tenant_id, client_id, token_file } => {
            let assertion = read_token_file("AZURE_FEDERATED_TOKEN_FILE", token_file)?;
            let body = encode_form(&[
                ("grant_type", "client_credentials"),
                ("client_id", client_id),
                ("scope", OAUTH_SCOPE),
                ("client_assertion_type", ASSERTION_TYPE),
                ("client_assertion", assertion.reveal()),
            ]);
            let url = format!("{authority}{tenant_id}/oauth2/v2.0/token");
            let headers = [("content-type", "application/x-www-form-urlencoded")];
            let request = build_request(http::Method::POST, &url, &headers, body)?;
            let reply = call("Entra", request)?.parse_json("Entra")?;
            parse_access_token("Entra", &reply, now_s)?
        }
    };
    token.user = Some(match &settings.user {
        Some(user) => user.clone(),
        None => read_object_id(&token.password)?,
    });
    Ok(token)
}

/// Reads the claim `oid` of a token; the server checks the signature.
fn read_object_id(token: &Secret) -> Result<String, TokenError> {
    let claims = token.reveal().split('.').nth(1).and_then(|part| URL_SAFE_NO_PAD.decode(part).ok());
    let claims = claims.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    let object_id = claims.as_ref().and_then(|claims| claims.get("oid")?.as_str());
    let is_plain = |id: &&str| !id.is_empty() && id.len() <= 100 && id.bytes().all(|b| b.is_ascii_graphic());
    let no_id = || TokenError("the token has no object id: set TOLLKEEPER_REDIS_IDENTITY_USER".to_owned());
    object_id.filter(is_plain).map(str::to_owned).ok_or_else(no_id)
}
