//! What the sources of tokens share: a token, the reasons why there is none, and the HTTP call of a metadata server or
//! token service, which is small, bounded, and without redirects.
//!
//! Calls over TLS go through the proxy of the environment, if there is one; others never do, because a proxy would see
//! their secrets. An error has the status and the code of the reply, never its body, which may hold a token.
//!
//! Decides: which tokens are refused: too long, expired (`check`).

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use http::uri::Scheme;
use rustls::crypto::ring;
use serde_json::Value;
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};

use crate::base::text::{percent_encode, truncate_and_escape};
use crate::settings::pem::load_system_roots;
use crate::settings::secret::Secret;

/// Maximum size of a token in bytes.
const MAX_TOKEN_BYTES: usize = 32 * 1024;
/// Maximum lifetime of a token in seconds; a source that says more is taken to say this.
pub(super) const MAX_LIFETIME_S: u64 = 7 * 86_400;

/// Password that expires, with its user.
#[derive(Debug)]
pub struct Token {
    /// User; `None` for the default user.
    pub(crate) user: Option<String>,
    pub(crate) password: Secret,
    /// Expiry in seconds since the Unix epoch.
    pub expires_at_s: u64,
}

/// Outcome of an attempt to get a token.
pub struct FetchOutcome {
    /// The token; `None`: the last one is good enough.
    pub token: Option<Token>,
    /// Credentials that could not be renewed, and still sign tokens.
    pub problem: Option<CredentialRenewalFailure>,
}

/// Failure to renew credentials, of which the old ones still sign tokens.
pub struct CredentialRenewalFailure {
    pub(super) error: TokenError,
    /// Expiry of these credentials in seconds since the Unix epoch.
    pub expires_at_s: u64,
}

/// Reason why there is no new token, free of secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TokenError(
    /// Message, which names the source and what to do.
    pub String,
);

impl FetchOutcome {
    /// Refuses a token that cannot be used at `now_s`, in seconds since the Unix epoch.
    pub(super) fn check(self, now_s: u64) -> Result<Self, TokenError> {
        let Some(Token { password, expires_at_s, .. }) = &self.token else { return Ok(self) };
        let is_plain = !password.reveal().is_empty() && password.reveal().bytes().all(|b| b.is_ascii_graphic());
        if !is_plain || password.reveal().len() > MAX_TOKEN_BYTES {
            return Err(TokenError("the token is empty, too long or not printable".to_owned()));
        }
        if *expires_at_s <= now_s {
            return Err(TokenError("the token has expired already; is the clock of this machine right?".to_owned()));
        }
        Ok(self)
    }
}

/// Reads a file with a token that another program renews, without white space around it.
pub fn read_token_file(setting: &'static str, path: &Path) -> Result<Secret, TokenError> {
    let mut text = String::new();
    let limit = MAX_TOKEN_BYTES as u64 + 1;
    let read = File::open(path).and_then(|file| file.take(limit).read_to_string(&mut text));
    read.map_err(|error| TokenError(format!("{setting}: cannot read {}: {error}", path.display())))?;
    if text.len() > MAX_TOKEN_BYTES {
        return Err(TokenError(format!("{setting}: {} has more than {MAX_TOKEN_BYTES} bytes", path.display())));
    }
    Ok(Secret::new(text.trim()))
}

/// Upper bound on a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Upper bound on the body of a reply in bytes.
const MAX_REPLY_BYTES: u64 = 64 * 1024;

/// Body of a reply with a status of 2xx.
pub(super) struct SuccessBody(pub(super) String);

/// Sends a request and returns the body of its reply. `what` names the service in errors.
///
/// # Errors
/// The service cannot be reached in time, or answers with another status than 2xx.
pub(super) fn call(what: &str, request: Request<Vec<u8>>) -> Result<SuccessBody, TokenError> {
    let target = request.uri().host().unwrap_or_default().to_owned();
    let failed = |error: ureq::Error| TokenError(format!("{what} at {target} does not answer: {error}"));
    let (head, body) = request.into_parts();
    let agent = build_http_agent(head.uri.scheme() == Some(&Scheme::HTTPS));
    let response = agent.run(Request::from_parts(head, &body[..])).map_err(failed)?;
    let (head, mut body) = response.into_parts();
    let body = body.with_config().limit(MAX_REPLY_BYTES).read_to_vec().map_err(failed)?;
    let text = String::from_utf8(body).map_err(|_| TokenError(format!("{what} at {target}: the reply is not text")))?;
    if head.status.is_success() {
        return Ok(SuccessBody(text));
    }
    let code = error_code(&text).map(|code| format!(" ({})", truncate_and_escape(&code, 100))).unwrap_or_default();
    Err(TokenError(format!("{what} at {target} answers {}{code}", head.status.as_u16())))
}

impl SuccessBody {
    /// Parses the reply as JSON.
    pub(super) fn parse_json(&self, what: &str) -> Result<Value, TokenError> {
        serde_json::from_str(&self.0).map_err(|_| TokenError(format!("{what}: the reply is not JSON")))
    }
}

/// Returns a text field of a reply.
pub(super) fn text_field<'v>(value: &'v Value, name: &str, what: &str) -> Result<&'v str, TokenError> {
    let text = value.get(name).and_then(Value::as_str);
    text.ok_or_else(|| TokenError(format!("{what}: the reply has no {name}")))
}

/// Returns a number of seconds, given as a number or as text.
pub(super) fn seconds_field(value: &Value, name: &str, what: &str) -> Result<u64, TokenError> {
    let field = value.get(name);
    let seconds = field.and_then(|field| field.as_u64().or_else(|| field.as_str()?.parse().ok()));
    seconds.ok_or_else(|| TokenError(format!("{what}: the reply has no {name}")))
}

/// Returns the text of an XML element that has no attributes and no escapes.
pub(super) fn xml_text<'x>(xml: &'x str, element: &str) -> Option<&'x str> {
    let after = xml.split_once(&format!("<{element}>"))?.1;
    Some(after.split_once('<')?.0.trim())
}

/// Returns the code of an error reply: of OAuth, of AWS's metadata or of STS.
fn error_code(text: &str) -> Option<String> {
    if let Ok(value) = serde_json::from_str::<Value>(text) {
        let code = value.get("error").or_else(|| value.get("Code")).or_else(|| value.get("code"))?;
        return code.as_str().map(str::to_owned);
    }
    xml_text(text, "Code").map(str::to_owned)
}

/// Builds an agent of services over TLS, or of those on this machine and network.
pub fn build_http_agent(is_https: bool) -> Agent {
    let builder = Agent::config_builder()
        .timeout_global(Some(CALL_TIMEOUT))
        .http_status_as_error(false)
        .max_redirects(0)
        .user_agent(concat!("tollkeeper/", env!("CARGO_PKG_VERSION")));
    let builder = if is_https { builder.tls_config(build_tls()) } else { builder.proxy(None) };
    builder.build().new_agent()
}

/// Builds the TLS options with the roots of the system.
fn build_tls() -> TlsConfig {
    let roots: Vec<Certificate<'static>> =
        load_system_roots().iter().map(|der| Certificate::from_der(der).to_owned()).collect();
    TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(RootCerts::new_with_certs(&roots))
        .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
        .build()
}

/// Encodes the fields of a form.
pub(super) fn encode_form(fields: &[(&str, &str)]) -> Vec<u8> {
    let pairs: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={}", percent_encode(value))).collect();
    pairs.join("&").into_bytes()
}

/// Builds a request; a header that is not valid is an error without its value.
pub(super) fn build_request(
    method: http::Method,
    url: &str,
    headers: &[(&'static str, &str)],
    body: Vec<u8>,
) -> Result<Request<Vec<u8>>, TokenError> {
    let mut builder = Request::builder().method(method).uri(url);
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(body).map_err(|_| TokenError("a URL or a token for a header is not valid".to_owned()))
}
