//! A control plane in this process, which does what the test says.
//!
//! Each stream that a client opens is kept with its headers and requests; the test sends responses on it, or ends it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures_util::stream::{BoxStream, StreamExt as _};
use prost::Message as _;
use prost_types::Any;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::sync::mpsc;
use tollkeeper::base::pb::xds::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use tollkeeper::base::pb::xds::{
    DiscoveryRequest, DiscoveryResponse, RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use super::http_server::{HttpServer, NextAcceptor};
use super::wait_for;

/// Type of the resources.
pub const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// A running control plane; stopped when dropped.
#[derive(Debug)]
pub struct XdsServer {
    script: Script,
    server: HttpServer,
}

/// TLS of a control plane, which reads its files at each handshake and demands client certificates.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// Directory of `ca.crt`, `server.crt` and `server.key`.
    pub directory: PathBuf,
}

/// A request with the time of its arrival.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    /// Time of arrival.
    pub at: Instant,
    /// The request.
    pub request: DiscoveryRequest,
}

#[derive(Clone, Debug, Default)]
struct Script {
    streams: Arc<Mutex<Vec<OpenedStream>>>,
    /// Sends the last response again after each refusal, as go-control-plane does.
    repeats_refused: Arc<AtomicBool>,
}

#[derive(Debug)]
struct OpenedStream {
    headers: MetadataMap,
    requests: Vec<ReceivedRequest>,
    /// `None` once the test has ended the stream.
    responses: Option<mpsc::UnboundedSender<Result<DiscoveryResponse, Status>>>,
    last_response: Option<DiscoveryResponse>,
}

impl XdsServer {
    /// Starts a control plane on a free port.
    pub fn start() -> Self {
        Self::bind(0, None)
    }

    /// Starts a control plane with TLS on a free port.
    pub fn start_tls(tls: ServerTls) -> Self {
        Self::bind(0, Some(tls))
    }

    /// Starts a control plane on the port of one that was stopped.
    pub fn start_on(port: u16) -> Self {
        Self::bind(port, None)
    }

    fn bind(port: u16, tls: Option<ServerTls>) -> Self {
        let script = Script::default();
        let service = AggregatedDiscoveryServiceServer::new(script.clone());
        let routes = tonic::service::Routes::new(service).prepare().into_axum_router();
        let tls = tls.map(|tls| -> NextAcceptor { Box::new(move || Arc::new(server_config(&tls)).into()) });
        Self { script, server: HttpServer::start(port, routes, tls) }
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// Its address, `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port())
    }

    /// Stops it; connections are closed.
    pub fn stop(&mut self) {
        self.server.stop();
        self.script.streams.lock().unwrap().clear();
    }

    /// Sends the last response again after each refusal from now on.
    pub fn repeat_refused(&self) {
        self.script.repeats_refused.store(true, Ordering::Relaxed);
    }

    /// Number of streams that were opened.
    pub fn streams(&self) -> usize {
        self.script.streams.lock().unwrap().len()
    }

    /// Waits for `count` requests on the stream at `index`; returns all of them.
    pub fn requests(&self, index: usize, count: usize) -> Vec<ReceivedRequest> {
        wait_for(&format!("{count} requests on stream {index}"), || {
            let streams = self.script.streams.lock().unwrap();
            let requests = &streams.get(index)?.requests;
            (requests.len() >= count).then(|| requests.clone())
        })
    }

    /// Waits for the request at `position` on the stream at `index`.
    pub fn request(&self, index: usize, position: usize) -> DiscoveryRequest {
        self.requests(index, position + 1)[position].request.clone()
    }

    /// Returns a header of the stream at `index`.
    pub fn header(&self, index: usize, name: &str) -> Option<String> {
        let streams = self.script.streams.lock().unwrap();
        Some(streams.get(index)?.headers.get(name)?.to_str().ok()?.to_owned())
    }

    /// Sends resources on the stream at `index`, under a version and a nonce.
    pub fn send(&self, index: usize, version: &str, nonce: &str, resources: Vec<Any>) {
        self.requests(index, 1);
        let response = DiscoveryResponse {
            version_info: version.to_owned(),
            resources,
            type_url: TYPE_URL.to_owned(),
            nonce: nonce.to_owned(),
        };
        self.script.streams.lock().unwrap()[index].send(response);
    }

    /// Ends the stream at `index`.
    pub fn end(&self, index: usize) {
        self.requests(index, 1);
        self.script.streams.lock().unwrap()[index].responses = None;
    }
}

impl Drop for XdsServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl OpenedStream {
    fn send(&mut self, response: DiscoveryResponse) {
        if let Some(responses) = &self.responses {
            // Fails only if the client has gone.
            let _ = responses.send(Ok(response.clone()));
        }
        self.last_response = Some(response);
    }
}

impl Script {
    fn take(&self, index: usize, request: DiscoveryRequest) {
        let mut streams = self.streams.lock().unwrap();
        // A stopped server has none.
        let Some(stream) = streams.get_mut(index) else { return };
        let is_refusal = request.error_detail.is_some();
        stream.requests.push(ReceivedRequest { at: Instant::now(), request });
        if is_refusal
            && self.repeats_refused.load(Ordering::Relaxed)
            && let Some(last) = stream.last_response.clone()
        {
            stream.send(DiscoveryResponse { nonce: format!("{}+", last.nonce), ..last });
        }
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Script {
    type StreamAggregatedResourcesStream = BoxStream<'static, Result<DiscoveryResponse, Status>>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let (responses, mut queued) = mpsc::unbounded_channel();
        let headers = request.metadata().clone();
        let opened = OpenedStream { headers, requests: Vec::new(), responses: Some(responses), last_response: None };
        let index = {
            let mut streams = self.streams.lock().unwrap();
            streams.push(opened);
            streams.len() - 1
        };
        let (script, mut requests) = (self.clone(), request.into_inner());
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                script.take(index, request);
            }
        });
        let responses = futures_util::stream::poll_fn(move |context| queued.poll_recv(context));
        Ok(Response::new(responses.boxed()))
    }
}

fn server_config(tls: &ServerTls) -> ServerConfig {
    let path = |name: &str| tls.directory.join(name);
    let certificates = |name: &str| {
        let found = CertificateDer::pem_file_iter(path(name)).expect("there is a certificate");
        found.collect::<Result<Vec<_>, _>>().expect("the certificates are PEM")
    };
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates("ca.crt"));
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
    let config = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
    let config = config.expect("there is TLS 1.3").with_client_cert_verifier(clients.expect("there is an authority"));
    let key = PrivateKeyDer::from_pem_file(path("server.key")).expect("there is a key");
    let mut config = config.with_single_cert(certificates("server.crt"), key).expect("the key fits");
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

/// A resource.
pub fn resource(config: &RateLimitConfig) -> Any {
    Any { type_url: TYPE_URL.to_owned(), value: config.encode_to_vec() }
}

/// A resource with one descriptor for each key, limited per day.
pub fn daily(domain: &str, limits: &[(&str, u32)]) -> RateLimitConfig {
    let limit = |(key, requests): &(&str, u32)| limited(key, RateLimitUnit::Day, *requests);
    RateLimitConfig {
        name: domain.to_owned(),
        domain: domain.to_owned(),
        descriptors: limits.iter().map(limit).collect(),
    }
}

/// A descriptor with a limit.
pub fn limited(key: &str, unit: RateLimitUnit, requests_per_unit: u32) -> RateLimitDescriptor {
    let policy = RateLimitPolicy { unit: unit.into(), requests_per_unit, ..RateLimitPolicy::default() };
    RateLimitDescriptor { key: key.to_owned(), rate_limit: Some(policy), ..RateLimitDescriptor::default() }
}
