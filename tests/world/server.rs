//! A Redis server on a simulated host: its connections, its clock, and its faults.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use simulated_redis::request::parse_command;
use simulated_redis::server::{Connection, Options, Outcome, Server};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{Instant, sleep, sleep_until};

use super::charge_watch::ChargeWatch;
use super::clock::HostClock;
use super::network::{Arrival, Direction, LinkName, Links};
use super::trace::Trace;

/// Largest piece of a stream that is read at once, in bytes.
const READ_BYTES: usize = 64 << 10;

/// A server.
#[derive(Debug)]
pub struct RedisHost {
    /// Address as `host:port`.
    pub address: String,
    /// Its clock.
    pub clock: Arc<HostClock>,
    /// The server program with its data.
    pub server: RefCell<Server>,
    links: Arc<Links>,
    trace: Trace,
    is_running: Cell<bool>,
    /// The process goes on.
    runs_again: Notify,
    connections: RefCell<Vec<OpenConnection>>,
    /// Time that each script takes, in milliseconds.
    script_ms: Cell<u64>,
    /// Time at which the script that runs ends.
    busy_until: Cell<Instant>,
    /// Checks what scripts do to counters, if it must.
    watch: RefCell<Option<Rc<ChargeWatch>>>,
}

#[derive(Debug)]
struct OpenConnection {
    host: String,
    task: AbortHandle,
}

impl RedisHost {
    /// Starts a server. Must be called within a `LocalSet`.
    pub fn start(
        address: &str,
        clock: Arc<HostClock>,
        links: &Arc<Links>,
        trace: &Trace,
        options: Options,
    ) -> Rc<Self> {
        let host = Rc::new(Self {
            address: address.to_owned(),
            clock,
            server: RefCell::new(Server::new(options)),
            links: Arc::clone(links),
            trace: trace.clone(),
            is_running: Cell::new(true),
            runs_again: Notify::new(),
            connections: RefCell::default(),
            script_ms: Cell::new(0),
            busy_until: Cell::new(Instant::now()),
            watch: RefCell::default(),
        });
        host.open_port();
        host
    }

    /// Accepts connections from now on.
    pub fn open_port(self: &Rc<Self>) {
        let (sender, mut arrivals) = mpsc::unbounded_channel::<Arrival>();
        self.links.open_port(&self.address, sender);
        let host = Rc::clone(self);
        spawn_local(async move {
            while let Some(arrival) = arrivals.recv().await {
                let from = arrival.host.clone();
                let task = spawn_local(Rc::clone(&host).serve(arrival)).abort_handle();
                host.connections.borrow_mut().retain(|open| !open.task.is_finished());
                host.connections.borrow_mut().push(OpenConnection { host: from, task });
            }
        });
    }

    /// Refuses connections and closes those that are open.
    pub fn close_port(&self) {
        self.links.close_port(&self.address);
        self.reset_connections(None);
    }

    /// Closes the connections of a host; `None`: of all.
    pub fn reset_connections(&self, of: Option<&str>) {
        self.connections.borrow_mut().retain(|open| {
            let is_closed = of.is_none_or(|host| host == open.host);
            if is_closed {
                open.task.abort();
            }
            !is_closed
        });
    }

    /// Stops the process, as SIGSTOP does, or lets it go on.
    pub fn set_running(&self, runs: bool) {
        self.is_running.set(runs);
        if runs {
            self.runs_again.notify_waiters();
        }
    }

    /// Has what scripts do to counters checked.
    pub fn watch_charges(&self, watch: &Rc<ChargeWatch>) {
        *self.watch.borrow_mut() = Some(Rc::clone(watch));
    }

    /// Makes each script take so long; no other command runs meanwhile.
    pub fn set_script_time(&self, milliseconds: u64) {
        self.script_ms.set(milliseconds);
    }

    /// Runs a command as a client on the same host does.
    pub fn run_now(&self, words: &[&'static [u8]]) {
        let words: Vec<Bytes> = words.iter().map(|word| Bytes::from_static(word)).collect();
        let now_us = self.clock.now().as_micros();
        self.server.borrow_mut().execute(&mut Connection::new(), now_us, &words, &mut BytesMut::new());
    }

    async fn wait_until_running(&self) {
        while !self.is_running.get() {
            self.runs_again.notified().await;
        }
    }

    async fn serve(self: Rc<Self>, arrival: Arrival) {
        let link: LinkName = (arrival.host, self.address.clone());
        let (mut from_host, mut to_host) = tokio::io::split(arrival.stream);
        let (received, mut chunks) = mpsc::unbounded_channel::<(Instant, BytesMut)>();
        let (replied, mut replies) = mpsc::unbounded_channel::<(Instant, Bytes)>();
        let receive = async {
            let mut last = Instant::now();
            loop {
                let mut chunk = BytesMut::with_capacity(READ_BYTES);
                match from_host.read_buf(&mut chunk).await {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                last = self.links.choose_arrival(&link, last);
                if received.send((last, chunk)).is_err() {
                    return;
                }
            }
        };
        let execute = async {
            let (mut connection, mut unread, mut last) = (Connection::new(), BytesMut::new(), Instant::now());
            while let Some((at, chunk)) = chunks.recv().await {
                self.links.wait_for_arrival(&link, Direction::ToServer, at).await;
                unread.extend_from_slice(&chunk);
                loop {
                    let Ok(command) = parse_command(&mut unread) else { return };
                    let Some(words) = command else { break };
                    let mut reply = BytesMut::new();
                    self.run_command(&mut connection, &words, &mut reply).await;
                    last = self.links.choose_arrival(&link, last);
                    if replied.send((last, reply.freeze())).is_err() {
                        return;
                    }
                }
            }
        };
        let send = async {
            while let Some((at, reply)) = replies.recv().await {
                self.links.wait_for_arrival(&link, Direction::ToHost, at).await;
                if to_host.write_all(&reply).await.is_err() {
                    return;
                }
            }
        };
        // A host that closes its connection ends `receive`; what it sent before still arrives.
        tokio::select! {
            biased;
            () = async { tokio::join!(biased; receive, execute) ; } => {}
            () = send => {}
        }
    }

    fn execute(&self, connection: &mut Connection, now_us: u64, words: &[Bytes], reply: &mut BytesMut) -> Outcome {
        let watch = self.watch.borrow();
        let calls = watch.as_ref().map(|watch| watch.repeat_charges(&self.server.borrow(), now_us, words));
        let outcome = self.server.borrow_mut().execute(connection, now_us, words, reply);
        if let (Some(watch), Some(calls)) = (&*watch, calls)
            && !has_error(reply)
        {
            watch.compare_counters(&self.server.borrow(), now_us, calls);
        }
        outcome
    }

    async fn run_command(&self, connection: &mut Connection, words: &[Bytes], reply: &mut BytesMut) {
        self.wait_until_running().await;
        while self.busy_until.get() > Instant::now() {
            sleep_until(self.busy_until.get()).await;
        }
        if words.first().is_some_and(|name| name.starts_with(b"EVAL")) && self.script_ms.get() > 0 {
            let end = Instant::now() + Duration::from_millis(self.script_ms.get());
            self.busy_until.set(end);
            sleep_until(end).await;
        }
        let now = self.clock.now();
        let outcome = self.execute(connection, now.as_micros(), words, reply);
        for word in words {
            self.trace.record_bytes(word);
        }
        self.trace.record_bytes(reply);
        if let Outcome::RepliedAfter(milliseconds) | Outcome::Blocked(milliseconds) = outcome {
            sleep(Duration::from_millis(milliseconds)).await;
            if matches!(outcome, Outcome::Blocked(_)) {
                connection.end_blocked_read(reply);
            }
        }
    }
}

/// True if a reply is an error, or an array with one.
fn has_error(mut reply: &[u8]) -> bool {
    while let Some(end) = reply.windows(2).position(|two| two == b"\r\n") {
        let (line, rest) = (&reply[..end], &reply[end + 2..]);
        let bytes = match line {
            [b'-', ..] => return true,
            [b'$', length @ ..] => str::from_utf8(length).ok().and_then(|length| length.parse::<usize>().ok()),
            _ => None,
        };
        reply = bytes.and_then(|bytes| rest.get(bytes + 2..)).unwrap_or(rest);
    }
    false
}
