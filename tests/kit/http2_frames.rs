//! HTTP/2 frame by frame, to send and to receive frames that client libraries hide.
//!
//! Settings and pings are acknowledged, as a peer must; everything else is left to the test.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};

use super::grpc::SHOULD_RATE_LIMIT;
use super::http;

/// Type of a DATA frame.
pub const DATA: u8 = 0;
/// Type of a HEADERS frame.
pub const HEADERS: u8 = 1;
/// Type of a PRIORITY frame.
pub const PRIORITY: u8 = 2;
/// Type of a RST_STREAM frame.
pub const RST_STREAM: u8 = 3;
/// Type of a SETTINGS frame.
pub const SETTINGS: u8 = 4;
/// Type of a PUSH_PROMISE frame.
pub const PUSH_PROMISE: u8 = 5;
/// Type of a PING frame.
pub const PING: u8 = 6;
/// Type of a GOAWAY frame.
pub const GOAWAY: u8 = 7;
/// Type of a WINDOW_UPDATE frame.
pub const WINDOW_UPDATE: u8 = 8;
/// Type of a CONTINUATION frame.
pub const CONTINUATION: u8 = 9;

/// Maximum length of a payload that every peer accepts.
pub const MAX_FRAME_BYTES: usize = 16_384;

/// Flag of an acknowledgement.
pub const ACK: u8 = 1;
/// Flag of the last frame of a message.
pub const END_STREAM: u8 = 1;
/// Flag of the last frame of the headers.
pub const END_HEADERS: u8 = 4;

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Type of the frame.
    pub kind: u8,
    /// Its flags.
    pub flags: u8,
    /// Number of its stream.
    pub stream: u32,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// A connection.
#[derive(Debug)]
pub struct Http2Connection {
    stream: TcpStream,
    /// The server's HPACK table has the headers of `ShouldRateLimit`.
    is_indexed: bool,
}

/// Headers of a call.
const fn call_headers<'a>(path: &'a str, authority: &'a str) -> [(&'static str, &'a str); 6] {
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
}

impl Http2Connection {
    /// Connects to a port of 127.0.0.1 and sends the connection preface.
    pub fn connect(port: u16) -> Self {
        Self::connect_from(port, Ipv4Addr::LOCALHOST)
    }

    /// Connects like `connect`, from another address of this machine.
    pub fn connect_from(port: u16, source: Ipv4Addr) -> Self {
        let stream = http::connect(port, source).expect("the listener accepts");
        let mut frames = Self { stream, is_indexed: false };
        frames.stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").expect("the server reads");
        frames.send(SETTINGS, 0, 0, b"").expect("the server reads");
        frames
    }

    /// Sends a frame.
    pub fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> io::Result<()> {
        self.stream.write_all(&frame(kind, flags, stream, payload))
    }

    /// Sends bytes, such as many frames at once.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Opens a call of `ShouldRateLimit`, its message still to come.
    pub fn call(&mut self, stream: u32, more_headers: &[(&str, &str)]) -> io::Result<()> {
        self.call_method(stream, SHOULD_RATE_LIMIT, more_headers)
    }

    /// Opens a call of a method by its path, its message still to come.
    pub fn call_method(&mut self, stream: u32, path: &str, more_headers: &[(&str, &str)]) -> io::Result<()> {
        self.open(stream, path, "tollkeeper", more_headers)
    }

    /// Opens a call of a method together with frames that follow, in one write.
    pub fn call_method_with(&mut self, stream: u32, path: &str, frames: &[u8]) -> io::Result<()> {
        let mut block = Vec::new();
        for (name, value) in call_headers(path, "tollkeeper") {
            put_literal(&mut block, LITERAL_WITHOUT_INDEXING, name, value);
        }
        self.send_bytes(&[&frame(HEADERS, END_HEADERS, stream, &block), frames].concat())
    }

    /// Opens a call of `ShouldRateLimit` with an `:authority`, its message still to come.
    pub fn call_to(&mut self, authority: &str, stream: u32) -> io::Result<()> {
        self.open(stream, SHOULD_RATE_LIMIT, authority, &[])
    }

    fn open(&mut self, stream: u32, path: &str, authority: &str, more_headers: &[(&str, &str)]) -> io::Result<()> {
        let mut block = Vec::new();
        for (name, value) in call_headers(path, authority).iter().chain(more_headers) {
            put_literal(&mut block, LITERAL_WITHOUT_INDEXING, name, value);
        }
        self.header_block(stream, &block)
    }

    /// Sends a header block, in CONTINUATION frames what does not fit into the first frame.
    pub fn header_block(&mut self, stream: u32, block: &[u8]) -> io::Result<()> {
        let mut fragments = block.chunks(MAX_FRAME_BYTES).peekable();
        let mut kind = HEADERS;
        while let Some(fragment) = fragments.next() {
            let flags = if fragments.peek().is_none() { END_HEADERS } else { 0 };
            self.send(kind, flags, stream, fragment)?;
            kind = CONTINUATION;
        }
        Ok(())
    }

    /// Opens a call like `call`, in a few bytes from the second on: the headers are in the server's HPACK table.
    pub fn call_indexed(&mut self, stream: u32) -> io::Result<()> {
        let mut block = Vec::new();
        if self.is_indexed {
            // The last literal has the index 62; the most significant bit marks an index.
            block.extend((62..68).rev().map(|index: u8| 0x80 | index));
        } else {
            for (name, value) in call_headers(SHOULD_RATE_LIMIT, "tollkeeper") {
                put_literal(&mut block, LITERAL_WITH_INDEXING, name, value);
            }
            self.is_indexed = true;
        }
        self.send(HEADERS, END_HEADERS, stream, &block)
    }

    /// The same connection, to send from another thread.
    pub fn try_clone(&self) -> Self {
        Self { stream: self.stream.try_clone().expect("a socket can be cloned"), is_indexed: self.is_indexed }
    }

    /// Sends a gRPC message frame: the stated length `stated_length`, then `bytes`.
    pub fn message(&mut self, stream: u32, stated_length: u32, bytes: &[u8], flags: u8) -> io::Result<()> {
        let mut payload = vec![0];
        payload.extend(stated_length.to_be_bytes());
        payload.extend(bytes);
        self.send(DATA, flags, stream, &payload)
    }

    /// Next frame except SETTINGS, PING and WINDOW_UPDATE; `None` once the server has closed.
    #[expect(clippy::should_implement_trait, reason = "a loop over frames would wait for the end of the connection")]
    pub fn next(&mut self) -> Option<Frame> {
        loop {
            let mut head = [0; 9];
            self.stream.read_exact(&mut head).ok()?;
            let [a, b, c, kind, flags, stream @ ..] = head;
            let mut payload = vec![0; usize::try_from(u32::from_be_bytes([0, a, b, c])).expect("24 bits")];
            self.stream.read_exact(&mut payload).ok()?;
            match kind {
                SETTINGS if flags & ACK == 0 => self.send(SETTINGS, ACK, 0, b"").ok()?,
                PING if flags & ACK == 0 => self.send(PING, ACK, 0, &payload).ok()?,
                SETTINGS | PING | WINDOW_UPDATE => {}
                _ => return Some(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload }),
            }
        }
    }
}

/// The bytes of a frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a frame is short").to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

const LITERAL_WITHOUT_INDEXING: u8 = 0;
const LITERAL_WITH_INDEXING: u8 = 0x40;

/// An HPACK literal, neither string compressed.
fn put_literal(block: &mut Vec<u8>, kind: u8, name: &str, value: &str) {
    block.push(kind);
    for text in [name, value] {
        put_length(block, text.len());
        block.extend(text.as_bytes());
    }
}

/// Appends the length of an HPACK string: seven bits, and the rest in further bytes of seven.
pub fn put_length(block: &mut Vec<u8>, length: usize) {
    let byte = |number: usize| u8::try_from(number).expect("it is less than 256");
    if length < 127 {
        return block.push(byte(length));
    }
    block.push(127);
    let mut rest = length - 127;
    while rest >= 128 {
        block.push(byte(rest % 128 + 128));
        rest /= 128;
    }
    block.push(byte(rest));
}
