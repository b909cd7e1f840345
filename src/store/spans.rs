//! Trace spans of calls to a store, named after OpenTelemetry's conventions for databases.
//!
//! A call has one span: a child of the first sampled request that it serves, with links to the others. Keys are not
//! recorded, because they contain descriptor values.

use crate::settings::endpoint::Endpoint;
use crate::telemetry::traces::{Span, SpanKind, SpanRef};

/// Starts the span of a call of `command` to `system` for a number of charges; `None` if no request is sampled.
pub(super) fn start(
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
pub(super) fn set_server(span: &mut Span, endpoint: &Endpoint) {
    match endpoint {
        Endpoint::Tcp { host, port } => {
            span.replace("server.address", host.clone());
            span.replace("server.port", i64::from(*port));
        }
        Endpoint::Unix(path) => span.replace("server.address", path.display().to_string()),
    }
}
