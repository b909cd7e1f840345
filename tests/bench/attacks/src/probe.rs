//! Probes: one call each 100 ms on a connection of its own, and its worst latency.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::frames::*;

const INTERVAL: Duration = Duration::from_millis(100);
/// Time after which a probe counts as failed.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Results of a probe.
#[derive(Default)]
pub struct ProbeResult {
    pub sent: u64,
    pub failed: u64,
    pub worst: Duration,
}

/// A probe in a thread.
pub struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<ProbeResult>,
}

impl Probe {
    /// Probes a method until it is stopped.
    pub fn start(address: SocketAddr, path: &'static str, message: Vec<u8>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let (mut result, mut client) = (ProbeResult::default(), None);
            while !stopped.load(Ordering::Relaxed) {
                let begun = Instant::now();
                if let Err(_error) = call(&mut client, address, path, &message) {
                    client = None;
                    result.failed += 1;
                }
                let took = begun.elapsed();
                result.sent += 1;
                result.worst = result.worst.max(took);
                thread::sleep(INTERVAL.saturating_sub(took));
            }
            result
        });
        Self { stop, thread }
    }

    /// Stops the probe after its last call.
    pub fn stop(self) -> ProbeResult {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a probe does not panic")
    }
}

/// One call; an error unless it is answered with grpc-status 0.
pub fn call(client: &mut Option<(Connection, u32)>, address: SocketAddr, path: &str, message: &[u8]) -> io::Result<()> {
    if client.is_none() {
        *client = Some((Connection::open(Ipv4Addr::LOCALHOST, address, b"")?, 1));
    }
    let Some((connection, next)) = client else { return Err(ErrorKind::NotConnected.into()) };
    let stream = *next;
    *next += 2;
    let head = frame(HEADERS, END_HEADERS, stream, &header_block(path, &[]));
    let data = frame(DATA, END_STREAM, stream, &grpc_message(false, message));
    connection.send(&[head, data].concat())?;
    let begun = Instant::now();
    let mut has_message = false;
    while begun.elapsed() < TIMEOUT {
        for received in connection.receive(TIMEOUT.saturating_sub(begun.elapsed()))? {
            if received.stream != stream {
                continue;
            }
            has_message |= received.kind == DATA && received.payload.len() > 5;
            if received.flags & END_STREAM != 0 || received.kind == RST_STREAM {
                return if has_message { Ok(()) } else { Err(ErrorKind::Other.into()) };
            }
        }
    }
    Err(ErrorKind::TimedOut.into())
}
