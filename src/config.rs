//! From rule files to rules, and when to do that again.
//!
//! `source` reads the bytes of every rule file, `watch` tells when they differ from what was read last, and `live`
//! holds the rules in force.

pub mod diagnostic;
pub mod keys;
pub mod yaml;
pub mod document;
pub mod compile;
pub mod schema;
pub mod source;
pub mod watch;
pub mod live;
