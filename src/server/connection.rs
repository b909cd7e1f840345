//! Connections: accepted, served, asked to close, cut off.
//!
//! All listeners share this loop. A connection is asked to close (GOAWAY, or `connection: close`) when it is old or
//! idle or the process stops, and is cut off when its grace is over; dropping the loop cuts off all. What a client may
//! put off is bounded by time: the TLS handshake, its first request, the head of an HTTP/1 request, the answer to an
//! HTTP/2 ping. A handshake is part of its connection, so that a slow one keeps nobody else from being accepted.

use std::future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, Response};
use axum::serve::Listener;
use axum::{BoxError, Router};
use hyper::body::{Body, Incoming};
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::{self, Builder};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::admission::{ConnectionPermit, ListenerAdmission, Purpose};
use super::admission_service::{PeerAddr, admission_service};
use super::coalesced_writer::CoalescedWriter;
use super::http2::Http2Server;
use super::reloading_tls::{self, ReloadingTls};
use crate::settings::client_limits::ClientLimits;
use crate::settings::grpc::GrpcSettings;

/// How the connections of a listener are kept.
#[derive(Clone, Debug)]
pub(super) struct ConnectionPolicy {
    protocol: ListenerProtocol,
    /// After this time a connection is asked to close; `None`: never.
    age: Option<Duration>,
    /// So much later it is cut off; `None`: never.
    grace: Option<Duration>,
    /// How long a client may take to begin.
    head_timeout: Duration,
    /// After so long without a request a connection is asked to close; `None`: never.
    idle_timeout: Option<Duration>,
}

/// How a listener speaks, and what answers.
#[derive(Clone, Debug)]
enum ListenerProtocol {
    Pages(Box<Builder<TokioExecutor>>, TowerToHyperService<Router>),
    Grpc(Arc<Http2Server>),
}

/// A connection, which is served as it is polled, until it ends.
pub(super) trait GracefulConnection: Future {
    /// Asks the client to ask no more; it ends once all is answered.
    fn graceful_shutdown(self: Pin<&mut Self>);
}

impl<I, S, B> GracefulConnection for auto::Connection<'_, TokioIo<I>, S, TokioExecutor>
where
    S: Service<Request<Incoming>, Response = Response<B>, Future: Send + 'static, Error: Into<BoxError>>,
    I: AsyncRead + AsyncWrite + Unpin + 'static,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    fn graceful_shutdown(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

/// How long a client that has asked nothing is waited for once it was told to go.
const UNUSED_CONNECTION_GRACE: Duration = Duration::from_secs(5);
/// InFlightRequests that a browser or the like may have open on one connection over HTTP/2.
const MAX_HTTP_STREAMS: u32 = 256;

impl ConnectionPolicy {
    /// For HTTP/1.1, and with TLS for HTTP/2 too.
    pub(super) fn http(bounds: &ClientLimits, purpose: Purpose, is_secured: bool, pages: Router) -> Self {
        let mut builder = Builder::new(TokioExecutor::new());
        if !is_secured {
            builder = builder.http1_only();
        }
        builder.http1().timer(TokioTimer::new()).header_read_timeout(bounds.head_timeout);
        builder.http2().timer(TokioTimer::new()).max_concurrent_streams(MAX_HTTP_STREAMS);
        builder.http2().max_header_list_size(bounds.head_bytes);
        if purpose.is_public() {
            builder.http1().max_buf_size(usize::try_from(bounds.head_bytes).unwrap_or(usize::MAX));
        }
        // Over HTTP/1 the time for the head is the time between two requests as well.
        let idle_timeout = is_secured.then_some(bounds.head_timeout);
        let protocol = ListenerProtocol::Pages(Box::new(builder), TowerToHyperService::new(pages));
        Self { protocol, age: None, grace: None, head_timeout: bounds.head_timeout, idle_timeout }
    }

    /// For gRPC: HTTP/2.
    pub(super) fn grpc(bounds: &ClientLimits, settings: &GrpcSettings, http2: Http2Server) -> Self {
        Self {
            protocol: ListenerProtocol::Grpc(Arc::new(http2)),
            age: settings.max_connection_age,
            grace: settings.max_connection_age_grace,
            head_timeout: bounds.head_timeout,
            idle_timeout: bounds.idle_timeout,
        }
    }

    /// Accepts and serves until `stopping` says so and all connections are closed.
    pub(super) async fn serve<L>(
        self,
        mut listener: L,
        (admission, tls): (Arc<ListenerAdmission>, Option<Arc<ReloadingTls>>),
        mut stopping: watch::Receiver<bool>,
    ) where
        L: Listener,
        L::Addr: PeerAddr,
    {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                // It waits a second after an error such as too many open files, instead of spinning.
                (io, address) = listener.accept() => {
                    let Some(permit) = admission.admit(address.peer()) else { continue };
                    let (policy, stopping) = (self.clone(), stopping.clone());
                    match &tls {
                        None => connections.spawn(policy.connection(io, permit, stopping)),
                        Some(tls) => {
                            let handshake = tls.accept(io);
                            connections.spawn(policy.secured(handshake, permit, stopping))
                        }
                    };
                }
                Some(_) = connections.join_next() => {}
                () = stopped(&mut stopping) => break,
            }
        }
        // Those who knock from now on are to find nobody, not somebody who does not answer.
        drop(listener);
        while connections.join_next().await.is_some() {}
    }

    async fn secured<I>(
        self,
        handshake: tokio_rustls::Accept<I>,
        permit: Arc<ConnectionPermit>,
        mut stopping: watch::Receiver<bool>,
    ) where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let shaken = tokio::select! {
            shaken = timeout(self.head_timeout, handshake) => shaken,
            () = stopped(&mut stopping) => return,
        };
        match shaken {
            Ok(Ok(io)) => self.connection(io, permit, stopping).await,
            Ok(Err(error)) => reloading_tls::log_handshake_failure(&error, permit.purpose(), permit.peer),
            Err(_) => {}
        }
    }

    async fn connection<I>(self, io: I, permit: Arc<ConnectionPermit>, stopping: watch::Receiver<bool>)
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let io = CoalescedWriter::new(io);
        match &self.protocol {
            ListenerProtocol::Pages(builder, pages) => {
                let admission_service = admission_service(pages.clone(), Arc::clone(&permit));
                self.keep(builder.serve_connection(TokioIo::new(io), admission_service), &permit, stopping).await;
            }
            ListenerProtocol::Grpc(http2) => {
                self.keep(Arc::clone(http2).serve(io, Arc::clone(&permit)), &permit, stopping).await;
            }
        }
    }

    async fn keep(
        &self,
        connection: impl GracefulConnection,
        permit: &ConnectionPermit,
        mut stopping: watch::Receiver<bool>,
    ) {
        let mut connection = pin!(connection);
        let old = async {
            match self.age {
                Some(age) => sleep(spread(age)).await,
                None => future::pending().await,
            }
        };
        let mut grace = self.grace;
        // How a connection ends is its client's affair: an error says nothing that an operator could mend.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = old => {}
            never_asked = self.quiet(permit) => if never_asked {
                grace = Some(UNUSED_CONNECTION_GRACE);
            },
            () = stopped(&mut stopping) => {}
        }
        connection.as_mut().graceful_shutdown();
        match grace {
            Some(grace) => drop(timeout(grace, connection).await),
            None => drop(connection.await),
        }
    }

    /// Waits until the client has asked nothing for too long; whether it never has.
    async fn quiet(&self, permit: &ConnectionPermit) -> bool {
        sleep(self.head_timeout).await;
        if !permit.has_asked() {
            return true;
        }
        let Some(idle_timeout) = self.idle_timeout else { return future::pending().await };
        loop {
            sleep(idle_timeout).await;
            if !permit.has_asked() {
                return false;
            }
        }
    }
}

/// Up to a tenth more or less, so that connections that were opened together are not closed together.
fn spread(age: Duration) -> Duration {
    let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0_u8) % 2001;
    age.mul_f64(0.9 + f64::from(u32::try_from(random).unwrap_or(1000)) / 10_000.0)
}

async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // If the sender is gone, so is the process's reason to go on.
    let _ = stopping.wait_for(|stop| *stop).await;
}
