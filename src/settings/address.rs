//! Addresses: of this program, to listen on and to connect to; of other servers, with the parts that their URLs share.
//!
//! Every form of the wildcard means all addresses of the machine, IPv4 and IPv6: manifests say `0.0.0.0` and do not
//! mean to exclude IPv6. A port is never shared with another process, so a port in use is an error at the start.
//! To a client, the wildcard means this machine.
//!
//! Errors about servers' URLs never repeat the text, because any part of it may be a mistyped password.
//!
//! Decides: how `--addr`, HOST:PORT and `unix:PATH` are read; `%XX` in a URL (`percent_decode`).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use super::problem::InvalidSetting;

/// Host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The host.
    pub host: Host,
    /// The port; 0 means any free port.
    pub port: u16,
}

/// Host part of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// All addresses of the machine.
    Wildcard,
    /// One address.
    Ip(IpAddr),
    /// A name, of which the first address that can be bound is used.
    Name(String),
}

impl Host {
    /// Parses a host: an empty text or an unspecified address is the wildcard; IPv6 may be in brackets. `None` if it is
    /// neither an address nor a name.
    pub fn parse(text: &str) -> Option<Self> {
        let bracketed = text.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
        if text.is_empty() {
            return Some(Self::Wildcard);
        }
        if let Some(inner) = bracketed {
            return inner.parse::<Ipv6Addr>().ok().map(|ip| Self::from_ip(ip.into()));
        }
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Some(Self::from_ip(ip));
        }
        let is_name = text.len() <= 253 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
        is_name.then(|| Self::Name(text.to_owned()))
    }

    const fn from_ip(ip: IpAddr) -> Self {
        if ip.is_unspecified() { Self::Wildcard } else { Self::Ip(ip) }
    }
}

impl Address {
    /// Parses `host:port`, `:port` or `[ipv6]:port`.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        // Without brackets the last group of an IPv6 address would parse as a port; `:::9090` is the wildcard.
        if host.contains(':') && !host.starts_with('[') && host != "::" {
            return None;
        }
        let is_number = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
        Some(Self { host: Host::parse(host)?, port: port.parse().ok().filter(|_| is_number)? })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Wildcard => write!(f, "[::]:{}", self.port),
            Host::Ip(ip) => write!(f, "{}", SocketAddr::from((*ip, self.port))),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Address of a running server: `HOST:PORT`, or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectAddress {
    /// `host:port`, as in a URL.
    Tcp(String),
    /// Path of a unix socket.
    Unix(String),
}

impl FromStr for ConnectAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")) {
            return if path.is_empty() { Err("give a path after `unix:`") } else { Ok(Self::Unix(path.to_owned())) };
        }
        let mut address = Address::parse(text).ok_or("give HOST:PORT, such as 127.0.0.1:8081, or unix:PATH")?;
        if address.host == Host::Wildcard {
            address.host = Host::Ip(Ipv4Addr::LOCALHOST.into());
        }
        Ok(Self::Tcp(address.to_string()))
    }
}

impl fmt::Display for ConnectAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{path}"),
        }
    }
}

/// Address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A TCP port.
    Tcp {
        /// Host name or IP address; IPv6 without brackets.
        host: String,
        /// The port, at least 1.
        port: u16,
    },
    /// A unix socket at this path.
    Unix(PathBuf),
}

/// `host:port`, `[ipv6]:port` or the path.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.parse::<Ipv6Addr>().is_ok() => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Forms of an address of Redis.
pub(crate) const REDIS_ADDRESS_HINT: &str = "give host:port, a path that begins with /, or \
                                     redis://user:password@host:port/db, IPv6 in brackets, and what is special in a \
                                     user or password as %40";

impl Endpoint {
    /// Parses `host:port`; the port is optional if there is a default.
    pub(crate) fn parse_host_port(text: &str, default_port: Option<u16>) -> Result<Self, InvalidSetting> {
        let no_address = || InvalidSetting::new("not an address of Redis", REDIS_ADDRESS_HINT);
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
            (None, None) => {
                return Err(InvalidSetting::new("no port, and no path that begins with /", REDIS_ADDRESS_HINT));
            }
            (None, Some(port)) => port,
            (Some(text), _) => {
                let is_number = text.bytes().all(|b| b.is_ascii_digit());
                text.parse().ok().filter(|port| is_number && *port > 0).ok_or_else(no_address)?
            }
        };
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

/// Decodes each `%XX` of `text`.
pub(crate) fn percent_decode(text: &str) -> Result<String, InvalidSetting> {
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
