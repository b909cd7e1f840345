//! Loopback ports that no other process binds between choice and use.
//!
//! Binding port 0 and closing it yields a port that any outgoing connection may get next, and servers that set
//! SO_REUSEPORT, as Envoy does, would not notice a clash. So ports come from below the range of outgoing connections,
//! and a lock on a file named after the port, in the directory for temporary files, reserves it among all suites of a
//! user on the machine. The kernel releases the lock with the process.

use std::env;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use socket2::{Domain, Socket, Type};

const FIRST: u32 = 20_000;
const COUNT: u32 = 12_000;

/// A free port of 127.0.0.1, reserved until this is dropped.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _reservation: File,
}

impl Port {
    /// Reserves a port that nothing listens on.
    pub fn reserve() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // One directory per user: files of another user cannot be opened for writing.
        let user = env::var("USER").unwrap_or_default();
        let locks = env::temp_dir().join(format!("tollkeeper-test-ports-{user}"));
        fs::create_dir_all(&locks).expect("the directory for temporary files is writable");
        // Each process starts at a different port, so that two of them seldom try the same one.
        let start = process::id().wrapping_mul(97);
        for _ in 0..COUNT {
            let offset = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
            let number = u16::try_from(FIRST + offset).expect("the range ends below 65536");
            let lock = File::create(locks.join(number.to_string())).expect("a lock file can be made");
            if lock.try_lock().is_ok() && bind(number).is_ok() {
                return Self { number, _reservation: lock };
            }
        }
        panic!("no free port from {FIRST} on");
    }

    /// The port's number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

/// Binds a port for a moment; fails if something listens on it.
///
/// The socket never listens. A process that another thread starts meanwhile inherits it until its program runs, and with
/// SO_REUSEADDR only a socket that listens keeps others from the port.
fn bind(port: u16) -> io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into())
}
