//! `MultiplexedConnection` of the `redis` crate.

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Value};

use super::{Call, OwnedCall, PipelineClient, RedisClient};
use crate::DEADLINE;
use crate::server::Server;

/// One connection.
#[derive(Clone)]
pub struct Client {
    connection: MultiplexedConnection,
    script_sha1: String,
}

impl RedisClient for Client {
    async fn connect(server: &Server) -> Self {
        let client = redis::Client::open(format!("redis://{}", server.address())).expect("a valid address");
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(DEADLINE));
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        Self {
            connection: connection.expect("the server accepts connections"),
            script_sha1: server.script_sha1.clone(),
        }
    }

    async fn call(&self, call: Call<'_>) -> bool {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.script_sha1).arg(1).arg(call.key).arg(call.argument);
        let reply: Result<Value, _> = command.query_async(&mut self.connection.clone()).await;
        matches!(reply, Ok(Value::BulkString(_)))
    }
}

impl PipelineClient for Client {
    async fn call_all(&self, calls: &[OwnedCall]) -> Vec<bool> {
        let mut pipeline = redis::pipe();
        for OwnedCall { key, argument } in calls {
            pipeline.cmd("EVALSHA").arg(&self.script_sha1).arg(1).arg(key).arg(argument);
        }
        let replies: Vec<Value> = pipeline.query_async(&mut self.connection.clone()).await.unwrap_or_default();
        replies.iter().map(|reply| matches!(reply, Value::BulkString(_))).collect()
    }
}
