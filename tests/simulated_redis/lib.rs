//! A Redis server for simulations: a synchronous state machine without sockets, threads, clock or randomness.
//!
//! A simulation passes the bytes of a connection to [`request::parse_command`], and each command with the time of the
//! simulated host to [`server::Server::execute`], which appends the reply. Scripts run in the Lua of Redis. Texts of
//! errors, order of checks, rounding and expiry are those of Redis 7.0; `tests/world/redis_agreement.rs` compares both.
//!
//! Absent: persistence, replication (a simulation copies snapshots), pub/sub, transactions, consumer groups, ACLs.

pub mod numbers;
pub mod reply;
pub mod request;
mod glob;
mod scan;
pub mod hash_fields;
pub mod streams;
pub mod sorted_sets;
pub mod keyspace;
mod arguments;
mod keys;
mod strings;
mod lists;
mod hashes;
mod sorted_set_commands;
mod stream_commands;
mod commands;
mod data_commands;
pub mod refusals;
pub mod cluster;
pub mod statistics;
mod struct_library;
mod scripts;
pub mod server;
mod server_commands;
