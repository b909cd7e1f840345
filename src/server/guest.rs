//! The way of the requests of one connection to the pages.
//!
//! A request too many goes no further than this, and costs neither a task nor a look at its body. A request to the
//! listeners for HTTP is told where it came from; one to gRPC does without.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::Response;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::IntoResponse as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::service::TowerToHyperService;

use super::door::{Guest, Purpose};
use crate::grpc::call::{self, Answer, Calls};
use crate::http::admin::Peer;

/// Where a connection came from.
pub(super) trait Origin {
    /// Its address, if it has one.
    fn peer(&self) -> Option<SocketAddr>;
}

impl Origin for SocketAddr {
    fn peer(&self) -> Option<SocketAddr> {
        // A listener on all addresses has those of IPv4 in the clothes of IPv6.
        Some(Self::new(self.ip().to_canonical(), self.port()))
    }
}

impl Origin for tokio::net::unix::SocketAddr {
    fn peer(&self) -> Option<SocketAddr> {
        None
    }
}

/// What a listener serves.
#[derive(Clone, Debug)]
pub(super) struct Pages {
    router: TowerToHyperService<Router>,
    /// The call that does not go by the router.
    calls: Option<Calls>,
}

impl From<Router> for Pages {
    fn from(router: Router) -> Self {
        Self { router: TowerToHyperService::new(router), calls: None }
    }
}

impl Pages {
    /// The same, but for a call that is answered by itself.
    pub(super) fn with(self, calls: Calls) -> Self {
        Self { calls: Some(calls), ..self }
    }
}

/// Takes the requests of one connection to the pages.
pub(super) fn entrance(
    pages: Pages,
    guest: Arc<Guest>,
) -> impl Service<Request<Incoming>, Response = Response<Answer>, Error = Infallible, Future: Send> {
    service_fn(move |mut request: Request<Incoming>| {
        guest.ask();
        let purpose = guest.purpose();
        if purpose != Purpose::Grpc
            && let Some(address) = guest.peer
        {
            request.extensions_mut().insert(Peer(address));
        }
        let turn = if purpose.is_public() { guest.begin() } else { None };
        let way = if turn.is_none() && purpose.is_public() && !is_probe(purpose, request.uri().path()) {
            guest.note_refused();
            Way::Out
        } else {
            match &pages.calls {
                Some(calls) if calls.takes(&request) => Way::Call(calls.clone()),
                _ => Way::Page(pages.router.clone()),
            }
        };
        async move {
            let answer = match way {
                Way::Out => refusal(purpose).map(Answer::Page),
                Way::Call(calls) => calls.answer(request).await,
                Way::Page(router) => call::page(router.call(request).await),
            };
            drop(turn);
            Ok(answer)
        }
    })
}

/// Where a request goes.
enum Way {
    Out,
    Call(Calls),
    Page(TowerToHyperService<Router>),
}

/// Whether somebody asks how the process is.
fn is_probe(purpose: Purpose, path: &str) -> bool {
    match purpose {
        Purpose::Grpc => path.starts_with("/grpc.health.v1.Health/"),
        _ => matches!(path, "/healthcheck" | "/livez" | "/readyz"),
    }
}

const TOO_MANY: &str = "too many requests are being answered; try again later";

/// A caller that is refused may ask again: nothing was charged.
fn refusal(purpose: Purpose) -> axum::response::Response {
    match purpose {
        Purpose::Grpc => tonic::Status::resource_exhausted(TOO_MANY).into_http(),
        _ => {
            let headers = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
            (StatusCode::SERVICE_UNAVAILABLE, headers, format!("{TOO_MANY}\n")).into_response()
        }
    }
}
