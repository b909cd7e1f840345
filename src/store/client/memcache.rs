//! Client of memcached servers: each key belongs to one of them.
//!
//! The client keeps connections to every server open and sends commands with a deadline, each once. It knows nothing of
//! limits. `memcache-async`, the only public client that runs over any stream, allocates whatever length a server
//! announces, so the few replies that counters need are decoded here.

pub mod error;
pub mod reply;
pub mod protocol;
pub(crate) mod connect;
pub(crate) mod server;
mod srv_records;
pub(crate) mod server_list;
