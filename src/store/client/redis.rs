//! Client of Redis and Valkey: one server, a primary that sentinels watch, or a cluster.
//!
//! The client keeps connections open, follows failovers and moved slots, and sends commands with a deadline. A command
//! is sent once; only a reply that proves that it did not run (MOVED, ASK, NOSCRIPT) is a reason to send it again. The
//! client knows nothing of limits, and of scripts only how to send them: its user passes a
//! `health_check::HealthCheck`, which defines the commands that a server must accept.

pub mod error;
pub mod resp;
pub mod hash_slot;
pub mod connection;
pub mod connect;
pub mod health_check;
pub mod deployment_context;
pub(crate) mod node;
pub mod deployment;
pub mod discovery;
pub mod key_connection;
