//! The way to the collector: a client for OTLP, over gRPC or HTTP, on threads that decisions go before.
//!
//! Nothing is dialled at the start, and nothing waits for the collector: one that is away, or comes later, is found out
//! when there are spans to send. Files with certificates are read once, here, so that what is wrong with them stops
//! the start. The library reads headers and compression from the environment by itself.

use std::sync::Arc;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TraceId;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, Protocol as Otlp, SpanExporter, WithExportConfig as _, WithHttpConfig as _,
    WithTonicConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{IdGenerator as _, RandomIdGenerator};
use rustls::crypto::ring;
use tonic::transport::{Certificate as TonicCertificate, ClientTlsConfig, Identity};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig, TlsProvider};

use crate::settings::choices::OtlpProtocol;
use crate::settings::pem::{ClientCertificate, PemFile, system_roots, trusted_roots};
use crate::settings::tracing::{CollectorTls, TracingSettings};
use crate::telemetry::traces::Tracer;
use crate::telemetry::traces::span_queue::SpanQueue;
use crate::thread_priority;

/// The longest that the last sending may take.
const LAST: Duration = Duration::from_secs(1);
/// Of an answer of the collector no more is read, in bytes.
const LONGEST_ANSWER_BYTES: u64 = 64 * 1024;

/// What begins traces and sends them; an error names the setting.
pub(super) fn start(settings: &TracingSettings) -> Result<Tracer, String> {
    let exporter = match settings.protocol {
        OtlpProtocol::Grpc => over_grpc(settings)?,
        OtlpProtocol::Http => over_http(settings)?,
    };
    let on_thread = (settings.setting, thread_priority::lower as fn());
    let span_queue = SpanQueue::start(exporter, &resource(settings), settings.queue, on_thread);
    let (protocol, endpoint) = (settings.protocol, settings.endpoint.as_str());
    tracing::warn!(?protocol, endpoint, ratio = settings.sampler.ratio, "traces are sent");
    Ok(Tracer {
        sampler: settings.sampler,
        formats: settings.formats,
        shows_descriptors: settings.records_descriptors,
        span_queue: Arc::new(span_queue),
    })
}

/// Sends what is left, and ends; waits for that a second at most.
pub(super) async fn finish(span_queue: Arc<SpanQueue>) {
    let flushed = tokio::task::spawn_blocking(move || span_queue.finish(LAST));
    if !tokio::time::timeout(LAST, flushed).await.is_ok_and(|ended| ended.unwrap_or(false)) {
        tracing::warn!("the last spans were not sent: the collector takes too long");
    }
}

/// What tells this process from others.
fn resource(settings: &TracingSettings) -> Resource {
    let has = |name: &str| settings.resource.iter().any(|(other, _)| other == name);
    let mut own = vec![KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))];
    if !has("service.instance.id") {
        own.push(KeyValue::new("service.instance.id", uuid(RandomIdGenerator::default().new_trace_id())));
    }
    own.retain(|attribute| !has(attribute.key.as_str()));
    let given = settings.resource.iter().map(|(name, value)| KeyValue::new(name.clone(), value.clone()));
    Resource::builder().with_attributes(own).with_attributes(given).build()
}

/// Random bits as a UUID of version 4.
fn uuid(random: TraceId) -> String {
    let mut bytes = random.to_bytes();
    (bytes[6], bytes[8]) = (bytes[6] & 0x0f | 0x40, bytes[8] & 0x3f | 0x80);
    let digits = TraceId::from_bytes(bytes).to_string();
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

fn over_grpc(settings: &TracingSettings) -> Result<SpanExporter, String> {
    let builder = SpanExporter::builder().with_tonic().with_endpoint(&settings.endpoint).with_timeout(settings.timeout);
    // Files are read in any case: what is wrong with them is to be known.
    let tls = tonic_tls(&settings.tls)?;
    let builder = if settings.endpoint.starts_with("https://") { builder.with_tls_config(tls) } else { builder };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("TRACING_ENABLED: no runtime for traces: {error}"))?;
    let exporter = {
        let _within = runtime.enter();
        builder.build()
    };
    // Encoding and the connection have a thread of their own, for as long as the process runs.
    let drive = move || {
        thread_priority::lower();
        runtime.block_on(std::future::pending::<()>());
    };
    let thread = std::thread::Builder::new().name("traces".to_owned()).spawn(drive);
    thread.map_err(|error| format!("TRACING_ENABLED: no thread for traces: {error}"))?;
    exporter.map_err(|error| wrong(settings, &error))
}

fn tonic_tls(tls: &CollectorTls) -> Result<ClientTlsConfig, String> {
    let config = match &tls.ca {
        Some(ca) => ClientTlsConfig::new().ca_certificate(TonicCertificate::from_pem(pem_of_certificates(ca)?)),
        None => ClientTlsConfig::new().trust_anchors(trusted_roots(None)?.roots),
    };
    Ok(match &tls.client {
        Some(ClientCertificate { certificate, key }) => {
            let secret = key.contents()?;
            key.private_key(&secret)?;
            config.identity(Identity::from_pem(pem_of_certificates(certificate)?, secret))
        }
        None => config,
    })
}

fn over_http(settings: &TracingSettings) -> Result<SpanExporter, String> {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(settings.timeout))
        .http_status_as_error(false)
        .max_redirects(0)
        .user_agent("")
        .tls_config(ureq_tls(settings)?);
    let builder = SpanExporter::builder().with_http().with_http_client(Client(config.build().new_agent()));
    let builder = builder.with_protocol(Otlp::HttpBinary).with_endpoint(&settings.endpoint);
    builder.with_timeout(settings.timeout).build().map_err(|error| wrong(settings, &error))
}

fn ureq_tls(settings: &TracingSettings) -> Result<TlsConfig, String> {
    let CollectorTls { ca, client } = &settings.tls;
    let roots = match ca {
        Some(ca) => certificates(ca)?,
        // There are many: they are read only where they are needed.
        None if !settings.endpoint.starts_with("https://") => Vec::new(),
        None => system_roots().iter().map(|der| Certificate::from_der(der).to_owned()).collect(),
    };
    let client = match client {
        Some(ClientCertificate { certificate, key }) => {
            Some(ClientCert::new_with_certs(&certificates(certificate)?, private_key(key)?))
        }
        None => None,
    };
    let builder = TlsConfig::builder().provider(TlsProvider::Rustls).root_certs(RootCerts::new_with_certs(&roots));
    Ok(builder.client_cert(client).unversioned_rustls_crypto_provider(Arc::new(ring::default_provider())).build())
}

fn wrong(settings: &TracingSettings, error: &ExporterBuildError) -> String {
    format!("{}: {error}", settings.setting)
}

/// All of its certificates.
fn certificates(file: &PemFile) -> Result<Vec<Certificate<'static>>, String> {
    let found = file.certificates(&file.contents()?)?;
    Ok(found.iter().map(|der| Certificate::from_der(der).to_owned()).collect())
}

fn private_key(file: &PemFile) -> Result<PrivateKey<'static>, String> {
    let pem = file.contents()?;
    file.private_key(&pem)?;
    PrivateKey::from_pem(&pem).map_err(|error| file.wrong(error))
}

/// Its contents, if there are certificates in it.
fn pem_of_certificates(file: &PemFile) -> Result<Vec<u8>, String> {
    let pem = file.contents()?;
    file.certificates(&pem)?;
    Ok(pem)
}

/// Speaks HTTP to the collector, and waits meanwhile: on the thread that has nothing else to do.
#[derive(Debug)]
struct Client(ureq::Agent);

#[tonic::async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let (head, mut body) = self.0.run(Request::from_parts(head, &body[..]))?.into_parts();
        let body = body.with_config().limit(LONGEST_ANSWER_BYTES).read_to_vec()?;
        Ok(Response::from_parts(head, body.into()))
    }
}
