//! A DNS server for SRV records, in a network of its own: port 53 and `/etc/resolv.conf` belong to the machine.
//!
//! [`in_own_network`] runs a test again in new namespaces for network and mounts, where [`DnsServer`] is the resolver.
//! Every name has the address 127.0.0.1.

use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, fs, thread};

/// Variable that is set in the network of a test.
const OWN_NETWORK: &str = "TOLLKEEPER_TEST_OWN_NETWORK";

/// Prepares the namespaces, then runs the command: `resolv.conf`, then its words.
const SCRIPT: &str =
    r#"mount --bind "$1" /etc/resolv.conf && PATH=$PATH:/usr/sbin:/sbin ip link set lo up && shift && exec "$@""#;

/// Ways to get the namespaces: as any user, or where that is forbidden, by sudo.
const NAMESPACES: [&[&str]; 2] =
    [&["unshare", "--map-root-user", "--net", "--mount"], &["sudo", "-n", "unshare", "--net", "--mount"]];

/// Runs the test of this name in a network of its own; returns `false` there, and `true` once it has passed.
pub fn in_own_network(test: &str) -> bool {
    if env::var_os(OWN_NETWORK).is_some() {
        return false;
    }
    let run = |words: &[&str], arguments: &[&str]| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(arguments).stdin(Stdio::null()).output().expect("the program is installed")
    };
    let is_possible = |words: &&&[&str]| {
        let mut command = Command::new(words[0]);
        let status = command.args(&words[1..]).arg("true").stdin(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    let namespaces = NAMESPACES.iter().find(is_possible).expect("a user namespace, root or sudo makes a network");
    let files = tempfile::tempdir().expect("a temporary directory can be made");
    let resolv_conf = files.path().join("resolv.conf");
    fs::write(&resolv_conf, "nameserver 127.0.0.1\n").expect("it can be written");
    let program = env::current_exe().expect("the test is a program");
    let (path, marker) = (env::var("PATH").expect("there is a PATH"), format!("{OWN_NETWORK}=1"));
    let words = ["sh", "-c", SCRIPT, "sh", resolv_conf.to_str().expect("paths of tests are UTF-8")];
    let inner = ["env", &format!("PATH={path}"), &marker, program.to_str().expect("paths of tests are UTF-8")];
    let output = run(namespaces, &[&words[..], &inner, &["--exact", test, "--nocapture"]].concat());
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).join("\n");
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    true
}

/// A name server on port 53 of 127.0.0.1; it ends with the process.
#[derive(Debug)]
pub struct DnsServer {
    targets: Arc<Mutex<Vec<SrvTarget>>>,
}

/// A server of the SRV record.
#[derive(Clone, Debug)]
pub struct SrvTarget {
    /// Name without a dot at its end.
    pub host: &'static str,
    /// Port of the server.
    pub port: u16,
}

impl DnsServer {
    /// Starts it; every SRV record has these targets.
    pub fn start(targets: &[SrvTarget]) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:53").expect("the network is the test's own");
        let targets = Arc::new(Mutex::new(targets.to_vec()));
        let current = Arc::clone(&targets);
        thread::spawn(move || {
            let mut query = [0; 1500];
            while let Ok((length, client)) = socket.recv_from(&mut query) {
                let targets = current.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if let Some(reply) = reply(&query[..length], &targets) {
                    // A client that has gone needs no reply.
                    let _ = socket.send_to(&reply, client);
                }
            }
        });
        Self { targets }
    }

    /// Replaces the targets; without any, the name does not exist.
    pub fn set(&self, targets: &[SrvTarget]) {
        *self.targets.lock().unwrap_or_else(PoisonError::into_inner) = targets.to_vec();
    }
}

/// Replies to a query of one question; `None` if it is not one.
fn reply(query: &[u8], targets: &[SrvTarget]) -> Option<Vec<u8>> {
    const HEADER_BYTES: usize = 12;
    const A: u16 = 1;
    const SRV: u16 = 33;
    const NAME_ERROR: u8 = 3;
    let name_end = HEADER_BYTES + query.get(HEADER_BYTES..)?.iter().position(|byte| *byte == 0)? + 1;
    let kind = u16::from_be_bytes(query.get(name_end..name_end + 2)?.try_into().ok()?);
    let data: Vec<Vec<u8>> = match kind {
        A => vec![vec![127, 0, 0, 1]],
        SRV => targets.iter().map(srv_data).collect(),
        _ => Vec::new(),
    };
    let code = if kind == SRV && targets.is_empty() { NAME_ERROR } else { 0 };
    let answers = u8::try_from(data.len()).ok()?;
    let mut reply = query[..2].to_vec();
    reply.extend([0x81, 0x80 | code, 0, 1, 0, answers, 0, 0, 0, 0]);
    reply.extend(&query[HEADER_BYTES..name_end + 4]);
    for data in data {
        // The name of the question, class IN, and a TTL of 0 s.
        reply.extend([0xc0, 0x0c]);
        reply.extend(kind.to_be_bytes());
        reply.extend([0, 1, 0, 0, 0, 0]);
        reply.extend(u16::try_from(data.len()).ok()?.to_be_bytes());
        reply.extend(data);
    }
    Some(reply)
}

/// Priority, weight, port and name.
fn srv_data(target: &SrvTarget) -> Vec<u8> {
    let mut data = vec![0, 1, 0, 1];
    data.extend(target.port.to_be_bytes());
    for label in target.host.split('.') {
        data.push(u8::try_from(label.len()).expect("a label is short"));
        data.extend(label.bytes());
    }
    data.push(0);
    data
}
