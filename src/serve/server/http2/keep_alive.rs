//! HTTP/2 pings that detect a client that is gone.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep, sleep};

/// Times of the pings of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeepAliveTimes {
    /// Time between the reply to a ping and the next ping.
    pub(super) interval: Duration,
    /// Maximum time until the reply.
    pub(super) timeout: Duration,
}

/// Pings of one connection.
pub(super) struct KeepAlive {
    pings: PingPong,
    times: KeepAliveTimes,
    /// Ends when the next ping is due, or the reply to the last one is overdue.
    timer: Pin<Box<Sleep>>,
    awaits_reply: bool,
}

impl KeepAlive {
    pub(super) fn new(pings: PingPong, times: KeepAliveTimes) -> Self {
        Self { pings, times, timer: Box::pin(sleep(times.interval)), awaits_reply: false }
    }

    /// Sends pings; ready when the reply to one is overdue.
    pub(super) fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.awaits_reply && self.pings.poll_pong(context).is_ready() {
                self.awaits_reply = false;
                self.timer.as_mut().reset(Instant::now() + self.times.interval);
            }
            ready!(self.timer.as_mut().poll(context));
            if self.awaits_reply {
                return Poll::Ready(());
            }
            // Sending fails if the connection is closing.
            self.awaits_reply = self.pings.send_ping(Ping::opaque()).is_ok();
            self.timer.as_mut().reset(Instant::now() + self.times.timeout);
        }
    }
}
