//! Small pieces that know nothing of rate limits: time, threads, text, and the protobuf messages of Envoy's APIs.
//!
//! Every other module may use them; they use nothing of the crate but each other.

pub mod clock;
pub mod named_enum;
pub mod go_syntax;
pub mod text;
pub mod text_table;
pub mod random;
pub mod write_coalescing;
pub mod sharded;
pub mod client_network;
pub mod threads;
pub mod pb;
