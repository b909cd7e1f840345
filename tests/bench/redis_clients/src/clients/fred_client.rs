//! `Client` of the `fred` crate.

use fred::clients::Client as FredClient;
use fred::interfaces::{ClientLike, LuaInterface};
use fred::types::config::Config;
use fred::types::{Builder, ClusterHash, CustomCommand, Value};

use super::{Call, OwnedCall, PipelineClient, RedisClient};
use crate::DEADLINE;
use crate::server::Server;

/// One connection.
#[derive(Clone)]
pub struct Client {
    client: FredClient,
    script_sha1: String,
}

impl RedisClient for Client {
    async fn connect(server: &Server) -> Self {
        let config = Config::from_url(&format!("redis://{}", server.address())).expect("a valid address");
        let mut builder = Builder::from_config(config);
        builder.with_performance_config(|performance| performance.default_command_timeout = DEADLINE);
        let client = builder.build().expect("a valid configuration");
        client.init().await.expect("the server accepts connections");
        Self { client, script_sha1: server.script_sha1.clone() }
    }

    async fn call(&self, call: Call<'_>) -> bool {
        let reply: Result<Value, _> =
            self.client.evalsha(self.script_sha1.clone(), vec![call.key], vec![Value::from(call.argument)]).await;
        matches!(reply, Ok(Value::String(_) | Value::Bytes(_)))
    }
}

impl PipelineClient for Client {
    async fn call_all(&self, calls: &[OwnedCall]) -> Vec<bool> {
        let pipeline = self.client.pipeline();
        for OwnedCall { key, argument } in calls {
            // Pipelines have no `evalsha`.
            let command = CustomCommand::new_static("EVALSHA", ClusterHash::FirstKey, false);
            let words: [&[u8]; 4] = [self.script_sha1.as_bytes(), b"1", key, argument];
            let _queued: Result<(), _> = pipeline.custom(command, words.map(Value::from).to_vec()).await;
        }
        let replies: Vec<Value> = pipeline.all().await.unwrap_or_default();
        replies.iter().map(|reply| matches!(reply, Value::String(_) | Value::Bytes(_))).collect()
    }
}
