//! The listeners: opened all at once before anything is served, so that a port taken or a certificate that is none is
//! one clear line.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::serve::{Listener, ListenerExt as _};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::ServerError;
use super::admission::{AdmissionLimits, ListenerAdmission, Purpose};
use super::connection::ConnectionPolicy;
use super::http2::Http2Server;
use super::reloading_tls::ReloadingTls;
use crate::grpc;
use crate::grpc::call::Calls;
use crate::grpc::health::GrpcHealth;
use crate::http::metrics_pages;
use crate::http::routes::{self, AppState};
use crate::settings::Settings;
use crate::settings::address::Address;
use crate::settings::client_limits::ClientLimits;
use crate::settings::grpc::GrpcSettings;
use crate::settings::listeners::GrpcListener;
use crate::settings::tls::ListenerTls;
use crate::telemetry::listener_stats::ServerStats;

/// Open listeners.
#[derive(Debug)]
pub(super) struct BoundListeners {
    grpc: (GrpcSocket, ListenerGuards),
    http: (TcpListener, ListenerGuards),
    debug: (TcpListener, ListenerGuards),
    prometheus: Option<(TcpListener, ListenerGuards)>,
    bounds: ClientLimits,
}

/// Who may come in, and what is shown to them.
type ListenerGuards = (Arc<ListenerAdmission>, Option<Arc<ReloadingTls>>);

#[derive(Debug)]
enum GrpcSocket {
    Tcp(TcpListener),
    Unix(std::os::unix::net::UnixListener, PathBuf),
}

impl BoundListeners {
    /// Opens all of them.
    pub(super) fn open(settings: &Settings, server_stats: &Arc<ServerStats>) -> Result<Self, ServerError> {
        let limits = Arc::new(AdmissionLimits::new(settings.client_limits, Arc::clone(server_stats)));
        let grpc = match &settings.listeners.grpc {
            GrpcListener::Tcp(address) => GrpcSocket::Tcp(open(["GRPC_HOST", "GRPC_PORT"], address)?),
            GrpcListener::Unix(path) => match open_unix(path) {
                Ok(listener) => GrpcSocket::Unix(listener, path.clone()),
                Err(error) => {
                    return Err(ServerError::Listen {
                        setting: "GRPC_UDS",
                        address: path.display().to_string(),
                        error,
                    });
                }
            },
        };
        let http = open(["HOST", "PORT"], &settings.listeners.http)?;
        let debug = open(["DEBUG_HOST", "DEBUG_PORT"], &settings.listeners.debug)?;
        let prometheus = settings.metrics.prometheus.as_ref();
        let prometheus = prometheus.map(|of| open(["PROMETHEUS_ADDR", "PROMETHEUS_ADDR"], &of.address)).transpose()?;
        Ok(Self {
            grpc: (grpc, guards(limits.admission(Purpose::Grpc), settings.listeners.grpc_tls.as_ref())?),
            http: (http, guards(limits.admission(Purpose::Http), settings.listeners.http_tls.as_ref())?),
            debug: (debug, (limits.admission(Purpose::Debug), None)),
            prometheus: prometheus.map(|listener| (listener, (limits.admission(Purpose::Prometheus), None))),
            bounds: settings.client_limits,
        })
    }

    /// Puts certificates in force as they change, for as long as `background` lasts.
    pub(super) fn follow_certificates(&self, background: &mut JoinSet<()>) {
        for tls in [&self.grpc.1.1, &self.http.1.1].into_iter().flatten() {
            background.spawn(Arc::clone(tls).follow());
        }
    }

    /// Where they listen, for the log: the address, or the path of the socket.
    pub(super) fn addresses(&self) -> [String; 4] {
        let grpc = match &self.grpc.0 {
            GrpcSocket::Tcp(listener) => address(listener),
            GrpcSocket::Unix(_, path) => path.display().to_string(),
        };
        let prometheus = self.prometheus.as_ref().map_or_else(|| "off".to_owned(), |(listener, _)| address(listener));
        [grpc, address(&self.http.0), address(&self.debug.0), prometheus]
    }

    /// Serves on all of them until `stopping` says so and all connections are closed.
    pub(super) fn serve(
        self,
        settings: &GrpcSettings,
        state: AppState,
        health: &GrpcHealth,
        stopping: &watch::Receiver<bool>,
    ) -> io::Result<JoinSet<()>> {
        let mut serving = JoinSet::new();
        let bounds = &self.bounds;
        let (socket, guards) = self.grpc;
        let service = &state.collector.service;
        let calls = Calls::new(Arc::clone(service), settings.max_message_bytes);
        let http2 = Http2Server::new(bounds, settings, calls, grpc::routes::routes(settings, service, health));
        let policy = ConnectionPolicy::grpc(bounds, settings, http2);
        match socket {
            GrpcSocket::Tcp(listener) => serving.spawn(policy.serve(tcp(listener)?, guards, stopping.clone())),
            GrpcSocket::Unix(listener, _) => {
                serving.spawn(policy.serve(UnixListener::from_std(listener)?, guards, stopping.clone()))
            }
        };
        let prometheus = self.prometheus.map(|listener| (listener, metrics_pages::routes(&state)));
        let public = (self.http, routes::public(state.clone()));
        for ((listener, guards), pages) in [public, (self.debug, routes::debug(state))].into_iter().chain(prometheus) {
            let policy = ConnectionPolicy::http(bounds, guards.0.purpose(), guards.1.is_some(), pages);
            serving.spawn(policy.serve(tcp(listener)?, guards, stopping.clone()));
        }
        Ok(serving)
    }
}

/// With the certificate that the settings name, if they do.
fn guards(admission: Arc<ListenerAdmission>, tls: Option<&ListenerTls>) -> Result<ListenerGuards, ServerError> {
    let tls = tls.map(|tls| ReloadingTls::load(tls, &admission)).transpose().map_err(ServerError::Certificate)?;
    Ok((admission, tls.map(Arc::new)))
}

/// A small answer must not wait for more to send.
fn tcp(listener: TcpListener) -> io::Result<impl Listener<Addr = SocketAddr>> {
    // A connection on which this fails is gone already.
    Ok(tokio::net::TcpListener::from_std(listener)?.tap_io(|stream| drop(stream.set_nodelay(true))))
}

fn address(listener: &TcpListener) -> String {
    listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string())
}

fn open([host, port]: [&'static str; 2], address: &Address) -> Result<TcpListener, ServerError> {
    let listener = address.listen();
    // A port that is taken or not allowed is the port's fault, an address that is unknown or elsewhere the host's.
    listener.map_err(|error| ServerError::Listen {
        setting: match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => port,
            _ => host,
        },
        address: address.to_string(),
        error,
    })
}

/// A socket file that nobody listens on any more is in the way after a crash, and is removed; one that somebody does is
/// left alone.
fn open_unix(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    // Any other error may come from a listener that is alive: its queue is full, or it is somebody else's.
    let is_left_over = || match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => false,
        Err(error) => error.kind() == io::ErrorKind::ConnectionRefused,
    };
    if is_socket && is_left_over() {
        std::fs::remove_file(path)?;
    }
    let listener = std::os::unix::net::UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
