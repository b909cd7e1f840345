//! Decision log: one record of each decision, which the server writes and every tool reads.

pub mod header;
pub mod record;
pub mod convert;
mod owned;
pub mod reader;
