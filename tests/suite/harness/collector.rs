//! A collector of traces in this process: takes OTLP over gRPC or HTTP and keeps what it got.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::runtime::Runtime;
use tonic::{Request, Response, Status};

use super::wait_for;

/// A span as it was received.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    /// Of the process that sent it, as text.
    pub(crate) resource: BTreeMap<String, String>,
    /// The span.
    pub(crate) span: Span,
    /// Its attributes, as text.
    pub(crate) attributes: BTreeMap<String, String>,
    /// The header `authorization` that came with it.
    pub(crate) authorization: String,
}

impl Received {
    /// The ids of its trace, of itself and of its parent, in hex.
    pub(crate) fn ids(&self) -> [String; 3] {
        [&self.span.trace_id, &self.span.span_id, &self.span.parent_span_id]
            .map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

#[derive(Clone, Debug, Default)]
struct Kept(Arc<Mutex<Vec<Received>>>);

/// A running collector; gone when dropped.
#[derive(Debug)]
pub(crate) struct Collector {
    port: u16,
    kept: Kept,
    _runtime: Runtime,
}

impl Collector {
    /// Takes OTLP over gRPC.
    pub(crate) fn grpc() -> Self {
        Self::start(|kept, listener| async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("the listener can be used");
            let routes = tonic::service::Routes::new(TraceServiceServer::new(kept)).prepare().into_axum_router();
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((io, _)) = listener.accept().await {
                let service = hyper_util::service::TowerToHyperService::new(routes.clone());
                connections.spawn(async move {
                    let builder = hyper_util::server::conn::auto::Builder::new(hyper_util::rt::TokioExecutor::new());
                    let _ended = builder.serve_connection(hyper_util::rt::TokioIo::new(io), service).await;
                });
            }
        })
    }

    /// Takes OTLP over HTTP, at `/v1/traces`.
    pub(crate) fn http() -> Self {
        Self::start(|kept, listener| async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("the listener can be used");
            let take = |headers: HeaderMap, body: Bytes| async move {
                let message = ExportTraceServiceRequest::decode(body);
                let Ok(message) = message else { return (StatusCode::BAD_REQUEST, Vec::new()) };
                let authorization = headers.get("authorization").and_then(|value| value.to_str().ok());
                kept.keep(message, authorization.unwrap_or_default());
                (StatusCode::OK, ExportTraceServiceResponse::default().encode_to_vec())
            };
            let _ended = axum::serve(listener, Router::new().route("/v1/traces", post(take))).await;
        })
    }

    fn start<F>(serve: impl FnOnce(Kept, TcpListener) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime can be built");
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
        listener.set_nonblocking(true).expect("a listener need not block");
        let port = listener.local_addr().expect("it has an address").port();
        let kept = Kept::default();
        runtime.spawn(serve(kept.clone(), listener));
        Self { port, kept, _runtime: runtime }
    }

    /// Where it is, on 127.0.0.1.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Where it is.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// What it has got so far.
    pub(crate) fn received(&self) -> Vec<Received> {
        self.kept.0.lock().expect("nobody panics here").clone()
    }

    /// The spans of that name, once there are so many.
    pub(crate) fn wait_for(&self, name: &str, count: usize) -> Vec<Received> {
        wait_for(&format!("{count} spans {name}"), || {
            let named: Vec<_> = self.received().into_iter().filter(|received| received.span.name == name).collect();
            (named.len() >= count).then_some(named)
        })
    }
}

impl Kept {
    fn keep(&self, message: ExportTraceServiceRequest, authorization: &str) {
        let mut kept = self.0.lock().expect("nobody panics here");
        for group in message.resource_spans {
            let resource = texts(&group.resource.unwrap_or_default().attributes);
            for span in group.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                let attributes = texts(&span.attributes);
                let (resource, authorization) = (resource.clone(), authorization.to_owned());
                kept.push(Received { resource, span, attributes, authorization });
            }
        }
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

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |attribute: &KeyValue| match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => text.clone(),
        Some(any_value::Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    attributes.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
}
