//! Opens all listeners before anything is served, so that a port in use is a startup error. `connection` accepts.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::serve::{Listener, ListenerExt as _};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::admission::{AdmissionLimits, ListenerKind};
use super::connection::{ConnectionPolicy, ListenerGuards};
use super::error::StartupError;
use super::http2::Http2Server;
use super::listener_addresses::{self, ListenerAddress};
use super::reloading_tls::ReloadingTls;
use super::sockets::{listen_tcp, listen_unix};
use crate::serve::grpc;
use crate::serve::grpc::health::GrpcHealth;
use crate::serve::grpc::service::ShouldRateLimitMethod;
use crate::serve::http::app_state::AppState;
use crate::serve::http::{metrics_pages, routes};
use crate::serve::quota::method::{add_refusal_to_router, add_to_router};
use crate::settings::Settings;
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

/// Open listeners that do not serve yet.
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

/// Open socket of an HTTP listener, with its guards.
#[derive(Debug)]
struct HttpListenerSocket {
    listener: TcpListener,
    guards: ListenerGuards,
}

/// Open socket of the gRPC listener; a Unix socket with its path.
#[derive(Debug)]
enum GrpcListenerSocket {
    Tcp(TcpListener),
    Unix(std::os::unix::net::UnixListener, PathBuf),
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
    /// Opens all listeners.
    ///
    /// # Errors
    /// The first listener that cannot be opened.
    pub(super) fn open_all(settings: &Settings, guards: GuardsByListener) -> Result<Self, StartupError> {
        let open = |listener: ListenerAddress<'_>| {
            listen_tcp(listener.address).map_err(|error| listener.build_startup_error(error))
        };
        let grpc = match &settings.listeners.grpc {
            GrpcListenAddress::Tcp(address) => {
                GrpcListenerSocket::Tcp(open(listener_addresses::grpc_address(address))?)
            }
            GrpcListenAddress::Unix(path) => {
                let listener =
                    listen_unix(path).map_err(|error| listener_addresses::build_unix_socket_error(path, error))?;
                GrpcListenerSocket::Unix(listener, path.clone())
            }
        };
        let GuardsByListener { grpc: grpc_guards, http, debug, prometheus } = guards;
        Ok(Self {
            grpc,
            grpc_guards,
            http: HttpListenerSocket { listener: open(listener_addresses::http_address(settings))?, guards: http },
            debug: HttpListenerSocket { listener: open(listener_addresses::debug_address(settings))?, guards: debug },
            prometheus: match listener_addresses::prometheus_address(settings) {
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

    /// Starts a task per listener, which serves until `stopping` turns true and its connections are closed.
    pub(super) fn start_serving(
        self,
        settings: &GrpcSettings,
        state: AppState,
        health: &GrpcHealth,
        stopping: &watch::Receiver<bool>,
    ) -> io::Result<JoinSet<()>> {
        let mut serving = JoinSet::new();
        let bounds = &self.bounds;
        let service = &state.collector.service;
        let method = ShouldRateLimitMethod::new(Arc::clone(service), settings.max_message_bytes);
        let router = grpc::build_router_of_other_methods(settings, health);
        let router = match &state.collector.quota {
            Some(quota) => add_to_router(router, quota),
            None => add_refusal_to_router(router, &service.clock),
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
        serve_pages(self.http, routes::build_http_router(state.clone()))?;
        serve_pages(self.debug, routes::build_debug_router(state))?;
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
