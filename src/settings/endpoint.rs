//! Addresses of servers that this program connects to, and the parts that their URLs share.
//!
//! Errors never repeat the text, because any part of it may be a mistyped password.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

use super::problem::InvalidSetting;

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
