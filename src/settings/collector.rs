//! Connections to an OpenTelemetry collector, and the resource that its records name.
//!
//! envoyproxy/ratelimit's TRACING_ variables take precedence over OpenTelemetry's, and of those the ones for one signal
//! over the general ones, as the OpenTelemetry specification requires. Headers of export requests are secrets and are
//! not kept here: the exporter reads them from the environment itself.

use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::CertificateDer;

use super::choices::OtelProtocol;
use super::pem::{ClientCertificate, PemFile, system_roots};
use super::problem::UnusableSetting;
use super::secret::Secret;
use super::setting::{AnySetting as _, Setting};
use super::table::decision_log::*;
use super::table::tracing::*;
use super::url::{endpoint, percent_decoded};
use super::value::text::SecretUrl;
use super::values::Values;
use crate::telemetry::otlp::{OtlpClientCertificate, OtlpOptions, OtlpProtocol, OtlpTls};

/// Connection to a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectorSettings {
    /// Protocol of the collector.
    pub protocol: OtlpProtocol,
    /// URL of the collector; over HTTP with the path of the signal.
    pub endpoint: String,
    /// The variable that names the URL, or would.
    pub setting: &'static str,
    /// Time limit of an export request.
    pub timeout: Duration,
    /// TLS to the collector.
    pub tls: CollectorTls,
    /// Resource attributes, `service.name` included.
    pub resource: Vec<(String, String)>,
}

/// TLS to a collector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectorTls {
    /// CA certificates to trust instead of the system's.
    pub ca: Option<PemFile>,
    /// Client certificate and its key.
    pub client: Option<ClientCertificate>,
}

/// Variables of one signal, which take precedence over the general ones.
pub(super) struct SignalVariables {
    /// Path of the signal over HTTP.
    path: &'static str,
    pub(super) endpoint: &'static Setting<Option<SecretUrl>>,
    protocol: &'static Setting<Option<OtelProtocol>>,
    headers: &'static Setting<Option<Secret>>,
    timeout: &'static Setting<Option<u64>>,
    certificate: &'static Setting<Option<PathBuf>>,
    client_certificate: &'static Setting<Option<PathBuf>>,
    client_key: &'static Setting<Option<PathBuf>>,
}

/// Variables of traces.
pub(super) static TRACES: SignalVariables = SignalVariables {
    path: "/v1/traces",
    endpoint: &OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    protocol: &OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    headers: &OTEL_EXPORTER_OTLP_TRACES_HEADERS,
    timeout: &OTEL_EXPORTER_OTLP_TRACES_TIMEOUT,
    certificate: &OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE,
    client_certificate: &OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE,
    client_key: &OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY,
};

/// Variables of logs.
pub(super) static LOGS: SignalVariables = SignalVariables {
    path: "/v1/logs",
    endpoint: &OTEL_EXPORTER_OTLP_LOGS_ENDPOINT,
    protocol: &OTEL_EXPORTER_OTLP_LOGS_PROTOCOL,
    headers: &OTEL_EXPORTER_OTLP_LOGS_HEADERS,
    timeout: &OTEL_EXPORTER_OTLP_LOGS_TIMEOUT,
    certificate: &OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE,
    client_certificate: &OTEL_EXPORTER_OTLP_LOGS_CLIENT_CERTIFICATE,
    client_key: &OTEL_EXPORTER_OTLP_LOGS_CLIENT_KEY,
};

/// URL of a local collector, over HTTP.
const DEFAULT_HTTP_ENDPOINT: &str = "http://localhost:4318";
/// URL of a local collector, over gRPC.
const DEFAULT_GRPC_ENDPOINT: &str = "http://localhost:4317";

impl CollectorSettings {
    /// Reads the connection of one signal.
    pub(super) fn read(values: &mut Values, signal: &SignalVariables) -> Self {
        let protocol = protocol(values, signal);
        let setting = values.first_set([signal.endpoint, &OTEL_EXPORTER_OTLP_ENDPOINT]);
        let setting = setting.map_or(OTEL_EXPORTER_OTLP_ENDPOINT.name(), |url| url.name);
        let endpoint = collector_url(values, signal, protocol);
        check_headers(values, signal);
        let timeout_ms = values.get(signal.timeout).unwrap_or_else(|| values.get(&OTEL_EXPORTER_OTLP_TIMEOUT));
        Self {
            protocol,
            setting,
            endpoint,
            timeout: Duration::from_millis(timeout_ms),
            tls: CollectorTls::read(values, signal),
            resource: resource(values),
        }
    }

    /// Returns the options of an exporter, with the contents of the certificate files. `on_thread_start` is called
    /// once on each thread that the exporter starts.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn options(&self, on_thread_start: fn()) -> Result<OtlpOptions, UnusableSetting> {
        Ok(OtlpOptions {
            protocol: self.protocol,
            endpoint: self.endpoint.clone(),
            timeout: self.timeout,
            tls: self.tls.contents(self.endpoint.starts_with("https://"))?,
            on_thread_start,
        })
    }
}

fn protocol(values: &mut Values, signal: &SignalVariables) -> OtlpProtocol {
    let otel = [signal.protocol, &OTEL_EXPORTER_OTLP_PROTOCOL];
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

fn collector_url(values: &mut Values, signal: &SignalVariables, protocol: OtlpProtocol) -> String {
    let of_signal = values.get(signal.endpoint);
    let is_general = of_signal.is_none();
    let setting = if is_general { &OTEL_EXPORTER_OTLP_ENDPOINT } else { signal.endpoint };
    let given = of_signal.or_else(|| values.get(&OTEL_EXPORTER_OTLP_ENDPOINT));
    let url = match (&given, protocol) {
        (Some(url), _) => url.reveal(),
        (None, OtlpProtocol::Grpc) => DEFAULT_GRPC_ENDPOINT,
        (None, OtlpProtocol::Http) => DEFAULT_HTTP_ENDPOINT,
    };
    if let Err(what) = check_url(url) {
        values.problem(setting, what, "give http://host:port or https://host:port");
    }
    match protocol {
        // The general URL is that of the collector; the path of the signal is fixed.
        OtlpProtocol::Http if is_general => format!("{}{}", url.trim_end_matches('/'), signal.path),
        _ => url.to_owned(),
    }
}

/// Checks that the headers can be sent; the exporter reads them itself.
fn check_headers(values: &mut Values, signal: &SignalVariables) {
    for setting in [signal.headers, &OTEL_EXPORTER_OTLP_HEADERS] {
        let Some(headers) = values.get(setting) else { continue };
        if !headers.reveal().split(',').filter(|pair| !pair.trim().is_empty()).all(is_header) {
            let fix = "give name=value,name=value, with special characters in a value as %20";
            values.problem(setting, "not a list of headers", fix);
        }
    }
}

impl CollectorTls {
    fn read(values: &mut Values, signal: &SignalVariables) -> Self {
        let ca = first_file(values, [signal.certificate, &OTEL_EXPORTER_OTLP_CERTIFICATE]);
        let certificates = [signal.client_certificate, &OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE];
        let certificate = first_file(values, certificates);
        let key = first_file(values, [signal.client_key, &OTEL_EXPORTER_OTLP_CLIENT_KEY]);
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

    /// Reads the files; also without TLS, so that problems are found.
    fn contents(&self, is_https: bool) -> Result<OtlpTls, UnusableSetting> {
        let roots = match &self.ca {
            Some(ca) => read_certificates(ca)?.0,
            None if is_https => system_roots().to_vec(),
            None => Vec::new(),
        };
        let client = match &self.client {
            Some(ClientCertificate { certificate, key }) => {
                let (chain, chain_pem) = read_certificates(certificate)?;
                let key_pem = key.contents()?;
                key.private_key(&key_pem)?;
                Some(OtlpClientCertificate { chain, chain_pem, key_pem })
            }
            None => None,
        };
        Ok(OtlpTls { roots, client })
    }
}

/// Reads a file with certificates; returns them parsed and as PEM.
fn read_certificates(file: &PemFile) -> Result<(Vec<CertificateDer<'static>>, Vec<u8>), UnusableSetting> {
    let pem = file.contents()?;
    Ok((file.certificates(&pem)?, pem))
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
