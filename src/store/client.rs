//! Parts that the clients of Redis and memcached share: pipelined connections, deadlines, circuit breakers, and the
//! tasks that keep connections open.
//!
//! Nothing here knows a protocol. `redis` and `memcache` define theirs, and what a failure means.

pub(crate) mod deadline;
pub mod server_status;
pub mod pipeline;
pub mod connect;
pub(crate) mod supervised_server;
pub mod tokens;
pub mod redis;
pub mod memcache;
