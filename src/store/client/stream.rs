//! Byte streams to servers: TCP, TLS and unix sockets.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use crate::settings::endpoint::Endpoint;

/// Time after which the kernel closes a connection with unacknowledged data.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(5);

/// Byte stream to a server.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// Connects to a server, over TLS if `tls` is given; a unix socket has no TLS.
///
/// # Errors
/// The server cannot be reached, or the TLS handshake fails.
pub(crate) async fn open(endpoint: &Endpoint, tls: Option<ClientConfig>) -> io::Result<Box<dyn Stream>> {
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
