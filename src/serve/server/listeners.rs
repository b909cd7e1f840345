//! Listeners: validates the addresses to listen on, opens the sockets, and starts to serve. `connection` accepts.
//!
//! All sockets are bound before anything is served, so a port in use is an error at startup. They listen only once
//! requests can be answered: until then connections are refused. Ports are never shared with another process. The
//! validation comes before any socket is opened: there, a port that another process uses is no problem, two listeners of
//! this process with one port are. A wildcard address listens on IPv4 and IPv6 with one dual-stack socket.
//!
//! Decides: from when on a start accepts connections.
//! Decides: how sockets are opened: IPv4 and IPv6, backlog, TCP_NODELAY, mode of a Unix socket, a stale one.
//! Decides: two listeners with one port (`find_address_problems`); the warning about open debug pages without TLS.
//! Decides: the line "serving".

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::serve::{Listener, ListenerExt as _};
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::admission::AdmissionLimits;
use super::connection::{ConnectionPolicy, ListenerGuards};
use super::error::StartupError;
use super::http2::Http2Server;
use super::tls::ReloadingTls;
use crate::serve::grpc::health::GrpcHealth;
use crate::serve::grpc::service::ShouldRateLimitMethod;
use crate::serve::http::app_state::AppState;
use crate::serve::http::metrics_pages;
use crate::serve::quota::method::{add_refusal_to_router, add_to_router};
use crate::serve::{grpc, http};
use crate::settings::Settings;
use crate::settings::address::{Address, Host};
use crate::settings::listeners::GrpcListenAddress;
use crate::telemetry::listener_stats::{ListenerKind, StatsByListener};
use crate::telemetry::logs::LIFECYCLE_TARGET;

/// Facts for the log line "serving" at the start, beside the addresses.
pub(super) struct StartSummary {
    /// Number of loaded rules.
    pub(super) rules: usize,
    /// Place of the counters.
    pub(super) counters: String,
    /// Admin requests are possible.
    pub(super) has_admin_token: bool,
}

/// Bound sockets of all listeners, which do not listen yet.
#[derive(Debug)]
pub(super) struct BoundListeners(Vec<BoundListener>);

/// Bound socket of a listener, with its guards.
#[derive(Debug)]
struct BoundListener {
    socket: ListenerSocket,
    guards: ListenerGuards,
}

/// Bound socket; a Unix socket with its path.
#[derive(Debug)]
enum ListenerSocket {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// Builds the admission limits of all kinds of listeners, and loads the certificates of those that have TLS.
///
/// # Errors
/// All certificates that cannot be used.
pub(super) fn load_guards_and_certificates(
    settings: &Settings,
    stats: &Arc<StatsByListener>,
) -> Result<Vec<ListenerGuards>, Vec<StartupError>> {
    let limits = Arc::new(AdmissionLimits::new(settings.client_limits, Arc::clone(stats)));
    let (mut guards, mut errors) = (Vec::new(), Vec::new());
    for kind in ListenerKind::ALL {
        let admission = limits.build_listener_admission(kind);
        let tls = match kind {
            ListenerKind::Grpc => settings.listeners.grpc_tls.as_ref(),
            ListenerKind::Http => settings.listeners.http_tls.as_ref(),
            ListenerKind::Debug | ListenerKind::Prometheus => None,
        };
        match tls.map(|tls| ReloadingTls::load(tls, &admission)).transpose() {
            Ok(tls) => guards.push(ListenerGuards { admission, tls: tls.map(Arc::new) }),
            Err(unusable) => errors.push(unusable.into()),
        }
    }
    if errors.is_empty() { Ok(guards) } else { Err(errors) }
}

impl BoundListeners {
    /// Binds the sockets of all listeners that are on.
    ///
    /// # Errors
    /// The first socket that cannot be bound.
    pub(super) fn open_all(settings: &Settings, guards: Vec<ListenerGuards>) -> Result<Self, StartupError> {
        let mut listeners = Vec::new();
        for guards in guards {
            if let Some(address) = find_listener_address(settings, guards.admission.kind()) {
                let socket = address.bind().map_err(|error| address.build_startup_error(error))?;
                listeners.push(BoundListener { socket, guards });
            }
        }
        Ok(Self(listeners))
    }

    /// Starts the tasks that reload certificates.
    pub(super) fn watch_certificates(&self, background: &mut JoinSet<()>) {
        for tls in self.0.iter().filter_map(|listener| listener.guards.tls.as_ref()) {
            background.spawn(Arc::clone(tls).watch_files());
        }
    }

    /// Logs the addresses that are listened on, and that other machines reach the debug listener if they do.
    pub(super) fn log_start(&self, start: &StartSummary) {
        let socket = |kind| Some(&self.0.iter().find(|listener| listener.guards.admission.kind() == kind)?.socket);
        let [grpc, http, debug_pages, prometheus] =
            ListenerKind::ALL.map(|kind| socket(kind).map_or_else(|| "off".to_owned(), ListenerSocket::format_address));
        tracing::info!(
            target: LIFECYCLE_TARGET,
            grpc, http, debug = debug_pages, prometheus, rules = start.rules, counters = start.counters, "serving"
        );
        if !socket(ListenerKind::Debug).is_some_and(ListenerSocket::is_loopback) {
            tracing::warn!(
                debug = debug_pages,
                has_admin_token = start.has_admin_token,
                "the console and the other debug pages have no TLS and are open to other machines (set \
                 DEBUG_HOST=127.0.0.1 or close the port by a NetworkPolicy: docs/console.md)"
            );
        }
    }

    /// Listens, and starts a task per listener, which serves until `stopping` turns true and its connections are closed.
    pub(super) fn start_serving(
        self,
        settings: &Settings,
        state: &AppState,
        health: &GrpcHealth,
        stopping: &watch::Receiver<bool>,
    ) -> io::Result<JoinSet<()>> {
        // All before any serves: who is answered on one finds the others open.
        self.0.iter().try_for_each(|listener| listener.socket.listen())?;
        let mut serving = JoinSet::new();
        let bounds = &settings.client_limits;
        for BoundListener { socket, guards } in self.0 {
            let (kind, has_tls) = (guards.admission.kind(), guards.tls.is_some());
            let policy = match kind {
                ListenerKind::Grpc => {
                    let http2 = build_grpc_server(settings, state, health);
                    ConnectionPolicy::for_grpc(bounds, &settings.grpc, http2)
                }
                ListenerKind::Http => {
                    ConnectionPolicy::for_http(bounds, kind, has_tls, http::build_http_router(state.clone()))
                }
                ListenerKind::Debug => {
                    ConnectionPolicy::for_http(bounds, kind, has_tls, http::build_debug_router(state.clone()))
                }
                ListenerKind::Prometheus => {
                    ConnectionPolicy::for_http(bounds, kind, has_tls, metrics_pages::build_metrics_router(state))
                }
            };
            match socket {
                ListenerSocket::Tcp(listener) => {
                    serving.spawn(policy.accept_connections(set_nodelay_on_accept(listener)?, guards, stopping.clone()))
                }
                ListenerSocket::Unix(listener, _) => {
                    let listener = tokio::net::UnixListener::from_std(listener)?;
                    serving.spawn(policy.accept_connections(listener, guards, stopping.clone()))
                }
            };
        }
        Ok(serving)
    }
}

impl ListenerSocket {
    fn listen(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => SockRef::from(listener).listen(ACCEPT_BACKLOG),
            Self::Unix(listener, _) => SockRef::from(listener).listen(ACCEPT_BACKLOG),
        }
    }

    fn format_address(&self) -> String {
        match self {
            Self::Tcp(listener) => {
                listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string())
            }
            Self::Unix(_, path) => path.display().to_string(),
        }
    }

    /// True if only this machine can connect.
    fn is_loopback(&self) -> bool {
        match self {
            Self::Tcp(listener) => listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback()),
            Self::Unix(..) => true,
        }
    }
}

/// Builds the server of the gRPC listener with all its services.
fn build_grpc_server(settings: &Settings, state: &AppState, health: &GrpcHealth) -> Http2Server {
    let service = &state.collector.service;
    let method = ShouldRateLimitMethod::new(Arc::clone(service), settings.grpc.max_message_bytes);
    let router = grpc::build_router_of_other_methods(&settings.grpc, health, service);
    let router = match &state.collector.quota {
        Some(quota) => add_to_router(router, quota),
        None => add_refusal_to_router(router, service),
    };
    Http2Server::new(&settings.client_limits, &settings.grpc, method, router)
}

/// Sets TCP_NODELAY on accepted connections, so that small responses are sent at once.
fn set_nodelay_on_accept(listener: TcpListener) -> io::Result<impl Listener<Addr = SocketAddr>> {
    // The call fails only on a connection that is closed already.
    Ok(tokio::net::TcpListener::from_std(listener)?.tap_io(|stream| drop(stream.set_nodelay(true))))
}

/// Address of a listener, with the variables that give it.
#[derive(Clone, Copy)]
enum ListenerAddress<'s> {
    Tcp {
        host_setting: &'static str,
        port_setting: &'static str,
        address: &'s Address,
    },
    /// Path of a Unix socket.
    Unix(&'s Path),
}

impl ListenerAddress<'_> {
    fn bind(self) -> io::Result<ListenerSocket> {
        match self {
            Self::Tcp { address, .. } => {
                open_first_address(address, |address| Ok(ListenerSocket::Tcp(bind_tcp(address)?.into())))
            }
            Self::Unix(path) => Ok(ListenerSocket::Unix(bind_unix(path)?, path.to_owned())),
        }
    }

    /// Error of the address; it names the variable that is at fault: the port if that is in use or not permitted.
    fn build_startup_error(self, error: io::Error) -> StartupError {
        let (setting, address) = match self {
            Self::Tcp { host_setting, port_setting, address } => match error.kind() {
                io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => (port_setting, address.to_string()),
                _ => (host_setting, address.to_string()),
            },
            Self::Unix(path) => ("GRPC_UDS", path.display().to_string()),
        };
        StartupError::Listen { setting, address, error }
    }
}

/// Address of a listener; `None` if it is off.
fn find_listener_address(settings: &Settings, kind: ListenerKind) -> Option<ListenerAddress<'_>> {
    let (host_setting, port_setting, address) = match kind {
        ListenerKind::Grpc => match &settings.listeners.grpc {
            GrpcListenAddress::Tcp(address) => ("GRPC_HOST", "GRPC_PORT", address),
            GrpcListenAddress::Unix(path) => return Some(ListenerAddress::Unix(path)),
        },
        ListenerKind::Http => ("HOST", "PORT", &settings.listeners.http),
        ListenerKind::Debug => ("DEBUG_HOST", "DEBUG_PORT", &settings.listeners.debug),
        ListenerKind::Prometheus => {
            ("PROMETHEUS_ADDR", "PROMETHEUS_ADDR", &settings.metrics.prometheus.as_ref()?.address)
        }
    };
    Some(ListenerAddress::Tcp { host_setting, port_setting, address })
}

/// Finds addresses that do not resolve, are not local or not permitted, and ports that two listeners have.
pub(super) fn find_address_problems(settings: &Settings) -> Vec<StartupError> {
    let mut problems = Vec::new();
    let mut checked: Vec<(&str, SocketAddr)> = Vec::new();
    for listener in ListenerKind::ALL.into_iter().filter_map(|kind| find_listener_address(settings, kind)) {
        let mut check = || match listener {
            ListenerAddress::Unix(path) => try_bind_unix_path(path),
            ListenerAddress::Tcp { port_setting, address, .. } => {
                let resolved = find_bindable_address(address)?;
                let other = checked.iter().find(|(_, other)| addresses_conflict(resolved, *other));
                let other = other.map(|(setting, _)| format!("{setting} is the same address"));
                checked.push((port_setting, resolved));
                other.map_or(Ok(()), |what| Err(io::Error::new(io::ErrorKind::AddrInUse, what)))
            }
        };
        problems.extend(check().err().map(|error| listener.build_startup_error(error)));
    }
    problems
}

/// Returns `true` if two listeners cannot both listen on these addresses.
fn addresses_conflict(one: SocketAddr, other: SocketAddr) -> bool {
    let is_any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() == other.port() && one.port() != 0 && (is_any || one.ip() == other.ip())
}

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
fn find_bindable_address(address: &Address) -> io::Result<SocketAddr> {
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

/// Binds a non-blocking Unix socket.
///
/// Removes a socket file that a crashed process left behind; a socket that still accepts connections stays.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    // Other errors can come from a live listener: its queue is full, or another user owns it.
    let is_stale = || match UnixStream::connect(path) {
        Ok(_) => false,
        Err(error) => error.kind() == io::ErrorKind::ConnectionRefused,
    };
    if is_socket && is_stale() {
        std::fs::remove_file(path)?;
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(path)?)?;
    Ok(socket.into())
}

/// Checks that a Unix listener can be opened, unless another process has it.
///
/// Binds and removes a socket in the same directory, since nothing else shows permissions reliably.
///
/// # Errors
/// Errors of the system: the path is too long, its directory is missing or not writable, or a file is in the way.
fn try_bind_unix_path(path: &Path) -> io::Result<()> {
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
