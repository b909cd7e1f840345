//! A server under attack: its process, its log and its memory.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::frames::CHECK;
use crate::probe;

/// Rules of tollkeeper: a limit that is never reached.
const RULES: &str =
    "domain: shop\ndescriptors:\n- {key: user, rate_limit: {unit: day, requests_per_unit: 4000000000}}\n";

/// A kind of server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ServerKind {
    Tollkeeper,
    GrpcGo,
}

impl ServerKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tollkeeper => "tollkeeper",
            Self::GrpcGo => "grpc-go",
        }
    }
}

/// A running server; dropping it stops the process.
pub struct Server {
    process: Child,
    pub address: SocketAddr,
    log_lines: Arc<AtomicU64>,
    peak_kib: Arc<AtomicU64>,
    stopped: Arc<AtomicBool>,
    directory: PathBuf,
}

impl Server {
    /// Starts a server on free ports and waits until it answers.
    pub fn start(kind: ServerKind, binary: &str) -> Self {
        let [port, http, debug] = free_ports();
        let directory = std::env::temp_dir().join(format!("attacks-{port}"));
        fs::create_dir_all(&directory).expect("a temporary directory is writable");
        let rules = directory.join("rules.yaml");
        fs::write(&rules, RULES).expect("the rules are written");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut command = Command::new(binary);
        match kind {
            ServerKind::Tollkeeper => command
                .args(["serve", "--config"])
                .arg(&rules)
                .envs([("GRPC_HOST", "127.0.0.1"), ("HOST", "127.0.0.1"), ("DEBUG_HOST", "127.0.0.1")])
                .envs([("GRPC_PORT", port), ("PORT", http), ("DEBUG_PORT", debug)].map(|(k, v)| (k, v.to_string()))),
            ServerKind::GrpcGo => command.arg(address.to_string()),
        };
        let mut process = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("the server starts");
        let (log_lines, peak_kib, stopped) = <(Arc<AtomicU64>, Arc<AtomicU64>, Arc<AtomicBool>)>::default();
        let log = BufReader::new(process.stderr.take().expect("the log is a pipe"));
        let counted = Arc::clone(&log_lines);
        thread::spawn(move || {
            for line in log.split(b'\n') {
                counted.fetch_add(u64::from(line.is_ok()), Ordering::Relaxed);
            }
        });
        let (status, peak, stop) =
            (format!("/proc/{}/status", process.id()), Arc::clone(&peak_kib), Arc::clone(&stopped));
        thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                peak.fetch_max(resident_kib(&status), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(50));
            }
        });
        let this = Self { process, address, log_lines, peak_kib, stopped, directory };
        while probe::call(&mut None, address, CHECK, b"").is_err() {
            thread::sleep(Duration::from_millis(20));
        }
        this
    }

    /// Lines that the server has logged.
    pub fn log_lines(&self) -> u64 {
        self.log_lines.load(Ordering::Relaxed)
    }

    /// Peak of the resident memory so far.
    pub fn peak_mib(&self) -> u64 {
        self.peak_kib.load(Ordering::Relaxed) / 1024
    }

    /// True if the process still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        let _killed = self.process.kill();
        let _status = self.process.wait();
        let _removed = fs::remove_dir_all(&self.directory);
    }
}

fn resident_kib(status: &str) -> u64 {
    let text = fs::read_to_string(status).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

fn free_ports() -> [u16; 3] {
    let listeners = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free"));
    listeners.map(|listener| listener.local_addr().expect("it is bound").port())
}
