//! An Envoy that runs a bootstrap of `envoy/` on ports of its own.
//!
//! TOLLKEEPER_TEST_ENVOY names the binary; `tests/run.sh` sets it. Envoy dies with the *thread* that started it, so
//! each Envoy has a thread that starts it, waits and ends it.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tempfile::TempDir;

use super::port::Port;
use super::{http, read, repository, signal, wait_for};

/// A running Envoy; ended when dropped.
#[derive(Debug)]
pub struct Envoy {
    listener: Port,
    admin: Port,
    _upstream: Port,
    files: TempDir,
    /// Dropping the sender makes the thread end Envoy.
    stop: Option<Sender<()>>,
    keeper: Option<JoinHandle<()>>,
}

/// Path of the Envoy binary; panics with instructions if the variable is not set.
fn binary() -> PathBuf {
    let path = env::var_os("TOLLKEEPER_TEST_ENVOY");
    path.expect("TOLLKEEPER_TEST_ENVOY names no Envoy: run tests/run.sh, or set it to what envoy/install.sh prints")
        .into()
}

/// Runs `envoy --mode validate` on a bootstrap.
pub fn validate(bootstrap: &Path) -> Output {
    let mut command = Command::new(binary());
    command.args(["--mode", "validate", "--use-dynamic-base-id", "--log-level", "warning", "-c"]).arg(bootstrap);
    command.output().expect("the Envoy under TOLLKEEPER_TEST_ENVOY can be started")
}

impl Envoy {
    /// Runs `envoy/NAME.yaml` against the tollkeepers at these ports and waits until it is ready.
    pub fn start(name: &str, tollkeepers: &[u16]) -> Self {
        Self::start_with(name, tollkeepers, |bootstrap| bootstrap)
    }

    /// Same as [`Self::start`], with a changed bootstrap.
    pub fn start_with(name: &str, tollkeepers: &[u16], change: impl FnOnce(String) -> String) -> Self {
        Self::start_file(&format!("envoy/{name}.yaml"), tollkeepers, change)
    }

    /// Same as [`Self::start_with`], with any bootstrap of the repository that uses the ports of those in `envoy/`.
    pub fn start_file(file: &str, tollkeepers: &[u16], change: impl FnOnce(String) -> String) -> Self {
        let (listener, upstream, admin) = (Port::reserve(), Port::reserve(), Port::reserve());
        let mut bootstrap = read(&repository(file));
        let ports = [(10_000, listener.number()), (10_001, upstream.number()), (9901, admin.number())];
        let tollkeepers = (8081..).zip(tollkeepers.iter().copied());
        for (shipped, own) in ports.into_iter().chain(tollkeepers) {
            let (from, to) = (format!("port_value: {shipped} "), format!("port_value: {own} "));
            assert!(bootstrap.contains(&from), "{file} uses no port {shipped}");
            bootstrap = bootstrap.replace(&from, &to);
        }
        // The shipped timeouts are for production: on a machine busy with tests they expire, and Envoy fails open.
        for timeout in ["0.02s", "0.1s", "0.25s", "0.5s", "1s"] {
            bootstrap = bootstrap.replace(&format!(" timeout: {timeout}"), " timeout: 10s");
        }

        let files = tempfile::tempdir().expect("a temporary directory can be made");
        let (config, log) = (files.path().join("envoy.yaml"), files.path().join("log"));
        fs::write(&config, change(bootstrap)).expect("the bootstrap can be written");
        let log = File::create(log).expect("a file can be made");
        let mut command = Command::new(binary());
        command.args(["--use-dynamic-base-id", "--concurrency", "2", "--log-level", "warning"]);
        // By default the access log is written every 10 s.
        command.args(["--file-flush-interval-msec", "50", "-c"]).arg(config);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let (stop, stopped) = mpsc::channel();
        let keeper = thread::spawn(move || keep(command, &stopped));
        let envoy = Self { listener, admin, _upstream: upstream, files, stop: Some(stop), keeper: Some(keeper) };
        envoy.wait_until_ready();
        envoy
    }

    /// Port for clients, on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.listener.number()
    }

    /// A GET for `path` to the listener for clients.
    pub fn get(&self, path: &str) -> http::Request {
        http::get(self.port(), path)
    }

    /// Value of a counter or gauge; 0 if it does not exist yet.
    pub fn stat(&self, name: &str) -> u64 {
        let stats = http::get(self.admin.number(), &format!("/stats?filter=^{name}$")).send().text();
        let value = stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        value.map_or(0, |value| value.parse().unwrap_or_else(|_| panic!("{name} is no number: {value}")))
    }

    /// Its statistics as Prometheus reads them.
    pub fn prometheus_page(&self) -> String {
        http::get(self.admin.number(), "/stats/prometheus").send().text()
    }

    fn wait_until_ready(&self) {
        let ready = http::get(self.admin.number(), "/ready");
        wait_for("Envoy to be ready", || {
            let gone = self.keeper.as_ref().is_none_or(JoinHandle::is_finished);
            assert!(!gone, "Envoy ended:\n{}", read(&self.files.path().join("log")));
            ready.try_send().ok().filter(|response| response.status == 200)
        });
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(keeper) = self.keeper.take() {
            // The thread's panic is already printed; a panic in drop would hide the test's own message.
            let _ = keeper.join();
        }
    }
}

/// Runs Envoy until it ends by itself or the sender of `stopped` is dropped.
fn keep(mut command: Command, stopped: &Receiver<()>) {
    let mut child = command.spawn().expect("the Envoy under TOLLKEEPER_TEST_ENVOY can be started");
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(Duration::from_millis(50)) {
        if child.try_wait().expect("the child's status can be read").is_some() {
            return;
        }
    }
    signal::kill(&mut child);
}
