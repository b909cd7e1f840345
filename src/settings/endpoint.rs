//! Addresses of servers that keep counters.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

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
