//! Addresses of Redis: `host:port`, a path, or `redis://user:password@host:port/db`. The kind of deployment says which
//! of them it allows, and how many.
//!
//! The syntax is that of envoyproxy/ratelimit, plus `rediss://`. Errors never repeat the text, because any part of it
//! may be a mistyped password. Text without a meaning, such as an unknown query, is an error.
//!
//! Decides: how `REDIS_URL` is read for a single server, Sentinel and Cluster.

use crate::base::named_enum::named_enum;
use crate::settings::address::{Endpoint, REDIS_ADDRESS_HINT, percent_decode};
use crate::settings::credentials::Credentials;
use crate::settings::problem::InvalidSetting;
use crate::settings::secret::Secret;
use crate::settings::setting::{AnySetting as _, Setting};
use crate::settings::value::choices;
use crate::settings::value::text::SecretUrl;
use crate::settings::values::Values;

named_enum! {
    /// Kind of socket of a single Redis server.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum SocketKind {
        /// TCP.
        Tcp = "tcp",
        /// Unix socket.
        Unix = "unix",
    }
}

choices! { SocketKind }

named_enum! {
    /// Kind of a Redis deployment.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum DeploymentKind {
        /// One server.
        Single = "SINGLE",
        /// A primary that sentinels monitor.
        Sentinel = "SENTINEL",
        /// A cluster.
        Cluster = "CLUSTER",
    }
}

impl DeploymentKind {
    /// Returns the kind of which a URL has the form: a list of servers is a cluster, or a primary and its sentinels if
    /// it begins with a name.
    fn from_url_form(url: &str) -> Self {
        match url.split_once(',') {
            // A password may hold a comma.
            _ if RedisAddress::parse(url, DEFAULT_REDIS_PORT).is_ok() => Self::Single,
            None => Self::Single,
            Some((first, _)) if is_primary_name(first.trim()) => Self::Sentinel,
            Some(_) => Self::Cluster,
        }
    }
}

choices! { DeploymentKind }

/// The variables that locate a deployment.
pub(crate) struct AddressVariables {
    pub(crate) url: &'static Setting<SecretUrl>,
    /// `None`: the form of the URL decides.
    pub(crate) kind: Option<&'static Setting<DeploymentKind>>,
    /// `None`: the form of the URL decides.
    pub(crate) socket: Option<&'static Setting<SocketKind>>,
}

/// Addresses in a `REDIS_URL`.
pub(super) struct Addresses {
    /// Name of the primary, for sentinels; else empty.
    pub(super) primary: String,
    pub(super) first: RedisAddress,
    pub(super) others: Vec<RedisAddress>,
}

const DEFAULT_REDIS_PORT: u16 = 6379;
const DEFAULT_SENTINEL_PORT: u16 = 26_379;
const SENTINEL_LIST_HINT: &str = "give the name of the primary, then its sentinels: primaryname,host:port,host:port";
const CLUSTER_LIST_HINT: &str = "give some of its nodes: host:port,host:port";

impl Addresses {
    fn from_single(first: RedisAddress) -> Self {
        Self { primary: String::new(), first, others: Vec::new() }
    }

    /// Stands for invalid addresses, so that the rest can be checked; nothing connects to it.
    fn placeholder() -> Self {
        let endpoint = Endpoint::Tcp { host: String::new(), port: 0 };
        Self::from_single(RedisAddress { endpoint, credentials: Credentials::None, database: None, tls: None })
    }
}

impl AddressVariables {
    /// Reads the addresses; a placeholder after a problem.
    pub(super) fn read_addresses(&self, values: &mut Values) -> Addresses {
        // Nothing can be checked against a value that is itself invalid.
        let is_socket_invalid = self.socket.is_some_and(|socket| values.is_invalid(socket));
        let is_kind_invalid = self.kind.is_some_and(|kind| values.is_invalid(kind));
        if is_kind_invalid || is_socket_invalid || values.is_invalid(self.url) {
            return Addresses::placeholder();
        }
        let url = values.get(self.url);
        let parsed = match (url.reveal(), self.deployment_kind(values)) {
            ("", _) => {
                let fix = "give the address of Redis, or unset all that begins with REDIS_";
                Err(InvalidSetting::new("set but empty", fix))
            }
            (text, DeploymentKind::Single) => self.parse_single_address(values, text).map(Addresses::from_single),
            (_, kind) if !values.is_set(self.url) => {
                let form = if kind == DeploymentKind::Sentinel { SENTINEL_LIST_HINT } else { CLUSTER_LIST_HINT };
                Err(InvalidSetting::new(format!("not set with {}={}", self.kind_name(), kind.name()), form))
            }
            (text, DeploymentKind::Sentinel) => parse_sentinel_list(text),
            (text, DeploymentKind::Cluster) => parse_cluster_list(text),
        };
        parsed.unwrap_or_else(|invalid| {
            values.add_problem(self.url, invalid.what, invalid.fix);
            Addresses::placeholder()
        })
    }

    /// Returns the kind of the deployment.
    pub(super) fn deployment_kind(&self, values: &Values) -> DeploymentKind {
        self.kind.map_or_else(|| DeploymentKind::from_url_form(values.get(self.url).reveal()), |kind| values.get(kind))
    }

    /// Returns the name of the variable that gives the kind; empty if there is none.
    fn kind_name(&self) -> &'static str {
        self.kind.map_or("", |kind| kind.name())
    }

    /// Returns the kind of socket that its variable gives; `None` if the variable is not set.
    pub(super) fn given_socket_kind(&self, values: &Values) -> Option<SocketKind> {
        self.socket.filter(|socket| values.is_set(*socket)).map(|socket| values.get(socket))
    }

    /// Parses the address of a single server; without a given kind of socket its form decides about the kind of socket.
    fn parse_single_address(&self, values: &Values, text: &str) -> Result<RedisAddress, InvalidSetting> {
        let (socket, kind) = (self.socket.map_or("", |socket| socket.name()), self.kind_name());
        let given_socket = self.given_socket_kind(values);
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
                    return Ok(RedisAddress::from_socket_path(text));
                }
                let fix = format!("give a path that begins with /, or {socket}=tcp");
                Err(InvalidSetting::new(format!("no path, though {socket} is unix"), fix))
            }
            Some(SocketKind::Tcp) if is_path => {
                let what = if values.is_set(self.url) { "a path" } else { "not set" };
                let fix = format!("give host:port, or {socket}=unix");
                Err(InvalidSetting::new(format!("{what}, though {socket} is tcp"), fix))
            }
            None if is_path => Ok(RedisAddress::from_socket_path(text)),
            Some(SocketKind::Tcp) | None => RedisAddress::parse(text, DEFAULT_REDIS_PORT).map_err(|invalid| {
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

fn parse_sentinel_list(text: &str) -> Result<Addresses, InvalidSetting> {
    let mut parts = split_at_commas(text);
    let primary = parts.next().unwrap_or_default().to_owned();
    if !is_primary_name(&primary) {
        return Err(InvalidSetting::new("it does not begin with the name of the primary", SENTINEL_LIST_HINT));
    }
    let urls = parse_urls(parts, DEFAULT_SENTINEL_PORT, "sentinel")?;
    let (first, others) = split_first_or_error(urls, "it names a primary and no sentinel", SENTINEL_LIST_HINT)?;
    Ok(Addresses { primary, first, others })
}

fn parse_cluster_list(text: &str) -> Result<Addresses, InvalidSetting> {
    let urls = parse_urls(split_at_commas(text), DEFAULT_REDIS_PORT, "cluster")?;
    let (first, others) = split_first_or_error(urls, "it names no node", CLUSTER_LIST_HINT)?;
    Ok(Addresses { primary: String::new(), first, others })
}

/// Splits a list at its commas.
fn split_at_commas(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn parse_urls<'t>(
    parts: impl Iterator<Item = &'t str>,
    default_port: u16,
    owner: &str,
) -> Result<Vec<RedisAddress>, InvalidSetting> {
    let parse = |part: &str| {
        if part.starts_with('/') {
            let what = format!("a unix socket, which is not possible for a {owner}");
            return Err(InvalidSetting::new(what, "give host:port,host:port"));
        }
        RedisAddress::parse(part, default_port)
    };
    parts.map(parse).collect()
}

fn split_first_or_error(
    urls: Vec<RedisAddress>,
    what: &str,
    fix: &str,
) -> Result<(RedisAddress, Vec<RedisAddress>), InvalidSetting> {
    let mut urls = urls.into_iter();
    let first = urls.next().ok_or_else(|| InvalidSetting::new(what, fix))?;
    Ok((first, urls.collect()))
}

/// One address with its credentials, database and TLS.
#[derive(Debug)]
pub(super) struct RedisAddress {
    pub(super) endpoint: Endpoint,
    pub(super) credentials: Credentials,
    /// Number of the database, if the address has one.
    pub(super) database: Option<u8>,
    /// `true` for `rediss://`, `false` for `redis://`, `None` without a scheme.
    pub(super) tls: Option<bool>,
}

impl RedisAddress {
    /// Returns the unix socket at the path `text`.
    fn from_socket_path(text: &str) -> Self {
        Self { endpoint: Endpoint::Unix(text.into()), credentials: Credentials::None, database: None, tls: None }
    }

    /// Parses an address on TCP; without a scheme it must have a port.
    fn parse(text: &str, default_port: u16) -> Result<Self, InvalidSetting> {
        let Some((scheme, rest)) = text.split_once("://") else {
            let endpoint = Endpoint::parse_host_port(text, None)?;
            return Ok(Self { endpoint, credentials: Credentials::None, database: None, tls: None });
        };
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "redis" => false,
            "rediss" => true,
            _ => return Err(InvalidSetting::new("not an address of Redis", REDIS_ADDRESS_HINT)),
        };
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = address.split_once('/').unwrap_or((address, ""));
        let (userinfo, host) = authority.rsplit_once('@').unwrap_or(("", authority));
        let mut login = UrlLogin::default();
        let (user, password) = userinfo.split_once(':').map_or((userinfo, None), |(user, word)| (user, Some(word)));
        login.set_user(percent_decode(user)?)?;
        password.map_or(Ok(()), |password| login.set_password(percent_decode(password)?))?;
        login.set_database(path)?;
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_decode(&value.replace('+', " "))?;
            match key {
                "username" => login.set_user(value)?,
                "password" => login.set_password(value)?,
                "db" => login.set_database(&value)?,
                _ => {
                    return Err(InvalidSetting::new(
                        "a query that is not known",
                        "give none but username, password and db",
                    ));
                }
            }
        }
        Ok(Self {
            endpoint: Endpoint::parse_host_port(host, Some(default_port))?,
            credentials: login.to_credentials()?,
            database: login.database,
            tls: Some(tls),
        })
    }
}

/// User, password and database of a URL, each of which may be given in several parts of it.
#[derive(Default)]
struct UrlLogin {
    user: Option<String>,
    password: Option<Secret>,
    database: Option<u8>,
}

impl UrlLogin {
    fn set_user(&mut self, user: String) -> Result<(), InvalidSetting> {
        if user.is_empty() { Ok(()) } else { set_once(&mut self.user, user, "user") }
    }

    fn set_password(&mut self, password: String) -> Result<(), InvalidSetting> {
        if password.is_empty() { Ok(()) } else { set_once(&mut self.password, Secret::new(password), "password") }
    }

    fn set_database(&mut self, text: &str) -> Result<(), InvalidSetting> {
        if text.is_empty() {
            return Ok(());
        }
        let is_number = text.bytes().all(|b| b.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_number);
        let no_number =
            || InvalidSetting::new("its database is no number", "give one of 0 to 255 after the /, or none");
        set_once(&mut self.database, number.ok_or_else(no_number)?, "database")
    }

    fn to_credentials(&self) -> Result<Credentials, InvalidSetting> {
        match (&self.user, &self.password) {
            (user, Some(password)) => Ok(Credentials::Inline { user: user.clone(), password: password.clone() }),
            (None, None) => Ok(Credentials::None),
            (Some(_), None) => Err(InvalidSetting::new(
                "it has a user and no password",
                "give user:password@, or :password@ for no user",
            )),
        }
    }
}

/// Sets `target`, which must be empty or equal.
fn set_once<T: PartialEq>(target: &mut Option<T>, value: T, what: &str) -> Result<(), InvalidSetting> {
    if target.as_ref().is_some_and(|other| *other != value) {
        return Err(InvalidSetting::new(format!("it gives the {what} twice"), "give it once"));
    }
    *target = Some(value);
    Ok(())
}

/// Returns `true` if sentinels accept `text` as the name of a primary.
fn is_primary_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b))
}
