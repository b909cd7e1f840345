//! tollkeeper: a rate-limit decision service for Envoy.
//!
//! The way of a request, one direction, no stage calls back:
//!
//! ```text
//! grpc/decode -> request -> rule (match) -> counter (key, limit, hits)
//!             -> store (charge) -> decision (merge) -> grpc/encode
//! ```
//!
//! What is true everywhere:
//! - one `now` and one rule set per decision, taken at the edge and passed down
//! - matching and algorithms are pure: no clock, no I/O, no log
//! - over limit is a value, never an error; a store failure is an error of that charge, and `decide` turns it into a
//!   verdict by the rule's policy
//! - a rule set is valid by construction; a reload replaces all of it or nothing
//! - everything has a bound: maps, queues, batches, waits, label values, key lengths
//! - no request is answered later than its deadline allows
//!
//! The modules stand in reading order, and a module uses only modules above it (a test checks this).

pub mod clock;
pub mod go_syntax;
pub mod thread_priority;
pub mod thread_time;
pub mod coalesce;
pub mod task_budget;
pub mod sharded;
pub mod identity_hasher;
pub mod telemetry;
pub mod request;
pub mod limit;
pub mod settings;
pub mod store_client;
pub mod redis;
pub mod memcache;
pub mod algorithm;
pub mod rule;
pub mod counter;
pub mod store;
pub mod decision;
pub mod decision_log;
pub mod decide;
pub mod pb;
pub mod config;
pub mod health;
pub mod grpc;
pub mod scrape;
pub mod report;
pub mod fleet;
pub mod http;
pub mod server;
pub mod bench;
pub mod replay;
pub mod simulate;
pub mod recommend;
pub mod why;
pub mod cli;
