//! Accepts connections and drives each of them from TLS handshake to close.
//!
//! All listeners share this loop. A connection is asked to close (GOAWAY, or `connection: close`) when it reaches its
//! maximum age, is idle, or the process stops; it is dropped when its grace period ends. Timeouts bound all that a
//! client can delay: the TLS handshake, the first request, the head of an HTTP/1 request, reading of a page; `http2`
//! has those of keepalive pings, and `admission` the limits on connections. The handshake runs in the connection's own
//! task, so a slow one does not delay `accept`.
//!
//! Bytes of bodies over HTTP count towards the limits of `admission` while they are in memory, but for those of operators,
//! who have few connections. The bytes of a response carry their count: hyper drops them when they are written, or when
//! the connection ends.
//!
//! Decides: when a connection is closed: age and jitter, idleness, slow handshake.
//! Decides: HTTP/1 on the gRPC port, HTTP/2 on an HTTP port; which `Host` is valid (`has_valid_host`).
//! Decides: HTTP clients that read nothing (`TOLLKEEPER_HEAD_TIMEOUT`, `TimeoutWriter`, `CountedBytes`).
//! Decides: no file descriptor left for `accept`; streams of an HTTP/2 connection over HTTP; GOAWAY.

use std::convert::Infallible;
use std::future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::uri::Authority;
use axum::http::{Request, Response, StatusCode, Version, header};
use axum::response::IntoResponse as _;
use axum::serve::Listener;
use axum::{BoxError, Router, body};
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::{self, Builder};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutWriter;

use super::admission::{BufferedBytes, ConnectionPermit, ListenerAdmission, build_too_many_bytes_http_response};
use super::coalesced_writer::CoalescedWriter;
use super::http2::{GracefulConnection, Http2Server};
use super::tls::{ReloadingTls, log_handshake_failure};
use crate::base::random::random_fraction;
use crate::serve::http::admin_token::ClientAddress;
use crate::settings::client_limits::ClientLimits;
use crate::settings::grpc::GrpcSettings;
use crate::telemetry::listener_stats::ListenerKind;

/// Address of the other end of an accepted connection.
pub(super) trait PeerAddr {
    /// IP address and port; `None` for a Unix socket.
    fn peer(&self) -> Option<SocketAddr>;
}

impl PeerAddr for SocketAddr {
    fn peer(&self) -> Option<SocketAddr> {
        // Dual-stack sockets report IPv4 peers as IPv4-mapped IPv6.
        Some(Self::new(self.ip().to_canonical(), self.port()))
    }
}

impl PeerAddr for tokio::net::unix::SocketAddr {
    fn peer(&self) -> Option<SocketAddr> {
        None
    }
}

/// Admission limits and TLS that a listener applies to each connection.
#[derive(Clone, Debug)]
pub(super) struct ListenerGuards {
    /// Limits on connections and requests.
    pub(super) admission: Arc<ListenerAdmission>,
    /// Certificate and client authentication; `None` for plaintext.
    pub(super) tls: Option<Arc<ReloadingTls>>,
}

/// Protocol and timeouts of a listener's connections.
#[derive(Clone, Debug)]
pub(super) struct ConnectionPolicy {
    protocol: ListenerProtocol,
    /// Age at which a connection is asked to close, +-10 %; `None` for no limit.
    max_age: Option<Duration>,
    /// Time between that request and dropping the connection; `None` for no limit.
    grace: Option<Duration>,
    /// Maximum time for the TLS handshake, for the first request, and without progress of writing to an HTTP client.
    head_timeout: Duration,
    /// Time without a request after which a connection is asked to close; `None` for no limit.
    idle_timeout: Option<Duration>,
}

/// Protocol of a listener, with the service that answers.
#[derive(Clone, Debug)]
enum ListenerProtocol {
    Http(Box<Builder<TokioExecutor>>, TowerToHyperService<Router>),
    Grpc(Arc<Http2Server>),
}

/// Grace period of a connection that never sent a request.
const UNUSED_CONNECTION_GRACE: Duration = Duration::from_secs(5);
/// Maximum number of concurrent HTTP/2 streams on a connection to an HTTP listener.
const MAX_HTTP_STREAMS: u32 = 256;
/// Maximum size of the headers of an HTTP request, such as to `/json`, in bytes.
const MAX_HTTP_HEAD_BYTES: u16 = 16 << 10;

impl ConnectionPolicy {
    /// Policy of an HTTP listener: HTTP/1.1, and with TLS also HTTP/2.
    pub(super) fn for_http(bounds: &ClientLimits, kind: ListenerKind, has_tls: bool, pages: Router) -> Self {
        let mut builder = Builder::new(TokioExecutor::new());
        if !has_tls {
            builder = builder.http1_only();
        }
        builder.http1().timer(TokioTimer::new()).header_read_timeout(bounds.head_timeout);
        // Large pages are written from where they are: a copy for each client that does not read would not be counted.
        builder.http1().writev(true);
        builder.http2().timer(TokioTimer::new()).max_concurrent_streams(MAX_HTTP_STREAMS);
        builder.http2().max_header_list_size(MAX_HTTP_HEAD_BYTES.into());
        if kind.serves_clients() {
            builder.http1().max_buf_size(MAX_HTTP_HEAD_BYTES.into());
        }
        // In HTTP/1 the timeout of the request head also bounds the time between two requests.
        let idle_timeout = has_tls.then_some(bounds.head_timeout);
        let protocol = ListenerProtocol::Http(Box::new(builder), TowerToHyperService::new(pages));
        Self { protocol, max_age: None, grace: None, head_timeout: bounds.head_timeout, idle_timeout }
    }

    /// Policy of the gRPC listener: HTTP/2.
    pub(super) fn for_grpc(bounds: &ClientLimits, settings: &GrpcSettings, http2: Http2Server) -> Self {
        Self {
            protocol: ListenerProtocol::Grpc(Arc::new(http2)),
            max_age: settings.max_connection_age,
            grace: settings.max_connection_age_grace,
            head_timeout: bounds.head_timeout,
            idle_timeout: bounds.idle_timeout,
        }
    }

    /// Accepts and serves connections until `stopping` turns true and all connections are closed.
    pub(super) async fn accept_connections<L>(
        self,
        mut listener: L,
        guards: ListenerGuards,
        mut stopping: watch::Receiver<bool>,
    ) where
        L: Listener,
        L::Addr: PeerAddr,
    {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                // `accept` sleeps for a second after an error such as too many open files, instead of spinning.
                (io, address) = listener.accept() => {
                    let Some(permit) = guards.admission.admit_connection(address.peer()) else { continue };
                    let (policy, stopping) = (self.clone(), stopping.clone());
                    match &guards.tls {
                        None => connections.spawn(policy.serve_connection(io, permit, stopping)),
                        Some(tls) => {
                            let handshake = tls.start_handshake(io);
                            connections.spawn(policy.serve_tls_connection(handshake, permit, stopping))
                        }
                    };
                }
                Some(_) = connections.join_next() => {}
                () = wait_for_stop(&mut stopping) => break,
            }
        }
        // Close the listener first, so that new connections are refused instead of hanging.
        drop(listener);
        while connections.join_next().await.is_some() {}
    }

    async fn serve_tls_connection<I>(
        self,
        handshake: tokio_rustls::Accept<I>,
        permit: Arc<ConnectionPermit>,
        mut stopping: watch::Receiver<bool>,
    ) where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let result = tokio::select! {
            result = timeout(self.head_timeout, handshake) => result,
            () = wait_for_stop(&mut stopping) => return,
        };
        match result {
            Ok(Ok(io)) => self.serve_connection(io, permit, stopping).await,
            Ok(Err(error)) => log_handshake_failure(&error, permit.listener_kind(), permit.peer),
            Err(_) => {}
        }
    }

    async fn serve_connection<I>(self, io: I, permit: Arc<ConnectionPermit>, stopping: watch::Receiver<bool>)
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        match &self.protocol {
            ListenerProtocol::Http(builder, pages) => {
                // A client that does not read blocks its connection, and no timeout of hyper ends that.
                let mut io = TimeoutWriter::new(io);
                io.set_timeout(Some(self.head_timeout));
                let service = wrap_with_admission(pages.clone(), Arc::clone(&permit));
                let io = TokioIo::new(CoalescedWriter::new(Box::pin(io)));
                self.drive_connection(builder.serve_connection(io, service), &permit, stopping).await;
            }
            ListenerProtocol::Grpc(http2) => {
                let io = CoalescedWriter::new(io);
                self.drive_connection(Arc::clone(http2).serve_connection(io, Arc::clone(&permit)), &permit, stopping)
                    .await;
            }
        }
    }

    /// Polls a connection until it is closed, and asks it to close when it is old, idle, or the process stops.
    async fn drive_connection(
        &self,
        connection: impl GracefulConnection,
        permit: &ConnectionPermit,
        mut stopping: watch::Receiver<bool>,
    ) {
        let mut connection = pin!(connection);
        let too_old = async {
            match self.max_age {
                Some(age) => sleep(add_jitter(age)).await,
                None => future::pending().await,
            }
        };
        let mut grace = self.grace;
        // Client I/O errors are not actionable; ignore them.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = too_old => {}
            is_unused = self.wait_until_idle(permit) => if is_unused {
                grace = Some(UNUSED_CONNECTION_GRACE);
            },
            () = wait_for_stop(&mut stopping) => {}
        }
        connection.as_mut().graceful_shutdown();
        match grace {
            Some(grace) => drop(timeout(grace, connection).await),
            None => drop(connection.await),
        }
    }

    /// Waits until the connection is idle for too long; returns true if it never had a request.
    async fn wait_until_idle(&self, permit: &ConnectionPermit) -> bool {
        sleep(self.head_timeout).await;
        if !permit.take_had_request() {
            return true;
        }
        let Some(idle_timeout) = self.idle_timeout else { return future::pending().await };
        loop {
            sleep(idle_timeout).await;
            if !permit.take_had_request() {
                return false;
            }
        }
    }
}

impl<I, S, B> GracefulConnection for auto::Connection<'_, TokioIo<I>, S, TokioExecutor>
where
    S: Service<Request<Incoming>, Response = Response<B>, Future: Send + 'static, Error: Into<BoxError>>,
    I: AsyncRead + AsyncWrite + Unpin + 'static,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    fn graceful_shutdown(self: Pin<&mut Self>) {
        auto::Connection::graceful_shutdown(self);
    }
}

/// Wraps the pages of an HTTP listener with admission, for one connection.
///
/// A rejected request is answered without reading its body. Requests get the client's address as an extension; gRPC
/// requests do not need it.
fn wrap_with_admission(
    pages: TowerToHyperService<Router>,
    connection: Arc<ConnectionPermit>,
) -> impl Service<Request<Incoming>, Response = Response<body::Body>, Error = Infallible, Future: Send> {
    service_fn(move |mut request: Request<Incoming>| {
        if let Some(address) = connection.peer {
            request.extensions_mut().insert(ClientAddress(address));
        }
        let has_valid_host = has_valid_host(&request);
        let admitted = connection.admit_request(request.uri().path()).map(|permit| (permit, pages.clone()));
        let connection = Arc::clone(&connection);
        async move {
            let response = match admitted {
                _ if !has_valid_host => {
                    (StatusCode::BAD_REQUEST, "400 Bad Request: missing, repeated or invalid Host header\n")
                        .into_response()
                }
                Ok((_permit, pages)) => answer_with_accounted_bodies(&pages, &connection, request).await,
                Err(rejection) => rejection.into_response(),
            };
            Ok(count_bytes_or_refuse(&connection, response).await)
        }
    })
}

/// Answers a request. The bytes of its body count towards the limits on buffered bytes meanwhile.
async fn answer_with_accounted_bodies(
    pages: &TowerToHyperService<Router>,
    connection: &Arc<ConnectionPermit>,
    request: Request<Incoming>,
) -> Response<body::Body> {
    let is_refused = Arc::new(AtomicBool::new(false));
    let received = BufferedBytes::new(Arc::clone(connection));
    let request = request.map(|body| MemoryAccountedRequestBody::new(body, received, Arc::clone(&is_refused)));
    let Ok(response) = pages.call(request).await;
    if is_refused.load(Ordering::Relaxed) { build_too_many_bytes_http_response() } else { response }
}

/// Counts the bytes of a response until they are written, or refuses it. Events, whose length is open, do not count.
async fn count_bytes_or_refuse(
    connection: &Arc<ConnectionPermit>,
    response: Response<body::Body>,
) -> Response<body::Body> {
    let length = response.body().size_hint().exact().and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
    let buffered = match BufferedBytes::reserve_for_response(connection, length) {
        Ok(None) => return response,
        Ok(Some(buffered)) => buffered,
        Err(limit) => {
            connection.record_refusal(limit);
            return build_too_many_bytes_http_response();
        }
    };
    let (head, body) = response.into_parts();
    match body::to_bytes(body, length).await {
        Ok(bytes) => Response::from_parts(head, Bytes::from_owner(CountedBytes { bytes, _buffered: buffered }).into()),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// True if an HTTP/1 request has the host that RFC 9112, section 3.2 demands: one `Host` header with a valid value.
///
/// In HTTP/2 the authority takes its place, and hyper checks it.
fn has_valid_host(request: &Request<Incoming>) -> bool {
    let is_required = request.version() == Version::HTTP_11;
    let mut hosts = request.headers().get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) => !is_required,
        (Some(host), None) => host.is_empty() || Authority::try_from(host.as_bytes()).is_ok(),
        (Some(_), Some(_)) => false,
    }
}

/// Returns `age` +-10 %, so that connections opened together are not closed together.
fn add_jitter(age: Duration) -> Duration {
    age.mul_f64(0.9 + 0.2 * random_fraction())
}

async fn wait_for_stop(stopping: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped, which also ends the process.
    let _ = stopping.wait_for(|stop| *stop).await;
}

/// Request body that adds each frame to the buffered bytes, and fails when a limit on them is reached.
///
/// Handlers gather the bytes, so they count until the body is dropped.
#[derive(Debug)]
struct MemoryAccountedRequestBody {
    body: Incoming,
    received: BufferedBytes,
    /// Set when a limit is exceeded.
    is_refused: Arc<AtomicBool>,
}

/// Bytes of a response, counted until hyper has written or dropped them.
struct CountedBytes {
    bytes: Bytes,
    _buffered: BufferedBytes,
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl MemoryAccountedRequestBody {
    /// Body whose bytes are added to `received`; `is_refused` is set when they exceed a limit.
    const fn new(body: Incoming, received: BufferedBytes, is_refused: Arc<AtomicBool>) -> Self {
        Self { body, received, is_refused }
    }
}

impl Body for MemoryAccountedRequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)) else { return Poll::Ready(None) };
        let frame = frame?;
        let length = frame.data_ref().map_or(0, Bytes::len);
        if let Err(limit) = self.received.add_bytes(length) {
            self.received.connection().record_refusal(limit);
            self.is_refused.store(true, Ordering::Relaxed);
            return Poll::Ready(Some(Err("too many bytes of requests and responses in progress".into())));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
