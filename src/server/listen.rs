//! The listeners: opened all at once before anything is served, so that a port taken is one clear line.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use axum::serve::{Listener, ListenerExt as _};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::ServerError;
use super::connection::Care;
use crate::grpc;
use crate::grpc::health::GrpcHealth;
use crate::http::metrics;
use crate::http::routes::{self, Site};
use crate::settings::address::Address;
use crate::settings::{Grpc, GrpcListener, Settings};

/// Open listeners.
#[derive(Debug)]
pub(super) struct Listeners {
    grpc: GrpcSocket,
    http: TcpListener,
    debug: TcpListener,
    prometheus: Option<TcpListener>,
}

#[derive(Debug)]
enum GrpcSocket {
    Tcp(TcpListener),
    Unix(std::os::unix::net::UnixListener, PathBuf),
}

impl Listeners {
    /// Opens all of them.
    pub(super) fn open(settings: &Settings) -> Result<Self, ServerError> {
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
        Ok(Self { grpc, http, debug, prometheus })
    }

    /// Where they listen, for the log: the address, or the path of the socket.
    pub(super) fn addresses(&self) -> [String; 4] {
        let grpc = match &self.grpc {
            GrpcSocket::Tcp(listener) => address(listener),
            GrpcSocket::Unix(_, path) => path.display().to_string(),
        };
        let prometheus = self.prometheus.as_ref().map_or_else(|| "off".to_owned(), address);
        [grpc, address(&self.http), address(&self.debug), prometheus]
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
        let (care, pages) = (Care::grpc(settings), grpc::routes::routes(settings, &site.instruments.service, health));
        match self.grpc {
            GrpcSocket::Tcp(listener) => serving.spawn(care.serve(tcp(listener)?, pages, stopping.clone())),
            GrpcSocket::Unix(listener, _) => {
                serving.spawn(care.serve(UnixListener::from_std(listener)?, pages, stopping.clone()))
            }
        };
        let prometheus = self.prometheus.map(|listener| (listener, metrics::routes(&site)));
        let public = (self.http, routes::public(site.clone()));
        for (listener, pages) in [public, (self.debug, routes::debug(site))].into_iter().chain(prometheus) {
            serving.spawn(Care::http().serve(tcp(listener)?, pages, stopping.clone()));
        }
        Ok(serving)
    }
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
