//! Admission of requests, before they reach the pages or the gRPC service.
//!
//! A rejected request is answered without reading its body. Requests to the HTTP listeners get the client's address as
//! an extension; gRPC requests do not need it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode, Version, header};
use axum::response::IntoResponse as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::service::TowerToHyperService;

use super::admission::{ConnectionPermit, ListenerKind, ProbePermit, RequestPermit};
use crate::serve::http::admin_token::ClientAddress;

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

/// Place of an admitted request, which it keeps until its response is taken.
#[derive(Debug)]
pub(super) enum Admitted {
    /// A request that limits admit.
    Request(RequestPermit),
    /// A health probe; `None` if it must not wait for anything, because too many are in progress.
    Probe(Option<ProbePermit>),
    /// A request of an operator, or a health probe over HTTP, which waits for nothing.
    Unlimited,
}

/// Admits a request by its path.
pub(super) fn admit(connection: &Arc<ConnectionPermit>, path: &str) -> Result<Admitted, OverloadRejection> {
    connection.set_active();
    match connection.kind() {
        ListenerKind::Grpc if path.starts_with(HEALTH_SERVICE) => Ok(Admitted::Probe(connection.admit_probe())),
        ListenerKind::Http if PROBE_PAGES.contains(&path) => Ok(Admitted::Unlimited),
        kind if kind.is_public() => connection.admit_request().map(Admitted::Request).map_err(|limit| {
            connection.record_refusal(limit);
            OverloadRejection(kind)
        }),
        _ => Ok(Admitted::Unlimited),
    }
}

/// Wraps the pages of an HTTP listener with admission, for one connection.
pub(super) fn admission_service(
    pages: TowerToHyperService<Router>,
    connection: Arc<ConnectionPermit>,
) -> impl Service<Request<Incoming>, Response = axum::response::Response, Error = Infallible, Future: Send> {
    service_fn(move |mut request: Request<Incoming>| {
        if let Some(address) = connection.peer {
            request.extensions_mut().insert(ClientAddress(address));
        }
        let has_valid_host = has_valid_host(&request);
        let admitted = admit(&connection, request.uri().path()).map(|admitted| (admitted, pages.clone()));
        async move {
            if !has_valid_host {
                return Ok((StatusCode::BAD_REQUEST, "400 Bad Request: missing, repeated or invalid Host header\n")
                    .into_response());
            }
            match admitted {
                Ok((_admitted, pages)) => pages.call(request).await,
                Err(rejection) => Ok(rejection.response()),
            }
        }
    })
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

/// Start of the paths of health probes over gRPC.
const HEALTH_SERVICE: &str = "/grpc.health.v1.Health/";
/// Paths of health probes over HTTP.
const PROBE_PAGES: [&str; 3] = ["/healthcheck", "/livez", "/readyz"];

const TOO_MANY_REQUESTS: &str = "too many concurrent requests; try again later";

/// Request that a limit on concurrent requests rejected.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverloadRejection(ListenerKind);

impl OverloadRejection {
    /// Response to the client, which may retry: no hits were charged.
    pub(super) fn response(self) -> axum::response::Response {
        match self.0 {
            ListenerKind::Grpc => tonic::Status::resource_exhausted(TOO_MANY_REQUESTS).into_http(),
            _ => {
                let headers = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
                (StatusCode::SERVICE_UNAVAILABLE, headers, format!("{TOO_MANY_REQUESTS}\n")).into_response()
            }
        }
    }
}
