//! Connections of the load: gRPC over plain HTTP/2, so that generating load takes little CPU on the machine.
//!
//! Decides: timeout of a call of `bench`, and what is an error.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Ping, RecvStream};
use http::{HeaderMap, Request, Uri};
use prost::Message as _;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tollkeeper::base::pb::codec::{GRPC_FRAME_HEAD_BYTES, encode_grpc_frame};
use tollkeeper::base::pb::{RATE_LIMIT_METHOD_PATH, RateLimitRequest, RateLimitResponse};
use tollkeeper::settings::address::ConnectAddress;
use tonic::Code;

/// Server under load, and access to it.
#[derive(Clone)]
pub struct BenchTarget {
    /// Address of the gRPC listener.
    pub target: ConnectAddress,
    /// TLS to the server; `None` means plaintext.
    pub tls: Option<BenchTls>,
    /// Time limit of a call or a connection attempt; calls send it as deadline.
    pub timeout: Duration,
}

/// TLS to the server under load.
#[derive(Clone)]
pub struct BenchTls {
    /// Configuration of the client.
    pub config: Arc<rustls::ClientConfig>,
    /// Name that the server's certificate must hold.
    pub server_name: ServerName<'static>,
}

/// Error of a call without a response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The server cannot be reached.
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    /// No response arrived in time.
    #[error("no response within the timeout")]
    Timeout,
    /// The connection failed.
    #[error("connection: {0}")]
    Connection(String),
    /// The server returned an error status.
    #[error("{0:?}: {1}")]
    Status(Code, String),
    /// The response is malformed.
    #[error("malformed response: {0}")]
    MalformedResponse(String),
}

/// A connection to the server, cheap to clone.
#[derive(Clone)]
pub struct BenchConnection {
    requests: SendRequest<Bytes>,
    /// Identifier, unique in this process.
    id: u64,
    uri: Uri,
    timeout: Duration,
    /// The timeout as a `grpc-timeout` header.
    grpc_timeout: http::HeaderValue,
}

/// Number of connections that this process has opened.
static OPENED_CONNECTIONS: AtomicU64 = AtomicU64::new(0);

impl BenchTarget {
    /// Connects, and waits for the answer to a ping.
    ///
    /// A server that speaks another protocol, or rejects the client certificate at the end of the TLS handshake, fails
    /// here and not in every call.
    pub async fn connect(&self) -> Result<BenchConnection, CallError> {
        let connected = timeout(self.timeout.max(Duration::from_secs(1)), self.connect_without_timeout()).await;
        connected.map_err(|_| CallError::Unreachable("timed out".to_owned()))?
    }

    async fn connect_without_timeout(&self) -> Result<BenchConnection, CallError> {
        let unreachable = |error: io::Error| CallError::Unreachable(error.to_string());
        let lost = |error: io::Error| CallError::Connection(error.to_string());
        match &self.target {
            ConnectAddress::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(unreachable)?;
                self.start_http2(stream, "localhost").await
            }
            ConnectAddress::Tcp(address) => {
                let stream = TcpStream::connect(address).await.map_err(unreachable)?;
                stream.set_nodelay(true).map_err(lost)?;
                match &self.tls {
                    None => self.start_http2(stream, address).await,
                    Some(BenchTls { config, server_name }) => {
                        let connector = TlsConnector::from(Arc::clone(config));
                        let stream = connector.connect(server_name.clone(), stream).await;
                        self.start_http2(stream.map_err(lost)?, address).await
                    }
                }
            }
        }
    }

    async fn start_http2<S>(&self, stream: S, authority: &str) -> Result<BenchConnection, CallError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 24);
        let (requests, mut connection) = builder.handshake(stream).await.map_err(to_connection_error)?;
        let mut pings = connection.ping_pong().ok_or_else(|| CallError::Connection("cannot send a ping".to_owned()))?;
        tokio::select! {
            biased;
            // The reason of the close is more useful than a missing ping answer.
            closed = &mut connection => {
                closed.map_err(to_connection_error)?;
                return Err(CallError::Connection("closed by the server".to_owned()));
            }
            pong = pings.ping(Ping::opaque()) => { pong.map_err(to_connection_error)?; }
        }
        // Each call on the connection gets the reason of its close.
        tokio::spawn(connection);
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let bad = |error: &dyn std::fmt::Display| CallError::Connection(error.to_string());
        let uri = Uri::builder().scheme(scheme).authority(authority).path_and_query(RATE_LIMIT_METHOD_PATH).build();
        let grpc_timeout = format!("{}u", self.timeout.as_micros()).try_into();
        Ok(BenchConnection {
            requests,
            id: OPENED_CONNECTIONS.fetch_add(1, Ordering::Relaxed),
            uri: uri.map_err(|error| bad(&error))?,
            timeout: self.timeout,
            grpc_timeout: grpc_timeout.map_err(|error: http::header::InvalidHeaderValue| bad(&error))?,
        })
    }
}

impl BenchConnection {
    /// Returns `true` if both are handles of one connection.
    pub fn is_same_connection(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// Sends a request and waits for its response.
    pub async fn call(&self, request: &RateLimitRequest) -> Result<RateLimitResponse, CallError> {
        timeout(self.timeout, self.call_without_timeout(encode_grpc_frame(request)))
            .await
            .unwrap_or(Err(CallError::Timeout))
    }

    async fn call_without_timeout(&self, frame: Bytes) -> Result<RateLimitResponse, CallError> {
        let mut head = Request::post(self.uri.clone())
            .body(())
            .map_err(|error| CallError::MalformedResponse(error.to_string()))?;
        let headers = head.headers_mut();
        headers.insert("content-type", http::HeaderValue::from_static("application/grpc"));
        headers.insert("te", http::HeaderValue::from_static("trailers"));
        headers.insert("grpc-timeout", self.grpc_timeout.clone());
        let mut requests = self.requests.clone().ready().await.map_err(to_connection_error)?;
        let (response, mut body) = requests.send_request(head, false).map_err(to_connection_error)?;
        body.send_data(frame, true).map_err(to_connection_error)?;
        let (head, mut body) = response.await.map_err(to_connection_error)?.into_parts();
        if !head.status.is_success() {
            return Err(CallError::MalformedResponse(format!("HTTP status {}", head.status)));
        }
        // A response without a message has its status in the headers.
        check_grpc_status(&head.headers)?;
        let message = read_response_body(&mut body).await?;
        match body.trailers().await.map_err(to_connection_error)? {
            Some(trailers) => check_grpc_status(&trailers)?,
            None => return Err(CallError::MalformedResponse("no trailers".to_owned())),
        }
        let bytes = match message.split_at_checked(GRPC_FRAME_HEAD_BYTES) {
            Some(([0, ..], bytes)) => bytes,
            Some(_) => return Err(CallError::MalformedResponse("unexpected compression".to_owned())),
            None => return Err(CallError::MalformedResponse("no message".to_owned())),
        };
        RateLimitResponse::decode(bytes).map_err(|error| CallError::MalformedResponse(error.to_string()))
    }
}

/// Maximum size of a response in bytes.
const MAX_RESPONSE_BYTES: usize = 4 << 20;

async fn read_response_body(body: &mut RecvStream) -> Result<Vec<u8>, CallError> {
    let mut message = Vec::with_capacity(64);
    while let Some(data) = body.data().await {
        let data = data.map_err(to_connection_error)?;
        body.flow_control().release_capacity(data.len()).map_err(to_connection_error)?;
        message.extend_from_slice(&data);
        if message.len() > MAX_RESPONSE_BYTES {
            return Err(CallError::MalformedResponse(format!("more than {MAX_RESPONSE_BYTES} bytes")));
        }
    }
    Ok(message)
}

/// Fails if headers or trailers carry an error status.
fn check_grpc_status(headers: &HeaderMap) -> Result<(), CallError> {
    let Some(code) = headers.get("grpc-status") else { return Ok(()) };
    match Code::from_bytes(code.as_bytes()) {
        Code::Ok => Ok(()),
        code => {
            let message = headers.get("grpc-message").map(|message| String::from_utf8_lossy(message.as_bytes()));
            Err(CallError::Status(code, message.unwrap_or_default().into_owned()))
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn to_connection_error(error: h2::Error) -> CallError {
    CallError::Connection(error.to_string())
}
