//! Connections of the load: gRPC over bare HTTP/2, so that the load costs the machine little beside what it measures.

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
use tonic::Code;

use crate::pb::codec::{FRAME_HEAD_BYTES, frame};
use crate::pb::{METHOD_PATH, RateLimitRequest, RateLimitResponse};
use crate::settings::target::Target;

/// Where the server is, and how to speak to it.
#[derive(Clone)]
pub struct Dial {
    /// Its gRPC listener.
    pub target: Target,
    /// With TLS: how, and the name on its certificate.
    pub tls: Option<(Arc<rustls::ClientConfig>, ServerName<'static>)>,
    /// How long a call may take, a connection too. The server is told so.
    pub timeout: Duration,
}

/// Why a call has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Nobody can be connected to.
    #[error("can not be reached: {0}")]
    Unreachable(String),
    /// None came in time.
    #[error("no answer within the timeout")]
    Late,
    /// The connection is of no more use.
    #[error("connection: {0}")]
    Connection(String),
    /// The server answered with an error.
    #[error("{0:?}: {1}")]
    Status(Code, String),
    /// What came is no answer.
    #[error("an answer that is none: {0}")]
    Answer(String),
}

/// A connection.
#[derive(Clone)]
pub struct GrpcConnection {
    requests: SendRequest<Bytes>,
    /// No other connection of this process has it.
    number: u64,
    uri: Uri,
    timeout: Duration,
    /// The timeout as gRPC writes it.
    deadline: http::HeaderValue,
}

/// Connections that this process opened.
static OPENED: AtomicU64 = AtomicU64::new(0);

impl Dial {
    /// Connects. It is done once the server has answered: one that speaks something else, or does not take our
    /// certificate, which TLS tells last of all, is found out here and not by every call.
    pub async fn connect(&self) -> Result<GrpcConnection, Failure> {
        let connected = timeout(self.timeout.max(Duration::from_secs(1)), self.open()).await;
        connected.map_err(|_| Failure::Unreachable("timed out".to_owned()))?
    }

    async fn open(&self) -> Result<GrpcConnection, Failure> {
        let away = |error: io::Error| Failure::Unreachable(error.to_string());
        let lost = |error: io::Error| Failure::Connection(error.to_string());
        match &self.target {
            Target::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(away)?;
                self.speak(stream, "localhost").await
            }
            Target::Tcp(address) => {
                let stream = TcpStream::connect(address).await.map_err(away)?;
                stream.set_nodelay(true).map_err(lost)?;
                match &self.tls {
                    None => self.speak(stream, address).await,
                    Some((config, name)) => {
                        let stream = TlsConnector::from(Arc::clone(config)).connect(name.clone(), stream).await;
                        self.speak(stream.map_err(lost)?, address).await
                    }
                }
            }
        }
    }

    async fn speak<S>(&self, stream: S, authority: &str) -> Result<GrpcConnection, Failure>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 24);
        let (requests, mut connection) = builder.handshake(stream).await.map_err(lost)?;
        let mut pings = connection.ping_pong().ok_or_else(|| Failure::Connection("no ping can be sent".to_owned()))?;
        tokio::select! {
            biased;
            // Why it ended says more than why there is no answer.
            ended = &mut connection => {
                ended.map_err(lost)?;
                return Err(Failure::Connection("closed by the server".to_owned()));
            }
            answered = pings.ping(Ping::opaque()) => { answered.map_err(lost)?; }
        }
        // How it ends, each call on it is told.
        tokio::spawn(connection);
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let bad = |error: &dyn std::fmt::Display| Failure::Connection(error.to_string());
        let uri = Uri::builder().scheme(scheme).authority(authority).path_and_query(METHOD_PATH).build();
        let deadline = format!("{}u", self.timeout.as_micros()).try_into();
        Ok(GrpcConnection {
            requests,
            number: OPENED.fetch_add(1, Ordering::Relaxed),
            uri: uri.map_err(|error| bad(&error))?,
            timeout: self.timeout,
            deadline: deadline.map_err(|error: http::header::InvalidHeaderValue| bad(&error))?,
        })
    }
}

impl GrpcConnection {
    /// Whether both are handles of one connection.
    pub fn is_same(&self, other: &Self) -> bool {
        self.number == other.number
    }

    /// Asks.
    pub async fn call(&self, request: &RateLimitRequest) -> Result<RateLimitResponse, Failure> {
        timeout(self.timeout, self.exchange(frame(request))).await.unwrap_or(Err(Failure::Late))
    }

    async fn exchange(&self, frame: Bytes) -> Result<RateLimitResponse, Failure> {
        let mut head = Request::post(self.uri.clone()).body(()).map_err(|error| Failure::Answer(error.to_string()))?;
        let headers = head.headers_mut();
        headers.insert("content-type", http::HeaderValue::from_static("application/grpc"));
        headers.insert("te", http::HeaderValue::from_static("trailers"));
        headers.insert("grpc-timeout", self.deadline.clone());
        let mut requests = self.requests.clone().ready().await.map_err(lost)?;
        let (answer, mut body) = requests.send_request(head, false).map_err(lost)?;
        body.send_data(frame, true).map_err(lost)?;
        let (head, mut body) = answer.await.map_err(lost)?.into_parts();
        if !head.status.is_success() {
            return Err(Failure::Answer(format!("HTTP status {}", head.status)));
        }
        // An error may come without a message, in the head.
        status(&head.headers)?;
        let message = read(&mut body).await?;
        match body.trailers().await.map_err(lost)? {
            Some(trailers) => status(&trailers)?,
            None => return Err(Failure::Answer("it has no trailers".to_owned())),
        }
        let bytes = match message.split_at_checked(FRAME_HEAD_BYTES) {
            Some(([0, ..], bytes)) => bytes,
            Some(_) => return Err(Failure::Answer("it is compressed, and nobody asked for that".to_owned())),
            None => return Err(Failure::Answer("it has no message".to_owned())),
        };
        RateLimitResponse::decode(bytes).map_err(|error| Failure::Answer(error.to_string()))
    }
}

/// The largest answer that is read, in bytes.
const MOST_ANSWER_BYTES: usize = 4 << 20;

async fn read(body: &mut RecvStream) -> Result<Vec<u8>, Failure> {
    let mut message = Vec::with_capacity(64);
    while let Some(data) = body.data().await {
        let data = data.map_err(lost)?;
        body.flow_control().release_capacity(data.len()).map_err(lost)?;
        message.extend_from_slice(&data);
        if message.len() > MOST_ANSWER_BYTES {
            return Err(Failure::Answer(format!("more than {MOST_ANSWER_BYTES} bytes")));
        }
    }
    Ok(message)
}

/// An error, if headers or trailers tell of one.
fn status(headers: &HeaderMap) -> Result<(), Failure> {
    let Some(code) = headers.get("grpc-status") else { return Ok(()) };
    match Code::from_bytes(code.as_bytes()) {
        Code::Ok => Ok(()),
        code => {
            let message = headers.get("grpc-message").map(|message| String::from_utf8_lossy(message.as_bytes()));
            Err(Failure::Status(code, message.unwrap_or_default().into_owned()))
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn lost(error: h2::Error) -> Failure {
    Failure::Connection(error.to_string())
}
