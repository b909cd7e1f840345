//! The trait that lets one loop drive connections of both HTTP servers.

use std::pin::Pin;

use axum::BoxError;
use axum::http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};

/// A connection: a future that serves its requests when polled and completes when it is closed.
///
/// hyper-util has a sealed trait of this name; this one covers the gRPC server too.
pub(super) trait GracefulConnection: Future {
    /// Announces the end to the client (GOAWAY, or `connection: close`); requests in flight are still answered.
    fn graceful_shutdown(self: Pin<&mut Self>);
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
