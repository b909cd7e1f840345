//! The servers that are measured, each in a process of its own, and the Redis behind them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A server.
pub(crate) struct ServerProcess {
    child: Child,
    address: SocketAddr,
}

impl ServerProcess {
    /// tollkeeper with these rules, and these settings besides.
    pub(crate) fn tollkeeper(rules: &Path, settings: &[(&str, &str)]) -> Self {
        let [grpc, http, debug] = [free_port(), free_port(), free_port()];
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollkeeper"));
        command.arg("serve").arg("--config").arg(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s").env("LOG_LEVEL", "error");
        command.env("GRPC_HOST", "127.0.0.1").env("HOST", "127.0.0.1").env("DEBUG_HOST", "127.0.0.1");
        command.env("GRPC_PORT", grpc.to_string()).env("PORT", http.to_string()).env("DEBUG_PORT", debug.to_string());
        command.envs(settings.iter().copied());
        Self::start(command, grpc)
    }

    /// What answers without deciding.
    pub(crate) fn empty_handler() -> Self {
        let port = free_port();
        let program: PathBuf = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.arg("empty-handler").arg(port.to_string());
        Self::start(command, port)
    }

    /// A Redis without persistence; `lines` are further words of its command line.
    pub(crate) fn redis(lines: &[&str]) -> Self {
        let port = free_port();
        let directory = std::env::temp_dir();
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port"]).arg(port.to_string());
        command.args(lines).current_dir(directory);
        Self::start(command, port)
    }

    fn start(mut command: Command, port: u16) -> Self {
        let child = command.stdout(Stdio::null()).spawn().expect("the server starts");
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        while std::net::TcpStream::connect(address).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { child, address }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// CPU time of all its threads, from the scheduler's nanosecond account.
    pub(crate) fn cpu(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("the server runs");
        tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok())
            .filter_map(|account| account.split(' ').next()?.parse().ok())
            .map(Duration::from_nanos)
            .sum()
    }

    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the server runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its resident size");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}
