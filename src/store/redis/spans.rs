//! What spans tell of calls.
//!
//! A call has one span, that of the first request it is made for among those that are sampled; it links to those of the
//! others. The names are those of OpenTelemetry's conventions for databases. Keys are not told: they hold what was
//! asked for.

use super::prepared_call::{Manner, PreparedCall};
use crate::settings::redis::Endpoint;
use crate::telemetry::traces::{Span, SpanKind};

impl PreparedCall {
    /// The span of a call for so many charges, if one of the requests is sampled.
    pub(super) fn span(&self, charges: usize) -> Option<Span> {
        let (first, others) = self.span_refs.split_first()?;
        let name = match self.manner {
            Manner::Script(..) => "EVALSHA",
            Manner::Count(_) => "INCRBY",
        };
        let mut span = first.child(name, SpanKind::Client);
        others.iter().for_each(|other| span.link(other));
        span.set("db.system.name", "redis");
        span.set("db.operation.name", name);
        span.set("tollkeeper.draws", i64::try_from(charges).unwrap_or(i64::MAX));
        Some(span)
    }
}

/// Tells where it goes; the last place is the one that counts.
pub(super) fn sent_to(span: &mut Span, endpoint: &Endpoint) {
    match endpoint {
        Endpoint::Tcp { host, port } => {
            span.replace("server.address", host.clone());
            span.replace("server.port", i64::from(*port));
        }
        Endpoint::Unix(path) => span.replace("server.address", path.display().to_string()),
    }
}
