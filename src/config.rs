//! From rule files to rules, and when to do that again.

pub mod live;
//! The rule files: where they come from, and noticing that they changed.
//!
//! `source` reads the bytes of every file of a layout; `watch` tells when they differ from what was read last. Neither
//! knows what a rule file says.
pub mod source;
pub mod watch;
