//! The connection of tollkeeper's own client.

use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::Instant;
use tollkeeper::store::client::pipeline::ClosedReceiver;
use tollkeeper::store::client::redis::connection::Connection;
use tollkeeper::store::client::redis::resp::Reply;

use super::{Call, RedisClient};
use crate::DEADLINE;
use crate::server::Server;

/// One connection.
#[derive(Clone)]
pub struct Client(Arc<Shared>);

struct Shared {
    connection: Connection,
    _closed: ClosedReceiver,
    script_sha1: String,
}

impl RedisClient for Client {
    async fn connect(server: &Server) -> Self {
        let stream = TcpStream::connect(server.address()).await.expect("the server accepts connections");
        stream.set_nodelay(true).expect("TCP has this option");
        let (connection, closed) = Connection::from_stream(stream);
        Self(Arc::new(Shared { connection, _closed: closed, script_sha1: server.script_sha1.clone() }))
    }

    async fn call(&self, call: Call<'_>) -> bool {
        let words: [&[u8]; 5] = [b"EVALSHA", self.0.script_sha1.as_bytes(), b"1", call.key, call.argument];
        let reply = self.0.connection.call(&words, false, Some(Instant::now() + DEADLINE)).await;
        matches!(reply, Ok(Reply::BulkString(_)))
    }
}
