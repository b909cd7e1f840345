//! A primary with two replicas and three sentinels, with a quorum of two.
//!
//! Servers are named by their index: 0 starts as the primary. Failover is slow by default, so that a busy machine does
//! not trigger one; [`Sentinels::fail_over`] makes it fast first. Sentinels know each other from their configuration,
//! since their own discovery takes seconds.

use std::time::Duration;

use super::{KIT_USER, Options, Server};
use crate::port::Port;
use crate::wait_for;

/// Name of the primary at the sentinels.
pub const NAME: &str = "counters";

const SERVERS: usize = 3;
const SENTINELS: usize = 3;

const FAST: Duration = Duration::from_millis(400);
const SLOW: Duration = Duration::from_secs(15);

/// Running servers and sentinels; all of them are killed when dropped.
#[derive(Debug)]
pub struct Sentinels {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
}

impl Sentinels {
    /// Starts them with options for the servers and for the sentinels, and waits until the sentinels agree.
    pub fn start_with(servers: &Options, sentinels: &Options) -> Self {
        let primary = servers.clone().launch();
        let of_it = format!("127.0.0.1 {}", primary.port());
        let mut servers: Vec<_> =
            (1..SERVERS).map(|_| servers.clone().with(&[("replicaof", &of_it)]).launch()).collect();
        servers.insert(0, primary);
        // All replicas must be connected: sentinels query the primary for its replicas once, and then seldom.
        servers.iter().for_each(Server::wait_until_ready);
        wait_for("the replicas to be in step", || {
            servers[1..].iter().all(|server| servers[0].streams_to(server)).then_some(())
        });
        let sentinels = start_sentinels(servers[0].port(), sentinels);
        let all = Self { servers, sentinels };
        all.wait_until_agreed();
        all
    }

    /// A server.
    pub fn server(&self, server: usize) -> &Server {
        &self.servers[server]
    }

    /// A sentinel.
    pub fn sentinel(&self, sentinel: usize) -> &Server {
        &self.sentinels[sentinel]
    }

    /// The addresses of the sentinels.
    pub fn addresses(&self) -> Vec<String> {
        self.sentinels.iter().map(Server::address).collect()
    }

    /// Primary that all running sentinels agree on; waits until they agree and its own role is primary.
    pub fn primary(&self) -> usize {
        wait_for("the sentinels to agree on the primary", || self.agreed_primary())
    }

    /// Promotes a replica while the primary runs (`SENTINEL FAILOVER`).
    ///
    /// Returns the new primary when the sentinels agree and the other servers are its replicas.
    pub fn planned_failover(&self) -> usize {
        let old = self.primary();
        self.up().next().expect("a sentinel runs").query::<()>(&["SENTINEL", "FAILOVER", NAME]);
        let new = self.wait_for_successor(old);
        let others = || (0..SERVERS).filter(|other| *other != new).map(|other| &self.servers[other]);
        let in_step = || others().filter(|other| other.is_up()).all(|other| self.servers[new].streams_to(other));
        wait_for("the others to be in step with the new primary", || in_step().then_some(()));
        self.wait_until_agreed();
        new
    }

    /// Kills the primary and returns the new one when the sentinels agree.
    pub fn fail_over(&self) -> usize {
        let old = self.primary();
        self.set_fast_failover(true);
        self.servers[old].kill();
        let new = self.wait_for_successor(old);
        self.set_fast_failover(false);
        new
    }

    /// Waits until the sentinels agree on a different primary, and returns it.
    pub fn wait_for_successor(&self, old: usize) -> usize {
        wait_for("another primary", || self.agreed_primary().filter(|primary| *primary != old))
    }

    /// Switches the sentinels between fast failover, after half a second, and slow failover.
    pub fn set_fast_failover(&self, fast: bool) {
        let after = if fast { FAST } else { SLOW }.as_millis().to_string();
        for sentinel in self.up() {
            sentinel.query::<()>(&["SENTINEL", "SET", NAME, "down-after-milliseconds", &after]);
        }
    }

    fn agreed_primary(&self) -> Option<usize> {
        let primary_of = |sentinel: &Server| {
            let (_, port): (String, u16) = sentinel.query(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]);
            self.servers.iter().position(|server| server.port() == port).expect("the port is a server's")
        };
        let mut all = self.up().map(primary_of);
        let first = all.next().expect("a sentinel runs");
        let server = &self.servers[first];
        (all.all(|other| other == first) && (!server.is_up() || server.info("role") == "master")).then_some(first)
    }

    /// Waits until each sentinel could fail over: it sees the others, and replicas that are up.
    fn wait_until_agreed(&self) {
        let able = |sentinel: &Server| {
            let replicas: Vec<Vec<String>> = sentinel.command(&["SENTINEL", "REPLICAS", NAME]).ok().map(fields)?;
            let is_up = |replica: &Vec<String>| field(replica, "flags") == Some("slave");
            let in_step = |replica: &Vec<String>| field(replica, "master-link-status") == Some("ok");
            let ready = replicas.len() == SERVERS - 1 && replicas.iter().all(|one| is_up(one) && in_step(one));
            let quorum = sentinel.command(&["SENTINEL", "CKQUORUM", NAME]).ok()?;
            let whole = format!("{quorum:?}").contains(&format!("{SENTINELS} usable"));
            (ready && whole).then_some(())
        };
        wait_for("the sentinels to agree", || self.up().all(|one| able(one).is_some()).then_some(()));
        self.primary();
    }

    fn up(&self) -> impl Iterator<Item = &Server> {
        self.sentinels.iter().filter(|sentinel| sentinel.is_up())
    }
}

/// Starts the sentinels of the primary at that port.
fn start_sentinels(primary: u16, options: &Options) -> Vec<Server> {
    let common = options.clone().sentinel().with(&[
        ("sentinel", &format!("monitor {NAME} 127.0.0.1 {primary} 2")),
        ("sentinel", &format!("down-after-milliseconds {NAME} {}", SLOW.as_millis())),
        ("sentinel", &format!("failover-timeout {NAME} 3000")),
        ("sentinel", &format!("auth-user {NAME} {KIT_USER}")),
        ("sentinel", &format!("auth-pass {NAME} {KIT_USER}")),
        ("sentinel", &format!("sentinel-user {KIT_USER}")),
        ("sentinel", &format!("sentinel-pass {KIT_USER}")),
    ]);
    // Each configuration names the other sentinels, so their ports must be known first.
    let ports: Vec<_> = (0..SENTINELS).map(|_| Port::reserve()).collect();
    let id = |sentinel: usize| format!("{sentinel:040x}");
    let numbers: Vec<_> = ports.iter().map(Port::number).collect();
    let configured = ports.into_iter().enumerate().map(|(own, port)| {
        let others = (0..SENTINELS).filter(|other| *other != own);
        let lines = others.map(|other| format!("known-sentinel {NAME} 127.0.0.1 {} {}", numbers[other], id(other + 1)));
        let lines: Vec<_> = lines.chain([format!("myid {}", id(own + 1))]).collect();
        let lines: Vec<_> = lines.iter().map(|line| ("sentinel", line.as_str())).collect();
        common.clone().with(&lines).launch_at(port)
    });
    let sentinels: Vec<_> = configured.collect();
    for sentinel in &sentinels {
        sentinel.wait_until_ready();
        // By default, sentinels poll roles every 10 s and gossip every 2 s.
        for (what, ms) in [("INFO-PERIOD", "200"), ("PUBLISH-PERIOD", "200"), ("ASK-PERIOD", "100")] {
            sentinel.query::<()>(&["SENTINEL", "DEBUG", what, ms]);
        }
    }
    sentinels
}

/// A list of maps, each as names and values in turn.
fn fields(reply: ::redis::Value) -> Vec<Vec<String>> {
    ::redis::from_redis_value(reply).expect("the reply is a list of maps")
}

fn field<'a>(map: &'a [String], name: &str) -> Option<&'a str> {
    map.chunks(2).find(|pair| pair[0] == name).map(|pair| pair[1].as_str())
}
