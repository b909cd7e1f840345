//! Bytes of requests and replies: what the simulated Redis reads and writes equals redis-server's, byte for byte.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use bytes::BytesMut;
use kit::redis::options;
use simulated_redis::request::parse_command;
use simulated_redis::server::{self, Connection};

/// Requests of a connection.
const REQUESTS: &[&[u8]] = &[
    b"PING\r\n",
    b"PING\nping\r\n  ECHO   text  \r\n\r\n\nGET none\r\n",
    b"*1\r\n$4\r\nPING\r\n*2\r\n$4\r\nECHO\r\n$0\r\n\r\n*2\r\n$4\r\nECHO\r\n$5\r\n\r\n\0\xff$\r\n",
    b"*0\r\n*-1\r\n*1\r\n$4\r\nPING\r\n",
    b"*2\r\n$4\r\nECHO\r\n$3\r\nlate",
    b"*1\r\n$4\r\nPING\r\n*x\r\n",
    b"*2147483648\r\n",
    b"*1\r\n+PING\r\n",
    b"*1\r\n$x\r\n",
    b"*1\r\n$-1\r\n",
    b"*1\r\n$536870913\r\n",
    b"*01\r\n",
    b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n*2\r\n$4\r\nLLEN\r\n$1\r\nk\r\n",
    b"HSET h f v\r\nHGETALL h\r\nZADD z 1.5 a\r\nZREVRANGEBYSCORE z 9 0 WITHSCORES\r\nZSCORE z a\r\nZSCORE z b\r\nXREAD STREAMS x 0\r\n",
    b"XADD x 1-1 f v\r\nXREAD STREAMS x 0\r\nSET k v NX\r\nSCRIPT EXISTS x\r\n",
    b"*3\r\n$4\r\nEVAL\r\n$40\r\nreturn {1,false,{ok='x'},{err='E\ny'},{}}\r\n$1\r\n0\r\n",
];

/// Replies of the simulated server, which gets the request in parts of this size.
fn simulated_replies(request: &[u8], part_bytes: usize, is_resp3: bool) -> Vec<u8> {
    let (mut server, mut connection) = (server::Server::new(server::Options::default()), Connection::new());
    let (mut input, mut replies) = (BytesMut::new(), BytesMut::new());
    let now_us = 1_700_000_000_000_000;
    if is_resp3 {
        server.execute(&mut connection, now_us, &["HELLO".into(), "3".into()], &mut replies);
        replies.clear();
    }
    for part in request.chunks(part_bytes) {
        input.extend_from_slice(part);
        loop {
            match parse_command(&mut input) {
                Ok(None) => break,
                Ok(Some(words)) => {
                    server.execute(&mut connection, now_us, &words, &mut replies);
                }
                Err(error) => {
                    error.encode(&mut replies);
                    return replies.to_vec();
                }
            }
        }
    }
    replies.to_vec()
}

#[test]
fn bytes_of_replies_agree() {
    let server = options().start();
    for is_resp3 in [false, true] {
        for request in REQUESTS {
            server.query::<()>(&["FLUSHALL"]);
            let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
            if is_resp3 {
                stream.write_all(b"HELLO 3\r\n").unwrap();
                let mut greeting = Vec::new();
                while !greeting.ends_with(b"$7\r\nmodules\r\n*0\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    greeting.extend(byte);
                }
            }
            stream.write_all(request).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut replies = Vec::new();
            stream.read_to_end(&mut replies).unwrap();
            for part_bytes in [1, 7, usize::MAX] {
                let simulated = simulated_replies(request, part_bytes, is_resp3);
                let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                assert_eq!(shown(&simulated), shown(&replies), "{}", shown(request));
                assert_eq!(simulated, replies);
            }
        }
    }
}
