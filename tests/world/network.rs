//! Links between simulated hosts and servers: latency, jitter, cuts in one or both directions, resets.
//!
//! A connection keeps the order of its bytes. What is sent while a direction is cut arrives after the cut, as TCP sends
//! it again, unless the client gives up before. Times have a resolution of 1 ms, that of tokio's timers.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kit::seeded_random::Chance;
use tokio::io::DuplexStream;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};
use tollkeeper::settings::address::Endpoint;
use tollkeeper::store::client::connect::{Dial, DialOutcome};
use tollkeeper::store::client::pipeline::ByteStream;

/// Bytes of a connection that were sent and not yet received, in each direction.
const CONNECTION_BUFFER_BYTES: usize = 1 << 20;

/// Direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// From the host to the server.
    ToServer,
    /// From the server to the host.
    ToHost,
}

/// Name of a link: a host, and the address of a server as `host:port`.
pub type LinkName = (String, String);

/// State of a link.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    /// Time that bytes take in each direction, in milliseconds.
    pub latency_ms: u64,
    /// Largest time that is added at random, in milliseconds.
    pub jitter_ms: u64,
    /// Nothing arrives at the server.
    pub is_cut_to_server: bool,
    /// Nothing arrives at the host.
    pub is_cut_to_host: bool,
}

impl Link {
    const fn is_cut(&self, direction: Direction) -> bool {
        match direction {
            Direction::ToServer => self.is_cut_to_server,
            Direction::ToHost => self.is_cut_to_host,
        }
    }
}

/// Connection that arrived at a server.
#[derive(Debug)]
pub struct Arrival {
    /// Name of the host.
    pub host: String,
    /// The server's end.
    pub stream: DuplexStream,
}

/// All links.
#[derive(Debug)]
pub struct Links {
    state: Mutex<LinksState>,
    changed: Notify,
}

#[derive(Debug)]
struct LinksState {
    usual: Link,
    links: BTreeMap<LinkName, Link>,
    servers: BTreeMap<String, mpsc::UnboundedSender<Arrival>>,
    chance: Chance,
}

impl Links {
    /// Creates links that are all as `usual`; `seed` is that of the jitter.
    pub fn new(usual: Link, seed: u64) -> Arc<Self> {
        let (links, servers) = (BTreeMap::new(), BTreeMap::new());
        let state = LinksState { usual, links, servers, chance: Chance::new(seed) };
        Arc::new(Self { state: Mutex::new(state), changed: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, LinksState> {
        self.state.lock().unwrap()
    }

    /// Opens the port of a server; its connections arrive at `arrivals`.
    pub fn open_port(&self, server: &str, arrivals: mpsc::UnboundedSender<Arrival>) {
        self.lock().servers.insert(server.to_owned(), arrivals);
    }

    /// Closes the port of a server: connections are refused.
    pub fn close_port(&self, server: &str) {
        self.lock().servers.remove(server);
    }

    /// Changes a link.
    pub fn change(&self, name: &LinkName, change: impl FnOnce(&mut Link)) {
        let mut state = self.lock();
        let usual = state.usual;
        change(state.links.entry(name.clone()).or_insert(usual));
        drop(state);
        self.changed.notify_waiters();
    }

    /// Chooses when bytes arrive that are sent now, not before `earliest`.
    pub fn choose_arrival(&self, name: &LinkName, earliest: Instant) -> Instant {
        let mut state = self.lock();
        let Link { latency_ms, jitter_ms, .. } = state.links.get(name).copied().unwrap_or(state.usual);
        let jitter_ms = if jitter_ms == 0 { 0 } else { state.chance.between(0, jitter_ms) };
        earliest.max(Instant::now() + Duration::from_millis(latency_ms + jitter_ms))
    }

    /// Waits until `at`, and until the direction is not cut.
    pub async fn wait_for_arrival(&self, name: &LinkName, direction: Direction, at: Instant) {
        if at > Instant::now() {
            sleep_until(at).await;
        }
        loop {
            let changed = self.changed.notified();
            let is_cut = {
                let state = self.lock();
                state.links.get(name).copied().unwrap_or(state.usual).is_cut(direction)
            };
            if !is_cut {
                return;
            }
            changed.await;
        }
    }

    async fn connect(self: Arc<Self>, host: String, server: String) -> io::Result<Box<dyn ByteStream>> {
        let name = (host.clone(), server.clone());
        for direction in [Direction::ToServer, Direction::ToHost] {
            let at = self.choose_arrival(&name, Instant::now());
            self.wait_for_arrival(&name, direction, at).await;
        }
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let arrivals = self.lock().servers.get(&server).cloned().ok_or_else(refused)?;
        let (own, stream) = tokio::io::duplex(CONNECTION_BUFFER_BYTES);
        arrivals.send(Arrival { host, stream }).map_err(|_| refused())?;
        Ok(Box::new(own))
    }
}

/// Network of one host.
#[derive(Debug)]
pub struct HostNetwork {
    /// Name of the host.
    pub host: String,
    /// All links.
    pub links: Arc<Links>,
}

impl Dial for HostNetwork {
    fn dial(&self, endpoint: &Endpoint) -> DialOutcome {
        Box::pin(Arc::clone(&self.links).connect(self.host.clone(), endpoint.to_string()))
    }
}
