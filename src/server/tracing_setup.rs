//! Builds the tracer from the settings: first the exporter, which can fail, then its queue and thread.
//!
//! Certificate files are read once, at startup, so that a problem with one of them is a startup error.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;

use crate::settings::pem::{ClientCertificate, PemFile, system_roots};
use crate::settings::problem::UnusableSetting;
use crate::settings::tracing::{CollectorTls, TracingSettings};
use crate::telemetry::traces::Tracer;
use crate::telemetry::traces::otlp::{self, OtlpClientCertificate, OtlpExporter, OtlpOptions, OtlpTls};
use crate::telemetry::traces::span_queue::{ExportThread, SpanQueue};
use crate::thread_priority;

/// Builds the exporter.
///
/// # Errors
/// Names the setting and the problem.
pub(super) fn exporter(settings: &TracingSettings) -> Result<OtlpExporter, UnusableSetting> {
    let options = OtlpOptions {
        protocol: settings.protocol,
        endpoint: settings.endpoint.clone(),
        timeout: settings.timeout,
        tls: read_tls(&settings.tls, settings.endpoint.starts_with("https://"))?,
        on_thread_start: thread_priority::lower,
    };
    otlp::exporter(&options).map_err(|error| UnusableSetting {
        setting: settings.setting,
        shown: settings.endpoint.clone(),
        what: error.to_string(),
    })
}

/// Starts to export.
pub(super) fn start_tracer(settings: &TracingSettings, exporter: OtlpExporter) -> Tracer {
    let thread = ExportThread { setting: settings.setting, on_start: thread_priority::lower };
    let span_queue = SpanQueue::start(exporter, &otlp::resource(&settings.resource), settings.queue, thread);
    let (protocol, endpoint) = (settings.protocol, settings.endpoint.as_str());
    tracing::warn!(?protocol, endpoint, ratio = settings.sampler.ratio, "exporting traces");
    Tracer {
        sampler: settings.sampler,
        formats: settings.formats,
        shows_descriptors: settings.records_descriptors,
        span_queue: Arc::new(span_queue),
    }
}

/// Reads the certificates; also without TLS, so that problems are found.
fn read_tls(tls: &CollectorTls, is_https: bool) -> Result<OtlpTls, UnusableSetting> {
    let roots = match &tls.ca {
        Some(ca) => read_certificates(ca)?.0,
        None if is_https => system_roots().to_vec(),
        None => Vec::new(),
    };
    let client = match &tls.client {
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

/// Reads a file with certificates; returns them parsed and as PEM.
fn read_certificates(file: &PemFile) -> Result<(Vec<CertificateDer<'static>>, Vec<u8>), UnusableSetting> {
    let pem = file.contents()?;
    Ok((file.certificates(&pem)?, pem))
}
