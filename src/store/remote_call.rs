//! Parts of a call to a server that any shared store needs: deadlines, continuation without its caller, and trace span.
//!
//! Spans are named after OpenTelemetry's conventions for databases. A call has one span: a child of the first sampled
//! request that it serves, with links to the others. Keys are not recorded, because they contain descriptor values.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::settings::endpoint::Endpoint;
use crate::telemetry::traces::{Span, SpanKind, SpanRef};

/// Deadlines closer than this count as equal; they were computed from two clock readings.
const DEADLINE_TOLERANCE: Duration = Duration::from_millis(1);

/// Deadlines of a call and of the caller that waits for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallDeadlines {
    /// Time by which the call ends.
    pub(super) call: Instant,
    /// Time until which the caller waits, if that is before the end of the call.
    pub(super) caller: Option<Instant>,
}

impl CallDeadlines {
    /// Sets the deadlines of a call that starts at `started` in a store with this timeout, for a caller that waits
    /// until `until`.
    ///
    /// A caller's short deadline must not count against the server: the call continues until the store's timeout. The
    /// caller passes an `until` that is at most the timeout after the start, give or take [`DEADLINE_TOLERANCE`].
    pub(super) fn new(until: Instant, started: Instant, timeout: Duration) -> Self {
        let longest = started + timeout;
        match until + DEADLINE_TOLERANCE < longest {
            true => Self { call: longest, caller: Some(until) },
            false => Self { call: until, caller: None },
        }
    }
}

/// Future that is spawned on drop unless it has completed.
pub(super) struct DetachOnDrop<T: Send + 'static> {
    future: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
}

impl<T: Send + 'static> DetachOnDrop<T> {
    /// Wraps a future.
    pub(super) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self { future: Some(Box::pin(future)) }
    }
}

impl<T: Send + 'static> Future for DetachOnDrop<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let future = self.future.as_mut().expect("polled after completion");
        let output = ready!(future.as_mut().poll(context));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static> Drop for DetachOnDrop<T> {
    fn drop(&mut self) {
        if let (Some(future), Ok(runtime)) = (self.future.take(), Handle::try_current()) {
            runtime.spawn(future);
        }
    }
}

/// Starts the span of a call of `command` to `system` for a number of charges; `None` if no request is sampled.
pub(super) fn start_span(
    system: &'static str,
    span_refs: &[SpanRef],
    command: &'static str,
    charges: usize,
) -> Option<Span> {
    let (first, others) = span_refs.split_first()?;
    let mut span = first.child(command, SpanKind::Client);
    others.iter().for_each(|other| span.link(other));
    span.set("db.system.name", system);
    span.set("db.operation.name", command);
    span.set("tollkeeper.draws", i64::try_from(charges).unwrap_or(i64::MAX));
    Some(span)
}

/// Records the server of a call; a redirected call keeps the last one.
pub(super) fn set_span_server(span: &mut Span, endpoint: &Endpoint) {
    match endpoint {
        Endpoint::Tcp { host, port } => {
            span.replace("server.address", host.clone());
            span.replace("server.port", i64::from(*port));
        }
        Endpoint::Unix(path) => span.replace("server.address", path.display().to_string()),
    }
}
