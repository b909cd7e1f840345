//! The way of the requests of one connection to the pages.
//!
//! A request too many goes no further than this, and costs neither a task nor a look at its body. A request to the
//! listeners for HTTP is told where it came from; one to gRPC does without.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::Router;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

use super::door::{Guest, Purpose, Turn};
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

/// Takes the requests of one connection to the pages.
#[derive(Clone, Debug)]
pub(super) struct Entrance {
    pages: TowerToHyperService<Router>,
    guest: Arc<Guest>,
}

type Answer = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

impl Entrance {
    /// For the requests of `guest`.
    pub(super) fn new(pages: Router, guest: Arc<Guest>) -> Self {
        Self { pages: TowerToHyperService::new(pages), guest }
    }
}

impl Service<Request<Incoming>> for Entrance {
    type Response = Response;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, mut request: Request<Incoming>) -> Answering {
        self.guest.ask();
        let purpose = self.guest.purpose();
        if purpose != Purpose::Grpc
            && let Some(address) = self.guest.peer
        {
            request.extensions_mut().insert(Peer(address));
        }
        let turn = if purpose.is_public() { self.guest.begin() } else { None };
        if turn.is_none() && purpose.is_public() && !is_probe(purpose, request.uri().path()) {
            self.guest.note_refused();
            return Answering::Refused(purpose);
        }
        Answering::Routed(self.pages.call(request), turn)
    }
}

/// Whether somebody asks how the process is.
fn is_probe(purpose: Purpose, path: &str) -> bool {
    match purpose {
        Purpose::Grpc => path.starts_with("/grpc.health.v1.Health/"),
        _ => matches!(path, "/healthcheck" | "/livez" | "/readyz"),
    }
}

/// An answer on its way.
#[expect(clippy::large_enum_variant, reason = "nearly all are of the large kind, and a box for each is what it avoids")]
pub(super) enum Answering {
    /// From the pages; the turn ends with it.
    Routed(Answer, Option<Turn>),
    /// From here.
    Refused(Purpose),
}

impl Future for Answering {
    type Output = Result<Response, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Routed(answer, turn) => {
                let answer = ready!(Pin::new(answer).poll(context));
                drop(turn.take());
                Poll::Ready(answer)
            }
            Self::Refused(purpose) => Poll::Ready(Ok(refusal(*purpose))),
        }
    }
}

const TOO_MANY: &str = "too many requests are being answered; try again later";

/// A caller that is refused may ask again: nothing was charged.
fn refusal(purpose: Purpose) -> Response {
    match purpose {
        Purpose::Grpc => tonic::Status::resource_exhausted(TOO_MANY).into_http(),
        _ => {
            let headers = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
            (StatusCode::SERVICE_UNAVAILABLE, headers, format!("{TOO_MANY}\n")).into_response()
        }
    }
}
