//! Addresses of Redis as people write them: `host:port`, a path, or `redis://user:password@host:port/db`.
//!
//! The syntax is that of envoyproxy/ratelimit, with `rediss://` besides. What is wrong is said without repeating any
//! of the text: wherever a slip was made, the password may be what follows it. Text that goes nowhere, such as a query
//! nobody knows, is an error and not dropped. What a host, a port and a `%20` are is the same in other URLs.

use std::net::Ipv6Addr;

use super::parse::Fault;
use super::redis::{Credentials, Endpoint};
use super::value::Secret;

/// One address, and what comes with it.
#[derive(Debug)]
pub(crate) struct Url {
    pub(crate) endpoint: Endpoint,
    pub(crate) credentials: Credentials,
    /// `None`: not said.
    pub(crate) database: Option<u8>,
    /// Whether its scheme says so; `None`: it has none.
    pub(crate) tls: Option<bool>,
}

const FORMS: &str = "give host:port, a path that begins with /, or redis://user:password@host:port/db, IPv6 in \
                     brackets, and what is special in a user or password as %40";

/// The socket at the path `text`.
pub(crate) fn at_path(text: &str) -> Url {
    Url { endpoint: Endpoint::Unix(text.into()), credentials: Credentials::None, database: None, tls: None }
}

/// `text` as an address on TCP; without a scheme it must have a port.
pub(crate) fn tcp(text: &str, default_port: u16) -> Result<Url, Fault> {
    let Some((scheme, rest)) = text.split_once("://") else {
        let endpoint = endpoint(text, None)?;
        return Ok(Url { endpoint, credentials: Credentials::None, database: None, tls: None });
    };
    let tls = match scheme.to_ascii_lowercase().as_str() {
        "redis" => false,
        "rediss" => true,
        _ => return Err(Fault::new("not an address of Redis", FORMS)),
    };
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = place.split_once('/').unwrap_or((place, ""));
    let (userinfo, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    let mut login = Login::default();
    let (user, password) = userinfo.split_once(':').map_or((userinfo, None), |(user, word)| (user, Some(word)));
    login.user(decoded(user)?)?;
    password.map_or(Ok(()), |password| login.password(decoded(password)?))?;
    login.database(path)?;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decoded(&value.replace('+', " "))?;
        match key {
            "username" => login.user(value)?,
            "password" => login.password(value)?,
            "db" => login.database(&value)?,
            _ => return Err(Fault::new("a query that is not known", "give none but username, password and db")),
        }
    }
    Ok(Url {
        endpoint: endpoint(host, Some(default_port))?,
        credentials: login.credentials()?,
        database: login.database,
        tls: Some(tls),
    })
}

/// What the parts of a URL say, which must not contradict each other.
#[derive(Default)]
struct Login {
    user: Option<String>,
    password: Option<Secret>,
    database: Option<u8>,
}

impl Login {
    fn user(&mut self, user: String) -> Result<(), Fault> {
        if user.is_empty() { Ok(()) } else { once(&mut self.user, user, "user") }
    }

    fn password(&mut self, password: String) -> Result<(), Fault> {
        if password.is_empty() { Ok(()) } else { once(&mut self.password, Secret::new(password), "password") }
    }

    fn database(&mut self, text: &str) -> Result<(), Fault> {
        if text.is_empty() {
            return Ok(());
        }
        let is_number = text.bytes().all(|b| b.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_number);
        let no_number = || Fault::new("its database is no number", "give one of 0 to 255 after the /, or none");
        once(&mut self.database, number.ok_or_else(no_number)?, "database")
    }

    fn credentials(&self) -> Result<Credentials, Fault> {
        match (&self.user, &self.password) {
            (user, Some(password)) => Ok(Credentials::Inline { user: user.clone(), password: password.clone() }),
            (None, None) => Ok(Credentials::None),
            (Some(_), None) => {
                Err(Fault::new("it has a user and no password", "give user:password@, or :password@ for no user"))
            }
        }
    }
}

/// Puts `value` into `place`, which holds nothing else.
fn once<T: PartialEq>(place: &mut Option<T>, value: T, what: &str) -> Result<(), Fault> {
    if place.as_ref().is_some_and(|other| *other != value) {
        return Err(Fault::new(format!("it gives the {what} twice"), "give it once"));
    }
    *place = Some(value);
    Ok(())
}

/// Whether sentinels can know a master by this name.
pub(crate) fn is_master_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b))
}

/// `host:port`; the port may be missing where there is a default for it.
pub(crate) fn endpoint(text: &str, default_port: Option<u16>) -> Result<Endpoint, Fault> {
    let no_address = || Fault::new("not an address of Redis", FORMS);
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
        (None, None) => return Err(Fault::new("no port, and no path that begins with /", FORMS)),
        (None, Some(port)) => port,
        (Some(text), _) => {
            let is_number = text.bytes().all(|b| b.is_ascii_digit());
            text.parse().ok().filter(|port| is_number && *port > 0).ok_or_else(no_address)?
        }
    };
    Ok(Endpoint::Tcp { host: host.to_owned(), port })
}

/// `text` with each `%XX` as the byte that it stands for.
pub(crate) fn decoded(text: &str) -> Result<String, Fault> {
    let wrong = || Fault::new("it has a % that stands for nothing", "write a % in a user or password as %25");
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
