//! A server in this process: accepts HTTP/1 and HTTP/2, with or without TLS, and answers through a router.

use std::fmt;
use std::net::TcpListener;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::wait_for;

/// Returns the acceptor for the next connection.
pub type NextAcceptor = Box<dyn Fn() -> TlsAcceptor + Send + Sync>;

/// A running server; stopped when dropped.
pub struct HttpServer {
    port: u16,
    runtime: Option<Runtime>,
}

impl fmt::Debug for HttpServer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HttpServer").field("port", &self.port).finish_non_exhaustive()
    }
}

impl HttpServer {
    /// Starts a server on `port` of 127.0.0.1, or on a free port if it is 0.
    pub fn start(port: u16, routes: Router, tls: Option<NextAcceptor>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime can be built");
        let listener = wait_for("the port to be free", || TcpListener::bind(("127.0.0.1", port)).ok());
        listener.set_nonblocking(true).expect("a listener need not block");
        let port = listener.local_addr().expect("it has an address").port();
        runtime.spawn(serve(listener, routes, tls));
        Self { port, runtime: Some(runtime) }
    }

    /// Its port on 127.0.0.1.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Stops it; connections are closed.
    pub fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Accepts connections until it is dropped.
async fn serve(listener: TcpListener, routes: Router, tls: Option<NextAcceptor>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("the listener can be used");
    let mut connections = JoinSet::new();
    while let Ok((io, _)) = listener.accept().await {
        let acceptor = tls.as_ref().map(|next| next());
        connections.spawn(serve_connection(io, routes.clone(), acceptor));
    }
}

/// Serves a connection. I/O errors of a client are what some tests are about.
async fn serve_connection(io: TcpStream, routes: Router, tls: Option<TlsAcceptor>) {
    let builder = Builder::new(TokioExecutor::new());
    let service = TowerToHyperService::new(routes);
    match tls {
        None => drop(builder.serve_connection(TokioIo::new(io), service).await),
        Some(tls) => {
            if let Ok(io) = tls.accept(io).await {
                drop(builder.serve_connection(TokioIo::new(io), service).await);
            }
        }
    }
}
