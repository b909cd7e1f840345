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
use super::connection::Care;
use super::door::{Door, House, Purpose};
use super::http2::Http2;
use super::identity::Identity;
use crate::grpc;
use crate::grpc::call::Calls;
use crate::grpc::health::GrpcHealth;
use crate::http::metrics;
use crate::http::routes::{self, Site};
use crate::settings::address::Address;
use crate::settings::bounds::Bounds;
use crate::settings::tls::Tls;
use crate::settings::{Grpc, GrpcListener, Settings};
use crate::telemetry::doors::Doors;

/// Open listeners.
#[derive(Debug)]
pub(super) struct Listeners {
    grpc: (GrpcSocket, Gate),
    http: (TcpListener, Gate),
    debug: (TcpListener, Gate),
    prometheus: Option<(TcpListener, Gate)>,
    bounds: Bounds,
}

/// Who may come in, and what is shown to them.
type Gate = (Arc<Door>, Option<Arc<Identity>>);

#[derive(Debug)]
enum GrpcSocket {
    Tcp(TcpListener),
    Unix(std::os::unix::net::UnixListener, PathBuf),
}

impl Listeners {
    /// Opens all of them.
    pub(super) fn open(settings: &Settings, doors: &Arc<Doors>) -> Result<Self, ServerError> {
        let house = Arc::new(House::new(settings.bounds, Arc::clone(doors)));
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
            grpc: (grpc, gate(house.door(Purpose::Grpc), settings.listeners.grpc_tls.as_ref())?),
            http: (http, gate(house.door(Purpose::Http), settings.listeners.http_tls.as_ref())?),
            debug: (debug, (house.door(Purpose::Debug), None)),
            prometheus: prometheus.map(|listener| (listener, (house.door(Purpose::Prometheus), None))),
            bounds: settings.bounds,
        })
    }

    /// Puts certificates in force as they change, for as long as `background` lasts.
    pub(super) fn follow_certificates(&self, background: &mut JoinSet<()>) {
        for identity in [&self.grpc.1.1, &self.http.1.1].into_iter().flatten() {
            background.spawn(Arc::clone(identity).follow());
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
        settings: &Grpc,
        site: Site,
        health: &GrpcHealth,
        stopping: &watch::Receiver<bool>,
    ) -> io::Result<JoinSet<()>> {
        let mut serving = JoinSet::new();
        let bounds = &self.bounds;
        let (socket, gate) = self.grpc;
        let service = &site.instruments.service;
        let calls = Calls::new(Arc::clone(service), settings.max_message_bytes);
        let http2 = Http2::new(bounds, settings, calls, grpc::routes::routes(settings, service, health));
        let care = Care::grpc(bounds, settings, http2);
        match socket {
            GrpcSocket::Tcp(listener) => serving.spawn(care.serve(tcp(listener)?, gate, stopping.clone())),
            GrpcSocket::Unix(listener, _) => {
                serving.spawn(care.serve(UnixListener::from_std(listener)?, gate, stopping.clone()))
            }
        };
        let prometheus = self.prometheus.map(|listener| (listener, metrics::routes(&site)));
        let public = (self.http, routes::public(site.clone()));
        for ((listener, gate), pages) in [public, (self.debug, routes::debug(site))].into_iter().chain(prometheus) {
            let care = Care::http(bounds, gate.0.purpose(), gate.1.is_some(), pages);
            serving.spawn(care.serve(tcp(listener)?, gate, stopping.clone()));
        }
        Ok(serving)
    }
}

/// With the certificate that the settings name, if they do.
fn gate(door: Arc<Door>, tls: Option<&Tls>) -> Result<Gate, ServerError> {
    let identity = tls.map(|tls| Identity::load(tls, &door)).transpose().map_err(ServerError::Certificate)?;
    Ok((door, identity.map(Arc::new)))
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
