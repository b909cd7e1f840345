//! The listeners: opened all at once before anything is served, so that a port taken is one clear line.

use std::future::Future;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use axum::Router;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use super::ServerError;
use crate::grpc::health::GrpcHealth;
use crate::grpc::service::Rpc;
use crate::http::routes::{self, Site};
use crate::pb;
use crate::pb::rate_limit_service_server::RateLimitServiceServer;
use crate::settings::address::Address;
use crate::settings::{Grpc, GrpcListener, Settings};

/// Open listeners.
#[derive(Debug)]
pub(super) struct Listeners {
    grpc: GrpcSocket,
    http: TcpListener,
    debug: TcpListener,
}

#[derive(Debug)]
enum GrpcSocket {
    Tcp(TcpListener),
    Unix(std::os::unix::net::UnixListener),
}

impl Listeners {
    /// Opens all of them.
    pub(super) fn open(settings: &Settings) -> Result<Self, ServerError> {
        let grpc = match &settings.listeners.grpc {
            GrpcListener::Tcp(address) => GrpcSocket::Tcp(open("GRPC_PORT", address)?),
            GrpcListener::Unix(path) => GrpcSocket::Unix(open_unix(path).map_err(|error| ServerError::Listen {
                setting: "GRPC_UDS",
                address: path.display().to_string(),
                error,
            })?),
        };
        let http = open("PORT", &settings.listeners.http)?;
        let debug = open("DEBUG_PORT", &settings.listeners.debug)?;
        Ok(Self { grpc, http, debug })
    }

    /// Serves on all of them until `stopping` says so and what is in flight is finished.
    pub(super) fn serve(
        self,
        settings: &Grpc,
        site: Site,
        health: &GrpcHealth,
        stopping: &watch::Receiver<bool>,
    ) -> Result<JoinSet<Result<(), ServerError>>, ServerError> {
        let mut serving = JoinSet::new();
        let routes = grpc_routes(settings, &site, health);
        let router = server(settings).add_routes(routes);
        let stop = stopped(stopping.clone());
        let failed = |listener: &'static str| move |error| ServerError::System { what: listener, error };
        match self.grpc {
            GrpcSocket::Tcp(listener) => {
                let listener = tokio::net::TcpListener::from_std(listener).map_err(failed("the gRPC listener"))?;
                let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
                serving.spawn(async move { ended("gRPC", router.serve_with_incoming_shutdown(incoming, stop).await) });
            }
            GrpcSocket::Unix(listener) => {
                let listener = UnixListener::from_std(listener).map_err(failed("the gRPC listener"))?;
                let incoming = UnixListenerStream::new(listener);
                serving.spawn(async move { ended("gRPC", router.serve_with_incoming_shutdown(incoming, stop).await) });
            }
        }
        for (name, listener, pages) in
            [("HTTP", self.http, routes::public(site.clone())), ("debug", self.debug, routes::debug(site))]
        {
            let listener = tokio::net::TcpListener::from_std(listener).map_err(failed("an HTTP listener"))?;
            serving.spawn(serve_http(name, listener, pages, stopped(stopping.clone())));
        }
        Ok(serving)
    }
}

fn open(setting: &'static str, address: &Address) -> Result<TcpListener, ServerError> {
    let listener = address.listen();
    listener.map_err(|error| ServerError::Listen { setting, address: address.to_string(), error })
}

/// A socket file that nobody listens on any more is in the way after a crash, and is removed; one that somebody does is
/// left alone.
fn open_unix(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
        std::fs::remove_file(path)?;
    }
    let listener = std::os::unix::net::UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn server(settings: &Grpc) -> Server {
    let mut server = Server::builder()
        .max_concurrent_streams(settings.max_concurrent_streams)
        .http2_keepalive_interval(settings.keepalive_interval)
        .http2_keepalive_timeout(Some(settings.keepalive_timeout));
    if let Some(age) = settings.max_connection_age {
        server = server.max_connection_age(spread(age));
    }
    if let Some(grace) = settings.max_connection_age_grace {
        server = server.max_connection_age_grace(grace);
    }
    server
}

/// Up to a tenth more or less, so that replicas that started together do not close their connections together.
fn spread(age: Duration) -> Duration {
    let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0_u8) % 2001;
    age.mul_f64(0.9 + f64::from(u32::try_from(random).unwrap_or(1000)) / 10_000.0)
}

fn grpc_routes(settings: &Grpc, site: &Site, health: &GrpcHealth) -> Routes {
    let service = RateLimitServiceServer::new(Rpc(std::sync::Arc::clone(&site.service)))
        .accept_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(settings.max_message_bytes);
    let routes = Routes::new(service).add_service(health.server());
    if !settings.reflection {
        return routes;
    }
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(pb::descriptor_set())
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    // Some clients know only the older of the two names.
    match (reflection().build_v1(), reflection().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => routes.add_service(v1).add_service(v1alpha),
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(%error, "reflection is off: the descriptors can not be served");
            routes
        }
    }
}

async fn serve_http(
    name: &'static str,
    listener: tokio::net::TcpListener,
    pages: Router,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServerError> {
    ended(name, axum::serve(listener, pages).with_graceful_shutdown(stop).await)
}

fn ended<E: std::error::Error + Send + Sync + 'static>(
    listener: &'static str,
    result: Result<(), E>,
) -> Result<(), ServerError> {
    result.map_err(|error| ServerError::Serve { listener, error: error.into() })
}

async fn stopped(mut stopping: watch::Receiver<bool>) {
    // If the sender is gone, so is the process's reason to go on.
    let _ = stopping.wait_for(|stop| *stop).await;
}
