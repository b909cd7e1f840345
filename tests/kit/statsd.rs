//! A statsd server that keeps every received line, over UDP or TCP.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::SockRef;

use super::wait_for;

/// A server on a port of 127.0.0.1; it ends with the process, or soon after it is dropped.
#[derive(Debug)]
pub struct StatsdServer {
    port: u16,
    lines: Arc<Mutex<Vec<String>>>,
    /// Threads that read a TCP connection each, until it ends.
    connections: Arc<Mutex<Vec<JoinHandle<()>>>>,
    stopped: Arc<AtomicBool>,
}

/// Line that [`StatsdServer::flush`] and [`StatsdServer::join`] send themselves.
const LAST: &str = "the end";

/// A server over UDP on a port of the system's choice.
pub fn udp() -> StatsdServer {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback has free ports");
    // A large buffer, so that no packet of a burst is lost.
    SockRef::from(&socket).set_recv_buffer_size(4 << 20).expect("a buffer can be made larger");
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a socket can be told when to give up");
    let statsd = StatsdServer::at(socket.local_addr().expect("it is bound").port());
    let (lines, stopped) = (Arc::clone(&statsd.lines), Arc::clone(&statsd.stopped));
    thread::spawn(move || {
        let mut packet = vec![0; 65_536];
        while !stopped.load(Ordering::Relaxed) {
            let Ok(length) = socket.recv(&mut packet) else { continue };
            let text = String::from_utf8_lossy(&packet[..length]).into_owned();
            lines.lock().expect("no thread panicked with the lock").extend(text.split('\n').map(str::to_owned));
        }
    });
    statsd
}

/// A server over TCP on this port; 0: one of the system's choice.
pub fn tcp(port: u16) -> StatsdServer {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("the port is free");
    let statsd = StatsdServer::at(listener.local_addr().expect("it is bound").port());
    let (lines, connections) = (Arc::clone(&statsd.lines), Arc::clone(&statsd.connections));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let lines = Arc::clone(&lines);
            let reader = thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    lines.lock().expect("no thread panicked with the lock").push(line);
                }
            });
            connections.lock().expect("no thread panicked with the lock").push(reader);
        }
    });
    statsd
}

impl StatsdServer {
    fn at(port: u16) -> Self {
        Self { port, lines: Arc::default(), connections: Arc::default(), stopped: Arc::default() }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Lines received so far.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("no thread panicked with the lock").clone()
    }

    /// Waits until all packets sent over UDP so far have arrived: sends one more packet and waits for it.
    pub fn flush(&self) {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback has free ports");
        socket.send_to(LAST.as_bytes(), (Ipv4Addr::LOCALHOST, self.port)).expect("loopback takes it");
        self.wait_for_last();
    }

    /// Waits until all that was written to TCP connections has been read; each process that wrote has ended.
    pub fn join(&self) {
        // It is accepted after all connections that were opened before.
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("it listens");
        writeln!(stream, "{LAST}").expect("loopback takes it");
        drop(stream);
        self.wait_for_last();
        let readers = std::mem::take(&mut *self.connections.lock().expect("no thread panicked with the lock"));
        readers.into_iter().for_each(|reader| reader.join().expect("it does not panic"));
    }

    fn wait_for_last(&self) {
        wait_for("statsd to read what it was sent", || {
            let mut lines = self.lines.lock().expect("no thread panicked with the lock");
            let has_ended = lines.iter().any(|line| line == LAST);
            lines.retain(|line| line != LAST);
            has_ended.then_some(())
        });
    }

    /// Sums of the counters, by the text before the value; panics at a malformed line.
    pub fn counters(&self) -> BTreeMap<String, i64> {
        let mut sums = BTreeMap::new();
        for line in self.lines() {
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no line of statsd: {line:?}"));
            if let Some((count, tags)) = value.split_once("|c") {
                let count: i64 = count.parse().unwrap_or_else(|_| panic!("no count: {line:?}"));
                *sums.entry(format!("{name}{tags}")).or_default() += count;
            }
        }
        sums
    }
}

impl Drop for StatsdServer {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}
