//! A collector in this process: accepts OTLP over gRPC or HTTP and keeps spans, log records and metrics.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_server::{LogsService, LogsServiceServer};
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tonic::codec::CompressionEncoding;
use tonic::{Request, Response, Status};

use super::http_server::{HttpServer, NextAcceptor};
use super::redis::certificates::Certificates;
use super::wait_for;

/// A span as it was received.
#[derive(Clone, Debug)]
pub struct ReceivedSpan {
    /// Resource attributes of the process that sent it, as text.
    pub resource: BTreeMap<String, String>,
    /// The span.
    pub span: Span,
    /// Its attributes, as text.
    pub attributes: BTreeMap<String, String>,
    /// The header `authorization` that came with it.
    pub authorization: String,
}

impl ReceivedSpan {
    /// The ids of its trace, of itself and of its parent, in hex.
    pub fn ids(&self) -> [String; 3] {
        [&self.span.trace_id, &self.span.span_id, &self.span.parent_span_id]
            .map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// A log record as it was received.
#[derive(Clone, Debug)]
pub struct ReceivedLog {
    /// Resource attributes of the process that sent it, as text.
    pub resource: BTreeMap<String, String>,
    /// The record.
    pub record: LogRecord,
    /// The header `authorization` that came with it.
    pub authorization: String,
}

impl ReceivedLog {
    /// Its body, which is text.
    pub fn body(&self) -> &str {
        match self.record.body.as_ref().and_then(|body| body.value.as_ref()) {
            Some(any_value::Value::StringValue(text)) => text,
            other => panic!("the body is no text: {other:?}"),
        }
    }
}

/// Metrics of an export request as they were received.
#[derive(Clone, Debug)]
pub struct ReceivedMetrics {
    /// Resource attributes of the process that sent them, as text.
    pub resource: BTreeMap<String, String>,
    /// The metrics.
    pub metrics: Vec<Metric>,
    /// The header `authorization` that came with them.
    pub authorization: String,
    /// The header `content-encoding`, or `grpc-encoding`.
    pub encoding: String,
}

#[derive(Clone, Debug, Default)]
struct Kept {
    spans: Arc<Mutex<Vec<ReceivedSpan>>>,
    logs: Arc<Mutex<Vec<ReceivedLog>>>,
    metrics: Arc<Mutex<Vec<ReceivedMetrics>>>,
    /// True to refuse metrics.
    refuses_metrics: Arc<AtomicBool>,
}

/// A running collector; stopped when dropped.
#[derive(Debug)]
pub struct OtlpCollector {
    server: HttpServer,
    is_tls: bool,
    kept: Kept,
}

impl OtlpCollector {
    /// Starts a collector that accepts OTLP over gRPC, and over HTTP at `/v1/traces`, `/v1/logs` and
    /// `/v1/metrics`.
    pub fn start() -> Self {
        Self::behind(None)
    }

    /// Starts a collector with TLS and a certificate for `localhost`.
    pub fn tls(certificates: &Certificates) -> Self {
        let pem = |name| certificates.path(name);
        let chain = CertificateDer::pem_file_iter(pem("server.crt")).expect("there is a certificate");
        let key = PrivateKeyDer::from_pem_file(pem("server.key")).expect("there is a key");
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().expect("there are versions").with_no_client_auth();
        let chain = chain.collect::<Result<_, _>>().expect("the certificates are some");
        let mut config = config.with_single_cert(chain, key).expect("the key fits");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Self::behind(Some(TlsAcceptor::from(Arc::new(config))))
    }

    fn behind(tls: Option<TlsAcceptor>) -> Self {
        let kept = Kept::default();
        let is_tls = tls.is_some();
        let tls = tls.map(|acceptor| -> NextAcceptor { Box::new(move || acceptor.clone()) });
        Self { server: HttpServer::start(0, routes(kept.clone()), tls), is_tls, kept }
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// Its URL.
    pub fn url(&self) -> String {
        let port = self.port();
        if self.is_tls { format!("https://localhost:{port}") } else { format!("http://127.0.0.1:{port}") }
    }

    /// Spans received so far.
    pub fn received(&self) -> Vec<ReceivedSpan> {
        self.kept.spans.lock().expect("no thread panicked with the lock").clone()
    }

    /// Log records received so far.
    pub fn logs(&self) -> Vec<ReceivedLog> {
        self.kept.logs.lock().expect("no thread panicked with the lock").clone()
    }

    /// Export requests with metrics received so far.
    pub fn metrics(&self) -> Vec<ReceivedMetrics> {
        self.kept.metrics.lock().expect("no thread panicked with the lock").clone()
    }

    /// Refuses metrics, or accepts them again.
    pub fn refuse_metrics(&self, refuses: bool) {
        self.kept.refuses_metrics.store(refuses, Ordering::SeqCst);
    }

    /// Waits for `count` spans of that name, and returns them.
    pub fn wait_for(&self, name: &str, count: usize) -> Vec<ReceivedSpan> {
        wait_for(&format!("{count} spans {name}"), || {
            let named: Vec<_> = self.received().into_iter().filter(|received| received.span.name == name).collect();
            (named.len() >= count).then_some(named)
        })
    }

    /// Waits for the span with that id. A parent ends after its children, so it can arrive later than they do.
    pub fn wait_for_span_id(&self, id: &[u8]) -> ReceivedSpan {
        wait_for("the span with an id", || self.received().into_iter().find(|received| received.span.span_id == id))
    }
}

/// Routes of OTLP over gRPC and over HTTP.
fn routes(kept: Kept) -> Router {
    let (over_http, logs_over_http, metrics_over_http) = (kept.clone(), kept.clone(), kept.clone());
    let take = |headers: HeaderMap, body: Bytes| async move {
        let Ok(message) = ExportTraceServiceRequest::decode(body) else { return (StatusCode::BAD_REQUEST, Vec::new()) };
        let authorization = headers.get("authorization").and_then(|value| value.to_str().ok());
        over_http.keep(message, authorization.unwrap_or_default());
        (StatusCode::OK, ExportTraceServiceResponse::default().encode_to_vec())
    };
    let take_logs = |headers: HeaderMap, body: Bytes| async move {
        let Ok(message) = ExportLogsServiceRequest::decode(body) else { return (StatusCode::BAD_REQUEST, Vec::new()) };
        let authorization = headers.get("authorization").and_then(|value| value.to_str().ok());
        logs_over_http.keep_logs(message, authorization.unwrap_or_default());
        (StatusCode::OK, ExportLogsServiceResponse::default().encode_to_vec())
    };
    let take_metrics = |headers: HeaderMap, body: Bytes| async move {
        let header =
            |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        let encoding = header("content-encoding");
        let mut plain = body.to_vec();
        if encoding == "gzip" {
            plain.clear();
            flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut plain).expect("gzip");
        }
        let Ok(message) = ExportMetricsServiceRequest::decode(&plain[..]) else {
            return (StatusCode::BAD_REQUEST, Vec::new());
        };
        if !metrics_over_http.keep_metrics(message, &header("authorization"), &encoding) {
            return (StatusCode::SERVICE_UNAVAILABLE, Vec::new());
        }
        (StatusCode::OK, ExportMetricsServiceResponse::default().encode_to_vec())
    };
    let services = tonic::service::Routes::new(TraceServiceServer::new(kept.clone()));
    let grpc = services.add_service(LogsServiceServer::new(kept.clone()));
    let metrics = MetricsServiceServer::new(kept).accept_compressed(CompressionEncoding::Gzip);
    let grpc = grpc.add_service(metrics).prepare().into_axum_router();
    grpc.merge(Router::new().route("/v1/traces", post(take)).route("/v1/logs", post(take_logs)))
        .merge(Router::new().route("/v1/metrics", post(take_metrics)))
}

impl Kept {
    fn keep(&self, message: ExportTraceServiceRequest, authorization: &str) {
        let mut kept = self.spans.lock().expect("no thread panicked with the lock");
        for group in message.resource_spans {
            let resource = texts(&group.resource.unwrap_or_default().attributes);
            for span in group.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                let attributes = texts(&span.attributes);
                let (resource, authorization) = (resource.clone(), authorization.to_owned());
                kept.push(ReceivedSpan { resource, span, attributes, authorization });
            }
        }
    }
}

impl Kept {
    fn keep_logs(&self, message: ExportLogsServiceRequest, authorization: &str) {
        let mut kept = self.logs.lock().expect("no thread panicked with the lock");
        for group in message.resource_logs {
            let resource = texts(&group.resource.unwrap_or_default().attributes);
            for record in group.scope_logs.into_iter().flat_map(|scope| scope.log_records) {
                kept.push(ReceivedLog { resource: resource.clone(), record, authorization: authorization.to_owned() });
            }
        }
    }
}

impl Kept {
    /// Keeps the metrics of a request; false if they are refused.
    fn keep_metrics(&self, message: ExportMetricsServiceRequest, authorization: &str, encoding: &str) -> bool {
        if self.refuses_metrics.load(Ordering::SeqCst) {
            return false;
        }
        let mut kept = self.metrics.lock().expect("no thread panicked with the lock");
        for group in message.resource_metrics {
            let resource = texts(&group.resource.unwrap_or_default().attributes);
            let metrics = group.scope_metrics.into_iter().flat_map(|scope| scope.metrics).collect();
            let (authorization, encoding) = (authorization.to_owned(), encoding.to_owned());
            kept.push(ReceivedMetrics { resource, metrics, authorization, encoding });
        }
        true
    }
}

#[tonic::async_trait]
impl MetricsService for Kept {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let header = |name: &str| {
            request.metadata().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let (authorization, encoding) = (header("authorization"), header("grpc-encoding"));
        match self.keep_metrics(request.into_inner(), &authorization, &encoding) {
            true => Ok(Response::new(ExportMetricsServiceResponse::default())),
            false => Err(Status::unavailable("not now")),
        }
    }
}

#[tonic::async_trait]
impl LogsService for Kept {
    async fn export(
        &self,
        request: Request<ExportLogsServiceRequest>,
    ) -> Result<Response<ExportLogsServiceResponse>, Status> {
        let authorization = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        let authorization = authorization.unwrap_or_default().to_owned();
        self.keep_logs(request.into_inner(), &authorization);
        Ok(Response::new(ExportLogsServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let authorization = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        let authorization = authorization.unwrap_or_default().to_owned();
        self.keep(request.into_inner(), &authorization);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Values of attributes as text, by their key.
pub fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |attribute: &KeyValue| match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => text.clone(),
        Some(any_value::Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    attributes.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
}
