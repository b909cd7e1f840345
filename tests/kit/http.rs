//! An HTTP/1.1 client that sends and returns headers as unchanged bytes, including duplicates.
//!
//! One request per connection, from any loopback address. Conveniences of libraries (encoding, merging of headers,
//! redirects, retries, pools) are deliberately absent: the suites test exactly those bytes.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use socket2::{Domain, Socket, Type};

use super::PATIENCE;

/// A request that is not sent yet.
#[derive(Clone, Debug)]
pub struct Request {
    port: u16,
    source: Ipv4Addr,
    /// Request line and headers so far, each with its line end.
    head: Vec<u8>,
    body: Vec<u8>,
}

/// A GET for `path` (sent as given) to a port of 127.0.0.1.
pub fn get(port: u16, path: &str) -> Request {
    request("GET", port, path)
}

/// A POST of `body` to `path` (sent as given) at a port of 127.0.0.1.
pub fn post(port: u16, path: &str, body: impl Into<Vec<u8>>) -> Request {
    let body = body.into();
    let length = body.len().to_string();
    Request { body, ..request("POST", port, path).header("content-length", length) }
}

/// A request without a body.
pub fn request(method: &str, port: u16, path: &str) -> Request {
    let head = format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n").into_bytes();
    Request { port, source: Ipv4Addr::LOCALHOST, head, body: Vec::new() }
}

impl Request {
    /// Adds a header; the value may be any bytes.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.head.extend_from_slice(name.as_bytes());
        self.head.extend_from_slice(b": ");
        self.head.extend_from_slice(value.as_ref());
        self.head.extend_from_slice(b"\r\n");
        self
    }

    /// Uses another method.
    pub fn method(mut self, method: &str) -> Self {
        let rest = self.head.iter().position(|byte| *byte == b' ').expect("the method ends with a blank");
        self.head.splice(..rest, method.bytes());
        self
    }

    /// Names another host.
    pub fn host(mut self, host: &str) -> Self {
        let line = format!("host: 127.0.0.1:{}", self.port);
        let at = self.head.windows(line.len()).position(|window| window == line.as_bytes()).expect("it names a host");
        self.head.splice(at..at + line.len(), format!("host: {host}").into_bytes());
        self
    }

    /// Sends from 127.0.0.`last` instead of 127.0.0.1.
    pub fn from(mut self, last: u8) -> Self {
        self.source = Ipv4Addr::new(127, 0, 0, last);
        self
    }

    /// Sends the request and reads the whole response; panics without one.
    pub fn send(&self) -> Response {
        self.try_send().unwrap_or_else(|error| panic!("no answer from port {}: {error}", self.port))
    }

    /// Sends the request and reads the whole response.
    pub fn try_send(&self) -> io::Result<Response> {
        let mut stream = connect(self.port, self.source)?;
        // In one write: a server that rejects the head would reset the connection when the body comes later.
        stream.write_all(&[&self.head, &b"\r\n"[..], &self.body].concat())?;
        let mut response = Vec::new();
        stream.read_to_end(&mut response)?;
        Response::parse(&response, self.head.starts_with(b"HEAD "))
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, String::from_utf8_lossy(&response).into_owned()))
    }
}

/// Connects from `source` to a port of 127.0.0.1; reads on the stream end after [`PATIENCE`].
pub fn connect(port: u16, source: Ipv4Addr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((source, 0)).into())?;
    socket.connect(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into())?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket.into())
}

/// Reads until the server closes or resets the connection; panics if it does neither.
pub fn read_until_closed(stream: &mut TcpStream) -> Vec<u8> {
    let mut words = Vec::new();
    match stream.read_to_end(&mut words) {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            panic!("the server keeps the connection open")
        }
        _ => words,
    }
}

/// A response.
#[derive(Clone)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Names and values as they came, in their order.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body, its transfer encoding undone.
    pub body: Vec<u8>,
}

impl Response {
    /// The values of all headers of that name, in their order.
    pub fn all(&self, name: &str) -> Vec<String> {
        let named = self.headers.iter().filter(|(own, _)| own.eq_ignore_ascii_case(name));
        named.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).collect()
    }

    /// The value of the only header of that name, `None` without one; panics if there are several.
    pub fn header(&self, name: &str) -> Option<String> {
        let mut values = self.all(name);
        assert!(values.len() <= 1, "{name} came {} times: {self:?}", values.len());
        values.pop()
    }

    /// The number in the only header of that name; panics if there is none.
    pub fn number(&self, name: &str) -> u64 {
        let value = self.header(name).unwrap_or_else(|| panic!("no {name} in {self:?}"));
        value.parse().unwrap_or_else(|_| panic!("{name} is no number: {value}"))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Reads a response; one to HEAD has no body, whatever its headers say.
    fn parse(response: &[u8], is_head: bool) -> Option<Self> {
        let (head, body) = split_at(response, b"\r\n\r\n")?;
        let mut lines = head.split(|&byte| byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        let status = std::str::from_utf8(lines.next()?).ok()?.split(' ').nth(1)?.parse().ok()?;
        let headers = lines.map(parse_header).collect::<Option<Vec<_>>>()?;
        let mut response = Self { status, headers, body: body.to_vec() };
        if !is_head && response.header("transfer-encoding").is_some_and(|encoding| encoding == "chunked") {
            response.body = join_chunks(body)?;
        }
        Some(response)
    }
}

/// Prints the response as received, so that failed assertions are readable.
impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status)?;
        for (name, value) in &self.headers {
            write!(f, "\n{name}: {}", value.escape_ascii())?;
        }
        write!(f, "\n\n{}", self.body.escape_ascii())
    }
}

fn parse_header(line: &[u8]) -> Option<(String, Vec<u8>)> {
    let (name, value) = split_at(line, b":")?;
    Some((String::from_utf8(name.to_vec()).ok()?, value.trim_ascii().to_vec()))
}

/// The data of the chunks; `None` if the last one is missing, so that a truncated response is not accepted.
fn join_chunks(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let (size, data) = split_at(rest, b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(size).ok()?, 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        body.extend_from_slice(data.get(..size)?);
        rest = data.get(size..)?.strip_prefix(b"\r\n")?;
    }
}

fn split_at<'a>(bytes: &'a [u8], separator: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = bytes.windows(separator.len()).position(|window| window == separator)?;
    Some((&bytes[..at], &bytes[at + separator.len()..]))
}
