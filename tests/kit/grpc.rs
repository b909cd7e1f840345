//! A blocking gRPC client for the service, for health checks, and for invalid messages.

use std::path::Path;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes};
use tokio::runtime::{self, Runtime};
use tollkeeper::base::pb::rate_limit_descriptor::Entry;
use tollkeeper::base::pb::rate_limit_service_client::RateLimitServiceClient;
use tollkeeper::base::pb::{RateLimitDescriptor, RateLimitRequest, RateLimitResponse};
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response};

use super::PATIENCE;

/// The service's only method.
pub const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A request for one descriptor of these entries.
pub fn rate_limit_request(domain: &str, entries: &[(&str, &str)]) -> RateLimitRequest {
    RateLimitRequest { domain: domain.to_owned(), descriptors: vec![descriptor(entries)], hits_addend: 0 }
}

/// A descriptor of these entries.
pub fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry {
        key: Bytes::copy_from_slice(key.as_bytes()),
        value: Bytes::copy_from_slice(value.as_bytes()),
    };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

/// A connection; no call waits longer than [`PATIENCE`].
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    channel: Channel,
}

impl Client {
    /// Connects to a port of 127.0.0.1.
    pub fn connect(port: u16) -> Self {
        Self::to(format!("http://127.0.0.1:{port}"))
    }

    /// Connects to a unix socket.
    pub fn connect_unix(path: &Path) -> Self {
        Self::to(format!("unix:{}", path.display()))
    }

    /// Connects to a port of `localhost` over TLS.
    ///
    /// The client trusts the authorities in the file `ca`. If a name is given, it presents `NAME.crt` from the same
    /// directory.
    pub fn connect_tls(port: u16, ca: &Path, name: Option<&str>) -> Self {
        let pem = |path: &Path| std::fs::read(path).expect("the certificate is there");
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem(ca)));
        if let Some(name) = name {
            let of = |ending: &str| pem(&ca.with_file_name(format!("{name}.{ending}")));
            tls = tls.identity(Identity::from_pem(of("crt"), of("key")));
        }
        let endpoint = Endpoint::from_shared(format!("https://localhost:{port}")).expect("the target is valid");
        Self::by(endpoint.tls_config(tls).expect("the certificates are valid"))
    }

    fn to(target: String) -> Self {
        Self::by(Endpoint::from_shared(target).expect("the target is valid"))
    }

    fn by(endpoint: Endpoint) -> Self {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
        let endpoint = endpoint.timeout(PATIENCE);
        let channel = runtime.block_on(endpoint.connect()).expect("the server accepts");
        Self { runtime, channel }
    }

    /// Calls `ShouldRateLimit`.
    pub fn call(&self, request: &RateLimitRequest) -> Result<RateLimitResponse, Status> {
        let mut client = RateLimitServiceClient::new(self.channel.clone());
        Ok(self.runtime.block_on(client.should_rate_limit(request.clone()))?.into_inner())
    }

    /// Calls `ShouldRateLimit` with these headers.
    pub fn call_with_headers(
        &self,
        request: &RateLimitRequest,
        headers: &[(&'static str, &str)],
    ) -> Result<RateLimitResponse, Status> {
        let mut client = RateLimitServiceClient::new(self.channel.clone());
        let mut request = Request::new(request.clone());
        for (name, value) in headers {
            request.metadata_mut().append(*name, value.parse().expect("the value is one"));
        }
        Ok(self.runtime.block_on(client.should_rate_limit(request))?.into_inner())
    }

    /// Calls `ShouldRateLimit`, and cancels the call once `when` returns true.
    pub fn call_until(&self, request: &RateLimitRequest, when: impl Fn() -> bool) {
        let mut client = RateLimitServiceClient::new(self.channel.clone());
        self.runtime.block_on(async {
            let mut call = std::pin::pin!(client.should_rate_limit(request.clone()));
            while tokio::time::timeout(Duration::from_millis(10), &mut call).await.is_err() {
                if when() {
                    break;
                }
            }
        });
        // The connection's task must run once to send the cancellation.
        self.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(10)).await });
    }

    /// Calls `ShouldRateLimit` with a compressed message.
    pub fn call_compressed(&self, request: &RateLimitRequest) -> Result<RateLimitResponse, Status> {
        let client = RateLimitServiceClient::new(self.channel.clone());
        let mut client = client.send_compressed(CompressionEncoding::Gzip);
        Ok(self.runtime.block_on(client.should_rate_limit(request.clone()))?.into_inner())
    }

    /// Makes several calls at once, each with the same deadline.
    pub fn call_concurrently(
        &self,
        request: &RateLimitRequest,
        count: usize,
        timeout: Duration,
    ) -> Vec<Result<RateLimitResponse, Status>> {
        self.runtime.block_on(async {
            let mut calls = tokio::task::JoinSet::new();
            for _ in 0..count {
                let mut client = RateLimitServiceClient::new(self.channel.clone());
                let mut request = Request::new(request.clone());
                request.set_timeout(timeout);
                calls.spawn(async move { Ok(client.should_rate_limit(request).await?.into_inner()) });
            }
            calls.join_all().await
        })
    }

    /// Sends `message` unchanged to a method; returns the bytes of the response.
    pub fn call_raw(&self, method: &'static str, message: impl Into<Bytes>) -> Result<Bytes, Status> {
        let mut client = tonic::client::Grpc::new(self.channel.clone());
        let (method, message) = (PathAndQuery::from_static(method), Request::new(message.into()));
        let call = async {
            client.ready().await.map_err(|error| Status::unknown(error.to_string()))?;
            client.unary(message, method, Raw).await
        };
        Ok(self.runtime.block_on(call)?.into_inner())
    }

    /// True if the service of that name reports that it is serving.
    pub fn is_serving(&self, service: &str) -> Result<bool, Status> {
        let mut client = HealthClient::new(self.channel.clone());
        let request = HealthCheckRequest { service: service.to_owned() };
        let response = self.runtime.block_on(client.check(request))?.into_inner();
        Ok(response.status() == health_check_response::ServingStatus::Serving)
    }

    /// Watches the health of the empty name until the stream ends; returns the stream's error.
    ///
    /// `on_status` receives true for each status SERVING, false for the others.
    pub fn watch(&self, mut on_status: impl FnMut(bool)) -> Result<(), Status> {
        let mut client = HealthClient::new(self.channel.clone());
        self.runtime.block_on(async {
            let mut stream = client.watch(HealthCheckRequest::default()).await?.into_inner();
            while let Some(response) = stream.message().await? {
                on_status(response.status() == health_check_response::ServingStatus::Serving);
            }
            Ok(())
        })
    }
}

/// Codec that passes bytes unchanged.
#[derive(Clone, Copy, Debug)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
