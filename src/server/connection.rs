//! Connections: accepted, served, asked to close, cut off.
//!
//! All listeners share this loop. A connection is asked to close (GOAWAY, or `connection: close`) when it is old or
//! the process stops, and is cut off when its grace is over; dropping the loop cuts off all. What a client may put off
//! is bounded by time: the head of an HTTP/1 request, the answer to an HTTP/2 ping. TLS is not here.

use std::future;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::gathered::Gathered;
use super::guest::{Entrance, Guest, Origin};
use crate::settings::Grpc;

/// How the connections of a listener are kept.
#[derive(Clone, Debug)]
pub(super) struct Care {
    builder: Builder<TokioExecutor>,
    /// After this time a connection is asked to close; `None`: never.
    age: Option<Duration>,
    /// So much later it is cut off; `None`: never.
    grace: Option<Duration>,
    /// Whether requests are told where they came from.
    tells_peer: bool,
}

/// How long a client may take for the head of a request, from the end of the one before.
const REQUEST_HEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls that a client may give up before they are begun. More, and its connection is closed; the default of 20 is what
/// an Envoy gives up at its timeout of 20 ms when this process is not let run for a moment.
const MOST_GIVEN_UP: usize = 2048;

impl Care {
    /// For HTTP/1.1.
    pub(super) fn http() -> Self {
        let mut builder = Builder::new(TokioExecutor::new()).http1_only();
        builder.http1().timer(TokioTimer::new()).header_read_timeout(REQUEST_HEAD_TIMEOUT);
        Self { builder, age: None, grace: None, tells_peer: true }
    }

    /// For gRPC: HTTP/2 without TLS.
    pub(super) fn grpc(settings: &Grpc) -> Self {
        let mut builder = Builder::new(TokioExecutor::new()).http2_only();
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(settings.max_concurrent_streams)
            .max_pending_accept_reset_streams(MOST_GIVEN_UP)
            .keep_alive_interval(settings.keepalive_interval)
            .keep_alive_timeout(settings.keepalive_timeout);
        Self { builder, age: settings.max_connection_age, grace: settings.max_connection_age_grace, tells_peer: false }
    }

    /// Accepts and serves until `stopping` says so and all connections are closed.
    pub(super) async fn serve<L>(self, mut listener: L, pages: Router, mut stopping: watch::Receiver<bool>)
    where
        L: Listener,
        L::Addr: Origin,
    {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                // It waits a second after an error such as too many open files, instead of spinning.
                (io, address) = listener.accept() => {
                    let guest = Guest { peer: address.peer().filter(|_| self.tells_peer) };
                    let entrance = Entrance::new(pages.clone(), guest);
                    let io = TokioIo::new(Gathered::new(io));
                    connections.spawn(self.clone().connection(io, entrance, stopping.clone()));
                }
                Some(_) = connections.join_next() => {}
                () = stopped(&mut stopping) => break,
            }
        }
        // Those who knock from now on are to find nobody, not somebody who does not answer.
        drop(listener);
        while connections.join_next().await.is_some() {}
    }

    async fn connection<I>(self, io: I, entrance: Entrance, mut stopping: watch::Receiver<bool>)
    where
        I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let mut connection = pin!(self.builder.serve_connection(io, entrance));
        let old = async {
            match self.age {
                Some(age) => sleep(spread(age)).await,
                None => future::pending().await,
            }
        };
        // How a connection ends is its client's affair: an error says nothing that an operator could mend.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = old => {}
            () = stopped(&mut stopping) => {}
        }
        connection.as_mut().graceful_shutdown();
        match self.grace {
            Some(grace) => drop(timeout(grace, connection).await),
            None => drop(connection.await),
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
