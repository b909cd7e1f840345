//! Small pieces that know nothing of rate limits: time, threads, text, and the protobuf messages of Envoy's APIs.
//!
//! Every other module may use them; they use nothing of the crate but each other.

pub mod clock;
pub(crate) mod named_enum;
pub mod go_syntax;
pub mod printable_text;
pub(crate) mod text_encoding;
pub(crate) mod text_table;
pub mod random;
pub mod threads;
pub mod write_coalescing;
pub mod sharded;
pub mod scheduler_lag;
pub mod pb;
