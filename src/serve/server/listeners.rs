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

use axum::Router;
use axum::serve::{Listener, ListenerExt as _};
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::admission::{AdmissionLimits, ListenerKind};
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
use crate::settings::client_limits::ClientLimits;
use crate::settings::grpc::GrpcSettings;
use crate::settings::listeners::GrpcListenAddress;
use crate::settings::problem::UnusableSetting;
use crate::settings::tls::ListenerTls;
use crate::telemetry::listener_stats::StatsByListener;
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

/// Bound sockets that do not listen yet.
#[derive(Debug)]
pub(super) struct BoundListeners {
    grpc: GrpcListenerSocket,
    grpc_guards: ListenerGuards,
    http: HttpListenerSocket,
    debug: HttpListenerSocket,
    prometheus: Option<HttpListenerSocket>,
    bounds: ClientLimits,
}

/// Admission limits of each listener, and the certificates of those that have TLS.
#[derive(Debug)]
pub(super) struct GuardsByListener {
    grpc: ListenerGuards,
    http: ListenerGuards,
    debug: ListenerGuards,
    prometheus: ListenerGuards,
}

/// Bound socket of an HTTP listener, with its guards.
#[derive(Debug)]
struct HttpListenerSocket {
    listener: TcpListener,
    guards: ListenerGuards,
}

/// Bound socket of the gRPC listener; a Unix socket with its path.
#[derive(Debug)]
enum GrpcListenerSocket {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl GuardsByListener {
    /// Builds the admission limits of all listeners, and loads the certificates of those that have TLS.
    ///
    /// # Errors
    /// All certificates that cannot be used.
    pub(super) fn load_guards_and_certificates(
        settings: &Settings,
        stats: &Arc<StatsByListener>,
    ) -> Result<Self, Vec<StartupError>> {
        let limits = Arc::new(AdmissionLimits::new(settings.client_limits, Arc::clone(stats)));
        let plaintext = |kind| ListenerGuards { admission: limits.build_listener_admission(kind), tls: None };
        let guards = |kind, tls: Option<&ListenerTls>| -> Result<ListenerGuards, UnusableSetting> {
            let admission = limits.build_listener_admission(kind);
            let tls = tls.map(|tls| ReloadingTls::load(tls, &admission)).transpose()?;
            Ok(ListenerGuards { admission, tls: tls.map(Arc::new) })
        };
        let grpc = guards(ListenerKind::Grpc, settings.listeners.grpc_tls.as_ref());
        let http = guards(ListenerKind::Http, settings.listeners.http_tls.as_ref());
        match (grpc, http) {
            (Ok(grpc), Ok(http)) => Ok(Self {
                grpc,
                http,
                debug: plaintext(ListenerKind::Debug),
                prometheus: plaintext(ListenerKind::Prometheus),
            }),
            (grpc, http) => Err([grpc.err(), http.err()].into_iter().flatten().map(StartupError::from).collect()),
        }
    }
}

impl BoundListeners {
    /// Binds the sockets of all listeners.
    ///
    /// # Errors
    /// The first socket that cannot be bound.
    pub(super) fn open_all(settings: &Settings, guards: GuardsByListener) -> Result<Self, StartupError> {
        let open = |listener: ListenerAddress<'_>| {
            let bound = open_first_address(listener.address, |address| Ok(bind_tcp(address)?.into()));
            bound.map_err(|error| listener.build_startup_error(error))
        };
        let grpc = match &settings.listeners.grpc {
            GrpcListenAddress::Tcp(address) => GrpcListenerSocket::Tcp(open(grpc_address(address))?),
            GrpcListenAddress::Unix(path) => {
                let listener = bind_unix(path).map_err(|error| build_unix_socket_error(path, error))?;
                GrpcListenerSocket::Unix(listener, path.clone())
            }
        };
        let GuardsByListener { grpc: grpc_guards, http, debug, prometheus } = guards;
        Ok(Self {
            grpc,
            grpc_guards,
            http: HttpListenerSocket { listener: open(http_address(settings))?, guards: http },
            debug: HttpListenerSocket { listener: open(debug_address(settings))?, guards: debug },
            prometheus: match prometheus_address(settings) {
                Some(listener) => Some(HttpListenerSocket { listener: open(listener)?, guards: prometheus }),
                None => None,
            },
            bounds: settings.client_limits,
        })
    }

    /// Starts the tasks that reload certificates.
    pub(super) fn watch_certificates(&self, background: &mut JoinSet<()>) {
        for tls in [&self.grpc_guards.tls, &self.http.guards.tls].into_iter().flatten() {
            background.spawn(Arc::clone(tls).watch_files());
        }
    }

    /// Logs the addresses that are listened on, and that other machines reach the debug listener if they do.
    pub(super) fn log_start(&self, start: &StartSummary) {
        let grpc = match &self.grpc {
            GrpcListenerSocket::Tcp(listener) => format_local_address(listener),
            GrpcListenerSocket::Unix(_, path) => path.display().to_string(),
        };
        let http = format_local_address(&self.http.listener);
        // Not named `debug`, which is a function in the macro's scope.
        let debug_pages = format_local_address(&self.debug.listener);
        let prometheus = self.prometheus.as_ref();
        let prometheus = prometheus.map_or_else(|| "off".to_owned(), |socket| format_local_address(&socket.listener));
        tracing::info!(
            target: LIFECYCLE_TARGET,
            grpc, http, debug = debug_pages, prometheus, rules = start.rules, counters = start.counters, "serving"
        );
        if !self.debug.listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback()) {
            tracing::warn!(
                debug = debug_pages,
                has_admin_token = start.has_admin_token,
                "the console and the other debug pages have no TLS and are open to other machines (set \
                 DEBUG_HOST=127.0.0.1 or close the port by a NetworkPolicy: docs/operations.md)"
            );
        }
    }

    /// Listens on all sockets: who is answered on one finds the others open.
    fn listen_on_all(&self) -> io::Result<()> {
        match &self.grpc {
            GrpcListenerSocket::Tcp(listener) => SockRef::from(listener).listen(ACCEPT_BACKLOG)?,
            GrpcListenerSocket::Unix(listener, _) => SockRef::from(listener).listen(ACCEPT_BACKLOG)?,
        }
        let pages = [Some(&self.http), Some(&self.debug), self.prometheus.as_ref()];
        pages.into_iter().flatten().try_for_each(|page| SockRef::from(&page.listener).listen(ACCEPT_BACKLOG))
    }

    /// Listens, and starts a task per listener, which serves until `stopping` turns true and its connections are closed.
    pub(super) fn start_serving(
        self,
        settings: &GrpcSettings,
        state: AppState,
        health: &GrpcHealth,
        stopping: &watch::Receiver<bool>,
    ) -> io::Result<JoinSet<()>> {
        self.listen_on_all()?;
        let mut serving = JoinSet::new();
        let bounds = &self.bounds;
        let service = &state.collector.service;
        let method = ShouldRateLimitMethod::new(Arc::clone(service), settings.max_message_bytes);
        let router = grpc::build_router_of_other_methods(settings, health, service);
        let router = match &state.collector.quota {
            Some(quota) => add_to_router(router, quota),
            None => add_refusal_to_router(router, service),
        };
        let http2 = Http2Server::new(bounds, settings, method, router);
        let policy = ConnectionPolicy::for_grpc(bounds, settings, http2);
        match self.grpc {
            GrpcListenerSocket::Tcp(listener) => serving.spawn(policy.accept_connections(
                set_nodelay_on_accept(listener)?,
                self.grpc_guards,
                stopping.clone(),
            )),
            GrpcListenerSocket::Unix(listener, _) => {
                let listener = tokio::net::UnixListener::from_std(listener)?;
                serving.spawn(policy.accept_connections(listener, self.grpc_guards, stopping.clone()))
            }
        };
        let mut serve_pages =
            |HttpListenerSocket { listener, guards }: HttpListenerSocket, pages: Router| -> io::Result<()> {
                let policy = ConnectionPolicy::for_http(bounds, guards.admission.kind(), guards.tls.is_some(), pages);
                serving.spawn(policy.accept_connections(set_nodelay_on_accept(listener)?, guards, stopping.clone()));
                Ok(())
            };
        if let Some(prometheus) = self.prometheus {
            serve_pages(prometheus, metrics_pages::build_metrics_router(&state))?;
        }
        serve_pages(self.http, http::build_http_router(state.clone()))?;
        serve_pages(self.debug, http::build_debug_router(state))?;
        Ok(serving)
    }
}

/// Sets TCP_NODELAY on accepted connections, so that small responses are sent at once.
fn set_nodelay_on_accept(listener: TcpListener) -> io::Result<impl Listener<Addr = SocketAddr>> {
    // The call fails only on a connection that is closed already.
    Ok(tokio::net::TcpListener::from_std(listener)?.tap_io(|stream| drop(stream.set_nodelay(true))))
}

fn format_local_address(listener: &TcpListener) -> String {
    listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string())
}

/// Address of a listener, with the variables that give it.
#[derive(Clone, Copy)]
struct ListenerAddress<'s> {
    host_setting: &'static str,
    port_setting: &'static str,
    address: &'s Address,
}

impl ListenerAddress<'_> {
    /// Error of the address; it names the variable that is at fault: the port if that is in use or not permitted.
    fn build_startup_error(&self, error: io::Error) -> StartupError {
        let setting = match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => self.port_setting,
            _ => self.host_setting,
        };
        StartupError::Listen { setting, address: self.address.to_string(), error }
    }
}

/// Error of the path of a Unix socket.
fn build_unix_socket_error(path: &Path, error: io::Error) -> StartupError {
    StartupError::Listen { setting: "GRPC_UDS", address: path.display().to_string(), error }
}

/// Address of the gRPC listener.
fn grpc_address(address: &Address) -> ListenerAddress<'_> {
    ListenerAddress { host_setting: "GRPC_HOST", port_setting: "GRPC_PORT", address }
}

/// Address of the HTTP listener.
fn http_address(settings: &Settings) -> ListenerAddress<'_> {
    ListenerAddress { host_setting: "HOST", port_setting: "PORT", address: &settings.listeners.http }
}

/// Address of the debug listener.
fn debug_address(settings: &Settings) -> ListenerAddress<'_> {
    ListenerAddress { host_setting: "DEBUG_HOST", port_setting: "DEBUG_PORT", address: &settings.listeners.debug }
}

/// Address of the Prometheus listener; `None` if it is off.
fn prometheus_address(settings: &Settings) -> Option<ListenerAddress<'_>> {
    let address = &settings.metrics.prometheus.as_ref()?.address;
    Some(ListenerAddress { host_setting: "PROMETHEUS_ADDR", port_setting: "PROMETHEUS_ADDR", address })
}

/// Finds addresses that do not resolve, are not local or not permitted, and ports that two listeners have.
pub(super) fn find_address_problems(settings: &Settings) -> Vec<StartupError> {
    let mut problems = Vec::new();
    let grpc = match &settings.listeners.grpc {
        GrpcListenAddress::Tcp(address) => Some(grpc_address(address)),
        GrpcListenAddress::Unix(path) => {
            problems.extend(try_bind_unix_path(path).err().map(|error| build_unix_socket_error(path, error)));
            None
        }
    };
    let all = [grpc, Some(http_address(settings)), Some(debug_address(settings)), prometheus_address(settings)];
    let mut checked: Vec<(ListenerAddress<'_>, SocketAddr)> = Vec::new();
    for listener in all.into_iter().flatten() {
        let resolved = match find_bindable_address(listener.address) {
            Ok(resolved) => resolved,
            Err(error) => {
                problems.push(listener.build_startup_error(error));
                continue;
            }
        };
        if let Some((other, _)) = checked.iter().find(|(_, other)| addresses_conflict(resolved, *other)) {
            let what = format!("{} is the same address", other.port_setting);
            problems.push(listener.build_startup_error(io::Error::new(io::ErrorKind::AddrInUse, what)));
        }
        checked.push((listener, resolved));
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
