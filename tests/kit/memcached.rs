//! A memcached for one test: on a reserved loopback port, with a client that speaks its text protocol.
//!
//! A missing memcached fails the test; version 1.6 is needed, for `mg` and `metadump`. With TLS the kit itself talks to
//! a second port, without TLS.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

use super::port::Port;
use super::redis::certificates::Certificates;
use super::tollkeeper::inherited_env;
use super::{PATIENCE, read, signal, wait_for};

/// Options to start a server with.
#[derive(Clone, Debug, Default)]
pub struct MemcachedOptions {
    arguments: Vec<String>,
    tls: bool,
}

/// A server without TLS.
pub fn memcached() -> MemcachedOptions {
    MemcachedOptions::default()
}

impl MemcachedOptions {
    /// Adds command line arguments.
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// Keeps about 20 000 counters, as few as memcached allows, and evicts others.
    pub fn smallest_memory(self) -> Self {
        self.with(&["-m", "2"])
    }

    /// Requires TLS; `verify_clients` requires a certificate of the client too.
    pub fn tls(mut self, certificates: &Certificates, verify_clients: bool) -> Self {
        self.tls = true;
        let path = |name| certificates.path(name).display().to_string();
        let mut options = format!("ssl_chain_cert={},ssl_key={}", path("server.crt"), path("server.key"));
        if verify_clients {
            // 2 means that a client without a certificate is refused.
            options += &format!(",ssl_ca_cert={},ssl_verify_mode=2", path("ca.crt"));
        }
        self.with(&["-Z", "-o", &options])
    }

    /// Starts it and waits until it answers.
    pub fn start(self) -> Memcached {
        let files = tempfile::tempdir().expect("a temporary directory can be made");
        let (port, plain) = (Port::reserve(), self.tls.then(Port::reserve));
        let mut addresses = format!("127.0.0.1:{}", port.number());
        if let Some(plain) = &plain {
            // The second address is not in its certificate.
            addresses += &format!(",127.0.0.2:{},notls:127.0.0.1:{}", port.number(), plain.number());
        }
        // Only root needs a user to run as; without one it refuses to start.
        let arguments = [&["-u".to_owned(), "root".to_owned(), "-l".to_owned(), addresses], &*self.arguments].concat();
        let child = Mutex::new(spawn(&arguments, &files));
        let server = Memcached { child, arguments, port, plain, files };
        server.wait_until_ready();
        server
    }
}

fn spawn(arguments: &[String], files: &TempDir) -> Child {
    let log = File::options().create(true).append(true).open(files.path().join("log")).expect("a file can be made");
    let mut command = Command::new("memcached");
    command.env_clear().envs(inherited_env()).args(arguments).current_dir(files.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().unwrap_or_else(|error| {
        panic!("memcached cannot be started ({error}): run tests/run.sh, or install memcached 1.6 or newer")
    })
}

/// A running server; killed when dropped.
#[derive(Debug)]
pub struct Memcached {
    child: Mutex<Child>,
    arguments: Vec<String>,
    port: Port,
    plain: Option<Port>,
    files: TempDir,
}

impl Memcached {
    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port())
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Keys of all items, with the time at which each expires, in seconds since the Unix epoch; -1 means never.
    pub fn keys(&self) -> BTreeMap<Vec<u8>, i64> {
        let lines = wait_for("the crawler to be free", || {
            let lines = self.command("lru_crawler metadump all", "END");
            lines.iter().all(|line| !line.starts_with("BUSY")).then_some(lines)
        });
        let item = |line: &String| {
            let field = |name: &str| line.split(' ').find_map(|field| field.strip_prefix(name)).unwrap_or_default();
            (percent_decoded(field("key=")), field("exp=").parse().expect("a time is a number"))
        };
        lines.iter().filter(|line| line.starts_with("key=")).map(item).collect()
    }

    /// Value of a counter; `None` if there is none.
    pub fn count(&self, key: &str) -> Option<u64> {
        let lines = self.command(&format!("get {key}"), "END");
        lines.get(1).map(|value| value.trim().parse().expect("a counter is a number"))
    }

    /// Sum of all counters.
    pub fn total(&self) -> u64 {
        let keys = self.keys().into_keys().map(|key| String::from_utf8(key).expect("a key is text"));
        keys.filter_map(|key| self.count(&key)).sum()
    }

    /// Stores values of one byte under keys of `length` bytes, until `is_done`; to evict older ones.
    pub fn fill(&self, length: usize, mut is_done: impl FnMut() -> bool) {
        // More than the smallest memory holds, because a counter that is read between batches counts as used.
        const BATCH: u32 = 50_000;
        const MAX_BATCHES: u32 = 10;
        for batch in 0..MAX_BATCHES {
            if is_done() {
                return;
            }
            let mut commands = String::new();
            for number in batch * BATCH..(batch + 1) * BATCH {
                commands += &format!("set {number:f>length$} 0 0 1 noreply\r\n1\r\n");
            }
            self.command(&(commands + "version"), "VERSION");
        }
        panic!("{} items evicted nothing", MAX_BATCHES * BATCH);
    }

    /// A number of `stats`.
    pub fn stat(&self, name: &str) -> u64 {
        let lines = self.command("stats", "END");
        let value = lines.iter().find_map(|line| line.strip_prefix("STAT ")?.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} in {lines:?}"))
    }

    /// Sends a command; returns the lines of the reply up to one that begins with `last`, or with an error.
    pub fn command(&self, command: &str, last: &str) -> Vec<String> {
        self.try_command(command, last).unwrap_or_else(|error| panic!("{command:.100}: {error}:\n{}", self.log()))
    }

    fn try_command(&self, command: &str, last: &str) -> std::io::Result<Vec<String>> {
        let port = self.plain.as_ref().unwrap_or(&self.port).number();
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(format!("{command}\r\n").as_bytes())?;
        let mut lines = Vec::new();
        for line in BufReader::new(stream).lines() {
            let line = line?;
            let is_last =
                [last, "ERROR", "CLIENT_ERROR", "SERVER_ERROR", "BUSY"].iter().any(|end| line.starts_with(end));
            lines.push(line);
            if is_last {
                return Ok(lines);
            }
        }
        Err(ErrorKind::UnexpectedEof.into())
    }

    /// Freezes it: the kernel keeps accepting connections, the server replies to nothing.
    pub fn freeze(&self) {
        signal::freeze(&self.child());
    }

    /// Continues it; the server then handles the bytes received meanwhile.
    pub fn thaw(&self) {
        signal::thaw(&self.child());
    }

    /// Kills it and waits until it has ended; all counters are lost. Its port stays reserved.
    pub fn kill(&self) {
        signal::kill(&mut self.child());
    }

    /// Starts it after [`Memcached::kill`], on the same port, and waits until it answers.
    pub fn restart(&self) {
        *self.child() = spawn(&self.arguments, &self.files);
        self.wait_until_ready();
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        // A failed test drops its servers while it panics, and they must be killed then too.
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> String {
        let path: PathBuf = self.files.path().join("log");
        read(&path)
    }

    fn wait_until_ready(&self) {
        wait_for("memcached to answer", || {
            if let Some(status) = self.child().try_wait().expect("the child's status can be read") {
                panic!("memcached ended with {status}:\n{}", self.log());
            }
            self.try_command("version", "VERSION").ok()
        });
    }
}

impl Drop for Memcached {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Decodes each `%XX`, by which `metadump` writes bytes of keys.
fn percent_decoded(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digits = if byte == b'%' { [rest.next(), rest.next()] } else { [None, None] };
        let value = |[high, low]: [Option<u8>; 2]| {
            let text = [high?, low?];
            u8::from_str_radix(std::str::from_utf8(&text).ok()?, 16).ok()
        };
        bytes.push(value(digits).unwrap_or(byte));
    }
    bytes
}
