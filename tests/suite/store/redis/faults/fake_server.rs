//! A fake Redis server, for versions that are seldom installed.
//!
//! Each connection is served by a thread that ends with it; replies depend on the command's name alone.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// Listens on 127.0.0.1 and replies with `reply`, which maps a command's upper-case name to the reply's bytes.
pub(super) fn serve(reply: fn(&str) -> &'static str) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("loopback has a port");
    let port = listener.local_addr().expect("it is bound").port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // The client closes the connection after the reply.
            thread::spawn(move || answer(stream, reply));
        }
    });
    port
}

fn answer(stream: TcpStream, reply: fn(&str) -> &'static str) -> Option<()> {
    let mut writer = stream.try_clone().ok()?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        // Accepts inline commands as well as arrays.
        let mut name = line.split_whitespace().next()?.to_ascii_uppercase();
        for place in 0..number(&line, '*').unwrap_or(0) {
            let mut length = String::new();
            reader.read_line(&mut length).ok()?;
            let mut word = vec![0; number(&length, '$')? + 2];
            reader.read_exact(&mut word).ok()?;
            if place == 0 {
                name = String::from_utf8_lossy(&word).trim_end().to_ascii_uppercase();
            }
        }
        writer.write_all(reply(&name).as_bytes()).ok()?;
    }
}

/// Number in a line that begins with `mark`.
fn number(line: &str, mark: char) -> Option<usize> {
    line.strip_prefix(mark)?.trim_end().parse().ok()
}

/// Redis 4, where a script that has called TIME cannot write.
pub(super) fn redis_4(name: &str) -> &'static str {
    match name {
        "PING" => "+PONG\r\n",
        "EVALSHA" => "-NOSCRIPT No matching script. Please use EVAL.\r\n",
        "EVAL" => {
            "-ERR Error running script (call to f_0): @user_script:1: @user_script: 1: Write commands not allowed after \
             non deterministic commands. Call redis.replicate_commands() at the start of your script in order to \
             switch to single commands replication mode.\r\n"
        }
        _ => "-ERR unknown command\r\n",
    }
}

/// Redis 8, for a user without LLEN.
pub(super) fn redis_8_without_llen(name: &str) -> &'static str {
    match name {
        "EVAL" => "-ERR ACL failure in script: User nolist has no permissions to run the 'llen' command\r\n",
        name => redis_4(name),
    }
}

/// Redis 6, for a user without LLEN.
pub(super) fn redis_6_without_llen(name: &str) -> &'static str {
    match name {
        "EVAL" => "-@user_script: 134: The user executing the script can't run this command or subcommand\r\n",
        name => redis_4(name),
    }
}
