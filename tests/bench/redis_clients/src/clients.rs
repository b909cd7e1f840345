//! The compared clients.

pub mod fred_client;
pub mod own;
pub mod redis_rs;

use std::future::Future;

use crate::server::Server;

/// One EVALSHA call with a key and an argument.
#[derive(Clone, Copy)]
pub struct Call<'c> {
    pub key: &'c [u8],
    pub argument: &'c [u8],
}

/// Call that outlives its caller.
pub struct OwnedCall {
    pub key: Vec<u8>,
    pub argument: Vec<u8>,
}

/// Client with one connection, shared by its clones.
pub trait RedisClient: Clone + Send + Sync + 'static {
    /// Connects to the server.
    fn connect(server: &Server) -> impl Future<Output = Self> + Send;

    /// Sends a call; returns true if its reply arrived before the deadline.
    fn call(&self, call: Call<'_>) -> impl Future<Output = bool> + Send;
}

/// Client that can send several calls as one pipeline.
pub trait PipelineClient: RedisClient {
    /// Sends calls as one pipeline; returns true for each whose reply arrived.
    fn call_all(&self, calls: &[OwnedCall]) -> impl Future<Output = Vec<bool>> + Send;
}
