//! A redis-server for one test: on reserved loopback ports, in a directory of its own, without persistence.
//!
//! The kit and replicas connect as an ACL user of their own, so tests may change the default user and its password,
//! and the kit can still query and configure. Options are lines of `redis.conf`. A missing redis-server
//! fails the test. `REDIS_SERVER=PROGRAM` tests another version: 7.0 or newer, which has `cluster-port`, or most of
//! single servers with 6.2.

pub mod client;
pub mod certificates;
pub mod cluster;
pub mod sentinels;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::redis::{FromRedisValue, RedisResult, Value};
use tempfile::TempDir;

use self::certificates::Certificates;
use self::client::RedisClient;
use super::port::Port;
use super::tollkeeper::inherited_env;
use super::{read, signal, wait_for};

/// User and password of the kit itself.
const KIT_USER: &str = "kit";

/// Timeout of the kit's own commands, far above the latency of a healthy server.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Options to start a server with.
#[derive(Clone, Debug)]
pub struct Options {
    program: String,
    lines: Vec<(String, String)>,
    kind: Kind,
    tls: bool,
    clock: OwnClock,
}

/// Clock of a server that differs from the machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OwnClock {
    /// None: it has the machine's.
    None,
    /// So many seconds from the machine's.
    Offset,
    /// Stands still at this time in microseconds since 1970.
    Frozen(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Single,
    Cluster,
    Sentinel,
}

/// A server without password, persistence or TLS.
pub fn options() -> Options {
    let program = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
    Options { program, lines: Vec::new(), kind: Kind::Single, tls: false, clock: OwnClock::None }
}

impl Options {
    /// Adds lines of `redis.conf`; the last line of a name applies, except for repeatable ones such as `user`.
    pub fn with(mut self, lines: &[(&str, &str)]) -> Self {
        self.lines.extend(lines.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self
    }

    /// Sets a password for the default user.
    pub fn password(self, password: &str) -> Self {
        self.with(&[("requirepass", &format!("{password:?}"))])
    }

    /// Adds an ACL user with these rules (`on >secret ~* +get`).
    pub fn user(self, name: &str, rules: &str) -> Self {
        self.with(&[("user", &format!("{name} {rules}"))])
    }

    /// Listens on a unix socket too, at [`Server::socket`].
    pub fn unix_socket(self) -> Self {
        self.with(&[("unixsocket", "redis.sock")])
    }

    /// Listens with TLS too, at [`Server::tls_port`].
    ///
    /// Accepts clients with and without a certificate; `tls-auth-clients yes` requires one.
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.tls = true;
        let path = |name| certificates.path(name).to_str().expect("paths of tests are UTF-8").to_owned();
        self.with(&[
            ("tls-cert-file", &path("server.crt")),
            ("tls-key-file", &path("server.key")),
            ("tls-ca-cert-file", &path("ca.crt")),
            ("tls-auth-clients", "optional"),
        ])
    }

    /// Starts this program.
    pub fn program(mut self, program: &str) -> Self {
        program.clone_into(&mut self.program);
        self
    }

    /// Has a clock of its own, which [`Server::set_clock`] sets.
    pub fn own_clock(mut self) -> Self {
        self.clock = OwnClock::Offset;
        self
    }

    /// Has a clock of its own that stands still at `now_us`, in microseconds since 1970, until
    /// [`Server::set_frozen_clock`] sets it.
    pub fn frozen_clock(mut self, now_us: u64) -> Self {
        self.clock = OwnClock::Frozen(now_us);
        self
    }

    /// Starts it and waits until it answers.
    pub fn start(self) -> Server {
        let server = self.launch();
        server.wait_until_ready();
        server
    }

    /// A node of a cluster, without slots.
    pub fn cluster(mut self) -> Self {
        self.kind = Kind::Cluster;
        self.with(&[("cluster-enabled", "yes")])
    }

    fn sentinel(mut self) -> Self {
        self.kind = Kind::Sentinel;
        self
    }

    /// Starts it without waiting, so that several can start at once.
    fn launch(self) -> Server {
        self.launch_at(Port::reserve())
    }

    fn launch_at(self, plain: Port) -> Server {
        let files = tempfile::tempdir().expect("a temporary directory can be made");
        let tls = self.tls.then(Port::reserve);
        // The default is the port + 10000, which may be in use.
        let bus = (self.kind == Kind::Cluster).then(Port::reserve);
        let mut config = self.config(files.path(), &plain);
        for (name, port) in [("tls-port", &tls), ("cluster-port", &bus)] {
            if let Some(port) = port {
                writeln!(config, "{name} {}", port.number()).expect("a text can be written to");
            }
        }
        fs::write(files.path().join("redis.conf"), config).expect("the configuration can be written");
        let clock = match self.clock {
            OwnClock::None => None,
            OwnClock::Offset => Some("+0".to_owned()),
            OwnClock::Frozen(now_us) => Some(frozen_time(now_us)),
        };
        if let Some(clock) = clock {
            fs::write(files.path().join(CLOCK), clock).expect("the clock can be set");
        }
        let child = Mutex::new(spawn(&self.program, self.kind, files.path()));
        let frozen = AtomicBool::new(false);
        Server { child, frozen, program: self.program, kind: self.kind, plain, tls, bus, files }
    }

    fn config(&self, directory: &Path, port: &Port) -> String {
        let mut lines = vec![
            ("bind", "127.0.0.1".to_owned()),
            ("port", port.number().to_string()),
            ("dir", directory.display().to_string()),
            ("user", format!("{KIT_USER} on >{KIT_USER} ~* &* +@all")),
        ];
        if self.kind != Kind::Sentinel {
            lines.extend([
                ("save", "\"\"".to_owned()),
                ("masteruser", KIT_USER.to_owned()),
                ("masterauth", KIT_USER.to_owned()),
                // Diskless replication delays writes until the replica reports, a second later, that it is in sync.
                ("repl-diskless-sync", "no".to_owned()),
            ]);
        }
        let own = self.lines.iter().map(|(name, value)| (name.as_str(), value.clone()));
        lines.into_iter().chain(own).fold(String::new(), |mut text, (name, value)| {
            writeln!(text, "{name} {value}").expect("a text can be written to");
            text
        })
    }
}

/// File with the offset of a server's own clock, or the time at which it stands still.
const CLOCK: &str = "clock";

/// Returns a time as libfaketime reads it: seconds with a fraction that it rounds down to the microsecond. All texts have
/// the same length, so that writing one over another needs no truncation.
fn frozen_time(now_us: u64) -> String {
    format!("{:010}.{:06}5", now_us / 1_000_000, now_us % 1_000_000)
}

/// libfaketime, of Debian's package `faketime`.
fn faketime_library() -> PathBuf {
    let machine = format!("/usr/lib/{}-linux-gnu/faketime/libfaketime.so.1", std::env::consts::ARCH);
    let places = [machine.as_str(), "/usr/lib/faketime/libfaketime.so.1", "/usr/lib64/faketime/libfaketime.so.1"];
    let found = places.into_iter().map(PathBuf::from).find(|place| place.exists());
    found.unwrap_or_else(|| panic!("libfaketime.so.1 is missing: run tests/run.sh, or apt-get install faketime"))
}

/// Starts the program on the configuration in `directory`, where it also logs.
fn spawn(program: &str, kind: Kind, directory: &Path) -> Child {
    let log = File::options().create(true).append(true).open(directory.join("log")).expect("a file can be made");
    let errors = log.try_clone().expect("a file can be opened twice");
    let mut command = Command::new(program);
    command.env_clear().envs(inherited_env()).arg(directory.join("redis.conf"));
    if kind == Kind::Sentinel {
        command.arg("--sentinel");
    }
    if let Ok(clock) = fs::read_to_string(directory.join(CLOCK)) {
        // libc before jemalloc, which reads the clock while libfaketime starts.
        let preload = format!("{} libc.so.6", faketime_library().display());
        command.env("LD_PRELOAD", preload).env("FAKETIME_TIMESTAMP_FILE", directory.join(CLOCK));
        command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        if clock.starts_with('+') {
            command.env("FAKETIME_CACHE_DURATION", "1");
        } else {
            command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_FMT", "%s").env("TZ", "UTC");
        }
    }
    command.current_dir(directory).stdin(Stdio::null()).stdout(log).stderr(errors);
    command.spawn().unwrap_or_else(|error| {
        panic!("{program} cannot be started ({error}): run tests/run.sh, or install Redis 7.0 or newer")
    })
}

/// A running server; killed when dropped.
#[derive(Debug)]
pub struct Server {
    child: Mutex<Child>,
    frozen: AtomicBool,
    program: String,
    kind: Kind,
    plain: Port,
    tls: Option<Port>,
    bus: Option<Port>,
    files: TempDir,
}

impl Server {
    /// Its port without TLS, on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.plain.number()
    }

    /// `127.0.0.1:PORT`, without TLS.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port())
    }

    /// Its TLS port on 127.0.0.1; panics without [`Options::tls`].
    pub fn tls_port(&self) -> u16 {
        self.tls.as_ref().expect("the server was started with TLS").number()
    }

    /// Path of its unix socket, which exists with [`Options::unix_socket`] only.
    pub fn socket(&self) -> PathBuf {
        self.files.path().join("redis.sock")
    }

    /// Reply to a command of the kit's user, on a new connection.
    pub fn command(&self, words: &[&str]) -> RedisResult<Value> {
        self.connect(REPLY_TIMEOUT)?.command(words)
    }

    /// Connection of the kit's user; `timeout` bounds connecting and each reply.
    pub fn connect(&self, timeout: Duration) -> RedisResult<RedisClient> {
        RedisClient::connect(&format!("redis://{KIT_USER}:{KIT_USER}@{}", self.address()), timeout)
    }

    /// Reply to a command as a `T`; panics for another type or an error.
    pub fn query<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let value = self.command(words).and_then(|value| Ok(::redis::from_redis_value(value)?));
        value.unwrap_or_else(|error| panic!("{:.300} at {}: {error}", format!("{words:?}"), self.address()))
    }

    /// A field of `INFO`; empty if it is not there.
    pub fn info(&self, field: &str) -> String {
        let info: String = self.query(&["INFO", "everything"]);
        let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.unwrap_or_default().trim().to_owned()
    }

    /// Calls of each command since the start or [`Server::reset_stats`], by lower-case name, subcommands as
    /// `config|get`, or as `config` before 7.0. Those of scripts count too; `auth`, `info` and `config|resetstat`,
    /// which the kit itself calls, are left out.
    pub fn command_counts(&self) -> BTreeMap<String, u64> {
        let info: String = self.query(&["INFO", "commandstats"]);
        let calls = info.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let calls = rest.split(',').next()?.parse().expect("calls are a number");
            (!["auth", "info", "config", "config|resetstat"].contains(&name)).then(|| (name.to_owned(), calls))
        });
        calls.collect()
    }

    /// Resets the command counts.
    pub fn reset_stats(&self) {
        self.query::<()>(&["CONFIG", "RESETSTAT"]);
    }

    /// Sets its own clock to so many seconds after the right time, within a second.
    pub fn set_clock(&self, offset_s: i64) {
        let (new, clock) = (self.files.path().join("clock.new"), self.files.path().join(CLOCK));
        fs::write(&new, format!("{offset_s:+}")).expect("the clock can be set");
        fs::rename(new, clock).expect("the clock can be set");
        let right_s = || SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970").as_secs();
        wait_for("the clock to jump", || {
            let (seconds, _): (u64, u64) = self.query(&["TIME"]);
            (seconds.abs_diff(right_s().saturating_add_signed(offset_s)) <= 1).then_some(())
        });
    }

    /// Sets the clock of [`Options::frozen_clock`]; the next command sees it.
    pub fn set_frozen_clock(&self, now_us: u64) {
        let clock = File::options().write(true).open(self.files.path().join(CLOCK)).expect("the clock is a file");
        clock.write_all_at(frozen_time(now_us).as_bytes(), 0).expect("the clock can be set");
    }

    /// Freezes it: the kernel keeps accepting connections, the server replies to nothing.
    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
        signal::freeze(&self.child());
    }

    /// Continues it; the server then handles the bytes received meanwhile.
    pub fn thaw(&self) {
        signal::thaw(&self.child());
        self.frozen.store(false, Ordering::Relaxed);
    }

    /// Kills it (`kill -9`) and waits until it has ended. Its ports stay reserved.
    pub fn kill(&self) {
        signal::kill(&mut self.child());
    }

    /// Starts it after [`Server::kill`], on the same ports and in the same directory, and waits until it answers.
    pub fn restart(&self) {
        self.relaunch();
        self.wait_until_ready();
    }

    fn relaunch(&self) {
        let mut child = self.child();
        assert!(child.try_wait().expect("the child's status can be read").is_some(), "the server still runs");
        self.frozen.store(false, Ordering::Relaxed);
        *child = spawn(&self.program, self.kind, self.files.path());
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        read(&self.files.path().join("log"))
    }

    /// True if it runs and is not frozen.
    fn is_up(&self) -> bool {
        let ended = self.child().try_wait().expect("the child's status can be read");
        ended.is_none() && !self.frozen.load(Ordering::Relaxed)
    }

    /// True if it streams writes to that replica; the replica reports itself in sync earlier.
    fn streams_to(&self, replica: &Self) -> bool {
        let info: String = self.query(&["INFO", "replication"]);
        info.contains(&format!("port={},state=online", replica.announced_port()))
    }

    /// Port that it announces to other servers of a cluster.
    fn announced_port(&self) -> u16 {
        self.tls.as_ref().unwrap_or(&self.plain).number()
    }

    /// The port of the cluster's own protocol.
    fn bus_port(&self) -> u16 {
        self.bus.as_ref().expect("the server is of a cluster").number()
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        // A failed test drops its servers while it panics, and they must be killed then too.
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until_ready(&self) {
        wait_for("redis-server to answer", || {
            if let Some(status) = self.child().try_wait().expect("the child's status can be read") {
                panic!("redis-server ended with {status}:\n{}", self.log());
            }
            self.command(&["PING"]).ok()
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
