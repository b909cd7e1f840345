//! Where traces go, and which requests have one.
//!
//! What headers are sent along is not here: they are secrets, and whoever sends reads them from the environment itself.

use std::time::Duration;

use super::tls::File;
use crate::telemetry::traces::Sampler;
use crate::telemetry::traces::propagation::PropagationFormats;
use crate::telemetry::traces::span_queue::SpanQueueOptions;

/// Where traces go, and which requests have one.
#[derive(Clone, Debug, PartialEq)]
pub struct Tracing {
    /// How the collector is spoken to.
    pub protocol: Protocol,
    /// The URL of the collector; over HTTP with the path of traces.
    pub endpoint: String,
    /// The variable that says so, or would.
    pub setting: &'static str,
    /// The longest that sending takes.
    pub timeout: Duration,
    /// How it is spoken to over TLS.
    pub tls: Tls,
    /// Names and values that tell this process from others; `service.name` is among them.
    pub resource: Vec<(String, String)>,
    /// Which requests are sampled.
    pub sampler: Sampler,
    /// In which forms callers may say of which trace they are.
    pub formats: PropagationFormats,
    /// How spans are queued.
    pub queue: SpanQueueOptions,
    /// Whether spans hold keys and values of descriptors.
    pub shows_descriptors: bool,
}

/// How a collector is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP over gRPC.
    Grpc,
    /// OTLP over HTTP/1.1, as protobuf.
    Http,
}

/// TLS to a collector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// The authorities to trust in place of the system's.
    pub ca: Option<File>,
    /// The certificate to show, and its key.
    pub client: Option<(File, File)>,
}
