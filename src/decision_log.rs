//! Decision log: one record of each decision, which the server writes and every tool reads.
//!
//! [`record`] and [`header`] are the format, [`reader`] reads it. [`log`] selects and encodes, a [`queue`] per sink
//! decouples decisions from I/O, and a `writer` per sink writes.

pub mod header;
pub mod record;
mod encode;
pub mod convert;
mod owned;
pub mod reader;
pub mod stream;
pub mod selection;
pub mod values;
pub mod queue;
mod lost_records;
mod sink;
mod writer;
pub mod log;
