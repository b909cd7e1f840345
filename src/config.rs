//! From rule files to rules, and when to do that again.

pub mod live;
//! The rule files: where they come from, and noticing that they changed.
//!
//! `source` reads the bytes of every file of a layout; `watch` tells when they differ from what was read last. Neither
//! knows what a rule file says.
pub mod source;
pub mod watch;
//! From rule file text to checked rules.
//! Configuration is modelled twice: `document` is a rule file as written, with positions; `rule::Domain` is what it
//! means. Only `compile` turns one into the other. All problems of all files are found at once, each with its place
//! and a fix, and nothing is returned while there is one: a rule set is taken whole or not at all.
//! `keys` is the one table of what may be written where; the reader, the JSON Schema and `config/reference.yaml` are
//! all held to it. Finding, reading and watching files is not done here.
pub mod diagnostic;
pub mod keys;
pub mod yaml;
pub mod document;
pub mod compile;
pub mod schema;
