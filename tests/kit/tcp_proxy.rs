//! A TCP proxy that fails on demand: it refuses, resets, discards, stalls, delays or truncates connections.
//!
//! A mode applies to new and open connections, and to all bytes sent after [`TcpProxy::set`] returns. Bytes sent in a
//! mode that forwards them stay in order. Half-closed connections are not
//! supported: if one side closes, the other is closed.

use std::future::pending;
use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc as sync_mpsc;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::port::Port;
use super::{PATIENCE, wait_for};

/// Treatment of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forwards everything.
    Pass,
    /// The port refuses connections, and open connections are closed.
    Refuse,
    /// Open and new connections are reset (RST).
    Reset,
    /// Discards the bytes of both sides and does not forward a close; connections stay open.
    Blackhole,
    /// Buffers all bytes until another mode forwards them: a partition that heals.
    Stall,
    /// Delays each piece in both directions, without limiting the throughput.
    Delay(Duration),
    /// Closes each connection after this many more response bytes.
    Truncate(usize),
}

fn ends_connections(mode: Mode) -> bool {
    matches!(mode, Mode::Refuse | Mode::Reset)
}

/// A proxy on 127.0.0.1; it and its connections end when it is dropped.
#[derive(Debug)]
pub struct TcpProxy {
    port: Port,
    /// Dropping the sender ends the proxy.
    mode: Option<watch::Sender<Mode>>,
    /// Signals that a mode has been applied.
    applied: Mutex<sync_mpsc::Receiver<()>>,
    counts: Arc<Counts>,
    keeper: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Counts {
    accepted: AtomicU64,
    open: AtomicU64,
    requests: DirectionCounts,
    responses: DirectionCounts,
}

#[derive(Debug, Default)]
struct DirectionCounts {
    bytes: AtomicU64,
    reads: AtomicU64,
}

impl TcpProxy {
    /// Listens in front of that address (`127.0.0.1:PORT`), which need not exist yet, and forwards everything.
    pub fn to(address: &str) -> Self {
        let port = Port::reserve();
        let (mode, modes) = watch::channel(Mode::Pass);
        let (applied_tx, applied) = sync_mpsc::channel();
        let counts = Arc::new(Counts::default());
        let link = Link { target: address.to_owned(), modes, counts: Arc::clone(&counts) };
        let number = port.number();
        let keeper = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be made").block_on(link.serve(number, &applied_tx));
        });
        let proxy = Self { port, mode: Some(mode), applied: Mutex::new(applied), counts, keeper: Some(keeper) };
        proxy.wait_until_taken_up();
        proxy
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Changes the mode for all connections. After a mode that ends connections, none of the earlier ones is open.
    pub fn set(&self, mode: Mode) {
        self.mode.as_ref().expect("it is hung up by dropping only").send_replace(mode);
        self.wait_until_taken_up();
        if ends_connections(mode) {
            wait_for("the proxy to end its connections", || (self.open_connections() == 0).then_some(()));
        }
    }

    /// Number of connections accepted so far.
    pub fn accepted_connections(&self) -> u64 {
        self.counts.accepted.load(Ordering::Relaxed)
    }

    /// Number of open connections.
    pub fn open_connections(&self) -> u64 {
        self.counts.open.load(Ordering::Relaxed)
    }

    /// Bytes read from clients, forwarded or not.
    pub fn request_bytes(&self) -> u64 {
        self.counts.requests.bytes.load(Ordering::Relaxed)
    }

    /// Number of reads from clients that returned bytes.
    pub fn request_reads(&self) -> u64 {
        self.counts.requests.reads.load(Ordering::Relaxed)
    }

    /// Bytes read from the server, forwarded or not.
    pub fn response_bytes(&self) -> u64 {
        self.counts.responses.bytes.load(Ordering::Relaxed)
    }

    fn wait_until_taken_up(&self) {
        let applied = self.applied.lock().expect("no thread panicked with the lock");
        applied.recv_timeout(PATIENCE).expect("the proxy runs until it is dropped");
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        drop(self.mode.take());
        if let Some(keeper) = self.keeper.take() {
            // The thread's panic is already printed; a panic in drop would hide the test's own message.
            let _ = keeper.join();
        }
    }
}

/// State shared by all connections.
#[derive(Clone)]
struct Link {
    target: String,
    modes: watch::Receiver<Mode>,
    counts: Arc<Counts>,
}

impl Link {
    /// Accepts until the proxy is dropped.
    async fn serve(mut self, port: u16, applied_tx: &sync_mpsc::Sender<()>) {
        let mut listener = None;
        loop {
            if *self.modes.borrow_and_update() == Mode::Refuse {
                listener = None;
            } else if listener.is_none() {
                let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
                listener = Some(bound.expect("the port is reserved"));
            }
            if applied_tx.send(()).is_err() {
                return;
            }
            loop {
                tokio::select! {
                    biased;
                    changed = self.modes.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return,
                    },
                    client = accept(listener.as_ref()) => {
                        self.counts.accepted.fetch_add(1, Ordering::Relaxed);
                        let open = Open::new(&self.counts);
                        tokio::spawn(self.clone().carry(client, open));
                    }
                }
            }
        }
    }

    /// Carries one connection to its end.
    async fn carry(self, client: TcpStream, _open: Open) {
        tokio::select! {
            biased;
            mode = self.ended() => if mode == Some(Mode::Reset) {
                // With this option, closing sends RST.
                let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
            },
            _ = self.connect_and_pump(&client) => {}
        }
    }

    /// Waits for a mode that ends all connections; `None` when the proxy itself ends.
    async fn ended(&self) -> Option<Mode> {
        let mut modes = self.modes.clone();
        let mode = modes.wait_for(|mode| ends_connections(*mode)).await;
        mode.ok().map(|mode| *mode)
    }

    async fn connect_and_pump(&self, client: &TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(&self.target).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let counts = &self.counts;
        tokio::select! {
            ended = self.pump(client, &server, &counts.requests, false) => ended,
            ended = self.pump(&server, client, &counts.responses, true) => ended,
        }
    }

    /// Carries one direction until it is closed.
    async fn pump(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        counts: &DirectionCounts,
        responses: bool,
    ) -> io::Result<()> {
        let (pieces, waiting) = mpsc::channel(1024);
        // The reader drops `pieces` at its end, so that what it has read is still written before the writer ends.
        let read = async {
            self.read(from, counts, pieces).await;
            pending::<()>().await;
        };
        tokio::select! {
            () = read => Ok(()),
            ended = self.write(to, waiting, responses) => ended,
        }
    }

    async fn read(&self, from: &TcpStream, counts: &DirectionCounts, pieces: mpsc::Sender<Piece>) {
        let mut modes = self.modes.clone();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = from.readable().await;
            wait_while(&mut modes, &[Mode::Stall]).await;
            let length = match read.and_then(|()| from.try_read(&mut buffer)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Ok(length) if length > 0 => length,
                _ => break,
            };
            counts.bytes.fetch_add(u64::try_from(length).expect("a length fits"), Ordering::Relaxed);
            counts.reads.fetch_add(1, Ordering::Relaxed);
            let mode = *modes.borrow();
            let delay = if let Mode::Delay(delay) = mode { delay } else { Duration::ZERO };
            let piece = Piece { due: Instant::now() + delay, bytes: buffer[..length].to_vec() };
            if mode != Mode::Blackhole && pieces.send(piece).await.is_err() {
                break;
            }
        }
        wait_while(&mut modes, &[Mode::Stall, Mode::Blackhole]).await;
    }

    async fn write(&self, to: &TcpStream, mut pieces: mpsc::Receiver<Piece>, responses: bool) -> io::Result<()> {
        let mut modes = self.modes.clone();
        let mut last = Mode::Pass;
        let mut left = usize::MAX;
        while let Some(piece) = pieces.recv().await {
            sleep_until(piece.due).await;
            wait_while(&mut modes, &[Mode::Stall]).await;
            let mode = *modes.borrow();
            if mode != last {
                last = mode;
                left = if let (Mode::Truncate(length), true) = (mode, responses) { length } else { usize::MAX };
            }
            if mode == Mode::Blackhole {
                continue;
            }
            let length = piece.bytes.len().min(left);
            write_all(to, &piece.bytes[..length]).await?;
            left -= if left == usize::MAX { 0 } else { length };
            if length < piece.bytes.len() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
        Ok(())
    }
}

/// Bytes of one read, and the time to write them.
struct Piece {
    due: Instant,
    bytes: Vec<u8>,
}

/// Waits until the mode is none of these; never returns once the proxy ends, which cancels all tasks.
async fn wait_while(modes: &mut watch::Receiver<Mode>, these: &[Mode]) {
    if modes.wait_for(|mode| !these.contains(mode)).await.is_err() {
        pending::<()>().await;
    }
}

async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        to.writable().await?;
        match to.try_write(bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Next connection; pending forever without a listener.
async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else { return pending().await };
    loop {
        // Only an aborted connection fails.
        if let Ok((client, _)) = listener.accept().await {
            return client;
        }
    }
}

/// Counts a connection as open until it is dropped.
struct Open(Arc<Counts>);

impl Open {
    fn new(counts: &Arc<Counts>) -> Self {
        counts.open.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(counts))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
