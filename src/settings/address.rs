//! An address to listen on.
//!
//! A wildcard, however it is written, means every address of the machine, IPv4 and IPv6: `0.0.0.0` is what manifests
//! say, and they do not mean to leave out half of the network. A port is never shared with another process, so that one
//! taken is found out at the start.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _};

use socket2::{Domain, Protocol, Socket, Type};

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Where to listen.
    pub host: Host,
    /// The port; 0: any free one.
    pub port: u16,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// On every address of the machine.
    Wildcard,
    /// On one address.
    Ip(IpAddr),
    /// On the first address that can be bound of those that this name stands for.
    Name(String),
}

impl Host {
    /// `text` as a host: empty or an unspecified address is the wildcard; IPv6 may stand in brackets. `None` if it is
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
    /// `host:port`, `:port` or `[ipv6]:port`.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        // Without brackets the last group of an IPv6 address would pass for a port; `:::9090` is the wildcard's.
        if host.contains(':') && !host.starts_with('[') && host != "::" {
            return None;
        }
        let is_number = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
        Some(Self { host: Host::parse(host)?, port: port.parse().ok().filter(|_| is_number)? })
    }

    /// Listens here. The listener does not block, as an asynchronous runtime wants it.
    ///
    /// Errors are those of the system: the port is taken, the address is not this machine's, the name is not known.
    pub fn listen(&self) -> io::Result<TcpListener> {
        match &self.host {
            Host::Wildcard => {
                let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, self.port));
                let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, self.port));
                listen_on(both).or_else(|error| match error.raw_os_error() {
                    // A machine without IPv6 says so in one of these ways.
                    Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::EPROTONOSUPPORT) => listen_on(ipv4),
                    _ => Err(error),
                })
            }
            Host::Ip(ip) => listen_on(SocketAddr::from((*ip, self.port))),
            Host::Name(name) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the name stands for no address");
                for address in (name.as_str(), self.port).to_socket_addrs()? {
                    match listen_on(address) {
                        Ok(listener) => return Ok(listener),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }
}

/// Connections that may wait to be accepted; the system has a bound of its own.
const BACKLOG: i32 = 4096;

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    // A restart must not wait until the connections of the last run are forgotten.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
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
