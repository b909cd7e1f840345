//! Small pieces that know nothing of rate limits: time, threads, text, and the protobuf messages of Envoy's APIs.
//!
//! Every other module may use them; they use nothing of the crate but each other.

pub mod clock;
pub(crate) mod words;
pub mod go_syntax;
pub mod text;
pub(crate) mod table;
pub mod random;
pub mod threads;
pub mod coalesce;
pub mod sharded;
pub mod pb;
