//! Connections to a control plane: dials, keepalive and pings.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddrV4, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::KeyPair;
use socket2::{Domain, Socket, Type};
use tokio::runtime::Runtime;
use tollkeeper::rules::source::{RuleSource, SourceConfig};
use tollkeeper::rules::xds::XdsConfig;
use tollkeeper::rules::xds::connect::{ResolveHost, connect_to_control_plane, resolve_host};
use tollkeeper::settings::xds::XdsSettings;

use super::{client_of, tls, xds_settings};
use kit::http2_frames::{ACK, PING};
use kit::xds_server::{XdsServer, daily, resource};
use kit::{http, wait_for};

/// Address without a server.
const AWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A listener whose queue is full: the kernel answers no further dial.
struct FullListener {
    listener: Socket,
    _queued: Vec<Socket>,
}

impl FullListener {
    fn bind(ip: Ipv4Addr, port: u16) -> Self {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener.bind(&SocketAddrV4::new(ip, port).into()).unwrap();
        listener.listen(0).unwrap();
        let dial = |_| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            // Its result is not awaited.
            let _ = socket.connect(&listener.local_addr().unwrap());
            socket
        };
        let _queued = (0..4).map(dial).collect();
        Self { listener, _queued }
    }

    fn address(&self) -> String {
        self.listener.local_addr().unwrap().as_socket().unwrap().to_string()
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Starts a source of rules whose server has the addresses that `resolve` returns.
fn source(runtime: &Runtime, server: &XdsServer, resolve: ResolveHost) -> RuleSource {
    let settings = xds_settings(&format!("control-plane.test:{}", server.port()), &[]);
    let _entered = runtime.enter();
    let config = XdsConfig { resolve, ..XdsConfig::new(settings) };
    RuleSource::start(SourceConfig::Xds(Box::new(config))).unwrap().0
}

fn assert_dial_ends(settings: &XdsSettings) {
    let began = Instant::now();
    let error = runtime().block_on(connect_to_control_plane(settings, resolve_host)).unwrap_err();
    assert_eq!(error, "no connection within 3 s");
    // The kernel gives up after 2 minutes.
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[test]
fn dial_that_is_not_answered_ends_after_3_s() {
    let listener = FullListener::bind(Ipv4Addr::LOCALHOST, 0);
    assert_dial_ends(&xds_settings(&listener.address(), &[]));
}

#[test]
fn tls_handshake_that_is_not_answered_ends_after_3_s() {
    let directory = tempfile::tempdir().unwrap();
    tls::issue(directory.path(), KeyPair::generate().unwrap(), &["localhost"]);
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let more = [
        ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", &file("client.crt")),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", &file("client.key")),
        ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", &file("ca.crt")),
    ];
    assert_dial_ends(&xds_settings(&listener.local_addr().unwrap().to_string(), &more));
}

#[test]
fn name_is_resolved_for_each_connection() {
    static DIALS: AtomicUsize = AtomicUsize::new(0);

    let (server, runtime) = (XdsServer::start(), runtime());
    // The name has another address between the two streams.
    let source = source(&runtime, &server, |_| {
        let is_away = DIALS.fetch_add(1, Ordering::Relaxed) == 1;
        Ok(vec![if is_away { AWAY } else { LOCALHOST }])
    });
    server.end(0);
    server.requests(1, 1);
    assert_eq!(DIALS.load(Ordering::Relaxed), 3);
    drop(source);
}

#[test]
fn address_that_does_not_answer_does_not_hide_another_one() {
    let (server, runtime) = (XdsServer::start(), runtime());
    let _full = FullListener::bind(Ipv4Addr::new(127, 0, 0, 2), server.port());
    let source = source(&runtime, &server, |host| {
        assert_eq!(host, "control-plane.test");
        Ok(vec![AWAY, LOCALHOST])
    });
    server.requests(0, 1);
    drop(source);
}

/// The kernel's timer of each connection to a port: its kind, and the hundredths of a second until it expires.
#[cfg(target_os = "linux")]
fn timers(port: u16) -> Vec<(String, u32)> {
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let timer = |row: Vec<&str>| {
        let (kind, left) = row[5].split_once(':').unwrap();
        (kind.to_owned(), u32::from_str_radix(left, 16).unwrap())
    };
    rows.filter(|row| row[2] == format!("0100007F:{port:04X}") && row[3] == "01").map(timer).collect()
}

#[cfg(target_os = "linux")]
#[test]
fn kernel_probes_the_connection_of_a_process_within_30_s() {
    const KEEPALIVE: &str = "02";

    let server = XdsServer::start();
    let _tollkeeper = client_of(&server).start();
    server.requests(0, 1);
    let left = wait_for("the keepalive timer", || match &timers(server.port())[..] {
        [(kind, left)] if kind == KEEPALIVE => Some(*left),
        _ => None,
    });
    assert!(left <= 30 * 100, "{left}");
}

/// Forwards one connection to `port`, and records what the client sends; returns the port to connect to.
fn recorded(port: u16) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let front = listener.local_addr().unwrap().port();
    let bytes = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&bytes);
    thread::spawn(move || -> io::Result<()> {
        let (mut client, _) = listener.accept()?;
        let mut server = http::connect(port, Ipv4Addr::LOCALHOST)?;
        let (mut from_server, mut to_client) = (server.try_clone()?, client.try_clone()?);
        thread::spawn(move || io::copy(&mut from_server, &mut to_client));
        let mut buffer = [0; 4096];
        loop {
            let length = client.read(&mut buffer)?;
            if length == 0 {
                return server.shutdown(Shutdown::Both);
            }
            bytes.lock().unwrap().extend_from_slice(&buffer[..length]);
            server.write_all(&buffer[..length])?;
        }
    });
    (front, recorded)
}

/// Kinds and flags of the frames that a client sent.
fn frames(mut bytes: &[u8]) -> Vec<(u8, u8)> {
    bytes = bytes.strip_prefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").expect("a connection preface");
    let mut frames = Vec::new();
    while let [a, b, c, kind, flags, _, _, _, _, rest @ ..] = bytes {
        frames.push((*kind, *flags));
        let length = u32::from_be_bytes([0, *a, *b, *c]);
        bytes = rest.get(usize::try_from(length).unwrap()..).unwrap_or_default();
    }
    frames
}

/// Control planes end connections that ping often; an adaptive window pings, too.
#[test]
fn stream_with_much_traffic_has_no_pings() {
    let server = XdsServer::start();
    let (port, sent) = recorded(server.port());
    let _tollkeeper = client_of(&server).env("CONFIG_GRPC_XDS_SERVER_URL", format!("127.0.0.1:{port}")).start();
    let keys: Vec<String> = (0..100).map(|number| format!("{number:02000}")).collect();
    for version in 1..=20 {
        let limits: Vec<_> = keys.iter().map(|key| (key.as_str(), version)).collect();
        let version = version.to_string();
        server.send(0, &version, &version, vec![resource(&daily("shop", &limits))]);
    }
    server.requests(0, 21);
    let frames = frames(&sent.lock().unwrap());
    assert!(frames.len() > 20, "{frames:?}");
    let pings = frames.iter().filter(|(kind, flags)| *kind == PING && flags & ACK == 0).count();
    assert_eq!(pings, 0, "{frames:?}");
}

mod keepalive {
    use std::net::TcpListener;
    use std::time::Duration;

    use socket2::SockRef;
    use tollkeeper::rules::xds::connect::{open_tcp, resolve_host};

    const TCP_USER_TIMEOUT: Duration = Duration::from_secs(20);

    const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

    const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn kernel_probes_an_idle_connection() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
        let port = listener.local_addr().expect("it has an address").port();
        let stream = open_tcp(&format!("127.0.0.1:{port}"), resolve_host).await.expect("it listens");
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().expect("it can be read"));
        let probed = KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * 2;
        assert_eq!(socket.tcp_keepalive_time().expect("it can be read"), KEEPALIVE_IDLE);
        assert_eq!(socket.tcp_keepalive_interval().expect("it can be read"), KEEPALIVE_INTERVAL);
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().expect("it can be read"), Some(TCP_USER_TIMEOUT));
        assert!(probed < Duration::from_secs(60), "a server that vanished is noticed too late");
    }
}
