//! Exporters of spans and logs to an OpenTelemetry collector: OTLP over gRPC or HTTP.
//!
//! An exporter connects when it sends for the first time and reconnects by itself, so nothing waits for the collector.
//! The OpenTelemetry library reads headers and compression from the environment. Logs are exported in the caller's
//! thread.
//!
//! Decides: when the OTLP sink of the decision log gives up or sends again; the default `service.instance.id`.

use std::io;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use opentelemetry::logs::{AnyValue, LogRecord as _, Logger as _, LoggerProvider as _};
use opentelemetry::trace::{SpanId, TraceFlags, TraceId};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, LogExporter, Protocol, SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::{LogBatch, LogExporter as _, SdkLogRecord, SdkLogger, SdkLoggerProvider};
use opentelemetry_sdk::trace::{IdGenerator as _, RandomIdGenerator};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use tokio::runtime::{Builder, Runtime};
use tonic::transport::{ClientTlsConfig, Identity};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig, TlsProvider};

pub use opentelemetry::logs::Severity;

/// Exporter of spans to a collector.
pub type OtlpSpanExporter = SpanExporter;

/// Connection to a collector.
#[derive(Clone, Debug)]
pub struct OtlpOptions {
    /// Protocol of the collector.
    pub protocol: OtlpProtocol,
    /// URL of the collector; over HTTP with the path of the signal.
    pub endpoint: String,
    /// Maximum time of one export.
    pub timeout: Duration,
    /// Certificates, used if the endpoint is an `https://` URL.
    pub tls: OtlpTls,
    /// Called once on each thread that the exporter starts.
    pub on_thread_start: fn(),
}

/// Protocol of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpProtocol {
    /// OTLP over gRPC.
    Grpc,
    /// OTLP over HTTP/1.1, encoded as protobuf.
    Http,
}

/// TLS of the connection to a collector.
#[derive(Clone, Debug, Default)]
pub struct OtlpTls {
    /// Trusted authorities.
    pub roots: Vec<CertificateDer<'static>>,
    /// Certificate that the exporter presents.
    pub client: Option<OtlpClientCertificate>,
}

/// Client certificate and key. Both have been parsed before.
#[derive(Clone, Debug)]
pub struct OtlpClientCertificate {
    /// Certificate chain.
    pub chain: Vec<CertificateDer<'static>>,
    /// Certificate chain as PEM.
    pub chain_pem: Vec<u8>,
    /// Private key as PEM.
    pub key_pem: Vec<u8>,
}

/// Error that prevents exporting.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// The options do not describe a valid exporter, for example because of the URL.
    #[error("{0}")]
    Exporter(#[from] ExporterBuildError),
    /// The URL or the certificates cannot be used.
    #[error("{0}")]
    Transport(#[from] tonic::transport::Error),
    /// The private key cannot be used.
    #[error("the private key cannot be used: {0}")]
    Key(#[from] ureq::Error),
    /// The exporter's thread cannot be started.
    #[error("cannot start the thread of the exporter: {0}")]
    Thread(#[from] io::Error),
}

/// Maximum size of a collector's response in bytes; the rest is not read.
const MAX_RESPONSE_BYTES: u64 = 64 * 1024;

/// Builds an exporter of spans. Over gRPC it runs a thread for the connection.
///
/// # Errors
/// The options are invalid, or the thread cannot be started.
pub fn build_span_exporter(options: &OtlpOptions) -> Result<SpanExporter, OtlpError> {
    match options.protocol {
        OtlpProtocol::Grpc => build_exporter_with_own_thread(options, || {
            set_grpc_transport(SpanExporter::builder().with_tonic(), options).build()
        }),
        OtlpProtocol::Http => Ok(set_http_transport(SpanExporter::builder().with_http(), options)?.build()?),
    }
}

/// Builds an exporter of logs. Over gRPC it runs a thread for the connection.
///
/// # Errors
/// The options are invalid, or the thread cannot be started.
pub fn build_log_exporter(options: &OtlpOptions) -> Result<LogExporter, OtlpError> {
    match options.protocol {
        OtlpProtocol::Grpc => build_exporter_with_own_thread(options, || {
            set_grpc_transport(LogExporter::builder().with_tonic(), options).build()
        }),
        OtlpProtocol::Http => Ok(set_http_transport(LogExporter::builder().with_http(), options)?.build()?),
    }
}

/// Random id of this process, the same for all signals.
static INSTANCE_ID: LazyLock<String> = LazyLock::new(|| format_uuid_v4(RandomIdGenerator::default().new_trace_id()));

/// Builds the resource that identifies this process; `attributes` take precedence over the defaults.
pub fn build_resource(attributes: &[(String, String)]) -> Resource {
    let has = |name: &str| attributes.iter().any(|(other, _)| other == name);
    let mut defaults = vec![KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))];
    if !has("service.instance.id") {
        defaults.push(KeyValue::new("service.instance.id", INSTANCE_ID.as_str()));
    }
    defaults.retain(|attribute| !has(attribute.key.as_str()));
    let given = attributes.iter().map(|(name, value)| KeyValue::new(name.clone(), value.clone()));
    Resource::builder().with_attributes(defaults).with_attributes(given).build()
}

/// Formats 128 random bits as a version 4 UUID.
fn format_uuid_v4(random: TraceId) -> String {
    let mut bytes = random.to_bytes();
    (bytes[6], bytes[8]) = (bytes[6] & 0x0f | 0x40, bytes[8] & 0x3f | 0x80);
    let digits = TraceId::from_bytes(bytes).to_string();
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

fn set_grpc_transport<B: WithExportConfig + WithTonicConfig>(builder: B, options: &OtlpOptions) -> B {
    let builder = builder.with_endpoint(&options.endpoint).with_timeout(options.timeout);
    match options.endpoint.starts_with("https://") {
        true => builder.with_tls_config(build_tonic_tls(&options.tls)),
        false => builder,
    }
}

/// Builds an exporter whose connection runs on a thread of its own until the process ends.
fn build_exporter_with_own_thread<E>(
    options: &OtlpOptions,
    build: impl FnOnce() -> Result<E, ExporterBuildError>,
) -> Result<E, OtlpError> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let exporter = {
        let _entered = runtime.enter();
        build()
    };
    let on_thread_start = options.on_thread_start;
    let work = move || {
        on_thread_start();
        runtime.block_on(std::future::pending::<()>());
    };
    std::thread::Builder::new().name("otlp".to_owned()).spawn(work)?;
    Ok(exporter?)
}

/// Builds the TLS options of a gRPC connection.
pub(super) fn build_tonic_tls(tls: &OtlpTls) -> ClientTlsConfig {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(tls.roots.iter().cloned());
    let config = ClientTlsConfig::new().trust_anchors(roots.roots);
    match &tls.client {
        Some(client) => config.identity(Identity::from_pem(&client.chain_pem, &client.key_pem)),
        None => config,
    }
}

fn set_http_transport<B: WithExportConfig + WithHttpConfig>(builder: B, options: &OtlpOptions) -> Result<B, OtlpError> {
    let builder = builder.with_http_client(BlockingHttpClient(build_http_agent(options)?));
    let builder = builder.with_protocol(Protocol::HttpBinary).with_endpoint(&options.endpoint);
    Ok(builder.with_timeout(options.timeout))
}

/// Builds a client of a collector over HTTP.
pub(super) fn build_http_agent(options: &OtlpOptions) -> Result<ureq::Agent, OtlpError> {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(options.timeout))
        .http_status_as_error(false)
        .max_redirects(0)
        .user_agent("")
        .tls_config(build_ureq_tls(&options.tls)?);
    Ok(config.build().new_agent())
}

fn build_ureq_tls(tls: &OtlpTls) -> Result<TlsConfig, OtlpError> {
    let owned = |chain: &[CertificateDer<'static>]| -> Vec<Certificate<'static>> {
        chain.iter().map(|der| Certificate::from_der(der).to_owned()).collect()
    };
    let client = match &tls.client {
        Some(client) => Some(ClientCert::new_with_certs(&owned(&client.chain), PrivateKey::from_pem(&client.key_pem)?)),
        None => None,
    };
    let roots = RootCerts::new_with_certs(&owned(&tls.roots));
    let builder = TlsConfig::builder().provider(TlsProvider::Rustls).root_certs(roots);
    Ok(builder.client_cert(client).unversioned_rustls_crypto_provider(Arc::new(ring::default_provider())).build())
}

/// HTTP client that blocks the exporting thread, which has nothing else to do.
#[derive(Debug)]
struct BlockingHttpClient(ureq::Agent);

#[tonic::async_trait]
impl HttpClient for BlockingHttpClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let (head, mut body) = self.0.run(Request::from_parts(head, &body[..]))?.into_parts();
        let body = body.with_config().limit(MAX_RESPONSE_BYTES).read_to_vec()?;
        Ok(Response::from_parts(head, body.into()))
    }
}

/// Log record to export.
#[derive(Clone, Debug)]
pub struct ExportedLog<'l> {
    /// Name of the event.
    pub event_name: &'static str,
    /// Time of the event in microseconds since the Unix epoch.
    pub time_us: u64,
    /// Severity.
    pub severity: Severity,
    /// Body, as text.
    pub body: &'l str,
    /// Sampled trace in hexadecimal; an invalid one is left out.
    pub trace_id: Option<&'l str>,
}

/// Exporter of logs that blocks its caller.
#[derive(Debug)]
pub struct BlockingLogExporter {
    exporter: LogExporter,
    /// Creates records.
    logger: SdkLogger,
    scope: InstrumentationScope,
    /// Timers of the exporter, which run in the caller's thread.
    runtime: Runtime,
    timeout: Duration,
}

impl BlockingLogExporter {
    /// Creates an exporter, which connects when it sends. `resource` is as for [`build_resource`].
    ///
    /// # Errors
    /// The options are invalid, or a thread cannot be started.
    pub fn new(options: &OtlpOptions, resource: &[(String, String)]) -> io::Result<Self> {
        let mut exporter = build_log_exporter(options).map_err(io::Error::other)?;
        exporter.set_resource(&build_resource(resource));
        let scope = InstrumentationScope::builder("tollkeeper").with_version(env!("CARGO_PKG_VERSION")).build();
        let logger = SdkLoggerProvider::builder().build().logger_with_scope(scope.clone());
        let runtime = Builder::new_current_thread().enable_time().build()?;
        Ok(Self { exporter, logger, scope, runtime, timeout: options.timeout })
    }

    /// Exports records in one request, which is sent again after an error that passes, until the time limit.
    ///
    /// # Errors
    /// The collector is not known to have them. The text has no secrets.
    pub fn export_logs<'l>(&self, logs: impl Iterator<Item = ExportedLog<'l>>) -> Result<(), String> {
        let records: Vec<SdkLogRecord> = logs.map(|log| self.build_record(&log)).collect();
        let batch: Vec<_> = records.iter().map(|record| (record, &self.scope)).collect();
        let exported = self.runtime.block_on(async {
            let export = self.exporter.export(LogBatch::new(&batch));
            tokio::time::timeout(self.timeout, export).await
        });
        match exported {
            Ok(exported) => exported.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no answer of the collector in {:?}", self.timeout)),
        }
    }

    fn build_record(&self, log: &ExportedLog<'_>) -> SdkLogRecord {
        let now = SystemTime::now();
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(log.time_us));
        let mut record = self.logger.create_log_record();
        record.set_event_name(log.event_name);
        record.set_timestamp(time.unwrap_or(now));
        record.set_observed_timestamp(now);
        record.set_severity_number(log.severity);
        record.set_severity_text(log.severity.name());
        record.set_body(AnyValue::String(log.body.to_owned().into()));
        if let Some(trace_id) = log.trace_id.and_then(|id| TraceId::from_hex(id).ok()) {
            record.set_trace_context(trace_id, SpanId::INVALID, Some(TraceFlags::SAMPLED));
        }
        record
    }
}
