//! Opens the sockets of listeners.
//!
//! A wildcard address listens on IPv4 and IPv6 with one dual-stack socket. Ports are never shared with another process,
//! so a port that is already in use is an error at startup.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use crate::settings::address::{Address, Host};

/// Length of the accept queue; the kernel caps it at `net.core.somaxconn`.
const ACCEPT_BACKLOG: i32 = 4096;

/// Opens a non-blocking TCP listener.
///
/// # Errors
/// Errors of the system: the port is in use, the address is not local, or the name does not resolve.
pub fn listen_tcp(address: &Address) -> io::Result<TcpListener> {
    open_first_address(address, |address| {
        let socket = bind_tcp(address)?;
        socket.listen(ACCEPT_BACKLOG)?;
        Ok(socket.into())
    })
}

/// Returns the address that a listener would have. A port that another process uses is no error.
///
/// # Errors
/// Errors of the system: the address is not local, the port is not permitted, or the name does not resolve.
pub(super) fn find_bindable_address(address: &Address) -> io::Result<SocketAddr> {
    open_first_address(address, |address| match bind_tcp(address) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => Err(error),
        _ => Ok(address),
    })
}

/// Opens the first address that a host stands for and that can be opened.
fn open_first_address<T>(address: &Address, open: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    match &address.host {
        Host::Wildcard => {
            let dual_stack = SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port));
            let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port));
            open(dual_stack).or_else(|error| match Errno::from_io_error(&error) {
                // The system has no IPv6.
                Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL | Errno::PROTONOSUPPORT) => open(ipv4),
                _ => Err(error),
            })
        }
        Host::Ip(ip) => open(SocketAddr::from((*ip, address.port))),
        Host::Name(name) => {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name resolves to no address");
            for resolved in (name.as_str(), address.port).to_socket_addrs()? {
                match open(resolved) {
                    Ok(opened) => return Ok(opened),
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    // Without SO_REUSEADDR a restart fails while connections of the last run are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
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

/// Checks that a Unix listener can be opened, unless another process has it.
///
/// Binds and removes a socket in the same directory, since nothing else shows permissions reliably.
///
/// # Errors
/// Errors of the system: the path is too long, its directory is missing or not writable, or a file is in the way.
pub(super) fn try_bind_unix_path(path: &Path) -> io::Result<()> {
    std::os::unix::net::SocketAddr::from_pathname(path)?;
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket is in the way"));
        }
        _ => {}
    }
    // One character, so that its path is not too long for the system if the own path is not.
    let probe = path.with_file_name("~");
    match UnixListener::bind(&probe) {
        Ok(_) => std::fs::remove_file(&probe),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(()),
        Err(error) => Err(error),
    }
}
