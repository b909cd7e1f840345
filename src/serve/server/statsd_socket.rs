//! Socket to a statsd server, opened when it is first used and again after an error.

use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _, UdpSocket};
use std::time::Duration;

use crate::settings::choices::StatsdTransport;

/// Socket to one server. Blocks for at most [`IO_TIMEOUT`] per call.
#[derive(Debug)]
pub(super) struct StatsdSocket {
    host: String,
    port: u16,
    transport: StatsdTransport,
    open: Option<OpenSocket>,
}

#[derive(Debug)]
enum OpenSocket {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

/// Maximum time to connect, and to write a packet.
const IO_TIMEOUT: Duration = Duration::from_secs(1);

impl StatsdSocket {
    /// Socket to `host:port`; resolves and opens nothing yet.
    pub(super) fn new(host: String, port: u16, transport: StatsdTransport) -> Self {
        Self { host, port, transport, open: None }
    }

    /// Address of the server: `host:port`.
    pub(super) fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// Sends a packet of lines.
    ///
    /// # Errors
    /// Errors of the system, after which the next call opens a new socket.
    pub(super) fn send(&mut self, packet: &str) -> io::Result<()> {
        let sent = match self.connected()? {
            OpenSocket::Tcp(stream) => stream.write_all(packet.as_bytes()),
            // In a datagram, line ends separate lines; the last line has none.
            OpenSocket::Udp(socket) => socket.send(packet.trim_end_matches('\n').as_bytes()).map(drop),
        };
        if sent.is_err() {
            self.open = None;
        }
        sent
    }

    fn connected(&mut self) -> io::Result<&mut OpenSocket> {
        let socket = match self.open.take() {
            Some(socket) => socket,
            None => self.connect()?,
        };
        Ok(self.open.insert(socket))
    }

    fn connect(&self) -> io::Result<OpenSocket> {
        let no_address = || io::Error::new(io::ErrorKind::NotFound, "the host resolves to no address");
        let address: SocketAddr = (self.host.as_str(), self.port).to_socket_addrs()?.next().ok_or_else(no_address)?;
        match self.transport {
            StatsdTransport::Tcp => {
                let stream = TcpStream::connect_timeout(&address, IO_TIMEOUT)?;
                stream.set_write_timeout(Some(IO_TIMEOUT))?;
                Ok(OpenSocket::Tcp(stream))
            }
            StatsdTransport::Udp => {
                let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(any)?;
                socket.set_write_timeout(Some(IO_TIMEOUT))?;
                socket.connect(address)?;
                Ok(OpenSocket::Udp(socket))
            }
        }
    }
}
