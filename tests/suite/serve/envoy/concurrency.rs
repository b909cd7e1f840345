//! Concurrent limits behind real Envoys with `envoy/concurrency.yaml`: streams that stay open, and how their slots
//! come back. `tests/bench/concurrency.py` has the load, and the faults that take long.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kit::envoy::Envoy;
use kit::redis::{Server, options};
use kit::tollkeeper::{self, Setup, Tollkeeper};
use kit::{http, read, repository, wait_for};

/// An upstream that answers at once and never ends its answers, except below `/now`; it also accepts WebSockets.
pub(crate) struct OpenUpstream {
    port: u16,
    is_stopped: Arc<AtomicBool>,
}

impl OpenUpstream {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&is_stopped);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                thread::spawn(move || serve(stream));
            }
        });
        Self { port, is_stopped }
    }

    /// A bootstrap with this upstream in place of its own.
    pub(crate) fn replace_in(&self, bootstrap: &str) -> String {
        let (before, after) = bootstrap.split_once("cluster_name: upstream\n").expect("it has an upstream");
        let (shown, port) = after.split_once("port_value: ").expect("an upstream has a port");
        let rest = port.trim_start_matches(|digit: char| digit.is_ascii_digit());
        format!("{before}cluster_name: upstream\n{shown}port_value: {}{rest}", self.port)
    }
}

impl Drop for OpenUpstream {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        let _woken = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

/// Answers requests of one connection, until one stays open or the caller closes it.
fn serve(mut stream: TcpStream) {
    let (mut head, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        head.extend_from_slice(&buffer[..count]);
        if !head.ends_with(b"\r\n\r\n") {
            continue;
        }
        let text = String::from_utf8_lossy(&head).to_ascii_lowercase();
        let answer = match text {
            _ if text.contains("upgrade: websocket") => {
                "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
            }
            _ if text.starts_with("get /now") => "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nnow",
            _ => "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n",
        };
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
        head.clear();
    }
}

/// A request whose response stays open until this is dropped.
#[derive(Debug)]
pub(crate) struct OpenStream(#[expect(dead_code, reason = "it is kept open")] TcpStream);

/// Opens a stream with these header lines; `Err` has the status of a request that was not admitted.
pub(crate) fn open(envoy: &Envoy, headers: &str) -> Result<OpenStream, u16> {
    let mut stream = http::connect(envoy.port(), Ipv4Addr::LOCALHOST).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let headers = headers.replace('\n', "\r\n");
    write!(stream, "GET /export HTTP/1.1\r\nhost: test\r\n{headers}\r\n\r\n").unwrap();
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&head)));
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{text}"));
    if matches!(status, 200 | 101) { Ok(OpenStream(stream)) } else { Err(status) }
}

const ANN: &str = "x-user: ann";

/// The shipped rules and bootstrap, with short heartbeats.
struct Fleet {
    envoys: Vec<Envoy>,
    replicas: Vec<Tollkeeper>,
    _upstream: OpenUpstream,
    _redis: Server,
}

fn setup(redis: &Server) -> Setup {
    tollkeeper::with_rules(&read(&repository("envoy/concurrency.rules.yaml")))
        .env("TOLLKEEPER_HOLDER_TIMEOUT", "2s")
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_URL", redis.address())
        .env("TOLLKEEPER_STORE_TIMEOUT", "5s")
}

impl Fleet {
    /// Two Envoys, each with a replica of its own.
    fn start() -> Self {
        let (redis, upstream) = (options().start(), OpenUpstream::start());
        let replicas: Vec<_> = (0..2).map(|_| setup(&redis).start()).collect();
        let start = |replica: &Tollkeeper| {
            Envoy::start_with("concurrency", &[replica.grpc_port()], |bootstrap| {
                let often = bootstrap.replace("interval: 5s\n", "interval: 0.2s\n");
                assert!(often.contains("no_traffic_interval: 0.2s"), "{often}");
                // Without BOOT, both Envoys would be one holder.
                let named = often.replace("%ENVIRONMENT(BOOT)%", &replica.id().to_string());
                upstream.replace_in(&named)
            })
        };
        let fleet = Self { envoys: replicas.iter().map(start).collect(), replicas, _upstream: upstream, _redis: redis };
        for envoy in &fleet.envoys {
            // At the start Redis may not be connected.
            wait_for("a request", || (envoy.get("/now").header("x-user", "first").send().status == 200).then_some(()));
        }
        fleet
    }

    /// Opens all slots of the user, three through the first Envoy and two through the second.
    fn fill(&self) -> [Vec<OpenStream>; 2] {
        [0, 1].map(|envoy| (envoy..3).map(|_| open(&self.envoys[envoy], ANN).expect("a slot is free")).collect())
    }

    /// Slots of the user in use, as a replica explains them.
    fn slots(&self) -> u64 {
        let body = r#"{"domain":"concurrency","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
        let page = http::post(self.replicas[0].debug_port(), "/explain", body).send().text();
        let page: serde_json::Value = serde_json::from_str(&page).unwrap_or_else(|_| panic!("{page}"));
        page["descriptors"][0]["slots"][0]["slots"].as_u64().unwrap_or_else(|| panic!("{page}"))
    }

    fn wait_until_free(&self) {
        wait_for("all slots to be free", || (self.slots() == 0).then_some(()));
    }
}

#[test]
fn limit_holds_over_two_envoys_and_a_slot_comes_back() {
    let fleet = Fleet::start();
    let [mut first, second] = fleet.fill();
    for envoy in &fleet.envoys {
        let rejection = envoy.get("/now").header("x-user", "ann").send();
        assert_eq!((rejection.status, rejection.number("retry-after")), (429, 1), "{rejection:?}");
        assert_eq!(envoy.get("/now").header("x-user", "bob").send().status, 200, "others have slots of their own");
        assert_eq!(envoy.get("/now").send().status, 200, "so have those without a name");
    }
    assert_eq!(fleet.slots(), 5);
    first.pop();
    let again = wait_for("the slot of the stream that ended", || open(&fleet.envoys[1], ANN).ok());
    assert_eq!(open(&fleet.envoys[0], ANN).err(), Some(429));
    drop((first, second, again));
    fleet.wait_until_free();
}

#[test]
fn forged_request_ids_are_streams_of_their_own() {
    let fleet = Fleet::start();
    let forged = "x-user: ann\nx-request-id: forged";
    let streams: Vec<_> = (0..5).map(|_| open(&fleet.envoys[0], forged).expect("a slot is free")).collect();
    assert_eq!(open(&fleet.envoys[0], forged).err(), Some(429));
    drop(streams);
    fleet.wait_until_free();
}

#[test]
fn websockets_hold_their_slots() {
    let fleet = Fleet::start();
    let upgrade = "x-user: ann\nconnection: upgrade\nupgrade: websocket";
    let sockets: Vec<_> = (0..5).map(|_| open(&fleet.envoys[0], upgrade).expect("a slot is free")).collect();
    assert_eq!(open(&fleet.envoys[0], upgrade).err(), Some(429));
    drop(sockets);
    fleet.wait_until_free();
}

#[test]
fn cancelled_requests_leave_no_slots() {
    let fleet = Fleet::start();
    for round in 0..60 {
        // Closed at any moment of the request, the first before it is read.
        let mut stream = http::connect(fleet.envoys[round % 2].port(), Ipv4Addr::LOCALHOST).unwrap();
        write!(stream, "GET /export HTTP/1.1\r\nhost: test\r\n{ANN}\r\n\r\n").unwrap();
        thread::sleep(Duration::from_micros(200 * u64::try_from(round).unwrap()));
    }
    fleet.wait_until_free();
    let [first, second] = fleet.fill();
    assert_eq!(open(&fleet.envoys[0], ANN).err(), Some(429));
    drop((first, second));
}

#[test]
fn slots_of_a_killed_envoy_come_back_and_those_of_another_stay() {
    let mut fleet = Fleet::start();
    let [first, second] = fleet.fill();
    // Much longer than the holder timeout: the health checks keep the slots.
    let until = Instant::now() + Duration::from_secs(6);
    while Instant::now() < until {
        assert_eq!(open(&fleet.envoys[1], ANN).err(), Some(429));
        thread::sleep(Duration::from_millis(100));
    }
    drop(fleet.envoys.remove(0));
    let mut streams = second;
    wait_for("the slots of the killed Envoy", || {
        streams.extend(open(&fleet.envoys[0], ANN).ok());
        (streams.len() == 5).then_some(())
    });
    assert_eq!(open(&fleet.envoys[0], ANN).err(), Some(429));
    drop((first, streams));
}

#[test]
fn requests_are_denied_without_the_service() {
    let mut fleet = Fleet::start();
    fleet.replicas[0].kill();
    assert_eq!(open(&fleet.envoys[0], ANN).err(), Some(503));
    assert!(open(&fleet.envoys[1], ANN).is_ok());
}
