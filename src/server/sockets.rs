//! Opens the sockets of listeners.
//!
//! A wildcard address listens on IPv4 and IPv6 with one dual-stack socket. Ports are never shared with another process,
//! so a port that is already in use is an error at startup.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use socket2::{Domain, Protocol, Socket, Type};

use crate::settings::address::{Address, Host};

/// Length of the accept queue; the kernel caps it at `net.core.somaxconn`.
const ACCEPT_BACKLOG: i32 = 4096;

/// Opens a non-blocking TCP listener.
///
/// # Errors
/// Errors of the system: the port is in use, the address is not local, or the name does not resolve.
pub fn listen_tcp(address: &Address) -> io::Result<TcpListener> {
    match &address.host {
        Host::Wildcard => {
            let dual_stack = SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port));
            let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port));
            listen_on(dual_stack).or_else(|error| match error.raw_os_error() {
                // The system has no IPv6.
                Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::EPROTONOSUPPORT) => listen_on(ipv4),
                _ => Err(error),
            })
        }
        Host::Ip(ip) => listen_on(SocketAddr::from((*ip, address.port))),
        Host::Name(name) => {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name resolves to no address");
            for resolved in (name.as_str(), address.port).to_socket_addrs()? {
                match listen_on(resolved) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    // Without SO_REUSEADDR a restart fails while connections of the last run are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(ACCEPT_BACKLOG)?;
    Ok(socket.into())
}

/// Opens a non-blocking Unix listener.
///
/// Removes a socket file that a crashed process left behind; a socket that still accepts connections stays.
pub(super) fn listen_unix(path: &Path) -> io::Result<UnixListener> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    // Other errors can come from a live listener: its queue is full, or another user owns it.
    let is_stale = || match UnixStream::connect(path) {
        Ok(_) => false,
        Err(error) => error.kind() == io::ErrorKind::ConnectionRefused,
    };
    if is_socket && is_stale() {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
