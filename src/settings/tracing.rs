//! Export and sampling of traces.
//!
//! envoyproxy/ratelimit's TRACING_ variables take precedence over OpenTelemetry's, and of those the ones for traces
//! over the general ones, as the OpenTelemetry specification requires. Headers of export requests are secrets and are
//! not kept here: the exporter reads them from the environment itself.

use std::path::PathBuf;
use std::time::Duration;

use super::choices::{OtelProtocol, SamplerKind};
use super::pem::{ClientCertificate, PemFile};
use super::setting::{AnySetting as _, Setting};
use super::table::tracing::*;
use super::url::{endpoint, percent_decoded};
use super::value::text::TextList;
use super::values::Values;
use crate::telemetry::traces::TraceSampler;
use crate::telemetry::traces::otlp::OtlpProtocol;
use crate::telemetry::traces::propagation::PropagationFormats;
use crate::telemetry::traces::span_queue::SpanQueueOptions;

/// Export and sampling of traces.
#[derive(Clone, Debug, PartialEq)]
pub struct TracingSettings {
    /// Protocol of the collector.
    pub protocol: OtlpProtocol,
    /// URL of the collector; over HTTP with the path of traces.
    pub endpoint: String,
    /// The variable that names the URL, or would.
    pub setting: &'static str,
    /// Time limit of an export request.
    pub timeout: Duration,
    /// TLS to the collector.
    pub tls: CollectorTls,
    /// Resource attributes, `service.name` included.
    pub resource: Vec<(String, String)>,
    /// Selection of the requests that are traced.
    pub sampler: TraceSampler,
    /// Formats of trace context that are read from requests.
    pub formats: PropagationFormats,
    /// Bounds of the export queue.
    pub queue: SpanQueueOptions,
    /// `true` if spans hold keys and values of descriptors.
    pub records_descriptors: bool,
}

/// TLS to a collector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectorTls {
    /// CA certificates to trust instead of the system's.
    pub ca: Option<PemFile>,
    /// Client certificate and its key.
    pub client: Option<ClientCertificate>,
}

/// URL of a local collector, over HTTP.
const DEFAULT_HTTP_ENDPOINT: &str = "http://localhost:4318/v1/traces";
/// URL of a local collector, over gRPC.
const DEFAULT_GRPC_ENDPOINT: &str = "http://localhost:4317";

impl TracingSettings {
    /// Reads the settings; `None` if no traces are exported.
    pub(super) fn read(values: &mut Values) -> Option<Self> {
        let protocol = protocol(values);
        let endpoints = [&OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, &OTEL_EXPORTER_OTLP_ENDPOINT];
        let setting = values.first_set(endpoints).map_or(OTEL_EXPORTER_OTLP_ENDPOINT.name(), |url| url.name);
        let endpoint = collector_url(values, protocol);
        check_headers(values);
        let timeout_ms = values.get(&OTEL_EXPORTER_OTLP_TRACES_TIMEOUT);
        let timeout_ms = timeout_ms.unwrap_or_else(|| values.get(&OTEL_EXPORTER_OTLP_TIMEOUT));
        let tracing = Self {
            protocol,
            setting,
            endpoint,
            timeout: Duration::from_millis(timeout_ms),
            tls: CollectorTls::read(values),
            resource: resource(values),
            sampler: sampler(values),
            formats: formats(values),
            queue: queue(values),
            records_descriptors: values.get(&TOLLKEEPER_TRACE_DESCRIPTORS),
        };
        if values.get(&TRACING_ENABLED) && !values.get(&OTEL_SDK_DISABLED) {
            return Some(tracing);
        }
        let is_enabled = values.get(&TRACING_ENABLED);
        let why = if is_enabled { "OTEL_SDK_DISABLED is true" } else { "it is only read with TRACING_ENABLED=true" };
        for setting in GROUP.settings {
            if !setting.info().is_family() && setting.name() != OTEL_SDK_DISABLED.name() {
                values.ignore_if_changed(*setting, why);
            }
        }
        None
    }
}

fn protocol(values: &mut Values) -> OtlpProtocol {
    let otel = [&OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, &OTEL_EXPORTER_OTLP_PROTOCOL];
    if values.is_set(&TRACING_EXPORTER_PROTOCOL) {
        for setting in otel {
            values.ignore_if_changed(setting, "TRACING_EXPORTER_PROTOCOL is set");
        }
        return values.get(&TRACING_EXPORTER_PROTOCOL);
    }
    let OtelProtocol(protocol) = values
        .first_set(otel)
        .map_or_else(|| OtelProtocol(values.get(&TRACING_EXPORTER_PROTOCOL)), |first| first.value);
    protocol
}

fn collector_url(values: &mut Values, protocol: OtlpProtocol) -> String {
    let for_traces = values.get(&OTEL_EXPORTER_OTLP_TRACES_ENDPOINT);
    let is_general = for_traces.is_none();
    let Some(url) = for_traces.or_else(|| values.get(&OTEL_EXPORTER_OTLP_ENDPOINT)) else {
        return match protocol {
            OtlpProtocol::Grpc => DEFAULT_GRPC_ENDPOINT.to_owned(),
            OtlpProtocol::Http => DEFAULT_HTTP_ENDPOINT.to_owned(),
        };
    };
    let setting = if is_general { &OTEL_EXPORTER_OTLP_ENDPOINT } else { &OTEL_EXPORTER_OTLP_TRACES_ENDPOINT };
    if let Err(what) = check_url(url.reveal()) {
        values.problem(setting, what, "give http://host:port or https://host:port");
    }
    match protocol {
        // The general URL is that of the collector; the path of traces is fixed.
        OtlpProtocol::Http if is_general => format!("{}/v1/traces", url.reveal().trim_end_matches('/')),
        _ => url.reveal().to_owned(),
    }
}

/// Checks that the headers can be sent; the exporter reads them itself.
fn check_headers(values: &mut Values) {
    for setting in [&OTEL_EXPORTER_OTLP_TRACES_HEADERS, &OTEL_EXPORTER_OTLP_HEADERS] {
        let Some(headers) = values.get(setting) else { continue };
        if !headers.reveal().split(',').filter(|pair| !pair.trim().is_empty()).all(is_header) {
            let fix = "give name=value,name=value, with special characters in a value as %20";
            values.problem(setting, "not a list of headers", fix);
        }
    }
}

impl CollectorTls {
    fn read(values: &mut Values) -> Self {
        let ca = first_file(values, [&OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE, &OTEL_EXPORTER_OTLP_CERTIFICATE]);
        let certificates = [&OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE, &OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE];
        let certificate = first_file(values, certificates);
        let key = first_file(values, [&OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY, &OTEL_EXPORTER_OTLP_CLIENT_KEY]);
        let client = match (certificate, key) {
            (Some(certificate), Some(key)) => Some(ClientCertificate { certificate, key }),
            (None, None) => None,
            (Some(PemFile { setting, .. }), None) => {
                let fix = "give OTEL_EXPORTER_OTLP_CLIENT_KEY too";
                values.problem_with(setting, "a certificate without its key", fix);
                None
            }
            (None, Some(PemFile { setting, .. })) => {
                let fix = "give OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE too";
                values.problem_with(setting, "a key without its certificate", fix);
                None
            }
        };
        Self { ca, client }
    }
}

fn first_file(values: &Values, settings: [&Setting<Option<PathBuf>>; 2]) -> Option<PemFile> {
    values.first_set(settings).map(|first| PemFile { setting: first.name, path: first.value })
}

fn resource(values: &mut Values) -> Vec<(String, String)> {
    let given = values.get(&OTEL_RESOURCE_ATTRIBUTES);
    let pairs = given.split(',').filter(|pair| !pair.trim().is_empty());
    let pairs: Option<Vec<(String, String)>> = pairs.map(attribute).collect();
    if pairs.is_none() {
        let fix = "give name=value,name=value, with special characters in a value as %20";
        values.problem(&OTEL_RESOURCE_ATTRIBUTES, "not a list of attributes", fix);
    }
    let mut resource = pairs.unwrap_or_default();
    let mut put = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            resource.retain(|(other, _)| other != name);
            resource.push((name.to_owned(), value));
        }
    };
    let own_name = values.is_set(&TRACING_SERVICE_NAME).then(|| values.get(&TRACING_SERVICE_NAME));
    put("service.name", own_name.or_else(|| values.get(&OTEL_SERVICE_NAME)));
    put("service.namespace", values.get(&TRACING_SERVICE_NAMESPACE));
    put("service.instance.id", values.get(&TRACING_SERVICE_INSTANCE_ID));
    if !resource.iter().any(|(name, value)| name == "service.name" && !value.is_empty()) {
        resource.retain(|(name, _)| name != "service.name");
        resource.push(("service.name".to_owned(), TRACING_SERVICE_NAME.default()));
    }
    resource
}

/// Parses `name=value`, with special characters in the value as `%20`.
fn attribute(pair: &str) -> Option<(String, String)> {
    let (name, value) = pair.split_once('=')?;
    let name = name.trim();
    (!name.is_empty()).then_some(())?;
    Some((name.to_owned(), percent_decoded(value.trim()).ok()?))
}

fn sampler(values: &mut Values) -> TraceSampler {
    let otel = values.get(&OTEL_TRACES_SAMPLER);
    let (true, Some(otel)) = (!values.is_set(&TRACING_SAMPLING_RATE), otel) else {
        values.ignore_if_changed(&OTEL_TRACES_SAMPLER, "TRACING_SAMPLING_RATE is set");
        let is_unset = otel.is_none();
        let why = if is_unset { "OTEL_TRACES_SAMPLER is not set" } else { "TRACING_SAMPLING_RATE is set" };
        values.ignore_if_changed(&OTEL_TRACES_SAMPLER_ARG, why);
        return TraceSampler { follows_parent: true, ratio: values.get(&TRACING_SAMPLING_RATE) };
    };
    let ratio = match otel.selection {
        SamplerKind::All => 1.0,
        SamplerKind::None => 0.0,
        SamplerKind::Ratio => values.get(&OTEL_TRACES_SAMPLER_ARG),
    };
    TraceSampler { follows_parent: otel.follows_parent, ratio }
}

fn formats(values: &mut Values) -> PropagationFormats {
    let TextList(names) = values.get(&OTEL_PROPAGATORS);
    let names: Vec<&str> = names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).collect();
    if names.iter().any(|name| !["tracecontext", "baggage", "b3", "b3multi", "none"].contains(name)) {
        let fix = "give tracecontext, b3 and b3multi, or fewer of them, or none";
        values.problem(&OTEL_PROPAGATORS, "names an unknown format", fix);
    }
    let has = |name| names.contains(&name);
    PropagationFormats { tracecontext: has("tracecontext"), b3: has("b3"), b3_multi: has("b3multi") }
}

fn queue(values: &mut Values) -> SpanQueueOptions {
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
        values.problem(&OTEL_BSP_MAX_EXPORT_BATCH_SIZE, "more than OTEL_BSP_MAX_QUEUE_SIZE", fix);
    }
    SpanQueueOptions { max_batch_spans: queue.max_spans, ..queue }
}

/// Checks the URL of a collector. The error repeats none of it, because it may hold a password.
fn check_url(url: &str) -> Result<(), &'static str> {
    let Some(rest) = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")) else {
        return Err("not a URL of a collector");
    };
    let authority = rest.split('/').next().unwrap_or_default();
    if authority.contains('@') {
        return Err("holds a user or password, which belongs in OTEL_EXPORTER_OTLP_HEADERS");
    }
    let is_address = endpoint(authority, Some(443)).is_ok();
    let is_plain = rest.bytes().all(|b| b.is_ascii_graphic() && !b"?#\"<>\\^`{|}".contains(&b));
    if is_address && is_plain { Ok(()) } else { Err("not a URL of a collector") }
}

/// Returns `true` if `pair` is `name=value` of a header that can be sent.
fn is_header(pair: &str) -> bool {
    let Some((name, value)) = pair.trim().split_once('=') else { return false };
    let (name, value) = (name.trim(), percent_decoded(value.trim()));
    let is_token = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&b));
    is_token && !name.is_empty() && value.is_ok_and(|value| value.bytes().all(|b| (b' '..=b'~').contains(&b)))
}
