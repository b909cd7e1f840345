//! The measured servers, each a process of its own: tollkeeper, the empty handler, and Redis.

use std::any::Any;
use std::fs;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kit::port::Port;
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::{redis, wait_for};

/// A running server, with its CPU time and memory; ended when dropped if it was started here.
pub(crate) struct MeasuredServer {
    address: SocketAddr,
    pid: u32,
    _process: Box<dyn Any>,
}

/// A tollkeeper with these rules, to be measured: it logs errors only.
pub(crate) fn tollkeeper(rules: &str) -> Setup {
    with_rules(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("LOG_LEVEL", "error")
}

impl MeasuredServer {
    /// Starts tollkeeper and waits until it is healthy.
    pub(crate) fn start(setup: Setup) -> Self {
        setup.start().into()
    }

    /// Starts the server that answers without deciding, and waits until it accepts connections.
    pub(crate) fn empty_handler() -> Self {
        let port = Port::reserve();
        let address = on_loopback(port.number());
        let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
        command.arg("empty-handler").arg(port.number().to_string());
        let child = command.stdout(Stdio::null()).spawn().expect("this program can be started");
        let handler = EmptyHandler { child, _port: port };
        wait_for("the empty handler to accept", || std::net::TcpStream::connect(address).ok());
        Self { address, pid: handler.child.id(), _process: Box::new(handler) }
    }

    /// A Redis that the caller keeps running.
    pub(crate) fn redis(server: &redis::Server) -> Self {
        let pid = server.info("process_id").parse().expect("a process id is a number");
        Self { address: on_loopback(server.port()), pid, _process: Box::new(()) }
    }

    /// A Redis that this value keeps running.
    pub(crate) fn owned_redis(server: redis::Server) -> Self {
        let Self { address, pid, .. } = Self::redis(&server);
        Self { address, pid, _process: Box::new(server) }
    }

    /// This process, the load generator.
    pub(crate) fn this_process() -> Self {
        Self { address: on_loopback(0), pid: std::process::id(), _process: Box::new(()) }
    }

    /// Address of its gRPC or Redis port.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// CPU time of all its threads, from the scheduler's statistics in nanoseconds.
    pub(crate) fn cpu(&self) -> Duration {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).expect("the server runs");
        tasks
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("schedstat")).ok())
            .filter_map(|account| account.split(' ').next()?.parse().ok())
            .map(Duration::from_nanos)
            .sum()
    }

    /// Resident memory, in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).expect("the server runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its resident size");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }
}

impl From<Tollkeeper> for MeasuredServer {
    fn from(tollkeeper: Tollkeeper) -> Self {
        Self { address: on_loopback(tollkeeper.grpc_port()), pid: tollkeeper.id(), _process: Box::new(tollkeeper) }
    }
}

/// The process of the empty handler, and its reserved port.
struct EmptyHandler {
    child: Child,
    _port: Port,
}

impl Drop for EmptyHandler {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn on_loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}
