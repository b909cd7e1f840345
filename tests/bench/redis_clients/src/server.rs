//! A redis-server of its own, on a free loopback port.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// Attempts to find a port that nothing else takes before redis-server does.
const PORT_ATTEMPTS: usize = 5;
/// Upper bound on the start of redis-server, in steps of 20 ms.
const START_STEPS: usize = 250;

/// Script of all calls: a counter that expires, and a reply of 40 bytes.
const SCRIPT: &str = "local used = redis.call('INCRBY', KEYS[1], 1)
if used == 1 then redis.call('PEXPIRE', KEYS[1], 60000) end
return string.format('%040d', used)";

/// Running redis-server; dropping it stops the process.
pub struct Server {
    process: Child,
    /// Loopback port.
    pub port: u16,
    /// SHA-1 of the loaded script.
    pub script_sha1: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _status = self.process.wait();
    }
}

impl Server {
    /// Starts redis-server and loads the script.
    pub fn start() -> Self {
        for _ in 0..PORT_ATTEMPTS {
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
            let port = free.expect("a loopback port is free").port();
            let mut process = Command::new("redis-server")
                .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
                .stdout(Stdio::null())
                .spawn()
                .expect("redis-server is installed");
            for _ in 0..START_STEPS {
                sleep(Duration::from_millis(20));
                if process.try_wait().expect("redis-server has a status").is_some() {
                    break;
                }
                if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
                    let mut server = Self { process, port, script_sha1: String::new() };
                    server.script_sha1 = server.query(&["SCRIPT", "LOAD", SCRIPT]);
                    return server;
                }
            }
            let _gone = process.kill();
        }
        panic!("redis-server does not start");
    }

    /// Address of the server.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Sends a command whose reply is a bulk string, and returns the string.
    fn query(&self, words: &[&str]) -> String {
        let mut stream = TcpStream::connect(self.address()).expect("the server accepts connections");
        let mut command = format!("*{}\r\n", words.len());
        for word in words {
            command += &format!("${}\r\n{word}\r\n", word.len());
        }
        stream.write_all(command.as_bytes()).expect("the server reads");
        let mut reply = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let read = stream.read(&mut buffer).expect("the server replies");
            assert!(read > 0, "the server closed the connection");
            reply.extend_from_slice(&buffer[..read]);
            let text = String::from_utf8_lossy(&reply);
            let Some((head, body)) = text.split_once("\r\n") else { continue };
            let length: usize = head.strip_prefix('$').and_then(|length| length.parse().ok()).expect("a bulk string");
            if body.len() >= length + 2 {
                return body[..length].to_owned();
            }
        }
    }
}
