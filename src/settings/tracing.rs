//! Sampling of traces, and the OTLP variables of all signals: URL, protocol, headers, TLS, resource.
//!
//! `otlp_metrics` and `decision_log` read the collector of metrics and logs by the functions of this file.
//! envoyproxy/ratelimit's TRACING_ variables take precedence over OpenTelemetry's, and of those the ones for one signal
//! over the general ones, as the OpenTelemetry specification requires. Headers of export requests are secrets and are
//! not kept here: the exporter reads them from the environment itself.
//!
//! Decides: which of `TRACING_*`, `OTEL_EXPORTER_OTLP_TRACES_*` and `OTEL_EXPORTER_OTLP_*` wins.
//! Decides: protocol (`OTEL_EXPORTER_OTLP_PROTOCOL`), URL and path of the collector; `service.name`.
//! Decides: spans of an export (`read_queue_options`).

use std::path::PathBuf;
use std::time::Duration;

use super::collector::{CollectorSettings, CollectorTls, check_collector_url, is_header_pair, parse_attribute};
use super::pem::PemFile;
use super::secret::Secret;
use super::setting::{AnySetting as _, Setting, settings};
use super::value::text::{SecretUrl, TextList};
use super::value::{Choice, WordTable, choices};
use super::values::Values;
use crate::base::named_enum::named_enum;
use crate::telemetry::otlp::OtlpProtocol;
use crate::telemetry::traces::propagation::PropagationFormats;
use crate::telemetry::traces::{SpanQueueOptions, TraceSampler};

settings! { "Tracing", only read "with TRACING_ENABLED=true and without OTEL_SDK_DISABLED";
    TRACING_ENABLED: bool = "false", "export traces over OTLP" .often_set();
    TRACING_SERVICE_NAME: String = "RateLimit", "service.name of traces; overrides OTEL_SERVICE_NAME";
    TRACING_SERVICE_NAMESPACE: Option<String> = "", "service.namespace of traces";
    TRACING_SERVICE_INSTANCE_ID: Option<String> = "", "service.instance.id of traces; empty: a random one";
    TRACING_EXPORTER_PROTOCOL: OtlpProtocol = "http",
        "protocol of the collector; overrides OTEL_EXPORTER_OTLP_PROTOCOL";
    TRACING_SAMPLING_RATE: f64 = "1",
        "share of the traces started here that is sampled; overrides OTEL_TRACES_SAMPLER"
        .within("0 to 1") .differs("another number prevents the start");
    TOLLKEEPER_TRACE_DESCRIPTORS: bool = "false",
        "record descriptors in spans; may identify persons";
    OTEL_SDK_DISABLED: bool = "false", "turn off traces and metrics over OTLP";
    OTEL_SERVICE_NAME: Option<String> = "", "service.name of traces";
    OTEL_RESOURCE_ATTRIBUTES: String = "", "resource attributes of traces: k=v,k=v";
    OTEL_EXPORTER_OTLP_ENDPOINT: Option<SecretUrl> = "",
        "URL of the collector; not set: http://localhost:4318, or port 4317 over gRPC" .often_set();
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: Option<SecretUrl> = "",
        "URL of the collector for traces; over HTTP with the whole path";
    OTEL_EXPORTER_OTLP_PROTOCOL: Option<OtelProtocol> = "", "protocol of the collector"
        .only_read("with TRACING_ENABLED=true and without TRACING_EXPORTER_PROTOCOL");
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: Option<OtelProtocol> = "", "protocol of the collector for traces"
        .only_read("with TRACING_ENABLED=true and without TRACING_EXPORTER_PROTOCOL");
    OTEL_EXPORTER_OTLP_HEADERS: Option<Secret> = "", "headers of export requests: k=v,k=v";
    OTEL_EXPORTER_OTLP_TRACES_HEADERS: Option<Secret> = "", "headers of export requests for traces: k=v,k=v";
    OTEL_EXPORTER_OTLP_TIMEOUT: u64 = "10000", "time limit of an export request, in milliseconds"
        .within("1 to 3600000");
    OTEL_EXPORTER_OTLP_TRACES_TIMEOUT: Option<u64> = "",
        "time limit of an export request for traces, in milliseconds" .within("1 to 3600000");
    OTEL_EXPORTER_OTLP_COMPRESSION: Option<Compression> = "", "compression of export requests";
    OTEL_EXPORTER_OTLP_TRACES_COMPRESSION: Option<Compression> = "", "compression of export requests for traces";
    OTEL_EXPORTER_OTLP_CERTIFICATE: Option<PathBuf> = "",
        "CA certificates for the collector (PEM), instead of the system's";
    OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE: Option<PathBuf> = "", "the same for traces";
    OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE: Option<PathBuf> = "", "client certificate for the collector (PEM)";
    OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE: Option<PathBuf> = "", "the same for traces";
    OTEL_EXPORTER_OTLP_CLIENT_KEY: Option<PathBuf> = "", "private key of the client certificate (PEM)";
    OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY: Option<PathBuf> = "", "the same for traces";
    OTEL_EXPORTER_OTLP_INSECURE: bool = "false", "connect to the collector without TLS"
        .without_effect("the URL decides, by http:// or https://");
    OTEL_EXPORTER_OTLP as "OTEL_EXPORTER_OTLP_*": Option<Secret> = "", "other settings of OTLP exporters"
        .without_effect("not known");
    OTEL_TRACES_SAMPLER: Option<OtelSampler> = "", "sampler of traces; not set: TRACING_SAMPLING_RATE"
        .only_read("with TRACING_ENABLED=true and without OTEL_SDK_DISABLED and TRACING_SAMPLING_RATE");
    OTEL_TRACES_SAMPLER_ARG: f64 = "1", "share of the traces that a traceidratio sampler keeps" .within("0 to 1")
        .only_read("with TRACING_ENABLED=true and OTEL_TRACES_SAMPLER=traceidratio or parentbased_traceidratio");
    OTEL_PROPAGATORS: TextList = "tracecontext,b3,b3multi",
        "formats of trace context in requests; W3C before B3";
    OTEL_BSP_MAX_QUEUE_SIZE: usize = "2048", "most queued spans; more are dropped and counted"
        .within("1 to 1000000");
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE: usize = "512", "most spans in an export request"
        .within("1 to 100000");
    OTEL_BSP_SCHEDULE_DELAY: u64 = "5000", "time that a span waits before export, in milliseconds"
        .within("1 to 3600000");
    OTEL_BSP_EXPORT_TIMEOUT: u64 = "30000", "see OTEL_EXPORTER_OTLP_TIMEOUT"
        .within("1 to 3600000") .without_effect("OTEL_EXPORTER_OTLP_TIMEOUT applies instead");
}

impl Choice for OtlpProtocol {
    const ACCEPTED_WORDS: WordTable<Self> = &[("http", Self::Http), ("grpc", Self::Grpc), ("", Self::Http)];
    const CASE_SENSITIVE: bool = true;
}

/// Protocol of the trace collector, in OpenTelemetry's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtelProtocol(pub OtlpProtocol);

impl Choice for OtelProtocol {
    const ACCEPTED_WORDS: WordTable<Self> =
        &[("http/protobuf", Self(OtlpProtocol::Http)), ("grpc", Self(OtlpProtocol::Grpc))];
    const CASE_SENSITIVE: bool = true;
    const EMPTY_IS_UNSET: bool = true;
}

named_enum! {
    /// Compression of export requests.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Compression {
        /// No compression.
        None = "none",
        /// gzip.
        Gzip = "gzip",
    }
}

choices! { Compression: EMPTY_IS_UNSET }

/// Sampler in OpenTelemetry's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtelSampler {
    /// `true` if the caller's decision takes precedence.
    pub follows_parent: bool,
    /// Selection of the traces that no caller decided about.
    pub selection: RootTraceSelection,
}

/// Selection of traces by this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootTraceSelection {
    /// All traces.
    All,
    /// No trace.
    None,
    /// The share in `OTEL_TRACES_SAMPLER_ARG`.
    Ratio,
}

impl OtelSampler {
    const fn new(follows_parent: bool, selection: RootTraceSelection) -> Self {
        Self { follows_parent, selection }
    }
}

impl Choice for OtelSampler {
    const ACCEPTED_WORDS: WordTable<Self> = &[
        ("always_on", Self::new(false, RootTraceSelection::All)),
        ("always_off", Self::new(false, RootTraceSelection::None)),
        ("traceidratio", Self::new(false, RootTraceSelection::Ratio)),
        ("parentbased_always_on", Self::new(true, RootTraceSelection::All)),
        ("parentbased_always_off", Self::new(true, RootTraceSelection::None)),
        ("parentbased_traceidratio", Self::new(true, RootTraceSelection::Ratio)),
    ];
    const CASE_SENSITIVE: bool = true;
    const EMPTY_IS_UNSET: bool = true;
}

/// Export and sampling of traces.
#[derive(Clone, Debug, PartialEq)]
pub struct TracingSettings {
    /// Connection to the collector.
    pub collector: CollectorSettings,
    /// Selection of the requests that are traced.
    pub sampler: TraceSampler,
    /// Formats of trace context that are read from requests.
    pub formats: PropagationFormats,
    /// Bounds of the export queue.
    pub queue: SpanQueueOptions,
    /// `true` if spans hold keys and values of descriptors.
    pub records_descriptors: bool,
}

impl TracingSettings {
    /// Reads the settings; `None` if no traces are exported.
    pub(super) fn from_values(values: &mut Values) -> Option<Self> {
        let is_off = values.get(&OTEL_SDK_DISABLED);
        if !values.get(&TRACING_ENABLED) || is_off {
            return None;
        }
        Some(Self {
            collector: CollectorSettings::from_signal_variables(values, &TRACE_VARIABLES),
            sampler: read_sampler(values),
            formats: read_propagation_formats(values),
            queue: read_queue_options(values),
            records_descriptors: values.get(&TOLLKEEPER_TRACE_DESCRIPTORS),
        })
    }
}

fn read_sampler(values: &Values) -> TraceSampler {
    let is_rate_set = values.is_set(&TRACING_SAMPLING_RATE);
    let otel = values.get_if(!is_rate_set, &OTEL_TRACES_SAMPLER);
    let Some(otel) = otel else {
        return TraceSampler { follows_parent: true, ratio: values.get(&TRACING_SAMPLING_RATE) };
    };
    let ratio = match otel.selection {
        RootTraceSelection::All => 1.0,
        RootTraceSelection::None => 0.0,
        RootTraceSelection::Ratio => values.get(&OTEL_TRACES_SAMPLER_ARG),
    };
    TraceSampler { follows_parent: otel.follows_parent, ratio }
}

fn read_propagation_formats(values: &mut Values) -> PropagationFormats {
    let TextList(names) = values.get(&OTEL_PROPAGATORS);
    let names: Vec<&str> = names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).collect();
    if names.iter().any(|name| !["tracecontext", "baggage", "b3", "b3multi", "none"].contains(name)) {
        let fix = "give tracecontext, b3 and b3multi, or fewer of them, or none";
        values.add_problem(&OTEL_PROPAGATORS, "names an unknown format", fix);
    }
    let has = |name| names.contains(&name);
    PropagationFormats { tracecontext: has("tracecontext"), b3: has("b3"), b3_multi: has("b3multi") }
}

fn read_queue_options(values: &mut Values) -> SpanQueueOptions {
    let queue = SpanQueueOptions {
        max_spans: values.get(&OTEL_BSP_MAX_QUEUE_SIZE),
        max_batch_spans: values.get(&OTEL_BSP_MAX_EXPORT_BATCH_SIZE),
        delay: Duration::from_millis(values.get(&OTEL_BSP_SCHEDULE_DELAY)),
    };
    if queue.max_batch_spans <= queue.max_spans {
        return queue;
    }
    if values.is_set(&OTEL_BSP_MAX_EXPORT_BATCH_SIZE) {
        let fix = "give less, or a larger OTEL_BSP_MAX_QUEUE_SIZE";
        values.add_problem(&OTEL_BSP_MAX_EXPORT_BATCH_SIZE, "more than OTEL_BSP_MAX_QUEUE_SIZE", fix);
    }
    SpanQueueOptions { max_batch_spans: queue.max_spans, ..queue }
}

/// Variables of one OpenTelemetry signal (traces, logs or metrics), which take precedence over those for all signals.
pub(super) struct OtlpSignalVariables {
    /// Path of the signal over HTTP.
    pub(super) path: &'static str,
    pub(super) endpoint: &'static Setting<Option<SecretUrl>>,
    pub(super) protocol: &'static Setting<Option<OtelProtocol>>,
    pub(super) headers: &'static Setting<Option<Secret>>,
    pub(super) timeout: &'static Setting<Option<u64>>,
    pub(super) compression: &'static Setting<Option<Compression>>,
    pub(super) certificate: &'static Setting<Option<PathBuf>>,
    pub(super) client_certificate: &'static Setting<Option<PathBuf>>,
    pub(super) client_key: &'static Setting<Option<PathBuf>>,
}

/// Variables of the export of traces over OTLP.
static TRACE_VARIABLES: OtlpSignalVariables = OtlpSignalVariables {
    path: "/v1/traces",
    endpoint: &OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    protocol: &OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    headers: &OTEL_EXPORTER_OTLP_TRACES_HEADERS,
    timeout: &OTEL_EXPORTER_OTLP_TRACES_TIMEOUT,
    compression: &OTEL_EXPORTER_OTLP_TRACES_COMPRESSION,
    certificate: &OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE,
    client_certificate: &OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE,
    client_key: &OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY,
};

/// URL of a local collector, over HTTP.
const DEFAULT_HTTP_ENDPOINT: &str = "http://localhost:4318";
/// URL of a local collector, over gRPC.
const DEFAULT_GRPC_ENDPOINT: &str = "http://localhost:4317";

impl CollectorSettings {
    /// Reads the connection of one signal.
    pub(super) fn from_signal_variables(values: &mut Values, signal: &OtlpSignalVariables) -> Self {
        let protocol = read_protocol(values, signal);
        let setting = values.first_set([signal.endpoint, &OTEL_EXPORTER_OTLP_ENDPOINT]);
        let setting = setting.map_or(OTEL_EXPORTER_OTLP_ENDPOINT.name(), |url| url.name);
        let endpoint = read_collector_url(values, signal, protocol);
        check_headers(values, signal);
        let timeout_ms = values.get(&OTEL_EXPORTER_OTLP_TIMEOUT);
        let timeout_ms = values.get(signal.timeout).unwrap_or(timeout_ms);
        let compression = values.first_set([signal.compression, &OTEL_EXPORTER_OTLP_COMPRESSION]);
        Self {
            protocol,
            setting,
            endpoint,
            is_compressed: compression.is_some_and(|first| first.value == Compression::Gzip),
            timeout: Duration::from_millis(timeout_ms),
            tls: CollectorTls::from_signal_variables(values, signal),
            resource: read_resource_attributes(values),
        }
    }
}

fn read_protocol(values: &Values, signal: &OtlpSignalVariables) -> OtlpProtocol {
    let otel = [signal.protocol, &OTEL_EXPORTER_OTLP_PROTOCOL];
    if values.is_set(&TRACING_EXPORTER_PROTOCOL) {
        return values.get(&TRACING_EXPORTER_PROTOCOL);
    }
    let OtelProtocol(protocol) = values
        .first_set(otel)
        .map_or_else(|| OtelProtocol(values.get(&TRACING_EXPORTER_PROTOCOL)), |first| first.value);
    protocol
}

fn read_collector_url(values: &mut Values, signal: &OtlpSignalVariables, protocol: OtlpProtocol) -> String {
    let of_signal = values.get(signal.endpoint);
    let is_general = of_signal.is_none();
    let setting = if is_general { &OTEL_EXPORTER_OTLP_ENDPOINT } else { signal.endpoint };
    let given = of_signal.or_else(|| values.get(&OTEL_EXPORTER_OTLP_ENDPOINT));
    let url = match (&given, protocol) {
        (Some(url), _) => url.reveal(),
        (None, OtlpProtocol::Grpc) => DEFAULT_GRPC_ENDPOINT,
        (None, OtlpProtocol::Http) => DEFAULT_HTTP_ENDPOINT,
    };
    if let Err(what) = check_collector_url(url) {
        values.add_problem(setting, what, "give http://host:port or https://host:port");
    }
    match protocol {
        // The general URL is that of the collector; the path of the signal is fixed.
        OtlpProtocol::Http if is_general => format!("{}{}", url.trim_end_matches('/'), signal.path),
        _ => url.to_owned(),
    }
}

/// Checks that the headers can be sent; the exporter reads them itself.
fn check_headers(values: &mut Values, signal: &OtlpSignalVariables) {
    for setting in [signal.headers, &OTEL_EXPORTER_OTLP_HEADERS] {
        let Some(headers) = values.get(setting) else { continue };
        if !headers.reveal().split(',').filter(|pair| !pair.trim().is_empty()).all(is_header_pair) {
            let fix = "give name=value,name=value, with special characters in a value as %20";
            values.add_problem(setting, "not a list of headers", fix);
        }
    }
}

impl CollectorTls {
    fn from_signal_variables(values: &mut Values, signal: &OtlpSignalVariables) -> Self {
        let ca = first_set_pem_file(values, [signal.certificate, &OTEL_EXPORTER_OTLP_CERTIFICATE]);
        let certificates = [signal.client_certificate, &OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE];
        let certificate = first_set_pem_file(values, certificates);
        let key = first_set_pem_file(values, [signal.client_key, &OTEL_EXPORTER_OTLP_CLIENT_KEY]);
        let names = [OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE.name(), OTEL_EXPORTER_OTLP_CLIENT_KEY.name()];
        let client = values.pair_certificate(certificate, key, names);
        Self { ca, client }
    }
}

/// Returns the file that the first of two settings names, or else the second; does not open it.
fn first_set_pem_file(values: &Values, settings: [&Setting<Option<PathBuf>>; 2]) -> Option<PemFile> {
    values.first_set(settings).map(|first| PemFile { setting: first.name, path: first.value })
}

fn read_resource_attributes(values: &mut Values) -> Vec<(String, String)> {
    let given = values.get(&OTEL_RESOURCE_ATTRIBUTES);
    let pairs = given.split(',').filter(|pair| !pair.trim().is_empty());
    let pairs: Option<Vec<(String, String)>> = pairs.map(parse_attribute).collect();
    if pairs.is_none() {
        let fix = "give name=value,name=value, with special characters in a value as %20";
        values.add_problem(&OTEL_RESOURCE_ATTRIBUTES, "not a list of attributes", fix);
    }
    let mut resource = pairs.unwrap_or_default();
    let mut put = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            resource.retain(|(other, _)| other != name);
            resource.push((name.to_owned(), value));
        }
    };
    let own_name = values.is_set(&TRACING_SERVICE_NAME).then(|| values.get(&TRACING_SERVICE_NAME));
    put("service.name", own_name.or(values.get(&OTEL_SERVICE_NAME)));
    put("service.namespace", values.get(&TRACING_SERVICE_NAMESPACE));
    put("service.instance.id", values.get(&TRACING_SERVICE_INSTANCE_ID));
    if !resource.iter().any(|(name, value)| name == "service.name" && !value.is_empty()) {
        resource.retain(|(name, _)| name != "service.name");
        resource.push(("service.name".to_owned(), TRACING_SERVICE_NAME.default()));
    }
    resource
}
