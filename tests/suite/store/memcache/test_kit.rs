//! Tests of the kit's memcached servers.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use kit::PATIENCE;
use kit::memcached::memcached;
use kit::redis::certificates::Certificates;

#[test]
fn server_shows_keys_expiries_and_counters() {
    let server = memcached().start();
    server.command("set a%_:\u{e4} 0 0 1\r\n7", "STORED");
    server.command("set b 0 1000000 2\r\n12", "STORED");
    let keys = server.keys();
    assert_eq!(keys.keys().map(Vec::as_slice).collect::<Vec<_>>(), ["a%_:\u{e4}".as_bytes(), b"b"]);
    assert_eq!(keys.values().map(|expiry| *expiry == -1).collect::<Vec<_>>(), [true, false]);
    assert_eq!((server.count("b"), server.count("c"), server.total()), (Some(12), None, 19));
    assert_eq!(server.stat("curr_items"), 2);
}

#[test]
fn restarted_server_is_empty_on_the_same_port() {
    let server = memcached().start();
    server.command("set a 0 0 1\r\n7", "STORED");
    let port = server.port();
    server.kill();
    server.restart();
    assert_eq!((server.port(), server.count("a")), (port, None));
}

#[test]
fn frozen_server_accepts_connections_and_replies_when_it_continues() {
    let server = memcached().start();
    server.freeze();
    let mut stream = TcpStream::connect(server.address()).expect("the kernel accepts");
    stream.write_all(b"version\r\n").expect("the kernel buffers");
    stream.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout can be set");
    assert_eq!(stream.read(&mut [0; 7]).map_err(|error| error.kind()), Err(ErrorKind::WouldBlock));
    server.thaw();
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    let mut reply = [0; 7];
    stream.read_exact(&mut reply).expect("the server replies");
    assert_eq!(&reply, b"VERSION");
}

#[test]
fn smallest_server_evicts_what_is_not_used() {
    let server = memcached().smallest_memory().start();
    server.command("set counter 0 0 1\r\n7", "STORED");
    server.fill("counter".len(), || server.count("counter").is_none());
    assert_ne!(server.stat("evictions"), 0);
}

#[test]
fn server_with_tls_shows_its_counters_too() {
    let files = tempfile::tempdir().expect("a temporary directory can be made");
    let server = memcached().tls(&Certificates::new(files.path()), true).start();
    server.command("set a 0 0 1\r\n7", "STORED");
    assert_eq!(server.count("a"), Some(7));
}
