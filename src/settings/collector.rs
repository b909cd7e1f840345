//! Settings of a connection to an OpenTelemetry collector, without the variables: `tracing` reads these.
//!
//! Decides: headers, URL (`%20`) and compression for a collector; that CAs of a file replace those of the system.

use std::time::Duration;

use rustls::pki_types::CertificateDer;

use super::address::{Endpoint, percent_decode};
use super::pem::{ClientCertificate, PemFile, load_system_roots};
use super::problem::UnusableSetting;
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
    /// `true` if requests are compressed with gzip; the exporter of traces and logs reads it from the environment itself.
    pub is_compressed: bool,
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

impl CollectorSettings {
    /// Returns the options of an exporter, with the contents of the certificate files. `on_thread_start` is called
    /// once on each thread that the exporter starts.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn build_otlp_options(&self, on_thread_start: fn()) -> Result<OtlpOptions, UnusableSetting> {
        Ok(OtlpOptions {
            protocol: self.protocol,
            endpoint: self.endpoint.clone(),
            timeout: self.timeout,
            tls: self.tls.read_tls_files(self.endpoint.starts_with("https://"))?,
            on_thread_start,
        })
    }
}

impl CollectorTls {
    /// Reads the files; also without TLS, so that problems are found.
    fn read_tls_files(&self, is_https: bool) -> Result<OtlpTls, UnusableSetting> {
        let roots = match &self.ca {
            Some(ca) => read_certificates(ca)?.0,
            None if is_https => load_system_roots().to_vec(),
            None => Vec::new(),
        };
        let client = match &self.client {
            Some(ClientCertificate { certificate, key }) => {
                let (chain, chain_pem) = read_certificates(certificate)?;
                let key_pem = key.read_contents()?;
                key.parse_private_key(&key_pem)?;
                Some(OtlpClientCertificate { chain, chain_pem, key_pem })
            }
            None => None,
        };
        Ok(OtlpTls { roots, client })
    }
}

/// Reads a file with certificates; returns them parsed and as PEM.
fn read_certificates(file: &PemFile) -> Result<(Vec<CertificateDer<'static>>, Vec<u8>), UnusableSetting> {
    let pem = file.read_contents()?;
    Ok((file.parse_certificates(&pem)?, pem))
}

/// Parses `name=value`, with special characters in the value as `%20`.
pub(super) fn parse_attribute(pair: &str) -> Option<(String, String)> {
    let (name, value) = pair.split_once('=')?;
    let name = name.trim();
    (!name.is_empty()).then_some(())?;
    Some((name.to_owned(), percent_decode(value.trim()).ok()?))
}

/// Checks the URL of a collector. The error repeats none of it, because it may hold a password.
pub(super) fn check_collector_url(url: &str) -> Result<(), &'static str> {
    let Some(rest) = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")) else {
        return Err("not a URL of a collector");
    };
    let authority = rest.split('/').next().unwrap_or_default();
    if authority.contains('@') {
        return Err("holds a user or password, which belongs in OTEL_EXPORTER_OTLP_HEADERS");
    }
    let is_address = Endpoint::parse_host_port(authority, Some(443)).is_ok();
    let is_plain = rest.bytes().all(|b| b.is_ascii_graphic() && !b"?#\"<>\\^`{|}".contains(&b));
    if is_address && is_plain { Ok(()) } else { Err("not a URL of a collector") }
}

/// Returns `true` if `pair` is `name=value` of a header that can be sent.
pub(super) fn is_header_pair(pair: &str) -> bool {
    let Some((name, value)) = pair.trim().split_once('=') else { return false };
    let (name, value) = (name.trim(), percent_decode(value.trim()));
    let is_token = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&b));
    is_token && !name.is_empty() && value.is_ok_and(|value| value.bytes().all(|b| (b' '..=b'~').contains(&b)))
}
