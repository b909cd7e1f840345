//! HTTP/1.1 as its specification demands it: hosts, unknown pages, and clients that do not read.

use std::io::{ErrorKind, Write as _};
use std::net::Ipv4Addr;
use std::time::Duration;

use kit::port::Port;
use kit::tollkeeper::{self, Tollkeeper};
use kit::{http, wait_for};

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 1}}
";

fn server() -> Tollkeeper {
    tollkeeper::with_rules(RULES).start()
}

/// Status of the response to bytes on an HTTP listener.
fn status_of(port: u16, request: &str) -> u16 {
    let mut stream = http::connect(port, Ipv4Addr::LOCALHOST).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let response = String::from_utf8_lossy(&http::read_until_closed(&mut stream)).into_owned();
    response.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{request}: {response}"))
}

#[test]
fn request_without_exactly_one_host_is_400() {
    let prometheus = Port::reserve();
    let address = format!("127.0.0.1:{}", prometheus.number());
    let server = tollkeeper::with_rules(RULES)
        .env("USE_PROMETHEUS", "true")
        .env("PROMETHEUS_ADDR", address)
        .env("TOLLKEEPER_DEBUG_HOSTS", "a_b.c")
        .start();
    let listeners =
        [(server.http_port(), "/healthcheck"), (server.debug_port(), "/stats"), (prometheus.number(), "/metrics")];
    for (port, path) in listeners {
        let status = |version: &str, headers: &str| {
            status_of(port, &format!("GET {path} HTTP/{version}\r\n{headers}connection: close\r\n\r\n"))
        };
        for host in ["a", "a_b.c:8080", "192.0.2.1:80", "[2001:db8::1]:8080"] {
            assert_eq!(status("1.1", &format!("host: {host}\r\n")), 200, "{path}: {host}");
        }
        // The debug listener accepts names only from its list.
        let empty = if port == server.debug_port() { 421 } else { 200 };
        assert_eq!(status("1.1", "host:\r\n"), empty, "{path}: an empty host is valid");
        assert_eq!(status("1.1", ""), 400, "{path}: no host");
        assert_eq!(status("1.1", "host: a\r\nhost: a\r\n"), 400, "{path}: two hosts");
        assert_eq!(status("1.1", "host: a b\r\n"), 400, "{path}: an invalid host");
        assert_eq!(status("1.0", ""), 200, "{path}: HTTP/1.0 needs no host");
        assert_eq!(status("1.0", "host: a\r\nhost: b\r\n"), 400, "{path}: two hosts in HTTP/1.0");
    }
    let json = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#;
    let request = format!("POST /json HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{json}", json.len());
    assert_eq!(status_of(server.http_port(), &request), 400);
    // The refused request charged nothing.
    assert_eq!([(); 2].map(|()| server.post_json(json).status), [200, 429]);
}

#[test]
fn client_that_never_reads_is_disconnected() {
    let server = tollkeeper::with_rules(RULES).env("TOLLKEEPER_HEAD_TIMEOUT", "1s").start();
    for (port, path) in [(server.debug_port(), "/stats"), (server.http_port(), "/no-such-page")] {
        let mut stream = http::connect(port, Ipv4Addr::LOCALHOST).unwrap();
        stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
        let requests = format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n").repeat(1000);
        let mut unsent = requests.as_bytes();
        // Goes on while the buffers of both directions are full, and while the process is slow.
        wait_for("the client to be disconnected", || {
            if unsent.is_empty() {
                unsent = requests.as_bytes();
            }
            match stream.write(unsent) {
                Ok(count) => unsent = &unsent[count..],
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return Some(()),
            }
            None
        });
    }
}

#[test]
fn debug_listener_knows_its_pages_only() {
    let server = server();
    let get = |path: &str| http::get(server.debug_port(), path).send();
    let index = get("/");
    assert_eq!(index.status, 200);
    assert!(index.text().contains("/rlconfig: "), "{index:?}");
    for unknown in ["/no-such-page", "/stats/", "/json", "/debug/pprof/", "//", "/rlconfig/x"] {
        assert_eq!(get(unknown).status, 404, "{unknown}");
    }
    let unknown = get("/no-such-page").text();
    assert_eq!(unknown.split_once("\n\n"), Some(("404 page not found", &*index.text())), "{unknown}");
    let statuses = || ["/healthcheck", "/readyz", "/livez"].map(|page| get(page).status);
    assert_eq!(statuses(), [200; 3]);
    server.signal("TERM");
    wait_for("the process to be unhealthy", || (statuses() == [500, 503, 200]).then_some(()));
}
