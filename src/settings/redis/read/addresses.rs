//! Reading of the addresses in a `REDIS_URL`, by the kind of deployment.

use crate::settings::choices::{DeploymentKind, SocketKind};
use crate::settings::credentials::Credentials;
use crate::settings::endpoint::Endpoint;
use crate::settings::invalid::InvalidSetting;
use crate::settings::setting::{AnySetting as _, Setting};
use crate::settings::url::{self, Url};
use crate::settings::value::choice::Choice as _;
use crate::settings::value::text::SecretUrl;
use crate::settings::values::Values;

/// Settings that locate a deployment.
pub(super) struct UrlSettings {
    pub(super) url: &'static Setting<SecretUrl>,
    pub(super) kind: &'static Setting<DeploymentKind>,
    /// `None`: the form of the URL decides.
    pub(super) socket: Option<&'static Setting<SocketKind>>,
}

/// Addresses in a `REDIS_URL`.
pub(super) struct Addresses {
    /// Name of the primary, for sentinels; else empty.
    pub(super) primary: String,
    pub(super) first: Url,
    pub(super) others: Vec<Url>,
}

const DEFAULT_PORT: u16 = 6379;
const DEFAULT_SENTINEL_PORT: u16 = 26_379;
const SENTINEL_FORM: &str = "give the name of the primary, then its sentinels: primaryname,host:port,host:port";
const CLUSTER_FORM: &str = "give some of its nodes: host:port,host:port";

impl Addresses {
    fn one(first: Url) -> Self {
        Self { primary: String::new(), first, others: Vec::new() }
    }

    /// Stands for invalid addresses, so that the rest can be checked; nothing connects to it.
    fn placeholder() -> Self {
        let endpoint = Endpoint::Tcp { host: String::new(), port: 0 };
        Self::one(Url { endpoint, credentials: Credentials::None, database: None, tls: None })
    }
}

impl UrlSettings {
    /// Reads the addresses; a placeholder after a problem.
    pub(super) fn read(&self, values: &mut Values) -> Addresses {
        // Nothing can be checked against a value that is itself invalid.
        let is_socket_invalid = self.socket.is_some_and(|socket| values.is_invalid(socket));
        if values.is_invalid(self.kind) || is_socket_invalid || values.is_invalid(self.url) {
            return Addresses::placeholder();
        }
        let url = values.get(self.url);
        let parsed = match (url.reveal(), values.get(self.kind)) {
            ("", _) => {
                let fix = "give the address of Redis, or unset all that begins with REDIS_";
                Err(InvalidSetting::new("set but empty", fix))
            }
            (text, DeploymentKind::Single) => self.single(values, text).map(Addresses::one),
            (_, kind) if !values.is_set(self.url) => {
                let form = if kind == DeploymentKind::Sentinel { SENTINEL_FORM } else { CLUSTER_FORM };
                Err(InvalidSetting::new(format!("not set with {}={}", self.kind.name(), kind.word()), form))
            }
            (text, DeploymentKind::Sentinel) => sentinels(text),
            (text, DeploymentKind::Cluster) => cluster(text),
        };
        parsed.unwrap_or_else(|invalid| {
            values.problem(self.url, invalid.what, invalid.fix);
            Addresses::placeholder()
        })
    }

    /// Kind of socket, if it is set.
    pub(super) fn given_socket(&self, values: &Values) -> Option<SocketKind> {
        self.socket.filter(|socket| values.is_set(*socket)).map(|socket| values.get(socket))
    }

    /// Parses the address of a single server; without a given kind of socket its form decides about the kind of socket.
    fn single(&self, values: &Values, text: &str) -> Result<Url, InvalidSetting> {
        let (socket, kind) = (self.socket.map_or("", |socket| socket.name()), self.kind.name());
        let given_socket = self.given_socket(values);
        let is_path = text.starts_with('/');
        if is_path && text.contains('?') {
            return Err(InvalidSetting::new(
                "a path with a query",
                "give the path alone, and a password by REDIS_AUTH",
            ));
        }
        match given_socket {
            Some(SocketKind::Unix) => {
                if is_path || !text.contains([':', ',', '@', '?']) {
                    return Ok(url::at_path(text));
                }
                let fix = format!("give a path that begins with /, or {socket}=tcp");
                Err(InvalidSetting::new(format!("no path, though {socket} is unix"), fix))
            }
            Some(SocketKind::Tcp) if is_path => {
                let what = if values.is_set(self.url) { "a path" } else { "not set" };
                let fix = format!("give host:port, or {socket}=unix");
                Err(InvalidSetting::new(format!("{what}, though {socket} is tcp"), fix))
            }
            None if is_path => Ok(url::at_path(text)),
            Some(SocketKind::Tcp) | None => url::tcp(text, DEFAULT_PORT).map_err(|invalid| {
                // A password may hold a comma, so this is a list only if it is not an address.
                if !text.contains(',') {
                    return invalid;
                }
                let fix = format!("give one address, or {kind}=cluster, or {kind}=sentinel");
                InvalidSetting::new(format!("a list, though {kind} is single"), fix)
            }),
        }
    }
}

fn sentinels(text: &str) -> Result<Addresses, InvalidSetting> {
    let mut parts = parts(text);
    let primary = parts.next().unwrap_or_default().to_owned();
    if !url::is_primary_name(&primary) {
        return Err(InvalidSetting::new("it does not begin with the name of the primary", SENTINEL_FORM));
    }
    let urls = list(parts, DEFAULT_SENTINEL_PORT, "sentinel")?;
    let (first, others) = split_first(urls, "it names a primary and no sentinel", SENTINEL_FORM)?;
    Ok(Addresses { primary, first, others })
}

fn cluster(text: &str) -> Result<Addresses, InvalidSetting> {
    let urls = list(parts(text), DEFAULT_PORT, "cluster")?;
    let (first, others) = split_first(urls, "it names no node", CLUSTER_FORM)?;
    Ok(Addresses { primary: String::new(), first, others })
}

/// Splits a list at its commas.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn list<'t>(parts: impl Iterator<Item = &'t str>, default_port: u16, owner: &str) -> Result<Vec<Url>, InvalidSetting> {
    let parse = |part: &str| {
        if part.starts_with('/') {
            let what = format!("a unix socket, which is not possible for a {owner}");
            return Err(InvalidSetting::new(what, "give host:port,host:port"));
        }
        url::tcp(part, default_port)
    };
    parts.map(parse).collect()
}

fn split_first(urls: Vec<Url>, what: &str, fix: &str) -> Result<(Url, Vec<Url>), InvalidSetting> {
    let mut urls = urls.into_iter();
    let first = urls.next().ok_or_else(|| InvalidSetting::new(what, fix))?;
    Ok((first, urls.collect()))
}
