//! Opening of connections: TCP, TLS and unix sockets within a time, and the explanation of failures.
//!
//! An error of connecting has a kind for decisions, and a text for operators that names the setting to check.
//!
//! [`Network`] is the only thing here that opens sockets; a simulation replaces it.
//!
//! Decides: TLS to a server: server name (SNI), words about TLS on one side only.
//! Decides: TCP_USER_TIMEOUT that replaces a dead connection.

use std::fmt::{self, Display};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::pipeline::{ByteStream, ClosedReceiver};
use crate::base::clock::Clock;
use crate::settings::address::Endpoint;

/// Connection that is ready for commands.
#[derive(Debug)]
pub(crate) struct Connected<C> {
    pub(crate) connection: C,
    /// Receives the reason once the connection is closed.
    pub(crate) closed: ClosedReceiver,
}

/// Server that a connection is opened to.
#[derive(Clone, Copy)]
pub(crate) struct ServerToConnect<'s> {
    pub(crate) network: &'s Network,
    pub(crate) endpoint: &'s Endpoint,
    pub(crate) uses_tls: bool,
}

/// Advice for connections to one kind of server.
pub(crate) struct TlsFailureDiagnosis {
    /// Names of the settings that advice about a failed TLS handshake mentions.
    pub(crate) tls_settings: TlsAdviceTexts,
    /// Command that the server answers in plaintext.
    pub(crate) plaintext_probe: PlaintextProbe,
    /// Error text if only the client uses TLS.
    pub(crate) server_lacks_tls: &'static str,
    /// Error text if only the server uses TLS.
    pub(crate) server_needs_tls: &'static str,
}

impl TlsFailureDiagnosis {
    /// Runs `open` for at most `limit`. Explains a failure that comes of a difference in TLS.
    pub(crate) async fn connect_or_diagnose<T, K: CallErrorKind>(
        &self,
        server: ServerToConnect<'_>,
        limit: Duration,
        open: impl Future<Output = Result<T, ConnectError<K>>>,
    ) -> Result<T, ConnectError<K>> {
        let late = || Err(ConnectError { kind: K::TIMEOUT, text: "no answer in time".to_owned() });
        match timeout(limit, open).await.unwrap_or_else(|_| late()) {
            // A server with the other protocol closes the connection or waits for more, which looks like an outage.
            Err(error) if error.kind == K::TIMEOUT || error.kind == K::BROKEN_CONNECTION => {
                let advice = match detect_tls_mismatch(server, &self.plaintext_probe).await {
                    None => return Err(error),
                    Some(TlsMismatch::ServerLacksTls) => self.server_lacks_tls,
                    Some(TlsMismatch::ServerNeedsTls) => self.server_needs_tls,
                };
                Err(ConnectError::misconfigured(advice.to_owned()))
            }
            outcome => outcome,
        }
    }

    /// Returns the error for a failed socket or TLS handshake. `name_advice` is the advice if the server's certificate
    /// has other names; `None`: that of the configured address.
    pub(crate) fn socket_error<K: CallErrorKind>(
        &self,
        error: &io::Error,
        uses_tls: bool,
        name_advice: Option<String>,
    ) -> ConnectError<K> {
        let text = io_error_text(error);
        let advice = name_advice.filter(|_| has_other_names(error));
        match advice.or_else(|| self.tls_settings.handshake_failure_advice(error)).filter(|_| uses_tls) {
            Some(advice) => ConnectError::misconfigured(format!("the TLS handshake failed: {text}; {advice}")),
            None => ConnectError { kind: K::BROKEN_CONNECTION, text },
        }
    }
}

/// Reason of a failed call to one kind of server.
pub(crate) trait CallErrorKind: Copy + PartialEq + Display + Send + Sync + 'static {
    /// No reply arrived before the deadline.
    const TIMEOUT: Self;
    /// The connection closed before the reply.
    const BROKEN_CONNECTION: Self;
    /// The server or the connection needs other settings.
    const MISCONFIGURED: Self;

    /// Returns true if the error concerns the whole server, not one key or slot.
    fn concerns_whole_server(self) -> bool;

    /// Returns true if the error lasts until an operator changes a setting.
    fn is_misconfiguration(self) -> bool;

    /// Returns true if the server rejects the credentials.
    fn is_login_failure(self) -> bool {
        false
    }
}

/// Reason why a server cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct ConnectError<K> {
    pub(crate) kind: K,
    /// Text for logs and health pages, free of secrets.
    pub(crate) text: String,
}

impl<K: CallErrorKind> ConnectError<K> {
    /// Creates an error that an operator must fix.
    pub(crate) const fn misconfigured(text: String) -> Self {
        Self { kind: K::MISCONFIGURED, text }
    }
}

/// What a process has of its machine. A simulation has a host for each of its processes.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// Wall clock.
    pub clock: Clock,
    /// Network.
    pub network: Network,
}

/// Opens connections to servers: sockets, or the links of a simulation.
#[derive(Clone, Default)]
pub struct Network(Option<Arc<dyn Dial>>);

/// Network of a simulation.
pub trait Dial: Send + Sync {
    /// Connects to a server as [`TcpStream::connect`] does.
    fn dial(&self, endpoint: &Endpoint) -> DialOutcome;
}

/// Connection that opens, or the reason why there is none.
pub type DialOutcome = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

impl Network {
    /// Creates a network whose connections `dial` opens, in plaintext.
    pub fn simulated(dial: Arc<dyn Dial>) -> Self {
        Self(Some(dial))
    }

    /// Connects to a server, over TLS if `tls` is given; a unix socket has no TLS.
    ///
    /// # Errors
    /// The server cannot be reached, or the TLS handshake fails.
    pub(crate) async fn connect(
        &self,
        endpoint: &Endpoint,
        tls: Option<ClientConfig>,
    ) -> io::Result<Box<dyn ByteStream>> {
        match &self.0 {
            Some(simulated) => simulated.dial(endpoint).await,
            None => connect_to_endpoint(endpoint, tls).await,
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "simulated" } else { "sockets" })
    }
}

/// Time after which the kernel closes a connection with unacknowledged data.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(5);

/// Connects to a server, over TLS if `tls` is given; a unix socket has no TLS.
///
/// # Errors
/// The server cannot be reached, or the TLS handshake fails.
async fn connect_to_endpoint(endpoint: &Endpoint, tls: Option<ClientConfig>) -> io::Result<Box<dyn ByteStream>> {
    let (host, port) = match endpoint {
        Endpoint::Tcp { host, port } => (host, *port),
        Endpoint::Unix(path) => return Ok(Box::new(UnixStream::connect(path).await?)),
    };
    let stream = TcpStream::connect((&**host, port)).await?;
    stream.set_nodelay(true)?;
    #[cfg(target_os = "linux")]
    SockRef::from(&stream).set_tcp_user_timeout(Some(TCP_USER_TIMEOUT))?;
    match tls {
        None => Ok(Box::new(stream)),
        Some(config) => {
            // A name in DNS may end in a dot, and a name in a certificate never does.
            let name = ServerName::try_from(host.trim_end_matches('.').to_owned()).map_err(io::Error::other)?;
            Ok(Box::new(TlsConnector::from(Arc::new(config)).connect(name, stream).await?))
        }
    }
}

/// Returns the text of an I/O error without the number of the OS error.
pub(crate) fn io_error_text(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Returns true if the handshake failed because the server's certificate has other names.
fn has_other_names(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    error.is_some_and(|error| format!("{error:?}").contains("NotValidForName"))
}

/// Texts of which the advice on a failed TLS handshake of one client is made.
pub(crate) struct TlsAdviceTexts {
    /// Start of the names: `REDIS` in `REDIS_TLS_CACERT`.
    pub(crate) prefix: &'static str,
    /// Setting that holds the addresses of the servers, such as `REDIS_URL`.
    pub(crate) address: &'static str,
    /// Instruction for connecting without TLS, such as `unset MEMCACHE_TLS`.
    pub(crate) plaintext: &'static str,
    /// Name of the server program: `Redis` or `memcached`.
    pub(crate) server: &'static str,
}

impl TlsAdviceTexts {
    /// Returns the advice if `error` is a failed handshake.
    pub(crate) fn handshake_failure_advice(&self, error: &io::Error) -> Option<String> {
        let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
        let Self { prefix, address, plaintext, server } = self;
        let name = format!("{error:?}");
        let is = |kind: &str| name.contains(kind);
        Some(if is("NotValidForName") {
            let check = format!("{prefix}_TLS_SKIP_HOSTNAME_VERIFICATION=true skips this check");
            format!("the host in {address} is not a name of the server's certificate; {check}")
        } else if is("InvalidCertificate") {
            format!("{prefix}_TLS_CACERT names the authorities that are trusted")
        } else if is("CertificateRequired") {
            format!("{prefix}_TLS_CLIENT_CERT and {prefix}_TLS_CLIENT_KEY name the certificate to show")
        } else if is("AlertReceived") {
            format!("does the server accept the certificate of {prefix}_TLS_CLIENT_CERT?")
        } else if is("InvalidMessage") {
            format!("does the server speak TLS? If not, {plaintext}")
        } else if is("PeerIncompatible") {
            "the server offers neither TLS 1.2 nor 1.3 as is needed".to_owned()
        } else if is("PeerMisbehaved") {
            format!("is the server a {server}?")
        } else {
            format!("look at {prefix}_TLS_CACERT")
        })
    }
}

/// Upper bound on the probe that finds whether the server speaks TLS.
const TLS_PROBE_TIMEOUT: Duration = Duration::from_millis(200);

/// ClientHello without contents.
const INVALID_TLS_HELLO: &[u8] = &[0x16, 3, 1, 0, 4, 1, 0, 0, 0];
/// First byte of a TLS alert.
const TLS_ALERT_BYTE: u8 = 0x15;

/// Command that a server answers in plaintext.
pub(crate) struct PlaintextProbe {
    /// The command.
    pub(crate) command: &'static [u8],
    /// Bytes that a reply may start with.
    pub(crate) replies: &'static [u8],
}

/// Difference between the client and the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TlsMismatch {
    /// Only the client uses TLS.
    ServerLacksTls,
    /// Only the server uses TLS.
    ServerNeedsTls,
}

/// Finds out if a server uses TLS and the client does not, or the reverse; `None` if that is not the reason.
///
/// Such a server closes the connection or waits for more bytes, which looks like an outage. The probe opens a separate
/// connection and sends bytes that hold no secret and that only the other protocol answers: a command in plaintext, or
/// an invalid ClientHello, which a TLS server answers with an alert.
async fn detect_tls_mismatch(server: ServerToConnect<'_>, plaintext: &PlaintextProbe) -> Option<TlsMismatch> {
    let ServerToConnect { network, endpoint, uses_tls } = server;
    let Endpoint::Tcp { .. } = endpoint else { return None };
    let probe = if uses_tls { plaintext.command } else { INVALID_TLS_HELLO };
    let first = timeout(TLS_PROBE_TIMEOUT, probe_first_reply_byte(network, endpoint, probe)).await.ok()??;
    match (uses_tls, first) {
        (true, byte) if plaintext.replies.contains(&byte) => Some(TlsMismatch::ServerLacksTls),
        (false, TLS_ALERT_BYTE) => Some(TlsMismatch::ServerNeedsTls),
        _ => None,
    }
}

/// Sends `probe` over a new plaintext connection, and returns the first byte of the reply.
async fn probe_first_reply_byte(network: &Network, endpoint: &Endpoint, probe: &[u8]) -> Option<u8> {
    let mut stream = network.connect(endpoint, None).await.ok()?;
    stream.write_all(probe).await.ok()?;
    stream.read_u8().await.ok()
}
