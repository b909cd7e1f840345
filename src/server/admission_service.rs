//! The way of requests past the admission.
//!
//! A request too many goes no further than this, and costs no look at its body. A request to the listeners for HTTP is
//! told where it came from; one to gRPC does without.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::IntoResponse as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::service::TowerToHyperService;

use super::admission::{ConnectionPermit, Purpose, RequestPermit};
use crate::http::admin::Peer;

/// Where a connection came from.
pub(super) trait PeerAddr {
    /// Its address, if it has one.
    fn peer(&self) -> Option<SocketAddr>;
}

impl PeerAddr for SocketAddr {
    fn peer(&self) -> Option<SocketAddr> {
        // A listener on all addresses has those of IPv4 in the clothes of IPv6.
        Some(Self::new(self.ip().to_canonical(), self.port()))
    }
}

impl PeerAddr for tokio::net::unix::SocketAddr {
    fn peer(&self) -> Option<SocketAddr> {
        None
    }
}

/// Lets a request for a path in, with its request_permit if it needs one; refuses it if there are too many.
pub(super) fn admit(permit: &Arc<ConnectionPermit>, path: &str) -> Result<Option<RequestPermit>, Refusal> {
    permit.ask();
    let purpose = permit.purpose();
    if !purpose.is_public() {
        return Ok(None);
    }
    let request_permit = permit.begin();
    if request_permit.is_none() && !is_probe(purpose, path) {
        permit.note_refused();
        return Err(Refusal(purpose));
    }
    Ok(request_permit)
}

/// Takes the requests of one connection over HTTP to the pages.
pub(super) fn admission_service(
    pages: TowerToHyperService<Router>,
    permit: Arc<ConnectionPermit>,
) -> impl Service<Request<Incoming>, Response = axum::response::Response, Error = Infallible, Future: Send> {
    service_fn(move |mut request: Request<Incoming>| {
        if let Some(address) = permit.peer {
            request.extensions_mut().insert(Peer(address));
        }
        let way = admit(&permit, request.uri().path()).map(|request_permit| (request_permit, pages.clone()));
        async move {
            match way {
                Ok((_turn, pages)) => pages.call(request).await,
                Err(refusal) => Ok(refusal.page()),
            }
        }
    })
}

/// Whether somebody asks how the process is.
fn is_probe(purpose: Purpose, path: &str) -> bool {
    match purpose {
        Purpose::Grpc => path.starts_with("/grpc.health.v1.Health/"),
        _ => matches!(path, "/healthcheck" | "/livez" | "/readyz"),
    }
}

const TOO_MANY: &str = "too many requests are being answered; try again later";

/// The answer to a request too many.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal(Purpose);

impl Refusal {
    /// A caller that is refused may ask again: nothing was charged.
    pub(super) fn page(self) -> axum::response::Response {
        match self.0 {
            Purpose::Grpc => tonic::Status::resource_exhausted(TOO_MANY).into_http(),
            _ => {
                let headers = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
                (StatusCode::SERVICE_UNAVAILABLE, headers, format!("{TOO_MANY}\n")).into_response()
            }
        }
    }
}
