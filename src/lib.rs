//! tollkeeper: a rate-limit decision service for Envoy.
//!
//! The way of a request, one direction, no stage calls back:
//!
//! ```text
//! serve/grpc/decode -> limit/request -> rules/rule (match) -> limit/charge (path, limit, hits)
//!     -> store (charge) -> decide (verdicts, merge) -> serve/grpc/encode
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

pub use tollkeeper_core::{base, limit, settings, telemetry};
pub use tollkeeper_rules::rules;
pub use tollkeeper_service::{decide, serve};
pub use tollkeeper_store::store;

pub mod tools;
