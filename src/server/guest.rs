//! Who is at the other end of a connection, and the way of its requests to the pages.

use std::net::SocketAddr;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

use crate::http::admin::Peer;

/// Where a connection came from.
pub(super) trait Origin {
    /// Its address, if it has one.
    fn peer(&self) -> Option<SocketAddr>;
}

impl Origin for SocketAddr {
    fn peer(&self) -> Option<SocketAddr> {
        // A listener on all addresses has those of IPv4 in the clothes of IPv6.
        Some(SocketAddr::new(self.ip().to_canonical(), self.port()))
    }
}

impl Origin for tokio::net::unix::SocketAddr {
    fn peer(&self) -> Option<SocketAddr> {
        None
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guest {
    /// What requests are told of it.
    pub(super) peer: Option<SocketAddr>,
}

/// Takes the requests of one connection to the pages.
#[derive(Clone, Debug)]
pub(super) struct Entrance {
    pages: TowerToHyperService<Router>,
    guest: Guest,
}

impl Entrance {
    /// For the requests of `guest`.
    pub(super) fn new(pages: Router, guest: Guest) -> Self {
        Self { pages: TowerToHyperService::new(pages), guest }
    }
}

impl Service<Request<Incoming>> for Entrance {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        if let Some(address) = self.guest.peer {
            request.extensions_mut().insert(Peer(address));
        }
        self.pages.call(request)
    }
}
