//! Quota streams between proxies and replicas, each on a connection of its own: reports, responses, PINGs and their
//! replies, in the order in which they were sent, at the speed of the link.

use std::cell::Cell;
use std::future::poll_fn;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use prost::Message as _;
use tokio::sync::{Notify, mpsc};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};
use tollkeeper::base::pb::codec::GRPC_FRAME_HEAD_BYTES;
use tollkeeper::base::pb::rlqs::RateLimitQuotaResponse;
use tollkeeper::serve::quota::evidence::{BodyPart, ConnectionPings, DeliveryEvidence};
use tollkeeper::serve::quota::service::QuotaService;
use tollkeeper::serve::quota::stream::StreamTask;

use super::super::fleet::Fleet;
use super::super::network::{Direction, LinkName, Links};
use super::super::replica::Replica;

/// `connect_timeout` of the proxy's cluster.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// `connection_keepalive` of the proxy's cluster.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// A process that may stand still.
#[derive(Debug)]
pub struct Running {
    runs: Cell<bool>,
    runs_again: Notify,
}

impl Running {
    /// A process that runs.
    pub fn new() -> Rc<Self> {
        Rc::new(Self { runs: Cell::new(true), runs_again: Notify::new() })
    }

    /// Stops the process, as SIGSTOP does, or lets it go on.
    pub fn set(&self, runs: bool) {
        self.runs.set(runs);
        if runs {
            self.runs_again.notify_waiters();
        }
    }

    /// True while it runs.
    pub const fn is_running(&self) -> bool {
        self.runs.get()
    }

    /// Waits until it runs.
    pub async fn wait(&self) {
        while !self.runs.get() {
            self.runs_again.notified().await;
        }
    }
}

/// Something that a proxy sends.
#[derive(Debug)]
enum FromProxy {
    Report(Bytes),
    PingReply,
    Keepalive,
}

/// Something that a replica sends.
#[derive(Debug)]
enum ToProxy {
    Response(RateLimitQuotaResponse),
    Ping,
    KeepaliveReply,
    Close,
}

/// Sends messages in one direction; they arrive in order.
struct LinkSender<T> {
    links: Arc<Links>,
    link: LinkName,
    last: Cell<Instant>,
    sender: mpsc::UnboundedSender<(Instant, T)>,
}

impl<T> LinkSender<T> {
    fn send(&self, message: T) {
        self.last.set(self.links.choose_arrival(&self.link, self.last.get()));
        // Nobody receives it if the other end is gone.
        let _ = self.sender.send((self.last.get(), message));
    }
}

/// The proxy's end of a connection. What it sends after the end of the connection is lost.
pub struct Connection {
    to_replica: LinkSender<FromProxy>,
    reset: Rc<Notify>,
}

impl Connection {
    /// Sends a report.
    pub fn report(&self, report: Bytes) {
        self.to_replica.send(FromProxy::Report(report));
    }

    /// Resets the connection: what is on its way is lost, and both ends see it at once.
    pub fn reset(&self) {
        self.reset.notify_waiters();
    }
}

/// The rest of the proxy's end: what it receives.
pub struct Receiver {
    fleet: Rc<Fleet>,
    link: LinkName,
    replica: usize,
    connection: Rc<Connection>,
    from_proxy: mpsc::UnboundedReceiver<(Instant, FromProxy)>,
    is_envoy: bool,
    peer: SocketAddr,
}

/// Name of the link between a proxy and a replica.
pub fn link_name(proxy: usize, replica: usize) -> LinkName {
    (format!("proxy{proxy}"), format!("quota{replica}"))
}

/// Begins to connect a proxy to a replica.
pub fn connect(fleet: &Rc<Fleet>, proxy: usize, replica: usize, is_envoy: bool) -> (Rc<Connection>, Receiver) {
    let link = link_name(proxy, replica);
    let (sender, from_proxy) = mpsc::unbounded_channel();
    let to_replica =
        LinkSender { links: Arc::clone(&fleet.links), link: link.clone(), last: Cell::new(Instant::now()), sender };
    let connection = Rc::new(Connection { to_replica, reset: Rc::new(Notify::new()) });
    let peer = SocketAddr::from((Ipv4Addr::new(10, 0, 0, u8::try_from(proxy).unwrap()), 40_000));
    let receiver = Receiver {
        fleet: Rc::clone(fleet),
        link,
        replica,
        connection: Rc::clone(&connection),
        from_proxy,
        is_envoy,
        peer,
    };
    (connection, receiver)
}

impl Receiver {
    /// Passes responses to `take` until the connection ends.
    pub async fn run(self, running: &Running, take: impl Fn(RateLimitQuotaResponse)) {
        let reset = Rc::clone(&self.connection.reset);
        tokio::select! {
            biased;
            () = reset.notified() => {}
            () = self.receive(running, take) => {}
        }
    }

    async fn receive(self, running: &Running, take: impl Fn(RateLimitQuotaResponse)) {
        let Self { fleet, link, replica, connection, from_proxy, is_envoy, peer } = self;
        let links = &fleet.links;
        let (sender, mut messages) = mpsc::unbounded_channel();
        let open = async {
            links.wait_for_arrival(&link, Direction::ToServer, links.choose_arrival(&link, Instant::now())).await;
            let process = fleet.replica(replica)?;
            let quota = Arc::clone(process.quota.as_ref()?);
            let to_proxy =
                LinkSender { links: Arc::clone(links), link: link.clone(), last: Cell::new(Instant::now()), sender };
            let end = ReplicaEnd { to_proxy, from_proxy, reset: Rc::clone(&connection.reset) };
            spawn_local(end.serve(process, quota, peer, is_envoy));
            links.wait_for_arrival(&link, Direction::ToHost, links.choose_arrival(&link, Instant::now())).await;
            Some(())
        };
        if !matches!(timeout(CONNECT_TIMEOUT, open).await, Ok(Some(()))) {
            return;
        }
        let (sent, replied) = (Cell::new(0_u64), Cell::new(0_u64));
        let read = async {
            while let Some((at, message)) = messages.recv().await {
                links.wait_for_arrival(&link, Direction::ToHost, at).await;
                running.wait().await;
                match message {
                    ToProxy::Response(response) => take(response),
                    ToProxy::Ping => connection.to_replica.send(FromProxy::PingReply),
                    ToProxy::KeepaliveReply => replied.set(replied.get() + 1),
                    ToProxy::Close => return,
                }
            }
        };
        let keep_alive = async {
            loop {
                sleep(KEEPALIVE_INTERVAL).await;
                running.wait().await;
                sent.set(sent.get() + 1);
                connection.to_replica.send(FromProxy::Keepalive);
                sleep(KEEPALIVE_TIMEOUT).await;
                // One that stood still reads what waits before it looks at the time.
                running.wait().await;
                sleep(Duration::from_millis(1)).await;
                if replied.get() < sent.get() {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            () = read => {}
            () = keep_alive => fleet.trace.count("a keepalive was not answered"),
        }
    }
}

/// The replica's end of a connection.
struct ReplicaEnd {
    to_proxy: LinkSender<ToProxy>,
    from_proxy: mpsc::UnboundedReceiver<(Instant, FromProxy)>,
    reset: Rc<Notify>,
}

impl ReplicaEnd {
    async fn serve(mut self, replica: Rc<Replica>, quota: Arc<QuotaService>, peer: SocketAddr, is_envoy: bool) {
        let pings = Arc::new(ConnectionPings::default());
        let evidence = DeliveryEvidence::new(Arc::clone(&pings));
        let (reports, mut unread) = mpsc::unbounded_channel();
        // One response, as the method has it.
        let (responses, mut built) = mpsc::channel(1);
        let handle = quota.open_stream(Some(peer), is_envoy);
        let task = StreamTask::new(quota, handle, Some(evidence.clone()));
        replica.spawn_call(task.run(stream::poll_fn(move |context| unread.poll_recv(context)), responses));
        drop(replica);
        let to_proxy = &self.to_proxy;
        let (links, link) = (&to_proxy.links, &to_proxy.link);
        let receive = async {
            while let Some((at, message)) = self.from_proxy.recv().await {
                links.wait_for_arrival(link, Direction::ToServer, at).await;
                match message {
                    FromProxy::Report(report) => {
                        if reports.send(Ok(report)).is_err() {
                            return;
                        }
                    }
                    FromProxy::PingReply => pings.record_reply(),
                    FromProxy::Keepalive => to_proxy.send(ToProxy::KeepaliveReply),
                }
            }
            // The proxy closed the connection.
            links.wait_for_arrival(link, Direction::ToServer, links.choose_arrival(link, Instant::now())).await;
        };
        let respond = async {
            while let Some(Ok(response)) = built.recv().await {
                let bytes = response.encoded_len() + GRPC_FRAME_HEAD_BYTES;
                to_proxy.send(ToProxy::Response(response));
                drop(BodyPart::new(&evidence.written, bytes));
            }
        };
        let ping = async {
            loop {
                poll_fn(|context| if pings.take_request(context) { Poll::Ready(()) } else { Poll::Pending }).await;
                pings.record_sent();
                to_proxy.send(ToProxy::Ping);
            }
        };
        tokio::select! {
            biased;
            () = self.reset.notified() => return,
            () = receive => {}
            () = respond => {}
            () = ping => {}
        }
        to_proxy.send(ToProxy::Close);
    }
}
