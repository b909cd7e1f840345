//! Streams in Redis that hold a decision log: one record in the field `record` of each entry.
//!
//! The sink `redis:STREAM` writes them. [`input`] reads one from begin to end, as a file is read; `group` reads one
//! as a consumer group, which shares the entries among its consumers. Other programs may write to a stream too: nothing
//! in an entry is trusted.

pub mod entry;
pub mod input;
pub(crate) mod json_line;
pub(crate) mod group;
