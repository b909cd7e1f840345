//! Addresses of Redis: `host:port`, a path, or `redis://user:password@host:port/db`.
//!
//! The syntax is that of envoyproxy/ratelimit, plus `rediss://`. Errors never repeat the text, because any part of it
//! may be a mistyped password. Text without a meaning, such as an unknown query, is an error. Hosts, ports and percent
//! encoding are parsed here for other URLs too.

use std::net::Ipv6Addr;

use super::credentials::Credentials;
use super::endpoint::Endpoint;
use super::invalid::InvalidSetting;
use super::secret::Secret;

/// One address with its credentials, database and TLS.
#[derive(Debug)]
pub(crate) struct Url {
    pub(crate) endpoint: Endpoint,
    pub(crate) credentials: Credentials,
    /// Number of the database, if the address has one.
    pub(crate) database: Option<u8>,
    /// `true` for `rediss://`, `false` for `redis://`, `None` without a scheme.
    pub(crate) tls: Option<bool>,
}

const FORMS: &str = "give host:port, a path that begins with /, or redis://user:password@host:port/db, IPv6 in \
                     brackets, and what is special in a user or password as %40";

/// Returns the unix socket at the path `text`.
pub(crate) fn at_path(text: &str) -> Url {
    Url { endpoint: Endpoint::Unix(text.into()), credentials: Credentials::None, database: None, tls: None }
}

/// Parses an address on TCP; without a scheme it must have a port.
pub(crate) fn tcp(text: &str, default_port: u16) -> Result<Url, InvalidSetting> {
    let Some((scheme, rest)) = text.split_once("://") else {
        let endpoint = endpoint(text, None)?;
        return Ok(Url { endpoint, credentials: Credentials::None, database: None, tls: None });
    };
    let tls = match scheme.to_ascii_lowercase().as_str() {
        "redis" => false,
        "rediss" => true,
        _ => return Err(InvalidSetting::new("not an address of Redis", FORMS)),
    };
    let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = address.split_once('/').unwrap_or((address, ""));
    let (userinfo, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    let mut login = UrlLogin::default();
    let (user, password) = userinfo.split_once(':').map_or((userinfo, None), |(user, word)| (user, Some(word)));
    login.user(percent_decoded(user)?)?;
    password.map_or(Ok(()), |password| login.password(percent_decoded(password)?))?;
    login.database(path)?;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = percent_decoded(&value.replace('+', " "))?;
        match key {
            "username" => login.user(value)?,
            "password" => login.password(value)?,
            "db" => login.database(&value)?,
            _ => {
                return Err(InvalidSetting::new(
                    "a query that is not known",
                    "give none but username, password and db",
                ));
            }
        }
    }
    Ok(Url {
        endpoint: endpoint(host, Some(default_port))?,
        credentials: login.credentials()?,
        database: login.database,
        tls: Some(tls),
    })
}

/// User, password and database of a URL, each of which may be given in several parts of it.
#[derive(Default)]
struct UrlLogin {
    user: Option<String>,
    password: Option<Secret>,
    database: Option<u8>,
}

impl UrlLogin {
    fn user(&mut self, user: String) -> Result<(), InvalidSetting> {
        if user.is_empty() { Ok(()) } else { set_once(&mut self.user, user, "user") }
    }

    fn password(&mut self, password: String) -> Result<(), InvalidSetting> {
        if password.is_empty() { Ok(()) } else { set_once(&mut self.password, Secret::new(password), "password") }
    }

    fn database(&mut self, text: &str) -> Result<(), InvalidSetting> {
        if text.is_empty() {
            return Ok(());
        }
        let is_number = text.bytes().all(|b| b.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_number);
        let no_number =
            || InvalidSetting::new("its database is no number", "give one of 0 to 255 after the /, or none");
        set_once(&mut self.database, number.ok_or_else(no_number)?, "database")
    }

    fn credentials(&self) -> Result<Credentials, InvalidSetting> {
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

/// Sets `slot`, which must be empty or equal.
fn set_once<T: PartialEq>(slot: &mut Option<T>, value: T, what: &str) -> Result<(), InvalidSetting> {
    if slot.as_ref().is_some_and(|other| *other != value) {
        return Err(InvalidSetting::new(format!("it gives the {what} twice"), "give it once"));
    }
    *slot = Some(value);
    Ok(())
}

/// Returns `true` if sentinels accept `text` as the name of a primary.
pub(crate) fn is_primary_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b))
}

/// Parses `host:port`; the port is optional if there is a default.
pub(crate) fn endpoint(text: &str, default_port: Option<u16>) -> Result<Endpoint, InvalidSetting> {
    let no_address = || InvalidSetting::new("not an address of Redis", FORMS);
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or_else(no_address)?;
            host.parse::<Ipv6Addr>().map_err(|_| no_address())?;
            (host, (!after.is_empty()).then(|| after.strip_prefix(':').unwrap_or_default()))
        }
        None => {
            let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            let is_name = host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
            if host.is_empty() || host.len() > 253 || !is_name {
                return Err(no_address());
            }
            (host, port)
        }
    };
    let port = match (port, default_port) {
        (None, None) => return Err(InvalidSetting::new("no port, and no path that begins with /", FORMS)),
        (None, Some(port)) => port,
        (Some(text), _) => {
            let is_number = text.bytes().all(|b| b.is_ascii_digit());
            text.parse().ok().filter(|port| is_number && *port > 0).ok_or_else(no_address)?
        }
    };
    Ok(Endpoint::Tcp { host: host.to_owned(), port })
}

/// Decodes each `%XX` of `text`.
pub(crate) fn percent_decoded(text: &str) -> Result<String, InvalidSetting> {
    let wrong = || InvalidSetting::new("it has a % that stands for nothing", "write a % in a user or password as %25");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16)).ok_or_else(wrong);
            let value = digit()? * 16 + digit()?;
            bytes.push(u8::try_from(value).expect("two hexadecimal digits are a byte"));
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).map_err(|_| wrong())
}
