//! Address of a running server: `HOST:PORT`, or `unix:PATH`.
//!
//! A wildcard host, as a server listens on, means this machine.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use super::address::{Address, Host};

/// Address to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `host:port`, as in a URL.
    Tcp(String),
    /// Path of a unix socket.
    Unix(String),
}

impl FromStr for Target {
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

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{path}"),
        }
    }
}
