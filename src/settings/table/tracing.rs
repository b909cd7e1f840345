//! Traces.

use std::path::PathBuf;

use crate::settings::choices::{Compression, OtelProtocol, OtelSampler};
use crate::settings::condition::Condition;
use crate::settings::secret::Secret;
use crate::settings::setting::settings;
use crate::settings::value::number::{FloatRange, IntRange};
use crate::settings::value::text::{SecretUrl, TextList};
use crate::telemetry::otlp::OtlpProtocol;

const SHARE: FloatRange = FloatRange::new(0.0, 1.0);
const UP_TO_AN_HOUR_MS: IntRange = IntRange::new(1, 3_600_000);

settings! { "Tracing";
    TRACING_ENABLED: bool = false, "export traces over OTLP";
    TRACING_SERVICE_NAME: String = "RateLimit", "service.name of traces; takes precedence over OTEL_SERVICE_NAME";
    TRACING_SERVICE_NAMESPACE: Option<String> = None, "service.namespace of traces";
    TRACING_SERVICE_INSTANCE_ID: Option<String> = None, "service.instance.id of traces; empty: a random one";
    TRACING_EXPORTER_PROTOCOL: OtlpProtocol = OtlpProtocol::Http,
        "protocol of the collector; takes precedence over OTEL_EXPORTER_OTLP_PROTOCOL";
    TRACING_SAMPLING_RATE: f64 = 1.0,
        "share of the traces started here that is sampled; takes precedence over OTEL_TRACES_SAMPLER"
        .allowed(SHARE) .differs(Condition::Never, "a number outside of 0 to 1 prevents the start");
    TOLLKEEPER_TRACE_DESCRIPTORS: bool = false,
        "record descriptors in spans; they may identify persons";
    OTEL_SDK_DISABLED: bool = false, "turn off traces, regardless of TRACING_ENABLED";
    OTEL_SERVICE_NAME: Option<String> = None, "service.name of traces";
    OTEL_RESOURCE_ATTRIBUTES: String = "", "resource attributes of traces: k=v,k=v";
    OTEL_EXPORTER_OTLP_ENDPOINT: Option<SecretUrl> = None,
        "URL of the collector; not set: http://localhost:4318, or port 4317 over gRPC";
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: Option<SecretUrl> = None,
        "URL of the collector for traces; over HTTP with the whole path";
    OTEL_EXPORTER_OTLP_PROTOCOL: Option<OtelProtocol> = None, "protocol of the collector";
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: Option<OtelProtocol> = None, "protocol of the collector for traces";
    OTEL_EXPORTER_OTLP_HEADERS: Option<Secret> = None, "headers of export requests: k=v,k=v";
    OTEL_EXPORTER_OTLP_TRACES_HEADERS: Option<Secret> = None, "headers of export requests for traces: k=v,k=v";
    OTEL_EXPORTER_OTLP_TIMEOUT: u64 = 10_000, "time limit of an export request, in milliseconds"
        .allowed(UP_TO_AN_HOUR_MS);
    OTEL_EXPORTER_OTLP_TRACES_TIMEOUT: Option<u64> = None,
        "time limit of an export request for traces, in milliseconds" .allowed(UP_TO_AN_HOUR_MS);
    OTEL_EXPORTER_OTLP_COMPRESSION: Option<Compression> = None, "compression of export requests";
    OTEL_EXPORTER_OTLP_TRACES_COMPRESSION: Option<Compression> = None, "compression of export requests for traces";
    OTEL_EXPORTER_OTLP_CERTIFICATE: Option<PathBuf> = None,
        "CA certificates for the collector, PEM file, instead of the system's";
    OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE: Option<PathBuf> = None, "the same for traces";
    OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE: Option<PathBuf> = None, "client certificate for the collector, PEM file";
    OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE: Option<PathBuf> = None, "the same for traces";
    OTEL_EXPORTER_OTLP_CLIENT_KEY: Option<PathBuf> = None, "private key of the client certificate, PEM file";
    OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY: Option<PathBuf> = None, "the same for traces";
    OTEL_EXPORTER_OTLP_INSECURE: bool = false, "connect to the collector without TLS"
        .no_effect(Condition::True, "the URL decides, by http:// or https://");
    OTEL_EXPORTER_OTLP as "OTEL_EXPORTER_OTLP_*": Option<Secret> = None, "other settings of OTLP exporters"
        .no_effect(Condition::NotEmpty, "it is not for traces or logs, or not known");
    OTEL_TRACES_SAMPLER: Option<OtelSampler> = None, "sampler of traces; not set: TRACING_SAMPLING_RATE";
    OTEL_TRACES_SAMPLER_ARG: f64 = 1.0, "share of the traces that a traceidratio sampler keeps" .allowed(SHARE);
    OTEL_PROPAGATORS: TextList = "tracecontext,b3,b3multi",
        "formats of trace context in requests; W3C takes precedence over B3";
    OTEL_BSP_MAX_QUEUE_SIZE: usize = 2048, "maximum number of queued spans; more are dropped and counted"
        .allowed(IntRange::new(1, 1_000_000));
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE: usize = 512, "maximum number of spans in an export request"
        .allowed(IntRange::new(1, 100_000));
    OTEL_BSP_SCHEDULE_DELAY: u64 = 5000, "time that a span waits for others before export, in milliseconds"
        .allowed(UP_TO_AN_HOUR_MS);
    OTEL_BSP_EXPORT_TIMEOUT: u64 = 30_000, "see OTEL_EXPORTER_OTLP_TIMEOUT"
        .allowed(UP_TO_AN_HOUR_MS) .no_effect(Condition::Set, "OTEL_EXPORTER_OTLP_TIMEOUT applies instead");
}
