//! Attacks a server with raw HTTP/2 frames and measures what other clients notice.
//!
//! Each attack meets a fresh server. Beside it, a probe of `ShouldRateLimit` and one of `Health/Check`, each on its own
//! connection, send a call each 100 ms. The table shows their worst latencies, failed probes, the peak of the server's
//! resident memory, its log lines, and how often it closed an attacking connection. Attackers run with `nice 19`, so
//! that on one machine they do not take the processor from the server and the probes.
//!
//! `tests/bench/attacks/run.sh [--seconds N] [--connections N] [--only NAME,NAME] [--servers tollkeeper,grpc-go]`

mod attack;
mod frames;
mod probe;
mod server;

use std::env;
use std::process::{Command, Stdio};
use std::time::Duration;

use attack::{ATTACKS, Attack};
use frames::{CHECK, SHOULD_RATE_LIMIT, rate_limit_request};
use probe::Probe;
use server::{Server, ServerKind};

/// Time for the attackers to notice their end.
const GRACE: Duration = Duration::from_secs(3);

fn main() {
    let options = Options::parse();
    if let Some((name, address)) = &options.attacker {
        let attack = find(name);
        let address = address.parse().expect("an address");
        return attack::attack(attack, address, options.connections, Duration::from_secs(options.seconds));
    }
    println!("{} attacking connections, {} s each\n", options.connections, options.seconds);
    println!(
        "| attack | server | worst call | worst health check | failed probes | resident MiB | log lines | closed |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for attack in ATTACKS.iter().filter(|attack| options.only.is_empty() || options.only.contains(&attack.name.into()))
    {
        for (kind, binary) in servers(&options.servers) {
            measure(attack, kind, &binary, &options);
        }
    }
}

/// Runs one attack against a fresh server and prints its row.
fn measure(attack: &Attack, kind: ServerKind, binary: &str, options: &Options) {
    let mut server = Server::start(kind, binary);
    let calls = Probe::start(server.address, SHOULD_RATE_LIMIT, rate_limit_request("shop", 1, "probe"));
    let checks = Probe::start(server.address, CHECK, Vec::new());
    let lines = server.log_lines();
    let mut attackers = Command::new("nice")
        .args(["-n", "19"])
        .arg(env::current_exe().expect("the program has a path"))
        .args(["--attacker", attack.name, "--address", &server.address.to_string()])
        .args(["--seconds", &options.seconds.to_string(), "--connections", &options.connections.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the attackers start");
    std::thread::sleep(Duration::from_secs(options.seconds));
    let (calls, checks) = (calls.stop(), checks.stop());
    std::thread::sleep(GRACE.min(Duration::from_secs(1)));
    let (peak, lines, is_running) = (server.peak_mib(), server.log_lines() - lines, server.is_running());
    drop(server);
    std::thread::sleep(GRACE);
    let _killed = attackers.kill();
    let output = attackers.wait_with_output().map(|output| output.stdout).unwrap_or_default();
    println!(
        "| {} | {} | {:.0} ms | {:.0} ms | {} of {} | {peak}{} | {lines} | {} |",
        attack.name,
        kind.name(),
        calls.worst.as_secs_f64() * 1e3,
        checks.worst.as_secs_f64() * 1e3,
        calls.failed + checks.failed,
        calls.sent + checks.sent,
        if is_running { "" } else { " (the process ended)" },
        String::from_utf8_lossy(&output).trim(),
    );
}

fn find(name: &str) -> &'static Attack {
    ATTACKS.iter().find(|attack| attack.name == name).unwrap_or_else(|| usage(&format!("no attack {name}")))
}

/// Servers with their binaries, from `TOLLKEEPER` and `GRPC_GO_SERVER`.
fn servers(names: &[String]) -> Vec<(ServerKind, String)> {
    let all = [(ServerKind::Tollkeeper, "TOLLKEEPER"), (ServerKind::GrpcGo, "GRPC_GO_SERVER")];
    let wanted = all.into_iter().filter(|(kind, _)| names.is_empty() || names.iter().any(|name| name == kind.name()));
    wanted.filter_map(|(kind, variable)| Some((kind, env::var(variable).ok()?))).collect()
}

/// Options of the command line.
struct Options {
    seconds: u64,
    connections: usize,
    only: Vec<String>,
    servers: Vec<String>,
    /// Attack and address of a process of attackers, which this program starts itself.
    attacker: Option<(String, String)>,
}

impl Options {
    fn parse() -> Self {
        let mut this = Self { seconds: 20, connections: 32, only: Vec::new(), servers: Vec::new(), attacker: None };
        let (mut attacker, mut address) = (None, None);
        let arguments: Vec<String> = env::args().skip(1).collect();
        for pair in arguments.chunks(2) {
            let value = pair.get(1).cloned().unwrap_or_else(|| usage("a value is missing"));
            let list = || value.split(',').map(str::to_owned).collect();
            let number = || value.parse().unwrap_or_else(|_| usage("not a number"));
            match pair[0].as_str() {
                "--seconds" => this.seconds = number(),
                "--connections" => this.connections = usize::try_from(number()).unwrap_or(usize::MAX),
                "--only" => this.only = list(),
                "--servers" => this.servers = list(),
                "--attacker" => attacker = Some(value),
                "--address" => address = Some(value),
                _ => usage("unknown option"),
            }
        }
        for name in &this.only {
            find(name);
        }
        this.attacker = attacker.zip(address);
        this
    }
}

fn usage(problem: &str) -> ! {
    let names: Vec<&str> = ATTACKS.iter().map(|attack| attack.name).collect();
    eprintln!(
        "{problem}\nusage: run.sh [--seconds N] [--connections N] [--only NAME,NAME] [--servers tollkeeper,grpc-go]"
    );
    eprintln!("attacks: {}", names.join(", "));
    std::process::exit(2);
}
