//! Tokens of IAM users of ElastiCache and MemoryDB, signed with credentials of AWS by signature version 4.
//!
//! A token is valid for 15 minutes, but not longer than the credentials that sign it. Credentials are fetched again
//! when they would not outlive the next token; while that fails, those that are still valid go on signing.
//!
//! The signature is in the query of a request, of which there is only what a login needs: GET of `/` without a body,
//! with `host` as the one signed header. The request is never sent; its URL without the scheme is the password.
//!
//! Decides: how IAM credentials of AWS are fetched (container, instance metadata), and a token is signed.

use jiff::Timestamp;
use ring::digest::{SHA256, digest};
use ring::hmac::{HMAC_SHA256, Key, sign};

use super::token_fetch::{
    CredentialRenewalFailure, FetchOutcome, Token, TokenError, build_request, call, encode_form, read_token_file,
    text_field, xml_text,
};
use crate::base::text::{percent_encode, to_hex};
use crate::settings::cloud_identity::{AwsCredentialSource, AwsIamSettings, ContainerAuthorization};
use crate::settings::secret::Secret;

/// Validity of a token: the maximum that the services accept.
const TOKEN_VALID_S: u32 = 900;
/// Remaining lifetime below which credentials are fetched again: two tokens.
const MIN_CREDENTIAL_LIFETIME_S: u64 = 2 * TOKEN_VALID_S as u64;
/// Lifetime of a session token of the instance metadata, in seconds.
const METADATA_SESSION_S: &str = "300";

/// Keys with their expiry.
pub struct Credentials {
    /// The keys.
    pub keys: AwsKeys,
    /// Seconds since the Unix epoch; `u64::MAX` for keys that do not expire.
    pub expires_at_s: u64,
}

/// Signer of tokens, with the last credentials.
pub struct AwsTokenSigner {
    settings: AwsIamSettings,
    /// Credentials that were fetched last.
    pub last: Option<Credentials>,
    /// Time at which two thirds of the last token's lifetime are over, in seconds since the Unix epoch.
    renew_at_s: u64,
}

impl AwsTokenSigner {
    /// Signer without credentials.
    pub const fn new(settings: AwsIamSettings) -> Self {
        Self { settings, last: None, renew_at_s: 0 }
    }

    /// Signs a token at `now_s`, after fetching credentials if the last ones end soon. While those cannot be fetched, a
    /// token is signed only when it is due.
    pub fn fetch(&mut self, now_s: u64) -> Result<FetchOutcome, TokenError> {
        let lifetime_s = |last: &Credentials| last.expires_at_s.saturating_sub(now_s);
        let mut error = None;
        if self.last.as_ref().is_none_or(|last| lifetime_s(last) < MIN_CREDENTIAL_LIFETIME_S) {
            match fetch_credentials(&self.settings.credentials) {
                Ok(new) => self.keep_longest(new),
                Err(failure) => error = Some(failure),
            }
        }
        let Some(usable) = self.last.as_ref().filter(|last| lifetime_s(last) > 0) else {
            let expired = || TokenError("the credentials of AWS have expired already".to_owned());
            return Err(error.unwrap_or_else(expired));
        };
        let problem = error.map(|error| CredentialRenewalFailure { error, expires_at_s: usable.expires_at_s });
        if problem.is_some() && now_s < self.renew_at_s {
            return Ok(FetchOutcome { token: None, problem });
        }
        let token = self.sign_token(usable, now_s)?;
        self.renew_at_s = now_s + (token.expires_at_s - now_s) * 2 / 3;
        Ok(FetchOutcome { token: Some(token), problem })
    }

    /// Keeps credentials, unless the last ones end later.
    pub fn keep_longest(&mut self, new: Credentials) {
        if self.last.as_ref().is_none_or(|last| last.expires_at_s <= new.expires_at_s) {
            self.last = Some(new);
        }
    }

    fn sign_token(&self, credentials: &Credentials, now_s: u64) -> Result<Token, TokenError> {
        let now = i64::try_from(now_s).ok().and_then(|now_s| Timestamp::from_second(now_s).ok());
        let now = now.ok_or_else(|| TokenError("the clock of this machine is wrong".to_owned()))?;
        let user = &*self.settings.user_id;
        let mut query = vec![("Action", "connect")];
        query.extend(self.settings.is_serverless.then_some(("ResourceType", "ServerlessCache")));
        query.push(("User", user));
        let request = RequestToPresign {
            host: &self.settings.cache_name,
            region: &self.settings.region,
            service: self.settings.service.name(),
            query: &query,
            time: &now.strftime("%Y%m%dT%H%M%SZ").to_string(),
            valid_s: TOKEN_VALID_S,
        };
        Ok(Token {
            user: Some(user.to_owned()),
            password: request.sign_url(&credentials.keys),
            expires_at_s: (now_s + u64::from(TOKEN_VALID_S)).min(credentials.expires_at_s),
        })
    }
}

/// Fetches credentials from their source.
fn fetch_credentials(source: &AwsCredentialSource) -> Result<Credentials, TokenError> {
    match source {
        AwsCredentialSource::Keys { id, secret, session_token } => {
            let (id, secret, session_token) = (id.clone(), secret.clone(), session_token.clone());
            Ok(Credentials { keys: AwsKeys { id, secret, session_token }, expires_at_s: u64::MAX })
        }
        AwsCredentialSource::WebIdentity { .. } => assume_role(source),
        AwsCredentialSource::Container { url, authorization } => {
            let what = "the source of AWS_CONTAINER_CREDENTIALS";
            let authorization = read_authorization(authorization.as_ref())?;
            let headers = authorization.as_ref().map(|token| ("authorization", token.reveal()));
            let request = build_request(http::Method::GET, url.reveal(), headers.as_slice(), Vec::new())?;
            parse_credentials(what, &call(what, request)?.parse_json(what)?)
        }
        AwsCredentialSource::InstanceMetadata(url) => fetch_instance_credentials(url),
    }
}

/// Calls `AssumeRoleWithWebIdentity` of STS, which needs no signature.
fn assume_role(source: &AwsCredentialSource) -> Result<Credentials, TokenError> {
    let AwsCredentialSource::WebIdentity { token_file, role_arn, session_name, sts_url } = source else {
        return Err(TokenError("not a web identity".to_owned()));
    };
    let token = read_token_file("AWS_WEB_IDENTITY_TOKEN_FILE", token_file)?;
    let body = encode_form(&[
        ("Action", "AssumeRoleWithWebIdentity"),
        ("Version", "2011-06-15"),
        ("RoleArn", role_arn),
        ("RoleSessionName", session_name),
        ("WebIdentityToken", token.reveal()),
    ]);
    let headers = [("content-type", "application/x-www-form-urlencoded"), ("accept", "application/xml")];
    let request = build_request(http::Method::POST, &format!("{sts_url}/"), &headers, body)?;
    let reply = call("STS", request)?.0;
    let field = |name: &str| xml_text(&reply, name).ok_or_else(|| TokenError(format!("STS: the reply has no {name}")));
    let keys = AwsKeys {
        id: Secret::new(field("AccessKeyId")?),
        secret: Secret::new(field("SecretAccessKey")?),
        session_token: Some(Secret::new(field("SessionToken")?)),
    };
    Ok(Credentials { keys, expires_at_s: parse_expiry_s(field("Expiration")?, "STS")? })
}

/// Reads the credentials of the role of an instance, by version 2 of the metadata.
fn fetch_instance_credentials(url: &str) -> Result<Credentials, TokenError> {
    let what = "the instance metadata of EC2";
    let ttl = [("x-aws-ec2-metadata-token-ttl-seconds", METADATA_SESSION_S)];
    let request = build_request(http::Method::PUT, &format!("{url}/latest/api/token"), &ttl, Vec::new())?;
    let session = Secret::new(call(what, request)?.0.trim());
    let get = |path: &str| {
        let headers = [("x-aws-ec2-metadata-token", session.reveal())];
        let url = format!("{url}/latest/meta-data/iam/security-credentials/{path}");
        call(what, build_request(http::Method::GET, &url, &headers, Vec::new())?)
    };
    let roles = get("")?.0;
    let role = roles.lines().next().map(str::trim).filter(|role| !role.is_empty());
    let role = role.ok_or_else(|| TokenError(format!("{what}: the instance has no role")))?;
    parse_credentials(what, &get(role)?.parse_json(what)?)
}

fn read_authorization(authorization: Option<&ContainerAuthorization>) -> Result<Option<Secret>, TokenError> {
    authorization
        .map(|authorization| match authorization {
            ContainerAuthorization::File(path) => read_token_file("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", path),
            ContainerAuthorization::Token(token) => Ok(token.clone()),
        })
        .transpose()
}

/// Reads the JSON of metadata and of container credentials.
fn parse_credentials(what: &str, reply: &serde_json::Value) -> Result<Credentials, TokenError> {
    let field = |name: &str| text_field(reply, name, what);
    let keys = AwsKeys {
        id: Secret::new(field("AccessKeyId")?),
        secret: Secret::new(field("SecretAccessKey")?),
        session_token: Some(Secret::new(field("Token")?)),
    };
    Ok(Credentials { keys, expires_at_s: parse_expiry_s(field("Expiration")?, what)? })
}

fn parse_expiry_s(text: &str, what: &str) -> Result<u64, TokenError> {
    let seconds = text.parse::<Timestamp>().ok().and_then(|time| u64::try_from(time.as_second()).ok());
    seconds.ok_or_else(|| TokenError(format!("{what}: the expiry in the reply is not a time")))
}

/// Credentials of AWS.
#[derive(Clone, Debug)]
pub struct AwsKeys {
    /// Id of the access key.
    pub id: Secret,
    /// The secret key.
    pub secret: Secret,
    /// Token of temporary keys.
    pub session_token: Option<Secret>,
}

/// Request that is to be presigned.
pub struct RequestToPresign<'r> {
    /// Host that the request goes to.
    pub host: &'r str,
    /// Region of the service.
    pub region: &'r str,
    /// Name of the service.
    pub service: &'r str,
    /// Parameters of the query, sorted by name; all names are below `X-Amz-`.
    pub query: &'r [(&'r str, &'r str)],
    /// Time of the signature, as `20150830T123600Z`.
    pub time: &'r str,
    /// Validity of the signature in seconds, at most 7 days.
    pub valid_s: u32,
}

impl RequestToPresign<'_> {
    /// Signs the request, and returns its URL without the scheme.
    pub fn sign_url(&self, keys: &AwsKeys) -> Secret {
        let date = self.time.split('T').next().unwrap_or_default();
        let scope = format!("{date}/{}/{}/aws4_request", self.region, self.service);
        let query = self.encode_query(keys, &scope);
        let payload = to_hex(digest(&SHA256, b"").as_ref());
        let canonical = format!("GET\n/\n{query}\nhost:{}\n\nhost\n{payload}", self.host);
        let canonical = to_hex(digest(&SHA256, canonical.as_bytes()).as_ref());
        let text = format!("AWS4-HMAC-SHA256\n{}\n{scope}\n{canonical}", self.time);
        let mut key = format!("AWS4{}", keys.secret.reveal()).into_bytes();
        for part in [date, self.region, self.service, "aws4_request"] {
            key = hmac(&key, part.as_bytes());
        }
        let signature = to_hex(&hmac(&key, text.as_bytes()));
        Secret::new(format!("{}/?{query}&X-Amz-Signature={signature}", self.host))
    }

    /// Encodes the query in the order of its names.
    fn encode_query(&self, keys: &AwsKeys, scope: &str) -> String {
        let credential = format!("{}/{scope}", keys.id.reveal());
        let valid_s = self.valid_s.to_string();
        let mut pairs: Vec<(&str, &str)> = self.query.to_vec();
        pairs.extend([("X-Amz-Algorithm", "AWS4-HMAC-SHA256"), ("X-Amz-Credential", &credential)]);
        pairs.extend([("X-Amz-Date", self.time), ("X-Amz-Expires", &valid_s)]);
        pairs.extend(keys.session_token.as_ref().map(|token| ("X-Amz-Security-Token", token.reveal())));
        pairs.push(("X-Amz-SignedHeaders", "host"));
        let pairs: Vec<String> =
            pairs.iter().map(|(name, value)| format!("{}={}", percent_encode(name), percent_encode(value))).collect();
        pairs.join("&")
    }
}

fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    sign(&Key::new(HMAC_SHA256, key), text).as_ref().to_vec()
}
